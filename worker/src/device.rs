//! On what a worker computes: `train.device` and `train.precision` of the job, and what this machine has.

use paraft_compute::cuda::{
    self, CudaOptions,
    library::{self, Part},
};
use paraft_models::Precision;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::{fmt, str::FromStr};

/// What the job asks for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DeviceConfig {
    /// A GPU where there is one and what it needs, else the CPU.
    #[default]
    Auto,
    /// The CPU.
    Cpu,
    /// A GPU: this one, or the one of the worker's turn on its host. An error where there is none.
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

/// The worker's turn on its host: what the launcher, torchrun or Slurm says, else the rank.
fn turn(rank: u32) -> u32 {
    ["PARAFT_LOCAL_RANK", "LOCAL_RANK", "SLURM_LOCALID"]
        .iter()
        .find_map(|v| std::env::var(v).ok()?.parse().ok())
        .unwrap_or(rank)
}

/// The same, for a rank of a group of so many: its GPU is none without NCCL.
pub fn choose_for(
    device: DeviceConfig,
    precision: Precision,
    rank: u32,
    group_size: u32,
) -> Result<Option<CudaOptions>, String> {
    let chosen = choose(device, precision, rank)?;
    match library::find(Part::Nccl).map_err(|why| format!("the ranks of a group reduce with NCCL: {why}")) {
        Err(why) if group_size > 1 && chosen.is_some() => match device {
            DeviceConfig::Auto => {
                tracing::warn!(%why, "computing on the CPU");
                Ok(None)
            }
            _ => Err(why),
        },
        _ => Ok(chosen),
    }
}

/// What the worker of that rank computes on; `None` is the CPU. An error where a GPU was asked for and is not there.
pub fn choose(device: DeviceConfig, precision: Precision, rank: u32) -> Result<Option<CudaOptions>, String> {
    let options = |ordinal| Some(CudaOptions { ordinal, precision, ..CudaOptions::default() });
    let asked = match device {
        DeviceConfig::Cpu => return Ok(None),
        DeviceConfig::Cuda(n) => Some(n),
        DeviceConfig::Auto => None,
    };
    let usable = || -> Result<u32, String> {
        for part in Part::NEEDED {
            library::find(part).map_err(str::to_string)?;
        }
        match cuda::count().map_err(|e| e.to_string())? {
            0 => Err("the driver sees no device (in a container, start it with --gpus all)".into()),
            n => Ok(n),
        }
    };
    match (asked, usable()) {
        (Some(Some(n)), Ok(count)) if n >= count => {
            Err(format!("there is no device cuda:{n}: there are {count}, cuda:0 to cuda:{}", count - 1))
        }
        (Some(Some(n)), Ok(_)) => Ok(options(n)),
        (_, Ok(count)) => Ok(options(turn(rank) % count)),
        (Some(_), Err(why)) => Err(why),
        (None, Err(why)) => {
            tracing::debug!(%why, "computing on the CPU");
            Ok(None)
        }
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
