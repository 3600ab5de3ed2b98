//! Leases of members. Every message renews the lease of its sender. A client that has nothing else to send sends
//! heartbeats, from its own I/O thread, so a long step is no silence. A member that is silent for a lease is
//! removed, even if its connection is open: a hanging process and a network that drops everything keep theirs open.
//!
//! Leader-only. Silence is counted in quarters of a lease, by periodic checks instead of clock comparison: a server
//! that was suspended itself finds one quarter gone, not a fleet of dead workers. So a member has between one lease
//! and one and a quarter.

use super::messages::{ConnId, Liveness};
use paraft_common::{WorkerId, config::ServerJob};
use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::{Duration, Instant},
};

/// After an election, members have at least this long to find the new leader. (They detect a hanging leader by the
/// connection's keepalive.)
const REFIND_TIMEOUT: Duration = Duration::from_secs(10);
/// Quarters of a lease that may pass in silence.
const QUARTERS: u32 = 4;

/// A stream whose signs of life are watched.
#[derive(Debug)]
struct WatchedStream {
    liveness: Arc<Liveness>,
    /// Quarters of a lease without a sign of life.
    silent: u32,
}

/// Which members are alive, absent or leaving.
#[derive(Debug, Default)]
pub struct Leases {
    streams: BTreeMap<ConnId, WatchedStream>,
    /// When the leases are checked next.
    look: Option<Instant>,
    /// Members without a stream, and the deadline of each.
    absent: BTreeMap<WorkerId, Instant>,
    /// Members whose Leave is proposed.
    leaving: BTreeSet<WorkerId>,
}

/// The result of a check.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct LeaseCheck {
    /// What is left of each member's lease, to a quarter of it.
    pub left: BTreeMap<WorkerId, Duration>,
    /// Members with an open stream whose lease is over.
    pub over: Vec<(WorkerId, ConnId)>,
}

fn grace(job: &ServerJob) -> Duration {
    Duration::from_millis(job.grace_ms)
}

impl Leases {
    /// Starts an epoch: these members must find the new leader.
    pub fn begin(&mut self, members: Vec<WorkerId>, job: Option<&ServerJob>, now: Instant) {
        let until = now + job.map_or(REFIND_TIMEOUT, |job| grace(job).max(REFIND_TIMEOUT));
        self.absent = members.into_iter().map(|w| (w, until)).collect();
        self.look = Some(now);
    }

    /// Records an open stream.
    pub fn opened(&mut self, conn: ConnId, liveness: Arc<Liveness>) {
        self.streams.insert(conn, WatchedStream { liveness, silent: 0 });
    }

    /// Records that a member has a stream.
    pub fn mark_present(&mut self, worker: WorkerId) {
        self.absent.remove(&worker);
    }

    /// Removes a closed stream.
    pub fn closed(&mut self, conn: ConnId) -> Option<Silence> {
        self.streams.remove(&conn).map(|w| Silence(w.silent))
    }

    /// Records that a member lost its stream. It may be absent for the rest of its lease: the connection of a
    /// vanished host closes long after the last sign of life.
    pub fn mark_absent(&mut self, worker: WorkerId, silence: Silence, job: Option<&ServerJob>, now: Instant) {
        let rest = job.map_or(REFIND_TIMEOUT, |job| {
            // One quarter may be a heartbeat that was a little late.
            let silent = job.lease() / QUARTERS * silence.0.saturating_sub(1);
            grace(job).saturating_sub(silent)
        });
        self.absent.insert(worker, now + rest);
    }

    /// Ends the wait for a member.
    pub fn expire(&mut self, worker: WorkerId, now: Instant) {
        self.absent.insert(worker, now);
    }

    /// Checks the leases, if it is time. `members`: those with a stream.
    pub fn check(
        &mut self,
        lease: Duration,
        members: impl IntoIterator<Item = (WorkerId, ConnId)>,
        now: Instant,
    ) -> Option<LeaseCheck> {
        self.look.filter(|at| *at <= now)?;
        let quarter = lease / QUARTERS;
        self.look = Some(now + quarter);
        let mut looked = LeaseCheck::default();
        for (worker, conn) in members {
            let Some(stream) = self.streams.get_mut(&conn) else { continue };
            stream.silent = if stream.liveness.take() { 0 } else { stream.silent + 1 };
            if stream.silent >= QUARTERS {
                looked.over.push((worker, conn));
            }
            looked.left.insert(worker, quarter * QUARTERS.saturating_sub(stream.silent));
        }
        looked.left.extend(self.absent.iter().map(|(w, until)| (*w, until.saturating_duration_since(now))));
        Some(looked)
    }

    /// Takes the members that were absent for too long, once.
    pub fn take_expired(&mut self, now: Instant) -> Vec<WorkerId> {
        let gone: Vec<_> = self.absent.iter().filter(|(_, until)| **until <= now).map(|(w, _)| *w).collect();
        gone.iter().for_each(|w| _ = self.absent.remove(w));
        gone
    }

    /// Records that a member's Leave is proposed.
    pub fn mark_leaving(&mut self, worker: WorkerId) {
        self.leaving.insert(worker);
    }

    /// Records that its Leave is applied; `back`: the worker returned before, in another session.
    pub fn mark_left(&mut self, worker: WorkerId, back: bool) {
        self.leaving.remove(&worker);
        if !back {
            self.absent.remove(&worker);
        }
    }

    /// Members whose Leave is proposed.
    pub fn leaving(&self) -> &BTreeSet<WorkerId> {
        &self.leaving
    }

    /// Whether no member is absent or leaving.
    pub fn is_quiet(&self) -> bool {
        self.absent.is_empty() && self.leaving.is_empty()
    }

    /// The next deadline. `attached`: some member has a stream.
    pub fn deadline(&self, attached: bool) -> Option<Instant> {
        let look = self.look.filter(|_| attached || !self.absent.is_empty());
        self.absent.values().copied().chain(look).min()
    }
}

/// How long a stream was silent before it closed.
#[derive(Clone, Copy, Debug)]
pub struct Silence(u32);

#[cfg(test)]
#[path = "leases_tests.rs"]
mod tests;
