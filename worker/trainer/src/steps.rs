//! The number of a job's steps, the minibatches of each, and the steps with checkpoints.

use paraft_common::{Step, config::ChunkPlan};

/// Steps of a job, the same on every worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Steps {
    /// Minibatches between two pushes. An epoch's last step has the remainder.
    minibatches_a_step: u64,
    /// Minibatches of a worker in one epoch.
    minibatches_an_epoch: u64,
    /// A worker's steps in one epoch. With the leased sampler: on average, if no worker leaves.
    pub per_epoch: u64,
    /// A worker's steps in the whole job, unless it stops early; with the leased sampler on average.
    pub total: u64,
}

impl Steps {
    /// From the minibatches of a worker's epoch and of a step. `most` limits the number of steps. `None` if there
    /// would be no steps.
    pub fn new(
        minibatches_an_epoch: u64,
        minibatches_a_step: u64,
        epochs: u64,
        most: Option<u64>,
    ) -> Option<Self> {
        if minibatches_an_epoch == 0 || minibatches_a_step == 0 {
            return None;
        }
        let per_epoch = minibatches_an_epoch.div_ceil(minibatches_a_step);
        let total = per_epoch.saturating_mul(epochs).min(most.unwrap_or(u64::MAX));
        Some(Self { minibatches_a_step, minibatches_an_epoch, per_epoch, total })
    }

    /// Minibatches of `step`, counted from 1.
    pub fn minibatches_of(&self, step: Step) -> u64 {
        self.minibatches_before(step.next()) - self.minibatches_before(step)
    }

    /// Minibatches that a worker has trained before `step`.
    pub fn minibatches_before(&self, step: Step) -> u64 {
        let done = step.0.saturating_sub(1);
        let (epochs, within) = (done / self.per_epoch, done % self.per_epoch);
        epochs.saturating_mul(self.minibatches_an_epoch).saturating_add(within * self.minibatches_a_step)
    }

    /// The epoch in which `step` is, from 1.
    pub fn epoch_of(&self, step: Step) -> u64 {
        step.0.div_ceil(self.per_epoch)
    }

    /// Whether `step` is an epoch's last, or the job's.
    pub fn ends_epoch(&self, step: Step) -> bool {
        step.0.is_multiple_of(self.per_epoch) || step.0 >= self.total
    }
}

/// The steps with checkpoints. The same on every worker of a job.
#[derive(Clone, Copy, Debug)]
pub struct CheckpointSteps {
    steps: Option<u64>,
    epochs: Option<u64>,
    total: u64,
    /// Leased sampler: checkpoints are cut between epochs; the interval and the total number of epochs.
    between: Option<(u64, u64)>,
}

impl CheckpointSteps {
    /// Every `steps` steps and every `epochs` epochs, in a job of these steps and chunks.
    pub fn new(steps: Option<u64>, epochs: Option<u64>, of: &Steps, leased: Option<ChunkPlan>) -> Self {
        let between = leased.map(|c| (epochs.unwrap_or(1), c.epochs));
        let epochs = epochs.map(|n| n.saturating_mul(of.per_epoch));
        Self { steps, epochs, total: of.total, between }
    }

    /// Whether a checkpoint is due once `step` is done. The job's last step always has one.
    pub fn at(&self, step: Step) -> bool {
        let every = |n: &u64| step.0.is_multiple_of(*n);
        self.steps.iter().chain(&self.epochs).any(every) || self.is_last(step)
    }

    /// Whether `step` is the job's last.
    pub fn is_last(&self, step: Step) -> bool {
        step.0 == self.total
    }

    /// Leased sampler: whether a checkpoint is due once this many epochs are over.
    pub fn after(&self, epochs: u64) -> bool {
        self.between.is_some_and(|(every, last)| epochs.is_multiple_of(every) || epochs == last)
    }
}
