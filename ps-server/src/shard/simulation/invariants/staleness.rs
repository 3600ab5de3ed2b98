//! The consistency rule: a worker that goes on after step `done` has in its weights its own pushes up to `done`, and
//! everyone else's up to `done` less the staleness.

use super::{Answer, BUCKETS, History, Pushed};
use bytes::Bytes;
use paraft_common::{Step, Version, WorkerId};
use std::collections::BTreeMap;

impl History {
    pub(super) fn staleness_is_bounded(
        &self,
        worker: WorkerId,
        answer: &Answer,
        done: Step,
        got: &BTreeMap<usize, (Version, Bytes)>,
    ) {
        // Buckets that went out before a switch, by the rule of then, may be of steps that the last one would wait for.
        assert!(
            answer.modes.values().any(|mode| mode.may_proceed(answer.slowest, done)),
            "{worker} goes on after {done}; the slowest is at {}",
            answer.slowest
        );
        if self.drops_late || self.lossy {
            return; // then a push of theirs, or of its own, may be out for good
        }
        // Who was away for too long has left, though its process may not know yet: nobody waits for it.
        let there = |p: &Pushed| {
            let g = self.cluster.0.lock();
            self.sessions.is_current(p.worker, p.session)
                && p.session <= answer.told
                && g.truth.read(|m| m.members.in_session(p.worker, p.session).is_some())
        };
        for bucket in 0..BUCKETS {
            let weights = Self::weights(&got[&bucket].1);
            for (place, p) in self.pushed.iter().enumerate() {
                // Of those who still are in the session that they pushed in.
                if !there(p) {
                    continue;
                }
                let own = p.worker == worker && p.step <= done;
                let others = answer.modes[&bucket].staleness().is_some_and(|s| p.step.0 + s <= done.0);
                let needed = own || others && p.worker != worker;
                let skipped = || Self::is_skipped(&self.cluster.0.lock(), bucket, p);
                assert!(
                    !needed || weights[place] != 0.0 || skipped() || self.was_in_an_earlier_round(p),
                    "{worker} goes on after {done} without {p:?} in bucket {bucket}"
                );
            }
        }
    }

    /// The final weights are the same for everyone, whoever leads when they ask.
    pub(super) fn the_end_is_the_same_for_all(&mut self, got: &BTreeMap<usize, (Version, Bytes)>) {
        let weights: Vec<Bytes> = got.values().map(|(_, w)| w.clone()).collect();
        let first = self.last.get_or_insert_with(|| weights.clone());
        assert!(*first == weights, "two workers end with different weights");
    }
}
