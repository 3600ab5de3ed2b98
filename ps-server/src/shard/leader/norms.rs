//! Closed rounds that wait for the norm of the whole gradient. The norm is known once every trained bucket of the
//! step is summed, on every shard. Leader-only: it may be lost at any moment.

use crate::shard::{round::Sum, state::ShardConfig};
use paraft_common::Step;
use std::collections::{BTreeMap, BTreeSet};

/// By step.
#[derive(Debug, Default)]
pub struct Norms(BTreeMap<Step, StepSums>);

#[derive(Debug, Default)]
struct StepSums {
    /// By local bucket.
    sums: BTreeMap<usize, Sum>,
    /// Trained buckets that are applied: an earlier leader got the norm, and failed before it proposed all buckets.
    applied: BTreeSet<usize>,
}

impl StepSums {
    /// The part of the buckets that are not applied, once all of them are summed. A worker that sent the norm
    /// before sends it again.
    fn part(&self, trained: usize) -> Option<f64> {
        let both = self.sums.keys().filter(|b| self.applied.contains(b)).count();
        let all = self.sums.len() + self.applied.len() - both == trained;
        all.then(|| self.sums.values().map(|s| s.mean_sum_of_squares).sum())
    }
}

/// The buckets of a shard that contribute to the norm.
fn trained(conf: &ShardConfig) -> impl Iterator<Item = usize> {
    let buckets = conf.buckets.iter().enumerate();
    buckets.filter(|(_, b)| b.spec.kind.is_in_norm()).map(|(at, _)| at)
}

impl Norms {
    /// Adds a round's sum. Returns the shard's part of the norm of its step, once it is known. `is_in`: whether the
    /// step is complete in a bucket.
    pub fn summed(
        &mut self,
        conf: &ShardConfig,
        step: Step,
        bucket: usize,
        sum: Sum,
        is_in: impl Fn(usize) -> bool,
    ) -> Option<f64> {
        let of = self.0.entry(step).or_insert_with(|| {
            let applied = trained(conf).filter(|b| *b != bucket && is_in(*b)).collect();
            StepSums { sums: BTreeMap::new(), applied }
        });
        of.sums.insert(bucket, sum);
        of.part(trained(conf).count())
    }

    /// Whether the shard's part of a step is known.
    pub fn is_known(&self, conf: &ShardConfig, step: Step) -> bool {
        self.0.get(&step).is_some_and(|of| of.part(trained(conf).count()).is_some())
    }

    /// The known parts of this shard, of steps whose norm is not known.
    pub fn known(&self, conf: &ShardConfig) -> Vec<(Step, f64)> {
        let trained = trained(conf).count();
        self.0.iter().filter_map(|(step, of)| Some((*step, of.part(trained)?))).collect()
    }

    /// Whether no sum waits.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Removes the sums of a bucket that are orphans.
    pub fn take_orphans(&mut self, is_orphan: impl Fn(usize, &Sum) -> bool) -> Vec<(usize, Sum)> {
        let mut taken = Vec::new();
        self.0.retain(|_, of| {
            let orphans: Vec<_> =
                of.sums.iter().filter(|(b, sum)| is_orphan(**b, sum)).map(|(b, _)| *b).collect();
            taken.extend(orphans.into_iter().filter_map(|b| Some((b, of.sums.remove(&b)?))));
            !of.sums.is_empty()
        });
        taken
    }

    /// Takes the sums of a step whose norm is known, by local bucket.
    pub fn take(&mut self, step: Step) -> BTreeMap<usize, Sum> {
        self.0.remove(&step).unwrap_or_default().sums
    }
}

#[cfg(test)]
#[path = "norms_tests.rs"]
mod tests;
