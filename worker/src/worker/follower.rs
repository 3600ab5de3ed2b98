//! A rank that does not lead its group: it computes what the leader says, and meets the servers only through it.

use super::{
    Shared, WorkerError, WorkerOptions, WorkerReport,
    evaluate::{Share, Watch, evaluate},
    training::finite,
};
use crate::{
    Job,
    engine::{Engine, Follows, Stepped},
    group::Ranks,
};
use paraft_common::Step;
use paraft_data::Prefetcher;
use paraft_models::{Batch, Evaluation, Model, Part};
use std::{sync::atomic::Ordering::Relaxed, time::Instant};

pub(super) struct Following<'a> {
    job: &'a Job,
    options: &'a WorkerOptions,
    data: &'a Shared,
    share: Share,
    /// With the step of the minibatch that comes next.
    batches: Option<(Step, Prefetcher<Batch>)>,
    batch: Batch,
    steps: u64,
    samples: u64,
    began: Instant,
}

impl<'a> Following<'a> {
    pub fn new(job: &'a Job, options: &'a WorkerOptions, data: &'a Shared) -> Self {
        Self {
            job,
            options,
            data,
            share: Share::of(job, options),
            batches: None,
            batch: Batch::default(),
            steps: 0,
            samples: 0,
            began: Instant::now(),
        }
    }

    /// What it did, with the weights that it ends with.
    pub fn report(&self, weights: Vec<f32>) -> WorkerReport {
        WorkerReport {
            steps: self.steps,
            samples: self.samples,
            seconds: self.began.elapsed().as_secs_f64(),
            weights,
            evaluation: None,
        }
    }
}

impl Follows for Following<'_> {
    fn batch(&mut self, step: Step) -> Result<&Batch, WorkerError> {
        if self.options.interrupt.is_set() {
            return Err(WorkerError::Interrupted);
        }
        let (next, mut batches) = match self.batches.take() {
            Some((next, batches)) if next == step => (next, batches),
            // The leader has changed, or was taken out for a while, or this rank was.
            _ => {
                let done = Step(step.0.saturating_sub(1));
                (step, self.data.plan.prefetch(self.job, &self.data.train, self.options.rank, done)?)
            }
        };
        if let Some(batch) = batches.next() {
            batches.recycle(std::mem::replace(&mut self.batch, batch?));
        }
        self.batches = Some((next.next(), batches));
        Ok(&self.batch)
    }

    fn stepped(&mut self, step: Step, stepped: Stepped) -> Result<(), WorkerError> {
        finite(stepped, step, self.share.worker())?;
        self.steps += 1;
        self.samples += self.batch.n as u64;
        self.data.gauges.step.store(step.0, Relaxed);
        self.data.gauges.samples.store(self.samples, Relaxed);
        self.data.gauges.loss(f64::from(stepped.loss));
        Ok(())
    }

    fn evaluate(
        &self,
        engine: &mut Engine,
        epoch: u64,
        place: (usize, usize),
    ) -> Result<Evaluation, WorkerError> {
        let test = &self.data.test;
        let worker = self.share.worker();
        let mut watch = Watch { interrupt: &*self.options.interrupt, recorder: None, worker, epoch };
        evaluate(engine, test, self.share.part(place, test.len()), &mut watch)
    }
}

/// Until the job is done, and then what this rank did; `None`: it leads from now on.
pub(super) fn follow(
    job: &Job,
    options: &WorkerOptions,
    model: &mut dyn Model,
    data: &Shared,
    ranks: &mut Ranks,
) -> Result<Option<WorkerReport>, WorkerError> {
    let layout = job.layout(model.tensors()).map_err(|e| WorkerError::Job(e.to_string()))?;
    let part = |b: &paraft_common::BucketSpec| Part { range: b.range(), encoding: job.train.encoding };
    let mut engine = Engine::new(model, layout.buckets().iter().map(part).collect(), Some(ranks));
    let mut following = Following::new(job, options, data);
    let over = engine.follow(&mut following)?;
    tracing::info!(steps = following.steps, over, "this rank has followed");
    Ok(over.then(|| following.report(engine.into_weights())))
}
