//! The leased sampler's part of the replicated state (shard 0): an epoch's data is cut into chunks, and each is trained
//! by whoever has it.
//!
//! ```text
//!          ask                       done
//!   next ──────▶ held by a worker ─────────▶ done         all done: the epoch is over
//!    back ──────▶      │
//!      ▲───────────────┘ the worker left, or came back in a new session
//! ```
//!
//! What it promises, for each epoch: every chunk is held by one worker at most; it counts as done only when the worker
//! that holds it says so; the epoch is over when all are done. So every chunk is trained at least once, and exactly once
//! where no worker leaves.
//!
//! Between two epochs stands a barrier. The epoch that follows is *open*, its chunks are given out, once every member has
//! said that it is ready for it: until then nobody trains, so the weights that are evaluated and the checkpoint that is
//! cut are those of the epoch's end in every mode. Who joins later finds it open and need not do that work.

use super::members::Members;
use paraft_common::{WorkerId, config::ChunkPlan};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// The chunks of the current epoch, and who has them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Chunks {
    plan: (u64, u64),
    /// The current epoch, from 0; as many as the plan has when all are over.
    epoch: u64,
    /// Its chunks are given out.
    open: bool,
    /// The first chunk that nobody has had.
    next: u64,
    /// Chunks that were given back.
    back: BTreeSet<u64>,
    /// How many are done.
    done: u64,
    held: BTreeMap<WorkerId, u64>,
    /// The latest ask of each member, until its session ends.
    asks: BTreeMap<WorkerId, Ask>,
    /// Who is to write the checkpoint of the epoch before, while this one is not open: the lowest member.
    writer: Option<WorkerId>,
    /// Chunks given back so far, in all epochs.
    returned: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Ask {
    request: u64,
    /// The epoch for which the worker is ready.
    epoch: u64,
}

/// What the state says to a worker's latest ask.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// Train this chunk.
    Train {
        /// Of this epoch, from 0.
        epoch: u64,
        /// From 0.
        chunk: u64,
    },
    /// Every chunk of the epoch is done or held by another worker; one may be given back, so the ask stands.
    Wait,
    /// So many epochs are over: do what is due between epochs, then ask again.
    Over {
        /// How many.
        epochs: u64,
        /// Write the checkpoint, if the job makes any.
        write: bool,
    },
    /// There is nothing more to train.
    Ended,
}

/// Numbers for `paraft status`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Summary {
    /// The current epoch, from 0.
    pub epoch: u64,
    /// Chunks of an epoch.
    pub per_epoch: u64,
    /// Done in this epoch.
    pub done: u64,
    /// Held by workers.
    pub held: u64,
    /// Given back in all epochs, because a worker left or came back in a new session.
    pub returned: u64,
}

impl Chunks {
    /// Nothing is given out yet.
    pub fn new(plan: ChunkPlan) -> Self {
        Self {
            plan: (plan.per_epoch, plan.epochs),
            epoch: 0,
            open: true,
            next: 0,
            back: BTreeSet::new(),
            done: 0,
            held: BTreeMap::new(),
            asks: BTreeMap::new(),
            writer: None,
            returned: 0,
        }
    }

    /// What it was made from.
    pub fn plan(&self) -> ChunkPlan {
        ChunkPlan { per_epoch: self.plan.0, epochs: self.plan.1 }
    }

    /// The job goes on from a checkpoint with so many epochs.
    pub(super) fn begin_at(&mut self, epochs: u64) {
        self.epoch = epochs.min(self.plan.1);
        // Those that begin evaluate the epoch before, as those would have done that wrote the checkpoint.
        self.open = epochs == 0;
    }

    /// A member asks. One that holds a chunk and does not say that it is done gives it back.
    pub(super) fn take(&mut self, worker: WorkerId, request: u64, epoch: u64, done: Option<u64>) {
        if self.asks.get(&worker).is_some_and(|a| a.request >= request) {
            return; // it came again, from a worker that has found another leader
        }
        match self.held.remove(&worker) {
            Some(chunk) if done == Some(chunk) => self.done += 1,
            Some(chunk) => self.return_chunk(chunk),
            None => {}
        }
        self.asks.insert(worker, Ask { request, epoch: epoch.min(self.epoch) });
        if self.done == self.plan.0 && self.epoch < self.plan.1 {
            self.epoch += 1;
            (self.open, self.next, self.done) = (false, 0, 0);
            self.writer = None;
        }
    }

    /// The worker's session is over.
    pub(super) fn give_back(&mut self, worker: WorkerId) {
        self.asks.remove(&worker);
        if let Some(chunk) = self.held.remove(&worker) {
            self.return_chunk(chunk);
        }
    }

    fn return_chunk(&mut self, chunk: u64) {
        self.back.insert(chunk);
        self.returned += 1;
    }

    /// Opens the epoch if everyone is ready for it, and gives chunks to those that wait, by rank.
    pub(super) fn settle(&mut self, members: &Members, started: bool) {
        let ready = |w: WorkerId| self.asks.get(&w).is_some_and(|a| a.epoch == self.epoch);
        if !self.open && started && self.epoch < self.plan.1 {
            let mut all = members.unfinished().peekable();
            self.open = all.peek().is_some() && all.all(|(w, _)| ready(w));
        }
        if !self.open {
            let there = |w: &WorkerId| members.get(*w).is_some_and(|m| !m.finished);
            self.writer = self.writer.filter(there).or_else(|| members.unfinished().map(|(w, _)| w).next());
            return;
        }
        self.writer = None;
        for (worker, ask) in &mut self.asks {
            ask.epoch = self.epoch;
            if self.held.contains_key(worker) {
                continue;
            }
            let fresh = (self.next < self.plan.0).then_some(self.next);
            let Some(chunk) = self.back.pop_first().or(fresh) else { continue };
            if fresh == Some(chunk) {
                self.next += 1;
            }
            self.held.insert(*worker, chunk);
        }
    }

    /// What to say to the ask with this number; `None` while it has to wait for the others to be ready, or where it is not
    /// the worker's latest. `stop`: the job has stopped early.
    pub fn answer(&self, worker: WorkerId, request: u64, stop: bool) -> Option<Answer> {
        let ask = self.asks.get(&worker).filter(|a| a.request == request)?;
        if stop {
            return Some(Answer::Ended);
        }
        if ask.epoch < self.epoch {
            return Some(Answer::Over { epochs: self.epoch, write: self.writer == Some(worker) });
        }
        if self.epoch == self.plan.1 {
            return Some(Answer::Ended);
        }
        match self.held.get(&worker) {
            Some(chunk) => Some(Answer::Train { epoch: self.epoch, chunk: *chunk }),
            None => self.open.then_some(Answer::Wait),
        }
    }

    /// Whether the worker holds a chunk.
    pub fn holds(&self, worker: WorkerId) -> bool {
        self.held.contains_key(&worker)
    }

    /// How far it has come.
    pub fn summary(&self) -> Summary {
        Summary {
            epoch: self.epoch,
            per_epoch: self.plan.0,
            done: self.done,
            held: self.held.len() as u64,
            returned: self.returned,
        }
    }
}
