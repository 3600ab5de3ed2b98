//! Whether a replica needs openraft's timer. It ticks five times between two heartbeats, in every replica that is
//! awake, and nearly every tick finds nothing to do. So it is off:
//!
//! - on a leader, whose heartbeats have a timer of their own;
//! - on a follower whose leader was heard within [`QUIET_ELECTIONS`] election timeouts. openraft lets a follower
//!   stand after three at the earliest: its lease lasts two, its timeout at least one. So the timer is on in time,
//!   and no election begins later than with a timer that is always on.
//! - while the replica sleeps (`sleep`).

use super::types::Vote;
use parking_lot::Mutex;
use std::time::{Duration, Instant};
use tokio::sync::Notify;

/// A follower needs no timer for so many election timeouts after an append.
pub(super) const QUIET_ELECTIONS: u32 = 2;

/// The interval of a leader's heartbeats, in milliseconds.
pub(super) fn heartbeat_ms(election: Duration) -> u64 {
    (election.as_millis() as u64 / 3).max(10)
}

/// What a replica's timekeeper knows.
#[derive(Debug, Default)]
pub(super) struct Ticks {
    heard: Mutex<Heard>,
    /// The timer has nothing to find.
    pub quiet: Mutex<bool>,
    /// Notified when the timekeeper must decide again.
    pub changed: Notify,
}

#[derive(Debug, Default)]
struct Heard {
    /// When the last append that was accepted arrived.
    at: Option<Instant>,
    /// A vote whose lease was dropped: appends under it do not renew the lease, and a follower may stand earlier.
    dropped: Option<Vote>,
    /// The timer runs until the next append.
    runs: bool,
}

impl Ticks {
    /// An append under this vote was accepted; `at`: when it arrived, which is no later than openraft's lease begins.
    pub fn heard(&self, at: Instant, vote: &Vote) {
        let mut heard = self.heard.lock();
        if heard.dropped.as_ref().is_some_and(|dropped| *vote <= *dropped) {
            return;
        }
        heard.dropped = None;
        heard.at = heard.at.max(Some(at));
        if std::mem::take(&mut heard.runs) {
            self.changed.notify_one();
        }
    }

    /// The lease of the leader with this vote is dropped: the timer runs until another leads.
    pub fn lease_dropped(&self, vote: Vote) {
        let mut heard = self.heard.lock();
        (heard.at, heard.dropped) = (None, Some(vote));
        self.changed.notify_one();
    }

    /// Until when a follower needs no timer; `None`: it needs it now, until it hears its leader.
    pub fn quiet_until(&self, quiet: Duration, now: Instant) -> Option<Instant> {
        let mut heard = self.heard.lock();
        let until = heard.at.map(|at| at + quiet).filter(|until| *until > now);
        heard.runs = until.is_none();
        until
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const QUIET: Duration = Duration::from_millis(300);

    #[test]
    fn follower_that_hears_its_leader_is_quiet_for_a_while() {
        let (ticks, at) = (Ticks::default(), Instant::now());
        assert_eq!(ticks.quiet_until(QUIET, at), None, "nothing was heard");
        ticks.heard(at, &Vote::new(1, 1));
        assert_eq!(ticks.quiet_until(QUIET, at), Some(at + QUIET));
        assert_eq!(ticks.quiet_until(QUIET, at + QUIET), None, "it was too long ago");
    }

    #[test]
    fn lease_that_was_dropped_is_not_renewed_under_its_vote() {
        let (ticks, at) = (Ticks::default(), Instant::now());
        let (old, new) = (Vote::new(2, 1), Vote::new(3, 2));
        ticks.heard(at, &old);
        ticks.lease_dropped(old);
        ticks.heard(at, &Vote::new(1, 3));
        ticks.heard(at, &old);
        assert_eq!(ticks.quiet_until(QUIET, at), None, "its follower may stand soon");
        ticks.heard(at, &new);
        assert_eq!(ticks.quiet_until(QUIET, at), Some(at + QUIET), "another leads");
    }

    #[test]
    fn heartbeats_come_three_times_an_election_timeout() {
        assert_eq!(heartbeat_ms(Duration::from_millis(150)), 50);
        assert_eq!(heartbeat_ms(Duration::from_millis(9)), 10);
    }
}
