//! A skipped step is never applied: no push of its round is, and no push is left out without a cause.

use super::{BUCKETS, History, Pushed};
use crate::shard::simulation::cluster::Group;
use paraft_common::BucketId;

impl History {
    /// Whether the log records this push as not applied.
    pub(super) fn is_skipped(group: &Group, bucket: usize, p: &Pushed) -> bool {
        group.skipped.1.contains(&(BucketId(bucket as u32), p.worker, p.session, p.step))
    }

    pub(super) fn skips_are_agreed(&self, group: &Group) {
        let skips = |w, session, step| {
            self.pushed.iter().any(|p| p.skip && (p.worker, p.session, p.step) == (w, session, step))
        };
        for (bucket, contributions) in &group.skipped.0 {
            let asked = contributions.iter().any(|c| skips(c.worker, c.session, c.step));
            assert!(asked, "{contributions:?} of {bucket} were skipped, and nobody skips");
        }
        let Some(conf) = group.truth.configured() else { return };
        for bucket in 0..BUCKETS {
            let image = conf.buckets[bucket].image();
            for (place, p) in self.pushed.iter().enumerate() {
                let out = p.skip || Self::is_skipped(group, bucket, p);
                assert!(!out || image.weights[place] == 0.0, "{p:?} is skipped, and in bucket {bucket}");
            }
        }
    }
}
