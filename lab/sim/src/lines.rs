//! What goes between the ranks of a worker: messages over their links, each waited for by who it is for.

use crate::{clock::Moment, network::Network};
use paraft_common::Step;
use paraft_session::Pull;
use parking_lot::Mutex;
use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};
use tokio::sync::oneshot;

/// What a message is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Kind {
    /// What the leader says, from rank to rank.
    Said,
    /// On its way round all ranks.
    Sum,
    /// And back to them.
    All,
    /// From stage to stage.
    Activation,
    /// And back.
    Gradient,
    /// Weights that another stage uses too.
    Lent,
    /// And their gradient.
    LentGradient,
    /// Whether the next minibatch goes in behind this one.
    GoesOn,
    /// Of a step that others are still in.
    Loss,
}

/// What is in it.
#[derive(Clone, Debug)]
pub(crate) enum Message {
    /// Values that are somewhere else here: only their bytes count.
    Values,
    /// The least and the most of all ranks.
    Range(f64, f64),
    /// The next minibatch goes in behind this one.
    GoesOn(bool),
    /// All pull.
    Pull(Pull),
    /// All make a step.
    Step(Step),
    /// The job is done.
    Over,
}

/// From whom, what about, and the how manieth of these.
pub(crate) type Tag = (usize, Kind, u64);

#[derive(Default)]
struct Inbox {
    came: BTreeMap<Tag, Message>,
    awaited: Option<(Tag, oneshot::Sender<Message>)>,
}

/// All lines of a worker.
pub(crate) struct Lines {
    network: Arc<Network>,
    /// The place of the first rank in the network.
    first: usize,
    ranks: Vec<Mutex<Inbox>>,
    /// When the last message between two arrives: later ones do not come before it.
    last: Mutex<BTreeMap<(usize, usize), Moment>>,
    /// Bytes that each rank has sent, of values.
    sent: Vec<AtomicU64>,
}

impl Lines {
    pub fn new(network: &Arc<Network>, first: usize, ranks: usize) -> Arc<Self> {
        Arc::new(Self {
            network: network.clone(),
            first,
            ranks: (0..ranks).map(|_| Mutex::default()).collect(),
            last: Mutex::default(),
            sent: (0..ranks).map(|_| AtomicU64::new(0)).collect(),
        })
    }

    /// How many ranks there are.
    pub fn ranks(&self) -> usize {
        self.ranks.len()
    }

    /// What a rank has sent to others.
    pub fn sent(&self, rank: usize) -> u64 {
        self.sent[rank].load(Relaxed)
    }

    /// A message of so many bytes, to another rank.
    pub fn send(
        self: &Arc<Self>,
        (from, to): (usize, usize),
        kind: Kind,
        number: u64,
        bytes: usize,
        message: Message,
    ) {
        self.sent[from].fetch_add(bytes as u64, Relaxed);
        let mut last = self.last.lock();
        let last = last.entry((from, to)).or_default();
        let lines = self.clone();
        let arrives = move || lines.arrive(to, (from, kind, number), message);
        let between = (self.first + from, self.first + to);
        *last = self.network.between(between, bytes as u64, *last, arrives);
    }

    fn arrive(&self, to: usize, tag: Tag, message: Message) {
        let mut inbox = self.ranks[to].lock();
        match inbox.awaited.take() {
            Some((awaited, tell)) if awaited == tag => _ = tell.send(message), // who waited may have ended
            awaited => {
                inbox.awaited = awaited;
                inbox.came.insert(tag, message);
            }
        }
    }

    /// Waits for a message. A rank waits for one at a time.
    pub async fn receive(&self, at: usize, tag: Tag) -> Message {
        let told = {
            let mut inbox = self.ranks[at].lock();
            if let Some(message) = inbox.came.remove(&tag) {
                return message;
            }
            let (tell, told) = oneshot::channel();
            inbox.awaited = Some((tag, tell));
            told
        };
        match told.await {
            Ok(message) => message,
            Err(_) => std::future::pending().await, // its worker has ended
        }
    }
}
