//! Inputs and effects of a session.

use paraft_common::{BucketId, ServerId, ShardId, Step};
use paraft_proto::{FromShard, Open, ToShard, WithBulk};
use std::time::Duration;

/// What the I/O passes to a session. A stream is named by the number of its [`Effect::Dial`] or
/// [`Effect::Ask`]; input of any but the shard's latest stream of each kind is ignored.
#[derive(Debug)]
pub enum Input {
    /// A message arrived.
    Message {
        /// From the leader of this shard.
        shard: ShardId,
        /// On this stream.
        dial: u64,
        /// The message, with its payload.
        message: WithBulk<FromShard>,
    },
    /// The stream could not be opened, or ended.
    Broken {
        /// To the leader of this shard.
        shard: ShardId,
        /// The stream.
        dial: u64,
        /// The reason, for people.
        cause: String,
    },
    /// It is [`Session::deadline`](crate::Session::deadline), or later.
    Tick,
}

/// What the I/O has to do.
#[derive(Clone, Debug)]
pub enum Effect {
    /// Open a stream to a server, in place of the shard's last one, and send `open` on it.
    Dial {
        /// For this shard.
        shard: ShardId,
        /// The stream's number; they rise within a session.
        dial: u64,
        /// The server's address.
        address: String,
        /// The first message.
        open: Box<Open>,
    },
    /// Drop the shard's stream, and what is still to be sent on it.
    HangUp {
        /// Of this shard.
        shard: ShardId,
        /// The stream's connection may be dead.
        broken: bool,
    },
    /// Open a second stream for the shard, in place of its last second stream, and send `open` on it: that
    /// server may lead by now.
    Ask {
        /// For this shard.
        shard: ShardId,
        /// The stream's number, counted as for a dial.
        dial: u64,
        /// The server's address.
        address: String,
        /// The first message.
        open: Box<Open>,
    },
    /// Drop the shard's second stream.
    AskNoMore(ShardId),
    /// The shard has no first stream any more: its second stream becomes the first.
    Turn(ShardId),
    /// Send on the shard's stream, in this order.
    Send(ShardId, ToShard),
    /// Send the initial state of the shard's buckets.
    SendInitial(ShardId),
    /// The shard has its initial state, and will not ask for it again.
    InitialKnown(ShardId),
    /// A push is acknowledged, or dropped. For measurements and records.
    Acked(Acked),
}

/// A push that was acknowledged for the first time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Acked {
    /// By the leader of this shard.
    pub shard: ShardId,
    /// Of this bucket.
    pub bucket: BucketId,
    /// Of this step.
    pub step: Step,
    /// The worker's count of its pushes on this shard, from 1; it keeps counting when a session is lost.
    pub seq: u64,
    /// Its payload.
    pub bytes: usize,
    /// When it was pushed.
    pub pushed: Duration,
    /// The shard's leader then.
    pub leader: ServerId,
    /// When the stream was opened.
    pub opened: Duration,
    /// It arrived too late for its round.
    pub dropped: bool,
}
