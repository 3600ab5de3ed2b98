//! A worker: from its options to its report.
//!
//! `paraft_trainer` decides a worker's next action; `training` performs it. If a group of ranks acts as one worker,
//! its leader runs that loop, and the other ranks follow its messages (`follower`). If ranks apply the gradients
//! themselves, the loop is in `reduce`. Models of sparse tables have theirs in `sparse`.
//!
//! A worker holds no durable state: weights, optimizer state and clocks are on the servers.

mod clock;
mod driver;
mod error;
mod evaluate;
mod follower;
mod join;
mod open_run;
mod options;
mod own_loop;
mod plan;
mod pushes;
mod records;
mod reduce;
mod rows;
mod setup;
mod shared;
mod sparse;
mod training;

pub use driver::WeightBuffer;
pub use error::{ErrorKind, WorkerError};
pub use open_run::{OpenRun, StepOutcome};
pub use options::{WorkerOptions, WorkerReport};
pub use own_loop::Run;
pub use plan::{Minibatches, Plan};
pub use setup::{LoopAction, Minibatch, OptimizerState, Setup};
pub use sparse::run_sparse;

use self::{
    join::{JoinedWorker, Staged, join, transport},
    shared::{Shared, staged},
    training::Training,
};
use crate::{
    engine::{Engine, StepError},
    group::{ControlMessage, Ranks},
    job::{Exchange, Job},
    metrics::{self, Gauges},
    slow::Slowdown,
    stage,
    streamed::Streamed,
};
use paraft_client::{ClientError, groups::MemberOptions};
use paraft_common::{BucketId, Encoding};
use paraft_data::{DataDigest, Split};
use paraft_models::{Model, Part};
use std::{sync::Arc, time::Duration};

/// Trains `model` on its share of `data` until the job is done. Blocks; the calling thread computes.
pub fn run(
    job: &Job,
    options: &WorkerOptions,
    model: &mut dyn Model,
    data: Split,
) -> Result<WorkerReport, WorkerError> {
    if job.is_sparse() {
        let why = "a model of sparse tables is trained by run_sparse";
        return Err(WorkerError::Misuse(why.into()));
    }
    let world = job.ranks();
    if options.rank >= world {
        let who = match job.ranks_of_worker() {
            1 => format!("{world} workers"),
            n => format!("{} workers of {n} ranks each", job.train.workers),
        };
        return Err(WorkerError::Job(format!(
            "--rank {} in a job of {who} (ranks are 0 to {})",
            options.rank,
            world - 1
        )));
    }
    let plan = Plan::new(job, &data.train)?.resuming_from(job, options.resume.as_deref())?;
    let gauges = Arc::new(Gauges::default());
    metrics::serve_at(options.metrics, &gauges, &job.name)?;
    let digest = data.digest()?;
    let data = Shared { train: Arc::new(data.train), test: Arc::new(data.test), digest, plan, gauges };
    let reduces = job.train.exchange == Exchange::AllReduce;
    if job.ranks_of_worker() == 1 && !reduces {
        return lead(job, options, model, data, None);
    }
    let (member, longest) = member(job, options, model, &data.digest)?;
    let mut ranks = Ranks::new(member, options.interrupt.clone(), longest)?;
    if !ranks.form(model)? {
        return Ok(WorkerReport::default());
    }
    if reduces {
        return reduce::run(job, options, model, &data, &mut ranks);
    }
    loop {
        if ranks.leads() {
            match lead(job, options, model, data.clone(), Some(&mut ranks)) {
                Err(WorkerError::Deposed) => tracing::warn!("another rank leads this group now"),
                Err(WorkerError::Regrouped) => {
                    tracing::info!("this rank restarts, with another part of the model or at another step");
                    if ranks.breaks_now() && !ranks.form(model)? {
                        return Ok(WorkerReport::default());
                    }
                    continue;
                }
                // Another rank or group took over this worker while this process was stopped.
                Err(WorkerError::Client(e)) if e.is_displaced() || ranks.breaks() => {
                    tracing::warn!(error = %e, "this rank has lost its group");
                    if !ranks.form(model)? {
                        return Ok(WorkerReport::default());
                    }
                    continue;
                }
                ended => return ended,
            }
        }
        if let Some(report) = follower::follow(job, options, model, &data, &mut ranks)? {
            return Ok(report);
        }
    }
}

