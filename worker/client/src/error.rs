//! A worker's errors, by cause: network, input, session, job.

use paraft_proto::WireKind;
use paraft_session::SessionError;
use std::time::Duration;

/// Why the client cannot continue.
#[derive(Clone, Debug, thiserror::Error)]
pub enum ClientError {
    /// A session cannot continue.
    #[error(transparent)]
    Session(#[from] SessionError),
    /// The control group did not answer in time, or had no place for this rank.
    #[error("no place in a group within {waited:.0?}: {why}")]
    Control {
        /// How long the client tried.
        waited: Duration,
        /// The last cause.
        why: String,
    },
    /// The interrupt given to [`Client::join_until`](crate::Client::join_until) is set.
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
