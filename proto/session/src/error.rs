//! Why a session cannot go on.

use paraft_common::ShardId;
use paraft_proto::WireKind;
use std::time::Duration;

/// Why a session cannot go on.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum SessionError {
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
}