/// This rank in its group, and the longest message between ranks that share the model.
fn member(
    job: &Job,
    options: &WorkerOptions,
    model: &dyn Model,
    digest: &DataDigest,
) -> Result<(MemberOptions, Option<usize>), WorkerError> {
    let (layers, size) = (model.layers(), job.ranks_of_worker());
    let mut settings = job.server_job_on(&model.tensors(), digest).fingerprint;
    let longest = match job.parallel.is_cut() {
        false => None,
        true => {
            job.check_slices(model).map_err(WorkerError::Job)?;
            let stages = job.stages(&layers).map_err(WorkerError::Job)?;
            // A shard sees only one rank of a worker, so the ranks themselves compare how they split the model.
            settings = format!("{settings}, layers {:?} in {} slices", stages.layers(), job.parallel.tensor);
            Some(stage::longest(&stages, layers.iter().map(|l| l.outputs.max(l.keeps)), job.train.batch))
        }
    };
    let member = MemberOptions {
        servers: options.servers.clone(),
        transport: transport(job),
        job: job.name.clone(),
        settings,
        worker: options.rank / size,
        size,
        rank: options.rank % size,
        address: String::new(),
        timeout: Duration::from_millis(job.cluster.timeout_ms),
    };
    Ok((member, longest))
}

/// Refuses what a model on a device can't do.
fn check_device(job: &Job, model: &mut dyn Model) -> Result<(), WorkerError> {
    if model.resident().is_none() {
        return Ok(());
    }
    if job.local.is_local() {
        return Err(WorkerError::Job(
            "[local] keeps a worker's weights in the host's memory, and this model is on a device; set train.device \
             = \"cpu\", or take [local] out"
                .into(),
        ));
    }
    if job.memory.resident.is_some() {
        return Err(WorkerError::Job("memory.resident: layers are streamed on the CPU, and this model is on a device; start the worker with \
                                     --device cpu".into()));
    }
    Ok(())
}

/// Trains as a worker of the servers: alone, or for the group that this rank leads.
fn lead(
    job: &Job,
    options: &WorkerOptions,
    model: &mut dyn Model,
    data: Shared,
    mut ranks: Option<&mut Ranks>,
) -> Result<WorkerReport, WorkerError> {
    let Shared { train, test, digest, plan, gauges } = data;
    check_device(job, model)?;
    let mut stage = job.parallel.is_cut().then(|| staged(job, options, model, None)).transpose()?;
    let setup = Setup {
        tensors: model.tensors(),
        samples: train.len(),
        data: digest.to_string(),
        classifies: job.classifies() && test.classes().is_some(),
        held_out: test.len(),
        init: Some(Box::new(|seed, weights| model.init(seed, weights))),
        groups: Vec::new(),
        state: None,
        note: String::new(),
        tables: Vec::new(),
    };
    let joined = match (&mut stage, ranks.as_deref_mut()) {
        (Some(stage), Some(ranks)) => {
            let (values, here) = (stage.values(), stage.stages_at(ranks.place()));
            let mut meet = |step| match ranks.say(&ControlMessage::Meet(step)) {
                Ok(()) => stage.meet(ranks, &*model, step).map_err(StepError::or_regrouped),
                Err(_) => Err(WorkerError::Regrouped),
            };
            join(job, options, setup, &plan, gauges, true, Some(Staged { values, here, meet: &mut meet }))?
        }
        (_, ranks) => join(job, options, setup, &plan, gauges, ranks.is_some(), None)?,
    };
    let JoinedWorker { mut driver, start, flush: _flush, .. } = joined;
    let (client, len) = (&mut driver.client, driver.layout.len());
    // Ranks that share a model end it together, whichever rank leads last.
    let ends = stage.is_some() && ranks.as_ref().is_some_and(|r| r.generation() > 1);
    if let Some(ranks) = ranks.as_deref_mut().filter(|r| !ends && start.0 >= plan.total && r.generation() > 1)
    {
        // The former leader was silent while the other workers finished.
        tracing::info!("the job is done; nothing is left for this group");
        client.finish();
        let mut weights = vec![0.0; len];
        client.pull_final(start, &mut weights)?;
        ranks.over(model);
        return Ok(WorkerReport { weights, ..WorkerReport::default() });
    }
    if !ends {
        driver.has_steps(start)?;
    }
    let part = |(i, b): (u32, &paraft_common::BucketSpec)| Part {
        range: b.range(),
        encoding: driver.client.device_encoding(BucketId(i)).unwrap_or(Encoding::F32),
    };
    let parts = (0..).zip(driver.layout.buckets()).map(part).collect();
    // In a group another rank can continue in the same session.
    let alone = ranks.is_none();
    let engine = match (job.memory.resident, stage, ranks) {
        (_, Some(stage), Some(ranks)) => Engine::staged(model, parts, stage, ranks),
        (None, _, ranks) => Engine::new(model, parts, ranks),
        (Some(resident), ..) => {
            let buckets = driver.layout.buckets().iter().map(|b| b.range()).collect();
            let streamed = Streamed::new(&model.layers(), buckets, resident, &options.scratch_folder())?;
            Engine::streamed(model, parts, streamed)
        }
    };
    let slow = Slowdown::new(options.slow, job.seed, options.rank);
    let mut training = Training { job, options, plan, train, test, engine, driver, slow };
    match training.run() {
        Err(WorkerError::Interrupted | WorkerError::Client(ClientError::Interrupted)) => {
            if alone {
                training.driver.leave();
            }
            Err(WorkerError::Interrupted)
        }
        ended => Ok(training.report(ended?)),
    }
}
