//! What can go wrong for a worker, in kinds that mean: the network, the input, the session, the job.

use paraft_common::ShardId;
use paraft_proto::WireKind;
use paraft_session::SessionError;
use std::time::Duration;

/// Why the client cannot go on.
#[derive(Clone, Debug, thiserror::Error)]
pub enum ClientError {
    /// No leader answered in time. Worth a retry by a scheduler.
    #[error("{shard}: no leader was reached in {waited:.0?}:{}", causes.iter().map(|(a, c)| format!("\n  {a}: {c}")).collect::<String>())]
    Unreachable {
        /// Which shard.
        shard: ShardId,
        /// How long it was tried.
        waited: Duration,
        /// The last cause for each address.
        causes: Vec<(String, String)>,
    },
    /// The servers refused what they were sent; the same again would be refused again.
    #[error("{shard}: {message}")]
    Refused {
        /// Which shard.
        shard: ShardId,
        /// What is wrong with it.
        kind: WireKind,
        /// The server's words, for people.
        message: String,
    },
    /// A server sent what the protocol does not allow.
    #[error("{shard}: the server broke the protocol: {what}")]
    Protocol {
        /// Which shard.
        shard: ShardId,
        /// What it sent.
        what: String,
    },
    /// The shard lost its state (a majority of its replicas lost their logs) and was founded anew.
    #[error(
        "{shard} has lost its state: a majority of its servers failed at the same time. Resume the job from its latest checkpoint"
    )]
    StateLost {
        /// Which shard.
        shard: ShardId,
    },
    /// The control group did not answer in time, or had no place for this rank.
    #[error("no place in a group within {waited:.0?}: {why}")]
    Control {
        /// How long it was tried.
        waited: Duration,
        /// The last cause.
        why: String,
    },
    /// What [`Client::interrupted_by`](crate::Client::interrupted_by) was given is set.
    #[error("interrupted")]
    Interrupted,
    /// The options contradict each other.
    #[error("{0}")]
    Options(String),
}

impl ClientError {
    /// Another process is this worker now.
    pub fn is_displaced(&self) -> bool {
        matches!(self, Self::Refused { kind: WireKind::RankTaken, .. })
    }
}

impl From<SessionError> for ClientError {
    fn from(e: SessionError) -> Self {
        match e {
            SessionError::Unreachable { shard, waited, causes } => {
                Self::Unreachable { shard, waited, causes }
            }
            SessionError::Refused { shard, kind, message } => Self::Refused { shard, kind, message },
            SessionError::Protocol { shard, what } => Self::Protocol { shard, what },
            SessionError::StateLost { shard } => Self::StateLost { shard },
        }
    }
}
