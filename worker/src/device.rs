//! On what a worker computes: what `train.device` and `train.precision` of the job ask for, and what this machine has.

use paraft_compute::cuda::{
    self, CudaOptions,
    library::{self, Part},
};
pub use paraft_job::DeviceConfig;
use paraft_models::Precision;

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
