//! A rank that does not lead its group: it computes what the leader orders. Only the leader speaks with the
//! servers, except for shards of this rank's stages.

use super::{
    WorkerError, WorkerOptions, WorkerReport,
    evaluate::{Watch, evaluate},
    join::{Flush, begin_trace, client_options},
    shared::{Shared, staged},
    training::finite,
};
use crate::{
    Job,
    engine::{Engine, FollowerSteps, StepLoss},
    group::Ranks,
    stage::Batches,
    start::{self, Init},
};
use paraft_client::{Client, ClientOptions};
use paraft_common::{Share, Step, WorkerId, layout::Cuts};
use paraft_data::Prefetcher;
use paraft_models::{Batch, Evaluation, Model, Part};
use std::{ops::Range, sync::atomic::Ordering::Relaxed, time::Instant};

pub(super) struct Follower<'a> {
    job: &'a Job,
    options: &'a WorkerOptions,
    data: &'a Shared,
    worker: WorkerId,
    /// The next minibatch's step, the mesh that it belongs to, and the minibatches from there.
    batches: Option<(Step, u32, Prefetcher<Batch>)>,
    batch: Batch,
    /// The minibatch after it, if it was requested.
    next: Option<Batch>,
    steps: u64,
    samples: u64,
    began: Instant,
}

impl<'a> Follower<'a> {
    pub fn new(job: &'a Job, options: &'a WorkerOptions, data: &'a Shared) -> Self {
        Self {
            job,
            options,
            data,
            worker: WorkerId(options.rank / job.ranks_of_worker()),
            batches: None,
            batch: Batch::default(),
            next: None,
            steps: 0,
            samples: 0,
            began: Instant::now(),
        }
    }

    /// This rank's result, with its final weights.
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

impl FollowerSteps for Follower<'_> {
    fn batches(&mut self, step: Step, mesh: usize, two: bool) -> Result<Batches<'_>, WorkerError> {
        if self.options.interrupt.is_set() {
            return Err(WorkerError::Interrupted);
        }
        let share = self.job.share_of(self.options.rank, mesh as u32);
        let mut batches = match self.batches.take() {
            Some((next, of, batches)) if (next, of) == (step, share) => batches,
            // The leader changed, this rank or the leader was removed for a while, or this rank is in another mesh.
            _ => {
                self.next = None;
                let done = Step(step.0.saturating_sub(1));
                self.data.plan.prefetch(self.job, &self.data.train, share, done)?
            }
        };
        if let Some(batch) = self.next.take().map(Ok).or_else(|| batches.next()) {
            batches.recycle(std::mem::replace(&mut self.batch, batch?));
        }
        if two {
            self.next = batches.next().transpose()?;
        }
        self.batches = Some((step.next(), share, batches));
        Ok((&self.batch, self.next.as_ref()))
    }

    fn stepped(&mut self, step: Step, stepped: StepLoss) -> Result<(), WorkerError> {
        finite(stepped, step, self.worker)?;
        self.steps += 1;
        self.samples += self.batch.n as u64;
        self.data.gauges.step.store(step.0, Relaxed);
        self.data.gauges.samples.store(self.samples, Relaxed);
        self.data.gauges.loss(f64::from(stepped.loss));
        Ok(())
    }

    fn evaluate(&self, engine: &mut Engine, number: u64, part: Share) -> Result<Evaluation, WorkerError> {
        let (worker, plan) = (self.worker, &self.data.plan);
        let at = plan.evaluations(self.job).place_of(number, plan);
        let mut watch = Watch { interrupt: &*self.options.interrupt, recorder: None, worker, at };
        evaluate(engine, &self.data.test, part, &mut watch)
    }
}

/// Follows until the job is done; returns this rank's result. `None`: this rank leads from now on.
pub(super) fn follow(
    job: &Job,
    options: &WorkerOptions,
    model: &mut dyn Model,
    data: &Shared,
    ranks: &mut Ranks,
) -> Result<Option<WorkerReport>, WorkerError> {
    let layout = job.layout(model.tensors()).map_err(|e| WorkerError::Job(e.to_string()))?;
    let part = |b: &paraft_common::BucketSpec| Part { range: b.range(), encoding: job.train.encoding };
    let parts = layout.buckets().iter().map(part).collect();
    let mut flush: Option<Flush> = None;
    let mut engine = match job.parallel.is_cut() {
        false => Engine::new(model, parts, Some(ranks)),
        true => {
            let flush = &mut flush;
            let join = move |model: &dyn Model, here, brings| {
                let (client, start) = join_stages(job, options, data, model, here, brings)?;
                data.gauges.stages(client.stages().clone());
                // First complete the former session's trace file.
                *flush = None;
                if let Some((folder, steps)) = &options.trace {
                    let place = options.rank % job.ranks_of_worker();
                    *flush = Some(begin_trace(&client, place, folder, *steps)?);
                }
                Ok((client, start))
            };
            let stage = staged(job, options, model, Some(Box::new(join)))?;
            Engine::staged(model, parts, stage, ranks)
        }
    };
    let mut following = Follower::new(job, options, data);
    let over = engine.follow(&mut following)?;
    tracing::info!(steps = following.steps, over, "this rank has followed");
    Ok(over.then(|| following.report(engine.into_weights())))
}

/// Opens a session with the shards of some stages of the model. `brings`: it supplies their first weights.
fn join_stages(
    job: &Job,
    options: &WorkerOptions,
    data: &Shared,
    model: &dyn Model,
    here: Range<usize>,
    brings: bool,
) -> Result<(Client, Step), WorkerError> {
    let (tensors, values) =
        (model.tensors(), job.stages(&model.layers()).map_err(WorkerError::Job)?.values());
    let cuts = Cuts { stages: &values, ..Cuts::default() };
    let mut server_job = job.server_job_cut_on(&tensors, cuts, &data.digest);
    let layout = job.layout_cut(tensors, cuts).map_err(|e| WorkerError::Job(e.to_string()))?;
    let mut draw = |seed, weights: &mut [f32]| model.init(seed, weights);
    let init = brings.then_some(&mut draw as &mut Init<'_>);
    let resume = options.resume.as_deref();
    let beginning =
        start::begin(job, resume, init, (&layout, &[], &[]), &data.plan, &options.scratch_folder())?;
    server_job.start = beginning.start;
    let client = ClientOptions { stages: Some(here), ..client_options(job, options, server_job, true) };
    let (mut client, start) = Client::join_until(client, beginning.initial, Some(options.interrupt.clone()))?;
    client.encode_by(&layout);
    Ok((client, start))
}
