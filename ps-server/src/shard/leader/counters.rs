//! What a leader counts, and what its workers report about themselves.

use super::progress::Progress;
use crate::shard::{staleness::Staleness, state::Shard};
use paraft_common::{WorkerId, auto};
use paraft_trace::Stages;
use parking_lot::Mutex;
use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

/// What a worker reports about itself, for people.
#[derive(Clone, Debug, Default)]
pub struct WorkerInfo {
    /// Where it runs.
    pub host: String,
    /// What it computes on.
    pub device: String,
    /// The last lines of its log.
    pub said: Vec<String>,
}

/// Counts of the leader, and the bytes of readers (which every replica serves). They start at zero with the
/// process.
///
/// A status locks some of them while it holds the shard's state. Code that holds one of these locks must therefore not
/// lock that state.
#[derive(Debug, Default)]
#[allow(missing_docs)]
pub struct Counters {
    pub pulls: AtomicU64,
    pub pulls_waited: AtomicU64,
    pub bytes_pulled: AtomicU64,
    pub not_modified: AtomicU64,
    /// Refused messages, by kind.
    pub refused: AtomicU64,
    /// Messages that were redirected to the leader, or that the worker must repeat.
    pub redirected: AtomicU64,
    /// This replica leads and serves workers.
    pub leads: AtomicBool,
    pub max_step_lead: AtomicU64,
    pub streams: AtomicU64,
    /// Payload of the entries proposed to the log.
    pub bytes_logged: AtomicU64,
    pub deltas: AtomicU64,
    /// Bytes of pushes that the leader holds, in open rounds and otherwise. Updated four times a lease.
    pub queued: AtomicU64,
    /// Input of the rule that chooses the mode; see [`Self::take_auto`].
    pub auto: Mutex<Option<auto::Report>>,
    /// What is left of each member's lease, to a quarter of it; empty if this replica does not lead.
    pub leases: Mutex<BTreeMap<WorkerId, Duration>>,
    /// Training progress, for people.
    pub progress: Mutex<Progress>,
    /// A checkpoint of this moment is requested. On shard 0, until its writer gets the request.
    pub save: AtomicBool,
    /// What workers report about themselves.
    pub about: Mutex<BTreeMap<WorkerId, WorkerInfo>>,
    /// Delays of the pushes that were applied while this replica led.
    pub staleness: Arc<Staleness>,
    /// The process's spans, for all its shards.
    pub stages: Arc<Stages>,
}

impl Counters {
    /// Counts a bucket sent to a worker, with `bytes` of weights.
    pub fn pulled(&self, bytes: usize, not_modified: bool) {
        self.bytes_pulled.fetch_add(bytes as u64, Relaxed);
        self.not_modified.fetch_add(u64::from(not_modified), Relaxed);
    }

    /// Stores what a worker reports about itself. Drops the reports of workers that are not members of `shard` any
    /// more.
    pub fn take_about(&self, shard: &Shard, worker: WorkerId, about: WorkerInfo) {
        // Before the lock: a status holds the shard's state while it waits for the lock.
        let members: BTreeSet<WorkerId> = shard.read(|m| m.members.iter().map(|(w, _)| w).collect());
        let mut all = self.about.lock();
        all.insert(worker, about);
        all.retain(|w, _| *w == worker || members.contains(w));
    }

    /// Takes the input of the rule that chooses the mode of `shard`, if one does and this replica leads. Each lead
    /// is reported once.
    pub fn take_auto(&self, shard: &Shard) -> Option<auto::Report> {
        let in_force = shard.read(|m| m.in_force);
        in_force.auto?;
        let mut auto = self.auto.lock();
        let report = auto.filter(|t| t.number == in_force.number)?;
        *auto = Some(auto::Report { counted: auto::Counted { lead: 0, ..report.counted }, ..report });
        Some(report)
    }
}

#[cfg(test)]
#[path = "counters_tests.rs"]
mod tests;
