//! Failures of a rank's part of a step.

use crate::{group::Ranks, worker::WorkerError};
use paraft_client::ClientError;
use paraft_compute::collective::GroupError;
use paraft_models::ModelError;

/// Why a rank's part of a step or an evaluation failed.
pub(crate) enum StepError {
    /// The group broke. It is formed again and the step restarts.
    Group(GroupError),
    Other(WorkerError),
}

impl StepError {
    /// Converts the error. If the group broke, this rank must join another one.
    pub fn or_regrouped(self) -> WorkerError {
        match self {
            Self::Group(_) => WorkerError::Regrouped,
            Self::Other(e) => e,
        }
    }
}

impl From<GroupError> for StepError {
    fn from(e: GroupError) -> Self {
        Self::Group(e)
    }
}

impl From<ModelError> for StepError {
    fn from(e: ModelError) -> Self {
        Self::from(WorkerError::from(e))
    }
}

impl From<ClientError> for StepError {
    fn from(e: ClientError) -> Self {
        Self::Other(e.into())
    }
}

impl From<WorkerError> for StepError {
    fn from(e: WorkerError) -> Self {
        match e {
            WorkerError::Model(e) if e.is_group() => Self::Group(GroupError::Broken(e.to_string())),
            e => Self::Other(e),
        }
    }
}

/// The group's error if the group caused the failure, as far as can be determined; otherwise this rank's own error.
pub(super) fn blame(ranks: &Ranks, why: StepError) -> Result<GroupError, WorkerError> {
    match why {
        StepError::Group(e) => Ok(ranks.reason(e)),
        StepError::Other(e) => ranks.broken().ok_or(e),
    }
}
