//! Acknowledgements of this worker's pushes, for callers that count them.

use paraft_common::{BucketId, ServerId, ShardId};
use std::time::Instant;

/// The first acknowledgement of a push.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Acked {
    /// Of which shard.
    pub shard: ShardId,
    /// Of which bucket.
    pub bucket: BucketId,
    /// The client's sequence number of the push on this shard, from 1. It keeps counting across sessions.
    pub seq: u64,
    /// The server that led the shard.
    pub leader: ServerId,
    /// When the stream that brought the ack was opened. A stream opened after a leader's death brings acks of
    /// another leader.
    pub opened: Instant,
    /// When the ack arrived.
    pub at: Instant,
}
