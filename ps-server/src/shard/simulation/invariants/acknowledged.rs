//! An acknowledged push is committed and stays so; at the level `leader`, it is either committed or counted as
//! lost.

use super::{BUCKETS, History};
use crate::shard::{Shard, simulation::cluster::Group};
use paraft_common::Version;

impl History {
    /// A worker gets the ack of the push at this place.
    pub fn acknowledged(&mut self, term: u64, bucket: usize, place: usize, version: Version) {
        self.pushed[place].acked[bucket] = true;
        let highest = self.acked.entry((term, bucket)).or_default();
        *highest = (*highest).max(version);
    }

    /// A worker is notified that the push at this place came too late for its round.
    pub fn dropped(&mut self, bucket: usize, place: usize) {
        self.pushed[place].dropped[bucket] = true;
    }

    /// A late push is never applied.
    pub(super) fn late_is_out(&self, truth: &Shard) {
        let Some(conf) = truth.configured() else { return };
        for bucket in 0..BUCKETS {
            let image = conf.buckets[bucket].image();
            for (place, push) in self.pushed.iter().enumerate().filter(|(_, p)| p.dropped[bucket]) {
                assert!(!push.acked[bucket], "{push:?} was acknowledged, and dropped in bucket {bucket}");
                assert_eq!(image.weights[place], 0.0, "{push:?} was dropped and is in bucket {bucket}");
            }
        }
    }

    /// At the level `leader`: for each worker that finished in the session of its pushes, each push is in the
    /// weights or counted as lost by the servers.
    pub(super) fn check_lost_pushes(&self, truth: &Shard) {
        let conf = truth.configured();
        let mut lost = 0u64;
        for bucket in 0..BUCKETS {
            let image = conf.as_ref().map(|c| c.buckets[bucket].image());
            let acked = self.pushed.iter().enumerate().filter(|(_, p)| p.acked[bucket] && !p.skip);
            let of_these = acked.filter(|(_, p)| self.sessions.is_current(p.worker, p.session));
            lost += of_these
                .filter(|(place, _)| image.as_ref().is_none_or(|i| i.weights[*place] == 0.0))
                .count() as u64;
        }
        let reported = truth.read(|m| m.pushes_lost);
        assert!(lost <= reported, "{lost} acknowledged pushes are in no weights, {reported} are reported");
    }

    pub(super) fn acknowledged_is_in(&self, group: &Group) {
        let conf = group.truth.configured();
        for bucket in 0..BUCKETS {
            let image = conf.as_ref().map(|c| c.buckets[bucket].image());
            for (place, push) in self.pushed.iter().enumerate().filter(|(_, p)| p.acked[bucket]) {
                // If a round of an earlier session already had a push of the step, that round acknowledges the
                // push.
                let by_another = || {
                    let same = |p: &super::Pushed| (p.worker, p.step) == (push.worker, push.step);
                    self.averages && self.pushed.iter().filter(|p| same(p)).count() > 1
                };
                // A skipped push is in the log only.
                let in_log = Self::is_skipped(group, bucket, push);
                let is_in = in_log || image.as_ref().is_some_and(|i| i.weights[place] != 0.0);
                assert!(is_in || by_another(), "{push:?} was acknowledged and is not in bucket {bucket}");
            }
        }
    }
}
