//! The consistency rule: the weights that a worker gets after step `done` contain its own pushes up to `done`, and
//! every other worker's up to `done` minus the staleness bound.

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
        // Buckets that were sent before a switch follow the old rule, and may be of steps that the new rule would
        // wait for.
        assert!(
            answer.modes.values().any(|mode| mode.may_proceed(answer.slowest, done)),
            "{worker} goes on after {done}; the slowest is at {}",
            answer.slowest
        );
        if self.drops_late || self.lossy {
            return; // a push may then be excluded for good
        }
        // A worker that was away for too long has left, possibly without its knowledge: no other waits for it.
        let there = |p: &Pushed| {
            let g = self.cluster.0.lock();
            self.sessions.is_current(p.worker, p.session)
                && p.session <= answer.told
                && g.truth.read(|m| m.members.in_session(p.worker, p.session).is_some())
        };
        for bucket in 0..BUCKETS {
            let weights = Self::weights(&got[&bucket].1);
            for (place, p) in self.pushed.iter().enumerate() {
                // Only workers that are still in the session of their push.
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

    /// The final weights are the same for all workers, whichever leader sends them.
    pub(super) fn the_end_is_the_same_for_all(&mut self, got: &BTreeMap<usize, (Version, Bytes)>) {
        let weights: Vec<Bytes> = got.values().map(|(_, w)| w.clone()).collect();
        let first = self.last.get_or_insert_with(|| weights.clone());
        assert!(*first == weights, "two workers end with different weights");
    }
}
