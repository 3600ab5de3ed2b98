//! Closed rounds that wait for the norm of the whole gradient, which is known when every trained bucket of the step is
//! summed, on every shard. Leader-only: may vanish at any moment.

use crate::shard::{round::Sum, state::Configured};
use paraft_common::{Step, TensorKind};
use std::collections::BTreeMap;

/// The sums, by step and local bucket.
#[derive(Debug, Default)]
pub struct Norms(BTreeMap<Step, BTreeMap<usize, Sum>>);

/// Buckets of a shard that the norm is of.
fn trained(conf: &Configured) -> usize {
    conf.buckets.iter().filter(|b| b.spec.kind == TensorKind::Param).count()
}

impl Norms {
    /// A round is summed. Gives the shard's part of the norm of its step, once it is known.
    pub fn summed(&mut self, conf: &Configured, step: Step, bucket: usize, sum: Sum) -> Option<f64> {
        self.0.entry(step).or_default().insert(bucket, sum);
        self.part(step, trained(conf))
    }

    fn part(&self, step: Step, trained: usize) -> Option<f64> {
        let sums = self.0.get(&step)?;
        (sums.len() == trained).then(|| sums.values().map(|s| s.mean_sum_of_squares).sum())
    }

    /// The shard's parts that are known, of steps whose norm is not.
    pub fn known(&self, conf: &Configured) -> Vec<(Step, f64)> {
        let trained = trained(conf);
        self.0.keys().filter_map(|step| Some((*step, self.part(*step, trained)?))).collect()
    }

    /// The norm of a step is known: its sums, by local bucket.
    pub fn take(&mut self, step: Step) -> BTreeMap<usize, Sum> {
        self.0.remove(&step).unwrap_or_default()
    }
}
