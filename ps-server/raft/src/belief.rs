//! The evidence of a leader's end that a replica has accepted.

use super::{network::Connection, types::Vote};
use std::{
    sync::atomic::AtomicBool,
    time::{Duration, Instant},
};
use tokio::sync::Mutex;

/// What a replica knows of its leader's end.
#[derive(Default)]
pub(super) struct Evidence {
    /// The last accepted evidence, and the connection to the accused leader.
    pub belief: Mutex<(Belief, Option<Connection>)>,
    /// It is looking for the next leader.
    pub succeeding: AtomicBool,
}

/// A replica accepts evidence once per this interval, unless it can tell that the last was true. If evidence is
/// false (a host refuses connections for a live process), it causes less than one election a second.
pub(super) const EVIDENCE_INTERVAL: Duration = Duration::from_millis(1500);
/// Accepted evidence is checked again after this long: the leader may have been alive all the time.
const EVIDENCE_LIFETIME: Duration = Duration::from_millis(500);

/// The last leader whose end a replica has accepted, and when. It has no clock.
#[derive(Debug, Default)]
pub(super) struct Belief(Option<(Vote, Instant)>);

impl Belief {
    /// Whether it accepts now that the leader with this vote has ended.
    pub fn holds(&self, vote: &Vote, now: Instant) -> bool {
        self.0.is_some_and(|(of, at)| of == *vote && now.saturating_duration_since(at) < EVIDENCE_LIFETIME)
    }

    /// The last accused leader, and the time since the evidence was accepted.
    pub fn last(&self, now: Instant) -> Option<(Vote, Duration)> {
        self.0.map(|(of, at)| (of, now.saturating_duration_since(at)))
    }

    /// Whether new evidence may be accepted, whatever became of the last.
    pub fn is_open(&self, now: Instant) -> bool {
        self.0.is_none_or(|(_, at)| now.saturating_duration_since(at) >= EVIDENCE_INTERVAL)
    }

    /// Accepts from now on that the leader with this vote has ended.
    pub fn accept(&mut self, vote: Vote, now: Instant) {
        self.0 = Some((vote, now));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn evidence_counts_against_one_leadership_and_not_again_at_once() {
        let (a, b) = (Vote::new_committed(3, 1), Vote::new_committed(4, 1));
        let (mut belief, now) = (Belief::default(), Instant::now());
        assert!(belief.is_open(now) && !belief.holds(&a, now));
        belief.accept(a, now);
        assert!(belief.holds(&a, now));
        assert!(
            !belief.holds(&b, now),
            "the same replica leads again, elected anew: that is another leadership"
        );
        assert!(!belief.is_open(now + EVIDENCE_INTERVAL - Duration::from_millis(1)));
        assert!(!belief.holds(&a, now + EVIDENCE_LIFETIME), "it is looked at again");
        assert!(belief.is_open(now + EVIDENCE_INTERVAL));
    }
}
