//! gRPC messages with bulk, without assembling them.
//!
//! tonic's codecs assemble a message in one buffer before they send it, and again before they read it: two
//! copies of every payload, and fresh pages for each. Here the message's header (everything but its `bytes`)
//! and its payload are sent without a copy: outgoing pieces go to HTTP/2 one by one, and incoming bytes stay
//! in the pieces in which they were received. On the wire it is ordinary gRPC and protobuf; a stock client
//! can talk to it.
//!
//! ```text
//! message ──encode──▶ [length, header] [piece] [piece] ...──▶ HTTP/2 frames ──decode──▶ message, pieces
//! ```
//!
//! - [`encode`]: a message to pieces. [`decode`]: pieces to a message. Both pure.
//! - [`body`]: as HTTP bodies.

pub mod body;
pub mod decode;
pub mod encode;

pub use body::{Incoming, call, respond};

use paraft_common::Payload;

/// A message, and separately the payloads of its `bytes` fields, which are empty in the message itself.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct WithBulk<M> {
    /// Everything but the bulk.
    pub message: M,
    /// In the order of the fields; as many as [`Bulk::detach`] returns for such a message.
    pub bulk: Vec<Payload>,
}

impl<M> WithBulk<M> {
    /// The only payload of a message that has one; empty if there is none.
    pub fn payload(self) -> Payload {
        self.bulk.into_iter().next().unwrap_or_default()
    }
}

impl<M: Bulk> From<M> for WithBulk<M> {
    fn from(mut message: M) -> Self {
        let bulk = message.detach();
        Self { message, bulk }
    }
}

/// The field with a message's bulk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// It has none.
    Nowhere,
    /// A `repeated bytes` field of the message.
    Own(u32),
    /// The message is a `oneof`; some of its kinds have a `bytes` field: (number of the kind, number of the
    /// field).
    Kinds(&'static [(u32, u32)]),
}

/// A message of the `.proto` files that may carry bulk. Without more it has none.
pub trait Bulk: prost::Message + Default + Send + 'static {
    /// The field with the bulk.
    const PLACE: Place = Place::Nowhere;

    /// Takes the payloads out: exactly one for a message whose field is not repeated, even if it is empty.
    fn detach(&mut self) -> Vec<Payload> {
        Vec::new()
    }
}

mod messages {
    use super::{Bulk, Place};
    use crate::{
        CheckpointPart, CheckpointRequest, FromShard, PeerReply, PeerRequest, ReadRequest, ToShard,
        checkpoint_part, from_shard, to_shard,
    };
    use paraft_common::Payload;
    use std::mem::take;

    impl Bulk for ToShard {
        const PLACE: Place = Place::Kinds(&[(2, 2), (3, 6)]);

        fn detach(&mut self) -> Vec<Payload> {
            match &mut self.kind {
                Some(to_shard::Kind::Init(m)) => vec![take(&mut m.payload).into()],
                Some(to_shard::Kind::Push(m)) => vec![take(&mut m.payload).into()],
                _ => Vec::new(),
            }
        }
    }

    impl Bulk for FromShard {
        const PLACE: Place = Place::Kinds(&[(3, 3)]);

        fn detach(&mut self) -> Vec<Payload> {
            match &mut self.kind {
                Some(from_shard::Kind::Weights(m)) => vec![take(&mut m.payload).into()],
                _ => Vec::new(),
            }
        }
    }

    impl Bulk for CheckpointPart {
        const PLACE: Place = Place::Kinds(&[(2, 3)]);

        fn detach(&mut self) -> Vec<Payload> {
            match &mut self.kind {
                Some(checkpoint_part::Kind::Piece(m)) => vec![take(&mut m.payload).into()],
                _ => Vec::new(),
            }
        }
    }

    impl Bulk for PeerRequest {
        const PLACE: Place = Place::Own(6);

        fn detach(&mut self) -> Vec<Payload> {
            take(&mut self.payloads).into_iter().map(Payload::from).collect()
        }
    }

    impl Bulk for PeerReply {}
    impl Bulk for CheckpointRequest {}
    impl Bulk for ReadRequest {}
}
