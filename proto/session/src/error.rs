//! Why a session cannot continue.

use paraft_common::ShardId;
use paraft_proto::WireKind;
use std::time::Duration;

/// Why a session cannot continue.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum SessionError {
    /// No leader answered in time. Worth a retry by a scheduler.
    #[error("{shard}: no leader was reached in {waited:.0?}:{}", causes.iter().map(|(a, c)| format!("\n  {a}: {c}")).collect::<String>())]
    Unreachable {
        /// The shard.
        shard: ShardId,
        /// For how long.
        waited: Duration,
        /// The last cause for each address.
        causes: Vec<(String, String)>,
    },
    /// The servers refused a message; the same message would be refused again.
    #[error("{shard}: {message}")]
    Refused {
        /// The shard.
        shard: ShardId,
        /// What is wrong with it.
        kind: WireKind,
        /// The server's text, for people.
        message: String,
    },
    /// A server violated the protocol.
    #[error("{shard}: the server broke the protocol: {what}")]
    Protocol {
        /// The shard.
        shard: ShardId,
        /// What it sent.
        what: String,
    },
    /// The shard lost its state (a majority of its replicas lost their logs) and was founded again.
    #[error(
        "{shard} has lost its state: a majority of its servers failed at the same time. Resume the job from its latest checkpoint"
    )]
    StateLost {
        /// The shard.
        shard: ShardId,
    },
}
