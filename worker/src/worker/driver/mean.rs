//! The step of a worker that runs the optimizer on the mean gradient, and writes a share of the results.

use super::Driver;
use crate::worker::WorkerError;
use paraft_client::{Pulled, RestOfResults};
use paraft_common::{BucketId, Share, Step};
use std::collections::BTreeSet;

/// See the module.
#[derive(Debug, Default)]
pub(super) struct MeanStep {
    /// The version of each bucket before the step.
    before: Vec<u64>,
    /// Whether every bucket of the mean is of this step: no round of it was skipped.
    whole: bool,
    /// While the results are written: those that other workers write.
    pub rest: Option<RestOfResults>,
    /// Results of other workers that did not write them, and the share at which that was so: this one writes them
    /// from then on.
    taken_over: (Option<Share>, BTreeSet<BucketId>),
}

impl Driver {
    /// A step starts.
    pub(super) fn begin_mean(&mut self) {
        if !self.layout.results().is_empty() {
            self.client.computed_at(None);
            self.mean.before = self.client.versions();
            self.mean.rest = None;
        }
    }

    /// The step's mean is pulled: whether it is whole. It is the same on every worker.
    pub(super) fn end_mean(&mut self) -> bool {
        let (now, before) = (self.client.versions(), &self.mean.before);
        self.mean.whole = self.layout.results().start > 0
            && (0..self.layout.results().start).all(|b| now.get(b) > before.get(b));
        self.mean.whole
    }

    /// Writes this worker's share of the results, or marks it as skipped.
    pub(super) fn write_results(&mut self, weights: &[f32], step: Step, share: Share) {
        if self.mean.taken_over.0 != Some(share) {
            self.mean.taken_over = (Some(share), BTreeSet::new());
        }
        let (whole, all) = (self.mean.whole, self.layout.results());
        let mut rest = RestOfResults { skips: !whole, ..RestOfResults::default() };
        // The versions of before: a result follows from them.
        self.client.computed_at(Some(self.mean.before.clone()));
        for (i, b) in all.enumerate() {
            let bucket = BucketId(b as u32);
            let own = i % share.of.max(1) as usize == share.place as usize;
            if !own && !self.mean.taken_over.1.contains(&bucket) {
                rest.buckets.insert(bucket);
            } else if whole {
                self.client.push(bucket, step, &weights[self.layout.buckets()[b].range()]);
            } else {
                self.client.skip_bucket(bucket, step);
            }
        }
        if whole {
            self.client.has_results();
        }
        self.mean.rest = Some(rest);
    }

    /// A pull of everything is answered: all results are of one step.
    pub(super) fn have_results(&mut self, pulled: &Pulled) -> Result<(), WorkerError> {
        let results = self.layout.results();
        if results.is_empty() {
            return Ok(());
        }
        if let Some(rest) = self.mean.rest.take() {
            self.mean.taken_over.1.extend(rest.written);
        }
        let versions = self.client.versions();
        let first = versions.get(results.start);
        if results.clone().all(|b| versions.get(b) == first) {
            return Ok(());
        }
        Err(WorkerError::Torn(pulled.done))
    }
}
