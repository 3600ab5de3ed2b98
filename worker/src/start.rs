//! What a job begins with: weights drawn from the seed, a model file, another job's, or a checkpoint.

use crate::{Job, WorkerError, streamed, worker::Plan};
use paraft_checkpoint::{Checkpoint, Folder, weights};
use paraft_client::{Initial, Values};
use paraft_common::{
    Layout,
    config::{Start, Stopping},
};
use std::path::Path;

/// Writes the weights of a seed.
pub type Init<'a> = dyn FnMut(u64, &mut [f32]) + 'a;

/// What a worker brings along for servers that have nothing yet.
pub struct InitialState {
    /// The bulk.
    pub initial: Initial,
    /// What the servers' job says of it; `None` for weights from the seed.
    pub start: Option<Start>,
}

impl InitialState {
    /// The steps that are done.
    pub fn step(&self) -> u64 {
        self.start.as_ref().map_or(0, |s| s.step)
    }
}

/// Prepares the job's beginning; `init` writes the weights of a seed, and without it another worker brings them. A checkpoint wins over `train.init`: the job that it is of
/// may have begun so.
/// Where a worker holds a part of its model, all of this lies in files in the folder `scratch`.
/// Everything that is wrong with a file is said here, before the servers hear of this worker.
pub fn begin(
    job: &Job,
    resume: Option<&Path>,
    init: Option<&mut Init<'_>>,
    layout: &Layout,
    plan: &Plan,
    scratch: &Path,
) -> Result<InitialState, WorkerError> {
    let room = |len: usize| -> Result<Values, WorkerError> {
        match job.by_layers() {
            true => Ok(streamed::scratch(scratch, len)?.into()),
            false => Ok(vec![0.0; len].into()),
        }
    };
    if let Some(path) = resume {
        return from_checkpoint(job, path, layout, plan, room);
    }
    if let Some(name) = job.train.init_job() {
        // The servers copy them.
        return Ok(InitialState { initial: Initial::default(), start: Some(Start::of_job(name)) });
    }
    if let Some(path) = &job.train.init {
        let (weights, from) = weights::load_into(&job.base_dir.join(path), layout, room)?;
        let start = Start { from, step: 0, epochs: 0, stopping: Stopping::default() };
        return Ok(InitialState { initial: Initial::fresh(weights), start: Some(start) });
    }
    let Some(init) = init else { return Ok(InitialState { initial: Initial::default(), start: None }) };
    let mut weights = room(layout.len())?;
    init(job.seed, &mut weights);
    Ok(InitialState { initial: Initial::fresh(weights), start: None })
}

fn from_checkpoint(
    job: &Job,
    path: &Path,
    layout: &Layout,
    plan: &Plan,
    room: impl FnMut(usize) -> Result<Values, WorkerError>,
) -> Result<InitialState, WorkerError> {
    let checkpoint = Checkpoint::open(&Folder::find(path)?)?;
    checkpoint.verify()?;
    checkpoint.fits(layout.tensors(), &job.on_servers().optimizer)?;
    let manifest = checkpoint.manifest();
    let samples = u64::from(job.shares()) * job.train.batch as u64;
    let (mut step, mut epochs) = (manifest.step_in(plan.per_epoch, samples), 0);
    if plan.leased.is_some() {
        // Only the servers know which chunks of an open epoch were done, and they are gone. Steps go on, so that
        // checkpoints that come later are later.
        (step, epochs) = (manifest.resume_step, manifest.epochs());
    }
    let nothing_left = match plan.leased {
        Some(c) if epochs >= c.epochs => Some(format!("has {epochs} epochs, and this job {}", c.epochs)),
        None if step >= plan.total => {
            Some(format!("is of step {step}, and this job has {} steps", plan.total))
        }
        _ => None,
    };
    if let Some(why) = nothing_left {
        let path = checkpoint.path().display();
        return Err(WorkerError::Job(format!("{path} {why}: nothing is left to train; raise train.epochs")));
    }
    let mut stopping = Stopping::from(&manifest.early_stop);
    // The rule may have been changed, or taken out, to go on.
    stopping.stop = job.eval.early_stop.is_some_and(|rule| stopping.bad >= rule.patience);
    let (weights, slots) = checkpoint.load_into(room)?;
    let stamps = manifest.stamps_for(layout).iter().map(|s| (s.version, s.clock)).collect();
    Ok(InitialState {
        initial: Initial { weights, slots, stamps },
        start: Some(Start { from: checkpoint.identity(), step, epochs, stopping }),
    })
}
