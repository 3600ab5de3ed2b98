//! Why a rank's part of a step was not done.

use crate::{group::Ranks, worker::WorkerError};
use paraft_client::ClientError;
use paraft_compute::collective::GroupError;
use paraft_models::ModelError;

/// Why a rank's part of a step or an evaluation was not done.
pub(crate) enum StepError {
    /// The group is formed anew, and it begins again.
    Group(GroupError),
    Other(WorkerError),
}

impl StepError {
    /// Where the group is what broke, this rank is to be in another.
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

/// Whether the group is to blame, as far as can be told; else the error that is this rank's own.
pub(super) fn blame(ranks: &Ranks, why: StepError) -> Result<GroupError, WorkerError> {
    match why {
        StepError::Group(e) => Ok(ranks.reason(e)),
        StepError::Other(e) => ranks.broken().ok_or(e),
    }
}
