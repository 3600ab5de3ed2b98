//! Why training ends early, what can be done about it, and the process's exit code.

use crate::exit;
use paraft_checkpoint::CheckpointError;
use paraft_client::{ClientError, SessionError, WireKind};
use paraft_common::{Step, WorkerId};
use paraft_data::DataError;
use paraft_job::JobError;
use paraft_models::ModelError;
use paraft_record::RecordError;
use std::path::PathBuf;

/// Why a worker ended.
#[derive(Debug, thiserror::Error)]
pub enum WorkerError {
    /// The servers, or the connection to them.
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
    /// The file for weights that are not in memory (`memory.resident`).
    #[error("memory.resident: {0}: {1}")]
    Scratch(PathBuf, String),
    /// The trace cannot be written.
    #[error("--trace {0}: {1}")]
    Trace(PathBuf, std::io::Error),
    /// The job does not fit the data or the fleet.
    #[error("{0}")]
    Job(String),
    /// The requested device is missing or unsuitable.
    #[error("train.device = \"{asked}\": {why}")]
    Device {
        /// The device's name in the job or the flag.
        asked: String,
        /// The reason.
        why: String,
    },
    /// A training loop called a method out of order: see [`Run`](crate::Run).
    #[error("{0}")]
    Misuse(String),
    /// The loss is not a finite number.
    #[error(
        "the loss became {loss} at {step} on {worker}: training has diverged (lower the rate, clip, or look at the batch). Servers refuse gradients that are not finite"
    )]
    NotFinite {
        /// The loss.
        loss: f32,
        /// The step of the loss.
        step: Step,
        /// The worker of the loss.
        worker: WorkerId,
    },
    /// All workers ended while they wrote the results of a step.
    #[error(
        "all workers ended while they wrote the weights and the optimizer's state of {0}: the servers have parts of this step and of the one \
         before. Resume from a checkpoint"
    )]
    Torn(Step),
    /// Another rank leads the group: this one was silent for too long.
    #[error("another rank leads this group now")]
    Deposed,
    /// This rank leads a group that was formed again, and has other stages of the model in it.
    #[error("the group has other ranks, and this one another part of the model")]
    Regrouped,
    /// A signal came.
    #[error("interrupted")]
    Interrupted,
}

/// What can be done about a [`WorkerError`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ErrorKind {
    /// The servers cannot be reached, have lost the job's state, or the device is missing: try again later or
    /// elsewhere, or resume from a checkpoint.
    Unavailable,
    /// The job or its training loop is wrong: fix it.
    Config,
    /// Data, a model file or a checkpoint is missing, damaged or of another job.
    Data,
    /// A file cannot be written: free space, or change permissions.
    Io,
    /// A loss or gradient is not finite: lower the rate, or clip.
    Diverged,
    /// The model failed, or a server broke the protocol.
    Failed,
    /// [`WorkerOptions::interrupt`](crate::WorkerOptions::interrupt) was set.
    Interrupted,
}

impl WorkerError {
    /// What can be done about it.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Client(e) => match e {
                ClientError::Session(SessionError::Unreachable { .. } | SessionError::StateLost { .. })
                | ClientError::Control { .. } => ErrorKind::Unavailable,
                ClientError::Session(SessionError::Refused { kind: WireKind::NotFinite, .. }) => {
                    ErrorKind::Diverged
                }
                ClientError::Session(SessionError::Refused { .. }) | ClientError::Options(_) => {
                    ErrorKind::Config
                }
                ClientError::Session(SessionError::Protocol { .. }) => ErrorKind::Failed,
                ClientError::Interrupted => ErrorKind::Interrupted,
            },
            Self::Data(_) => ErrorKind::Data,
            Self::Model(_) => ErrorKind::Failed,
            Self::Record(_) | Self::Trace(..) | Self::Scratch(..) => ErrorKind::Io,
            Self::Checkpoint(e) if e.is_io() => ErrorKind::Io,
            Self::Checkpoint(_) => ErrorKind::Data,
            Self::Job(_) | Self::Misuse(_) => ErrorKind::Config,
            Self::NotFinite { .. } => ErrorKind::Diverged,
            Self::Torn(_) | Self::Deposed | Self::Regrouped | Self::Device { .. } => ErrorKind::Unavailable,
            Self::Interrupted => ErrorKind::Interrupted,
        }
    }

    /// Another process is connected as this worker.
    pub fn is_rank_taken(&self) -> bool {
        let taken = |e: &SessionError| matches!(e, SessionError::Refused { kind: WireKind::RankTaken, .. });
        matches!(self, Self::Client(ClientError::Session(e)) if taken(e))
    }

    /// A push with a NaN or an infinity was refused: its step may be skipped.
    pub(crate) fn is_not_finite(&self) -> bool {
        let refused = |e: &SessionError| matches!(e, SessionError::Refused { kind: WireKind::NotFinite, .. });
        matches!(self, Self::Client(ClientError::Session(e)) if refused(e))
    }

    /// The process's exit code.
    pub fn exit_code(&self) -> i32 {
        match self.kind() {
            ErrorKind::Unavailable => exit::UNAVAILABLE,
            ErrorKind::Config => exit::CONFIG,
            ErrorKind::Data => exit::DATA,
            ErrorKind::Io => exit::IO,
            ErrorKind::Diverged | ErrorKind::Failed => exit::FAILED,
            ErrorKind::Interrupted => exit::INTERRUPTED,
        }
    }
}

impl From<JobError> for WorkerError {
    fn from(e: JobError) -> Self {
        Self::Job(e.to_string())
    }
}
