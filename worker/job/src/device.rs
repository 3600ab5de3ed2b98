//! `train.device`: the workers' device. The worker finds out what its machine has.

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::{fmt, str::FromStr};

/// The job's choice.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DeviceConfig {
    /// A GPU if there is a usable one, otherwise the CPU.
    #[default]
    Auto,
    /// The CPU.
    Cpu,
    /// A GPU: this one, or the one of the worker's local rank. Fails if there is none.
    Cuda(Option<u32>),
}

impl FromStr for DeviceConfig {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "auto" => Ok(Self::Auto),
            "cpu" => Ok(Self::Cpu),
            "cuda" => Ok(Self::Cuda(None)),
            _ => text
                .strip_prefix("cuda:")
                .and_then(|n| n.parse().ok())
                .map(|n| Self::Cuda(Some(n)))
                .ok_or_else(|| format!("`{text}` is no device: auto, cpu, cuda or cuda:N expected")),
        }
    }
}

impl fmt::Display for DeviceConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Cpu => f.write_str("cpu"),
            Self::Cuda(None) => f.write_str("cuda"),
            Self::Cuda(Some(n)) => write!(f, "cuda:{n}"),
        }
    }
}

impl Serialize for DeviceConfig {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for DeviceConfig {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_read_as_they_are_written() {
        for text in ["auto", "cpu", "cuda", "cuda:3"] {
            assert_eq!(text.parse::<DeviceConfig>().map(|d| d.to_string()).as_deref(), Ok(text));
        }
        for bad in ["", "gpu", "cuda:", "cuda:-1", "cuda:x", "CPU"] {
            assert!(bad.parse::<DeviceConfig>().is_err(), "{bad}");
        }
    }
}
