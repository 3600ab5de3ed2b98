//! The leased sampler's part of the replicated state (shard 0): an epoch's data is cut into chunks, and the worker
//! that holds a chunk trains it.
//!
//! ```text
//!          ask                       done
//!   next ──────▶ held by a worker ─────────▶ done         all done: the epoch is over
//!    back ──────▶      │
//!      ▲───────────────┘ the worker left, or came back in a new session
//! ```
//!
//! Guarantees for each epoch: at most one worker holds a chunk; a chunk counts as done only when its holder says
//! so; the epoch is over when all chunks are done. So every chunk is trained at least once, and exactly once if no
//! worker leaves.
//!
//! A barrier separates two epochs. The next epoch is *open*, and its chunks are assigned, once every member is
//! ready for it. Until then no worker trains, so the evaluated weights and the checkpoint are those of the epoch's
//! end in every mode. A worker that joins later finds the epoch open and need not do that work.

use super::members::Members;
use paraft_common::{WorkerId, config::ChunkPlan};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// The chunks of the current epoch, and their holders.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Chunks {
    plan: (u64, u64),
    /// The current epoch, from 0; at the end, the number of epochs in the plan.
    epoch: u64,
    /// Its chunks are being assigned.
    open: bool,
    /// The first chunk that was never assigned.
    next: u64,
    /// Chunks that were returned.
    back: BTreeSet<u64>,
    /// Number of finished chunks.
    done: u64,
    held: BTreeMap<WorkerId, u64>,
    /// The latest request of each member, until its session ends.
    asks: BTreeMap<WorkerId, ChunkRequest>,
    /// The worker that must write the checkpoint of the previous epoch while this one is not open: the lowest
    /// member.
    writer: Option<WorkerId>,
    /// Chunks returned so far, in all epochs.
    returned: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct ChunkRequest {
    request: u64,
    /// The epoch for which the worker is ready.
    epoch: u64,
}

/// The state's answer to a worker's latest request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// Train this chunk.
    Train {
        /// The epoch, from 0.
        epoch: u64,
        /// The chunk, from 0.
        chunk: u64,
    },
    /// Every chunk of the epoch is done or held by another worker. One may be returned, so the request remains.
    Wait,
    /// This many epochs are over: do the work between epochs, then request again.
    Over {
        /// Number of epochs.
        epochs: u64,
        /// Write the checkpoint, if the job has checkpoints.
        write: bool,
    },
    /// No data is left to train.
    Ended,
}

/// Numbers for `paraft status`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Summary {
    /// The current epoch, from 0.
    pub epoch: u64,
    /// Chunks of an epoch.
    pub per_epoch: u64,
    /// Finished chunks of this epoch.
    pub done: u64,
    /// Chunks that workers hold.
    pub held: u64,
    /// Chunks returned in all epochs, because a worker left or came back in a new session.
    pub returned: u64,
}

impl Chunks {
    /// No chunk is assigned yet.
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

    /// The plan that it was made from.
    pub fn plan(&self) -> ChunkPlan {
        ChunkPlan { per_epoch: self.plan.0, epochs: self.plan.1 }
    }

    /// Starts from a checkpoint with this many epochs.
    pub(super) fn begin_at(&mut self, epochs: u64) {
        self.epoch = epochs.min(self.plan.1);
        // The new workers evaluate the previous epoch, as the writers of the checkpoint would have done.
        self.open = epochs == 0;
    }

    /// Handles a member's request. A member that holds a chunk and does not report it as done returns it.
    pub(super) fn take(&mut self, worker: WorkerId, request: u64, epoch: u64, done: Option<u64>) {
        if self.asks.get(&worker).is_some_and(|a| a.request >= request) {
            return; // a repeated request, from a worker that has found another leader
        }
        match self.held.remove(&worker) {
            Some(chunk) if done == Some(chunk) => self.done += 1,
            Some(chunk) => self.return_chunk(chunk),
            None => {}
        }
        self.asks.insert(worker, ChunkRequest { request, epoch: epoch.min(self.epoch) });
        if self.done == self.plan.0 && self.epoch < self.plan.1 {
            self.epoch += 1;
            (self.open, self.next, self.done) = (false, 0, 0);
            self.writer = None;
        }
    }

    /// Returns the chunk of a worker whose session is over.
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

    /// Opens the epoch if every member is ready for it, and assigns chunks to the waiting members, by rank.
    pub(super) fn assign(&mut self, members: &Members, started: bool) {
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

    /// The answer to the request with this number. `None` while it must wait for other members, or if it is not the
    /// worker's latest. `stop`: the job has stopped early.
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

    /// The progress of the epoch.
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
