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
mod tests {
    use super::*;
    use paraft_common::Mode;
    use proptest::prelude::*;

    const STEP: Duration = Duration::from_millis(10);

    proptest! {
        /// A member is removed after one lease to one and a quarter of silence, or at the end of its allowed
        /// absence; no other is.
        #[test]
        fn a_member_goes_for_its_silence_and_for_nothing_else(
            beats in prop::collection::vec(prop::collection::vec((1u32..300, 1u32..150), 1..6), 3),
        ) {
            let job = ServerJob { grace_ms: 1000, ..ServerJob::new("leases", Mode::Bsp, 8, 8) };
            let (lease, begun) = (job.lease(), Instant::now());
            let mut leases = Leases::default();
            let workers: Vec<WorkerId> = (0..3).map(WorkerId).collect();
            leases.begin(workers.clone(), Some(&job), begun);
            let lives: Vec<Arc<Liveness>> = workers.iter().map(|_| Arc::default()).collect();
            for (w, liveness) in workers.iter().zip(&lives) {
                leases.opened(u64::from(w.0), liveness.clone());
                leases.mark_present(*w);
            }
            // Each alternates between some steps with heartbeats and some without.
            let beats_at = |w: usize, step: u32| {
                let turn: u32 = beats[w].iter().map(|(on, off)| on + off).sum();
                let mut at = step % turn;
                for (on, off) in &beats[w] {
                    if at < *on { return true; }
                    if at < on + off { return false; }
                    at -= on + off;
                }
                false
            };
            let mut last = [begun; 3];
            let mut here: BTreeSet<WorkerId> = workers.iter().copied().collect();
            for step in 0..1500u32 {
                let now = begun + STEP * step;
                for w in 0..3 {
                    if here.contains(&workers[w]) && beats_at(w, step) {
                        lives[w].heard();
                        last[w] = now;
                    }
                }
                if leases.deadline(!here.is_empty()).is_none_or(|at| at > now) {
                    continue;
                }
                let attached = here.iter().map(|w| (*w, u64::from(w.0)));
                let Some(looked) = leases.check(lease, attached, now) else { continue };
                let over: Vec<_> = looked.over.iter().map(|(w, _)| *w).collect();
                for w in here.clone() {
                    let silent = now - last[w.0 as usize];
                    prop_assert!(!over.contains(&w) || silent >= lease, "{w} after {silent:?}");
                    prop_assert!(silent < lease * 5 / 4 + STEP, "{w} was looked at too late");
                    prop_assert!(over.contains(&w) || silent < lease, "{w} stays after {silent:?}");
                    prop_assert!(looked.left[&w] <= lease);
                }
                for (w, conn) in looked.over {
                    here.remove(&w);
                    prop_assert!(leases.closed(conn).is_some());
                    leases.expire(w, now);
                    prop_assert_eq!(leases.take_expired(now), vec![w], "once");
                    prop_assert_eq!(leases.take_expired(now), vec![]);
                    leases.mark_leaving(w);
                    prop_assert!(!leases.is_quiet());
                    leases.mark_left(w, false);
                }
            }
        }

        /// An absent member has the rest of its lease, and is not absent once it is back.
        #[test]
        fn who_is_away_has_what_is_left_of_its_lease(silent in 0u32..6, back in any::<bool>()) {
            let job = ServerJob { grace_ms: 4000, ..ServerJob::new("leases", Mode::Bsp, 8, 8) };
            let (mut leases, now, w) = (Leases::default(), Instant::now(), WorkerId(7));
            leases.mark_absent(w, Silence(silent), Some(&job), now);
            let left = Duration::from_millis(4000 - 1000 * u64::from(silent.saturating_sub(1).min(4)));
            prop_assert_eq!(leases.deadline(false), Some(now + left));
            if back {
                leases.mark_present(w);
            }
            let gone = if back { vec![] } else { vec![w] };
            prop_assert_eq!(leases.take_expired(now + left), gone);
            prop_assert!(leases.is_quiet());
        }
    }
}
