//! What a worker hears of its pushes, for whoever keeps count of them.

use paraft_common::{BucketId, ServerId, ShardId};
use std::time::Instant;

/// A push that was acknowledged, for the first time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Acked {
    /// Of which shard.
    pub shard: ShardId,
    /// Of which bucket.
    pub bucket: BucketId,
    /// The client's count of its pushes on this shard, from 1; it goes on when a session is lost.
    pub seq: u64,
    /// Who led the shard.
    pub leader: ServerId,
    /// When the stream that brought the ack was opened: one that was opened after a leader's death brings acks of
    /// another leader.
    pub opened: Instant,
    /// When it came.
    pub at: Instant,
}
