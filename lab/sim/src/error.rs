//! Why a run could not be simulated, or failed as a real one would.

use paraft_common::{ShardId, Step, WorkerId};
use paraft_worker::{WorkerError, exit};

/// See the module.
#[derive(Debug, thiserror::Error)]
pub enum SimError {
    /// No fleet can be like this.
    #[error("{0}")]
    Setup(String),
    /// The simulator has no model of what the job asks for.
    #[error("the simulator does not have {what}: {instead}")]
    Unsupported {
        /// Which part of the job.
        what: &'static str,
        /// What to do.
        instead: &'static str,
    },
    /// The job, the model or the data.
    #[error(transparent)]
    Worker(#[from] WorkerError),
    /// The model.
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
        /// When.
        step: Step,
        /// Where.
        worker: WorkerId,
    },
    /// A worker found no leader within its timeout.
    #[error("{worker} found no leader of {shard} within cluster.timeout_ms of simulated time; last: {why}")]
    Unreachable {
        /// Who.
        worker: WorkerId,
        /// Of what.
        shard: ShardId,
        /// What it heard last.
        why: String,
    },
    /// A server refused what a worker said.
    #[error("{shard} refused {worker}: {why}")]
    Refused {
        /// Who.
        worker: WorkerId,
        /// By whom.
        shard: ShardId,
        /// Why.
        why: String,
    },
    /// No worker is left.
    #[error("all workers have failed; let them come back (--restart-s), or fail less often (--mttf-s)")]
    AllLost,
    /// Nothing can happen any more.
    #[error("at {0:.3} s nobody could go on any more")]
    Stuck(f64),
    /// The calibration.
    #[error("{0}")]
    Calibration(String),
    /// The machine gives no runtime.
    #[error("no runtime for the simulation: {0}")]
    Runtime(String),
}

impl SimError {
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
