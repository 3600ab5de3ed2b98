//! `[memory]`: how much of a model a worker holds at a time.

use crate::{
    Job,
    check::{Check, bad},
};
use paraft_common::need::Bytes;
use serde::{Deserialize, Serialize};

/// `[memory]`
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct MemoryConfig {
    /// The maximum of the model's weights in a worker's memory; absent: all of them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub resident: Option<Resident>,
}

/// A part of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Written", into = "Written")]
pub enum Resident {
    /// This many layers, each as large as the largest; from 1.
    Layers(u64),
    /// This many bytes.
    Bytes(u64),
}

#[derive(Serialize, Deserialize)]
#[serde(untagged)]
enum Written {
    Layers(u64),
    Size(String),
}

impl TryFrom<Written> for Resident {
    type Error = String;

    fn try_from(written: Written) -> Result<Self, String> {
        let resident = match written {
            Written::Layers(n) => Self::Layers(n),
            Written::Size(text) => Self::Bytes(text.parse::<Bytes>()?.0),
        };
        match resident {
            Self::Layers(0) | Self::Bytes(0) => {
                Err("nothing can be computed with nothing in memory: write 2, or \"4 GiB\"".into())
            }
            resident => Ok(resident),
        }
    }
}

impl Resident {
    /// The number of values, if the largest layer has this many.
    pub fn values(self, largest: usize) -> usize {
        match self {
            Self::Layers(n) => largest.saturating_mul(usize::try_from(n).unwrap_or(usize::MAX)),
            Self::Bytes(bytes) => usize::try_from(bytes).unwrap_or(usize::MAX) / size_of::<f32>(),
        }
    }
}

impl From<Resident> for Written {
    fn from(resident: Resident) -> Self {
        match resident {
            Resident::Layers(n) => Self::Layers(n),
            // In whole bytes: a rounded number would differ.
            Resident::Bytes(n) => Self::Size(format!("{n} B")),
        }
    }
}

impl MemoryConfig {
    pub(crate) fn check(&self, job: &Job) -> Check {
        if self.resident.is_none() {
            return Ok(());
        }
        job.check_by_layers()?;
        let encoding = job.train.encoding;
        if encoding.feeds_back() {
            let why = format!(
                "layers are streamed to save memory, and error feedback of {encoding} keeps as much as the model"
            );
            return bad("memory.resident", why, "take train.encoding out");
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<MemoryConfig, String> {
        toml::from_str(text).map_err(|e| e.message().to_string())
    }

    #[test]
    fn a_part_is_said_in_layers_or_bytes_and_written_as_it_is() {
        for (text, resident) in [
            ("resident = 3", Some(Resident::Layers(3))),
            ("resident = \"4 GiB\"", Some(Resident::Bytes(4 << 30))),
            ("resident = \"1.5GiB\"", Some(Resident::Bytes(3 << 29))),
            ("", None),
        ] {
            let config = read(text).expect(text);
            assert_eq!(config.resident, resident);
            assert_eq!(read(&toml::to_string(&config).expect("writes")), Ok(config));
        }
        for text in
            ["resident = 0", "resident = \"0 B\"", "resident = -1", "resident = \"4 GB\"", "resident = true"]
        {
            assert!(read(text).is_err(), "{text}");
        }
    }
}
