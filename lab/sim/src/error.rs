//! Why a simulation is not possible, or failed as a real run would.

use paraft_common::{ShardId, Step, WorkerId};
use paraft_worker::{ErrorKind, WorkerError, exit};

/// The error of a simulation.
#[derive(Debug, thiserror::Error)]
pub enum SimError {
    /// The parameters of the fleet are invalid.
    #[error("{0}")]
    Setup(String),
    /// The simulator does not model a feature of the job.
    #[error("the simulator does not have {what}: {instead}")]
    Unsupported {
        /// The feature.
        what: &'static str,
        /// What to do instead.
        instead: &'static str,
    },
    /// An error in the job, the model or the data.
    #[error(transparent)]
    Worker(#[from] WorkerError),
    /// An error of the model.
    #[error("the model failed: {0}")]
    Model(#[from] paraft_models::ModelError),
    /// The record cannot be written or read.
    #[error(transparent)]
    Record(#[from] paraft_record::RecordError),
    /// Training has diverged.
    #[error(
        "the loss became {loss}, or a gradient no number, at {step} on {worker}: training has diverged (lower the rate, clip, or choose fewer workers or less staleness)"
    )]
    NotFinite {
        /// The loss.
        loss: f32,
        /// The step.
        step: Step,
        /// The worker.
        worker: WorkerId,
    },
    /// A worker found no leader within its timeout.
    #[error("{worker} found no leader of {shard} within cluster.timeout_ms of simulated time; last: {why}")]
    Unreachable {
        /// The worker.
        worker: WorkerId,
        /// The shard without a leader.
        shard: ShardId,
        /// The last error.
        why: String,
    },
    /// A server refused a worker's message.
    #[error("{shard} refused {worker}: {why}")]
    Refused {
        /// The worker.
        worker: WorkerId,
        /// The shard.
        shard: ShardId,
        /// The reason.
        why: String,
    },
    /// No worker is left.
    #[error("all workers have failed; let them come back (--restart-s), or fail less often (--mttf-s)")]
    AllLost,
    /// No event is left: the run is stuck.
    #[error("at {0:.3} s no process could continue")]
    Stuck(f64),
    /// The calibration failed.
    #[error("{0}")]
    Calibration(String),
    /// The async runtime could not start.
    #[error("no runtime for the simulation: {0}")]
    Runtime(String),
}

impl SimError {
    /// Whether the loss or a gradient became NaN or infinite.
    pub fn diverged(&self) -> bool {
        match self {
            Self::NotFinite { .. } => true,
            Self::Worker(e) => e.kind() == ErrorKind::Diverged,
            _ => false,
        }
    }

    /// The process's exit code.
    pub fn exit_code(&self) -> i32 {
        match self {
            Self::Setup(_) => exit::USAGE,
            Self::Unsupported { .. } => exit::CONFIG,
            Self::Worker(e) => e.exit_code(),
            Self::Record(_) => exit::IO,
            Self::Calibration(_) => exit::DATA,
            Self::Unreachable { .. } => exit::UNAVAILABLE,
            Self::Refused { .. } => exit::CONFIG,
            Self::Model(_) | Self::NotFinite { .. } | Self::AllLost | Self::Stuck(_) | Self::Runtime(_) => {
                exit::FAILED
            }
        }
    }
}
