//! What goes into a session and what comes out of it.

use paraft_common::{BucketId, ServerId, ShardId, Step};
use paraft_proto::{FromShard, Open, ToShard, WithBulk};
use std::time::Duration;

/// What the I/O tells a session. Streams are named by the number of their [`Effect::Dial`] or [`Effect::Ask`]; what comes from
/// another than the shard's latest of each is ignored.
#[derive(Debug)]
pub enum Input {
    /// A message came.
    Message {
        /// From the leader of this shard.
        shard: ShardId,
        /// On this stream.
        dial: u64,
        /// The message, its payload beside it.
        message: WithBulk<FromShard>,
    },
    /// The stream could not be opened, or ended.
    Broken {
        /// To the leader of this shard.
        shard: ShardId,
        /// Which stream.
        dial: u64,
        /// Why, for people.
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
        /// The stream's number; those of a session rise.
        dial: u64,
        /// Of the server.
        address: String,
        /// The first message.
        open: Box<Open>,
    },
    /// Let the shard's stream go, and what is still to be sent on it.
    HangUp {
        /// Of this shard.
        shard: ShardId,
        /// The connection that the stream was on may carry nothing any more.
        broken: bool,
    },
    /// Open another stream beside the shard's own, in place of the last one beside it, and send `open` on it: the server may
    /// lead by now.
    Ask {
        /// For this shard.
        shard: ShardId,
        /// The stream's number, as a dial's.
        dial: u64,
        /// Of the server.
        address: String,
        /// The first message.
        open: Box<Open>,
    },
    /// Let the stream beside the shard's own go.
    AskNoMore(ShardId),
    /// The shard has no stream of its own any more: the one beside it is that from now on.
    Turn(ShardId),
    /// Send on the shard's stream, in this order.
    Send(ShardId, ToShard),
    /// Send the initial state of the shard's buckets.
    SendInitial(ShardId),
    /// The shard has its initial state: nobody will ask for it again.
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
    /// The worker's count of its pushes on this shard, from 1; it goes on when a session is lost.
    pub seq: u64,
    /// Its payload.
    pub bytes: usize,
    /// When it was pushed.
    pub pushed: Duration,
    /// Who led the shard.
    pub leader: ServerId,
    /// When the stream was opened.
    pub opened: Duration,
    /// It came too late for its round.
    pub dropped: bool,
}
