//! The number of the job's steps, and the minibatches of each.

use super::WorkerError;
use crate::{
    job::{CheckpointConfig, Job, SamplerKind},
    samples::fill,
};
use paraft_checkpoint::{Checkpoint, Folder, Manifest};
use paraft_common::{
    Step,
    config::{ChunkPlan, Start},
};
use paraft_data::{Batches, Dataset, Prefetcher, Sampler};
use paraft_models::Batch;
use paraft_trainer::{CheckpointSteps, EvaluationSteps, Steps};
use std::{ops::Deref, path::Path, sync::Arc};

/// Steps of the job, the same on every worker.
#[derive(Clone, Debug)]
pub struct Plan {
    pub(super) sampler: Sampler,
    /// The number of steps, and the minibatches of each.
    pub steps: Steps,
    /// The chunks of the leased sampler.
    pub leased: Option<ChunkPlan>,
}

impl Deref for Plan {
    type Target = Steps;

    fn deref(&self) -> &Steps {
        &self.steps
    }
}

impl Plan {
    /// Counts the steps. The error says why there would be none.
    pub fn new(job: &Job, train: &Dataset) -> Result<Self, WorkerError> {
        Self::of(job, train.len())
    }

    /// Likewise, for a training set of this many samples.
    pub fn of(job: &Job, samples: usize) -> Result<Self, WorkerError> {
        if samples > u32::MAX as usize {
            return Err(WorkerError::Job(format!(
                "{samples} training samples; at most {} can be numbered",
                u32::MAX
            )));
        }
        let t = &job.train;
        let mut sampler = Sampler::new(samples, job.seed);
        (sampler.shuffle, sampler.drop_last, sampler.drop_last_batch) = (t.shuffle, t.drop_last, t.drop_last);
        let leased = match t.sampler {
            SamplerKind::Static => None,
            SamplerKind::Leased => Some(ChunkPlan { per_epoch: sampler.chunks(t.chunk()), epochs: t.epochs }),
        };
        let minibatches_an_epoch = match leased {
            None => sampler.steps(job.shares() as usize, t.batch) as u64,
            Some(_) => (samples as u64).div_ceil(u64::from(job.shares()) * t.batch as u64),
        };
        let a_step = job.local.minibatches();
        let steps = Steps::new(minibatches_an_epoch, a_step, t.epochs, t.max_steps).ok_or_else(|| {
            WorkerError::Job(format!(
                "{} training samples give {} workers no whole minibatch of {}; use a smaller train.batch, fewer workers, or train.drop_last = false",
                samples,
                job.shares(),
                t.batch
            ))
        })?;
        Ok(Self { sampler, steps, leased })
    }

    /// For a job that ends when its loops end: no epochs, and no limit of steps.
    pub fn open(job: &Job) -> Result<Self, WorkerError> {
        let (endless, a_step) = (1 << 62, job.local.minibatches());
        let steps = Steps::new(endless, a_step, 1, job.train.max_steps)
            .ok_or_else(|| WorkerError::Job("a step of no minibatches".into()))?;
        Ok(Self { sampler: Sampler::new(1, job.seed), steps, leased: None })
    }

    /// The same plan for a job that resumes from this checkpoint: its steps have higher numbers than the checkpoint's.
    fn resuming(self, job: &Job, from: &Manifest) -> Self {
        if self.leased.is_some() {
            return self; // its steps continue from the checkpoint's
        }
        let samples = u64::from(job.shares()) * job.train.batch as u64;
        let numbers = from.resume_step.saturating_sub(from.step_in(self.per_epoch, samples));
        Self { steps: self.steps.leaving_out(numbers), ..self }
    }

    /// The same plan for a job that resumes from the checkpoint at this path, if it resumes.
    pub fn resuming_from(self, job: &Job, path: Option<&Path>) -> Result<Self, WorkerError> {
        let Some(path) = path else { return Ok(self) };
        let checkpoint = Checkpoint::open(&Folder::find(path)?)?;
        Ok(self.resuming(job, checkpoint.manifest()))
    }

