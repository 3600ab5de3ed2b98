//! Messages between the ranks of a worker over their links; a receiver waits for a specific one.

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

/// The kind of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Kind {
    /// A leader's command, from rank to rank.
    Command,
    /// The first round of the ring.
    Sum,
    /// The second round, with the result.
    All,
    /// Activations for the next stage.
    Activation,
    /// Their gradient, for the previous stage.
    Gradient,
    /// Weights that another stage uses too.
    Lent,
    /// Their gradient.
    LentGradient,
    /// Whether the next minibatch overlaps with this one.
    Continues,
    /// The loss of a step that other ranks are still in.
    Loss,
}

/// The content of a message.
#[derive(Clone, Debug)]
pub(crate) enum Message {
    /// Values that are held elsewhere here: only their bytes count.
    Values,
    /// The minimum and the maximum over the ranks.
    Range(f64, f64),
    /// Whether the next minibatch overlaps with this one.
    Continues(bool),
    /// All ranks pull.
    Pull(Pull),
    /// All ranks take a step.
    Step(Step),
    /// The job is done.
    Over,
}

/// The sender, the kind, and the number of the message of this kind.
pub(crate) type Tag = (usize, Kind, u64);

#[derive(Default)]
struct Inbox {
    came: BTreeMap<Tag, Message>,
    awaited: Option<(Tag, oneshot::Sender<Message>)>,
}

/// All links between the ranks of a worker.
pub(crate) struct Lines {
    network: Arc<Network>,
    /// The position of the first rank in the network.
    first: usize,
    ranks: Vec<Mutex<Inbox>>,
    /// When the last message between two ranks arrives: messages keep their order.
    last: Mutex<BTreeMap<(usize, usize), Moment>>,
    /// Bytes of values that each rank has sent.
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
