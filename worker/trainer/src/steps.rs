//! The number of a job's steps, the minibatches of each, and the steps with evaluations and checkpoints.

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
    /// The number of a worker's last step in the whole job, unless it stops early; with the leased sampler on average.
    pub total: u64,
    /// Numbers that no step of this job has. A job that resumes may have more samples in a step than before, and so
    /// fewer steps up to the same place in the data. Its steps are counted on from the checkpoint's, so that a later
    /// step always has a higher number.
    pub left_out: u64,
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
        Some(Self { minibatches_a_step, minibatches_an_epoch, per_epoch, total, left_out: 0 })
    }

    /// Leaves out so many numbers, for a job that resumes.
    pub fn leaving_out(self, numbers: u64) -> Self {
        // A checkpoint may have been made up; the last step has a next one in any case.
        Self { total: self.total.saturating_add(numbers).min(u64::MAX - 1), left_out: numbers, ..self }
    }

    /// The steps that a job of this plan has up to this one: its place in the data.
    pub fn place_of(&self, step: Step) -> u64 {
        step.0.saturating_sub(self.left_out)
    }

    /// Minibatches of `step`, counted from 1.
    pub fn minibatches_of(&self, step: Step) -> u64 {
        self.minibatches_before(step.next()) - self.minibatches_before(step)
    }

    /// Minibatches that a worker has trained before `step`.
    pub fn minibatches_before(&self, step: Step) -> u64 {
        let done = self.place_of(step).saturating_sub(1);
        let (epochs, within) = (done / self.per_epoch, done % self.per_epoch);
        epochs.saturating_mul(self.minibatches_an_epoch).saturating_add(within * self.minibatches_a_step)
    }

    /// The epoch in which `step` is, from 1.
    pub fn epoch_of(&self, step: Step) -> u64 {
        self.place_of(step).div_ceil(self.per_epoch)
    }

    /// Whether `step` is an epoch's last, or the job's.
    pub fn ends_epoch(&self, step: Step) -> bool {
        let place = self.place_of(step);
        place > 0 && place.is_multiple_of(self.per_epoch) || step.0 >= self.total
    }
}

/// The steps after which held-out samples are evaluated, besides the job's last one, whose weights always are. The same
/// on every worker of a job.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EvaluationSteps {
    /// The last step of each epoch.
    pub epochs: bool,
    /// Each multiple of this number.
    pub every: Option<u64>,
}

impl EvaluationSteps {
    /// Whether there are any.
    pub fn any(&self) -> bool {
        self.epochs || self.every.is_some()
    }

    /// Whether an evaluation follows this step.
    pub fn at(&self, step: Step, of: &Steps) -> bool {
        self.epochs && of.ends_epoch(step)
            || self.every.is_some_and(|n| step.0 > 0 && step.0.is_multiple_of(n))
    }

    /// The number of the evaluation after this step. Evaluations are told apart by their numbers, which grow: the
    /// epochs or, if there are several in an epoch, the steps.
    pub fn number(&self, step: Step, of: &Steps) -> u64 {
        match self.every {
            Some(_) => step.0,
            None => of.epoch_of(step),
        }
    }

    /// The step after which the evaluation with this number is made.
    pub fn step_of(&self, number: u64, of: &Steps) -> Step {
        match self.every {
            Some(_) => Step(number),
            None => {
                let step = number.saturating_mul(of.per_epoch).saturating_add(of.left_out);
                Step(step.min(of.total))
            }
        }
    }

    /// The epochs that are over at the evaluation with this number; and its step, if there are several in an epoch.
    pub fn place_of(&self, number: u64, of: &Steps) -> (u64, Option<Step>) {
        match self.every {
            Some(_) => (of.place_of(Step(number)) / of.per_epoch, Some(Step(number))),
            None => (number, None),
        }
    }
}

/// The steps with checkpoints. The same on every worker of a job.
#[derive(Clone, Copy, Debug)]
pub struct CheckpointSteps {
    steps: Option<u64>,
    epochs: Option<u64>,
    total: u64,
    /// As in [`Steps`].
    left_out: u64,
    /// Leased sampler: checkpoints are cut between epochs; the interval and the total number of epochs.
    between: Option<(u64, u64)>,
}

impl CheckpointSteps {
    /// Every `steps` steps and every `epochs` epochs, in a job of these steps and chunks.
    pub fn new(steps: Option<u64>, epochs: Option<u64>, of: &Steps, leased: Option<ChunkPlan>) -> Self {
        let between = leased.map(|c| (epochs.unwrap_or(1), c.epochs));
        let epochs = epochs.map(|n| n.saturating_mul(of.per_epoch));
        Self { steps, epochs, total: of.total, left_out: of.left_out, between }
    }

    /// Whether a checkpoint is due once `step` is done. The job's last step always has one.
    pub fn at(&self, step: Step) -> bool {
        let every = |at: u64, n: Option<u64>| n.is_some_and(|n| at.is_multiple_of(n));
        let place = step.0.saturating_sub(self.left_out);
        every(step.0, self.steps) || every(place, self.epochs) || self.is_last(step)
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