    /// The steps after which the job evaluates.
    pub fn evaluations(&self, job: &Job) -> EvaluationSteps {
        EvaluationSteps { epochs: job.eval.every_epoch, every: job.eval.every_steps }
    }

    /// The steps with checkpoints.
    pub fn checkpoints(&self, config: &CheckpointConfig) -> CheckpointSteps {
        CheckpointSteps::new(config.every_steps, config.epochs(), &self.steps, self.leased)
    }

    /// Whether an evaluation or a checkpoint follows this step, or may, if only its time decides that.
    pub fn ends_at(&self, job: &Job, step: Step) -> bool {
        let due = job.checkpoints().is_some_and(|c| self.checkpoints(c).at(step));
        due || step.0 >= self.steps.total || self.evaluations(job).at(step, self)
    }

    /// The number of consecutive steps at the job's start without an evaluation or checkpoint between.
    pub fn between_ends(&self, job: &Job) -> usize {
        let of_epoch = self.steps.per_epoch.min(self.steps.total);
        let steps = (1..of_epoch).find(|step| self.ends_at(job, Step(*step)));
        let every = steps.unwrap_or(match self.ends_at(job, Step(of_epoch)) {
            true => of_epoch,
            false => self.steps.total,
        });
        every.try_into().unwrap_or(usize::MAX)
    }

    /// The samples left to train for a job with this start.
    pub fn budget(&self, job: &Job, start: Option<&Start>) -> u64 {
        let done = |of: fn(&Start) -> u64| start.map_or(0, of);
        match self.leased {
            Some(c) => {
                let epochs = c.epochs.saturating_sub(done(|s| s.epochs));
                epochs.checked_mul(u64::from(self.sampler.len)).unwrap_or(0)
            }
            None => {
                let minibatches = self
                    .minibatches_before(Step(self.total).next())
                    .saturating_sub(self.minibatches_before(Step(done(|s| s.step)).next()));
                let samples = job.train.batch as u64 * u64::from(job.shares());
                // A script trains as long as it wants, so the end is unknown.
                minibatches.checked_mul(samples).unwrap_or(0)
            }
        }
    }

    /// The minibatches of a [share](Job::share_of) after step `done`, filled on their own thread.
    pub(super) fn prefetch(
        &self,
        job: &Job,
        train: &Arc<Dataset>,
        share: u32,
        done: Step,
    ) -> Result<Prefetcher<Batch>, WorkerError> {
        let (data, mut minibatches) = (train.clone(), self.minibatches(job, share, done));
        Ok(Prefetcher::spawn(move |b: &mut Batch| {
            fill(&data, &minibatches.next(), b)?;
            Ok(true)
        })?)
    }

    /// The samples of a [share](Job::share_of) in each minibatch after step `done` (static sampler).
    ///
    /// # Panics
    /// If the job has fewer shares.
    pub fn minibatches(&self, job: &Job, share: u32, done: Step) -> Minibatches {
        let (rank, world, batch) = (share as usize, job.shares() as usize, job.train.batch);
        let epoch = self.place_of(done) / self.per_epoch;
        let mut current = self.sampler.batches(epoch, rank, world, batch);
        let first = Step(self.left_out + epoch * self.per_epoch + 1);
        for _ in self.minibatches_before(first)..self.minibatches_before(done.next()) {
            current.next();
        }
        Minibatches { sampler: self.sampler, epoch, current, rank, world, batch }
    }
}

/// A rank's minibatches, one by one. Endless: the loop counts the steps.
#[derive(Clone, Debug)]
pub struct Minibatches {
    sampler: Sampler,
    epoch: u64,
    current: Batches,
    rank: usize,
    world: usize,
    batch: usize,
}

impl Minibatches {
    /// The samples of the next minibatch.
    #[allow(clippy::should_implement_trait)] // unlike an iterator it never ends
    pub fn next(&mut self) -> Vec<u32> {
        loop {
            if let Some(samples) = self.current.next() {
                return samples;
            }
            self.epoch += 1;
            self.current = self.sampler.batches(self.epoch, self.rank, self.world, self.batch);
        }
    }
}
