//! What can go wrong for a worker, in kinds that mean: the network, the input, the session, the job.

use paraft_proto::WireKind;
use paraft_session::SessionError;
use std::time::Duration;

/// Why the client cannot go on.
#[derive(Clone, Debug, thiserror::Error)]
pub enum ClientError {
    /// One of its sessions can't go on.
    #[error(transparent)]
    Session(#[from] SessionError),
    /// The control group did not answer in time, or had no place for this rank.
    #[error("no place in a group within {waited:.0?}: {why}")]
    Control {
        /// How long it was tried.
        waited: Duration,
        /// The last cause.
        why: String,
    },
    /// What [`Client::join_until`](crate::Client::join_until) was given is set.
    #[error("interrupted")]
    Interrupted,
    /// The options contradict each other.
    #[error("{0}")]
    Options(String),
}

impl ClientError {
    /// Another process is this worker now.
    pub fn is_displaced(&self) -> bool {
        matches!(self, Self::Session(SessionError::Refused { kind: WireKind::RankTaken, .. }))
    }
}
