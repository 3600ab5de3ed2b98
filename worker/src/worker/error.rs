//! Why training ends before its time, and the process's exit code.

use crate::exit;
use paraft_checkpoint::CheckpointError;
use paraft_client::ClientError;
use paraft_common::{Step, WorkerId};
use paraft_data::DataError;
use paraft_models::ModelError;
use paraft_record::RecordError;
use std::path::PathBuf;

/// Why a worker ended.
#[derive(Debug, thiserror::Error)]
pub enum WorkerError {
    /// The servers, or the way to them.
    #[error(transparent)]
    Client(#[from] ClientError),
    /// The data.
    #[error(transparent)]
    Data(#[from] DataError),
    /// The model.
    #[error("the model failed: {0}")]
    Model(#[from] ModelError),
    /// The record.
    #[error(transparent)]
    Record(#[from] RecordError),
    /// A checkpoint or a model file cannot be written or used.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// The trace cannot be written.
    #[error("--trace {0}: {1}")]
    Trace(PathBuf, std::io::Error),
    /// The job does not fit the data or the fleet.
    #[error("{0}")]
    Job(String),
    /// The loss is no number any more.
    #[error(
        "the loss became {loss} at {step} on {worker}: training has diverged (lower the rate, clip, or look at the batch). Servers refuse gradients that are not finite"
    )]
    NotFinite {
        /// The loss.
        loss: f32,
        /// When.
        step: Step,
        /// Where.
        worker: WorkerId,
    },
    /// Another rank leads the group now: this one was silent for too long.
    #[error("another rank leads this group now")]
    Deposed,
    /// A signal came.
    #[error("interrupted")]
    Interrupted,
}

impl WorkerError {
    /// The process's exit code.
    pub fn exit_code(&self) -> i32 {
        match self {
            WorkerError::Client(
                ClientError::Unreachable { .. } | ClientError::StateLost { .. } | ClientError::Control { .. },
            ) => exit::UNAVAILABLE,
            WorkerError::Client(ClientError::Refused { message, .. }) if message.contains("NaN") => {
                exit::FAILED
            }
            WorkerError::Client(ClientError::Refused { .. } | ClientError::Options(_)) => exit::CONFIG,
            WorkerError::Client(ClientError::Protocol { .. }) => exit::FAILED,
            WorkerError::Data(_) => exit::DATA,
            WorkerError::Model(_) | WorkerError::NotFinite { .. } => exit::FAILED,
            WorkerError::Record(_) | WorkerError::Trace(..) => exit::IO,
            WorkerError::Checkpoint(e) if e.is_io() => exit::IO,
            WorkerError::Checkpoint(_) => exit::DATA,
            WorkerError::Job(_) => exit::CONFIG,
            WorkerError::Deposed => exit::UNAVAILABLE,
            WorkerError::Client(ClientError::Interrupted) | WorkerError::Interrupted => exit::INTERRUPTED,
        }
    }
}
