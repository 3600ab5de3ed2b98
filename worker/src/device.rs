//! Selects the worker's device from `train.device`, `train.precision` and this machine's hardware.

use paraft_compute::cuda::{
    self, CudaOptions,
    library::{self, Part},
};
pub use paraft_job::DeviceConfig;
use paraft_models::Precision;

/// The worker's local rank on its host, from the launcher, torchrun or Slurm; otherwise its rank.
fn turn(rank: u32) -> u32 {
    ["PARAFT_LOCAL_RANK", "LOCAL_RANK", "SLURM_LOCALID"]
        .iter()
        .find_map(|v| std::env::var(v).ok()?.parse().ok())
        .unwrap_or(rank)
}

/// Likewise for a rank of a group of this size. Without NCCL such a rank uses no GPU.
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

/// The device of the worker with this rank; `None` is the CPU. Fails if the job requires a GPU and there is none.
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
