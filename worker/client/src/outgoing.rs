//! Messages to a shard's stream, which may not be open yet.

use crate::initial::Messages;
use paraft_lanes::Sender;
use paraft_proto::{ToShard, WithBulk, to_shard::Kind};
use std::sync::{Arc, Mutex, MutexGuard};
use tokio::sync::mpsc;

/// Queued messages. An initial state is made only when it is sent: that of a large model would fill the memory.
pub(crate) enum OutgoingMessage {
    One(Option<ToShard>),
    Initial(Messages),
}

impl Iterator for OutgoingMessage {
    type Item = WithBulk<ToShard>;

    fn next(&mut self) -> Option<Self::Item> {
        let message = match self {
            OutgoingMessage::One(m) => m.take(),
            OutgoingMessage::Initial(all) => all.next().map(|m| ToShard { kind: Some(Kind::Init(m)) }),
        };
        message.map(WithBulk::from)
    }
}

impl From<ToShard> for OutgoingMessage {
    fn from(m: ToShard) -> Self {
        OutgoingMessage::One(Some(m))
    }
}

/// The sending side of a stream.
pub(crate) struct Outgoing(Mutex<OutgoingState>);

enum OutgoingState {
    /// The stream is connecting; these messages wait.
    None(Vec<OutgoingMessage>),
    Lane(Arc<Sender<OutgoingMessage>>),
    Http(mpsc::UnboundedSender<OutgoingMessage>),
}

impl Outgoing {
    /// No connection exists yet.
    pub fn new(first: OutgoingMessage) -> Arc<Self> {
        Arc::new(Self(Mutex::new(OutgoingState::None(vec![first]))))
    }

    /// Sends a message, as soon as the stream is open.
    pub fn send(&self, what: OutgoingMessage) {
        match &mut *self.lock() {
            OutgoingState::None(waits) => waits.push(what),
            OutgoingState::Lane(lane) => lane.put(what),
            OutgoingState::Http(stream) => _ = stream.send(what),
        }
    }

    /// The training thread took received weights.
    pub fn give_back(&self) {
        if let OutgoingState::Lane(lane) = &*self.lock() {
            lane.give_back();
        }
    }

    /// A lane is open.
    pub fn lane(&self, lane: Arc<Sender<OutgoingMessage>>) {
        let mut way = self.lock();
        if let OutgoingState::None(waits) = &mut *way {
            waits.drain(..).for_each(|what| lane.put(what));
        }
        *way = OutgoingState::Lane(lane);
    }

    /// An HTTP/2 stream is open; it sends what the returned receiver yields.
    pub fn http(&self) -> mpsc::UnboundedReceiver<OutgoingMessage> {
        let (tx, rx) = mpsc::unbounded_channel();
        let mut way = self.lock();
        if let OutgoingState::None(waits) = &mut *way {
            waits.drain(..).for_each(|what| _ = tx.send(what));
        }
        *way = OutgoingState::Http(tx);
        rx
    }

    fn lock(&self) -> MutexGuard<'_, OutgoingState> {
        self.0.lock().unwrap_or_else(|e| e.into_inner())
    }
}
