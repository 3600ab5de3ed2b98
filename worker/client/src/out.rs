//! What goes out on a shard's stream, which may not be there yet.

use crate::initial::Messages;
use paraft_lanes::Sender;
use paraft_proto::{ToShard, WithBulk, to_shard::Kind};
use std::sync::{Arc, Mutex, MutexGuard};
use tokio::sync::mpsc;

/// What waits to go out. Initial states are made when their turn comes: those of a large model would fill the memory.
pub(crate) enum Sent {
    One(Option<ToShard>),
    Initial(Messages),
}

impl Iterator for Sent {
    type Item = WithBulk<ToShard>;

    fn next(&mut self) -> Option<Self::Item> {
        let message = match self {
            Sent::One(m) => m.take(),
            Sent::Initial(all) => all.next().map(|m| ToShard { kind: Some(Kind::Init(m)) }),
        };
        message.map(WithBulk::from)
    }
}

impl From<ToShard> for Sent {
    fn from(m: ToShard) -> Self {
        Sent::One(Some(m))
    }
}

/// The way out.
pub(crate) struct Out(Mutex<Way>);

enum Way {
    /// It is dialled; so much waits.
    None(Vec<Sent>),
    Lane(Arc<Sender<Sent>>),
    Http(mpsc::UnboundedSender<Sent>),
}

impl Out {
    /// Nothing is dialled yet.
    pub fn new(first: Sent) -> Arc<Self> {
        Arc::new(Self(Mutex::new(Way::None(vec![first]))))
    }

    /// Sends it, as soon as there is a way.
    pub fn send(&self, what: Sent) {
        match &mut *self.lock() {
            Way::None(waits) => waits.push(what),
            Way::Lane(lane) => lane.put(what),
            Way::Http(stream) => _ = stream.send(what),
        }
    }

    /// Weights that came were taken.
    pub fn give_back(&self) {
        if let Way::Lane(lane) = &*self.lock() {
            lane.give_back();
        }
    }

    /// There is a lane.
    pub fn lane(&self, lane: Arc<Sender<Sent>>) {
        let mut way = self.lock();
        if let Way::None(waits) = &mut *way {
            waits.drain(..).for_each(|what| lane.put(what));
        }
        *way = Way::Lane(lane);
    }

    /// There is a stream over HTTP/2, which takes what comes there.
    pub fn http(&self) -> mpsc::UnboundedReceiver<Sent> {
        let (tx, rx) = mpsc::unbounded_channel();
        let mut way = self.lock();
        if let Way::None(waits) = &mut *way {
            waits.drain(..).for_each(|what| _ = tx.send(what));
        }
        *way = Way::Http(tx);
        rx
    }

    fn lock(&self) -> MutexGuard<'_, Way> {
        self.0.lock().unwrap_or_else(|e| e.into_inner())
    }
}
