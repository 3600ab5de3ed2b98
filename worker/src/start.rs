//! A job's initial state: weights from the seed, a model file, another job's weights, or a checkpoint.

use crate::{Job, WorkerError, streamed, worker::Plan};
use bytes::Bytes;
use paraft_checkpoint::{Checkpoint, Folder, Manifest, weights};
use paraft_client::{Initial, SavedPartition, Values};
use paraft_common::{
    BucketId, Layout, ParamGroup, TableSpec,
    config::{Start, Stopping},
    table::MAX_PUSH_BYTES,
};
use std::{collections::BTreeMap, path::Path};

/// Writes the weights of a seed.
pub type Init<'a> = dyn FnMut(u64, &mut [f32]) + 'a;

/// The state that a worker supplies to servers without one.
pub struct InitialState {
    /// Weights and optimizer state.
    pub initial: Initial,
    /// Its description in the servers' job; `None` for weights from the seed.
    pub start: Option<Start>,
}

impl InitialState {
    /// The number of finished steps.
    pub fn step(&self) -> u64 {
        self.start.as_ref().map_or(0, |s| s.step)
    }
}

/// Prepares the job's initial state. `init` writes the weights of a seed; without it another worker supplies them.
/// A checkpoint takes precedence over `train.init`: the checkpoint's job may have started from that file. If a
/// worker holds a part of its model, the state lies in files in the folder `scratch`. Every error in a file is
/// reported here, before the worker contacts the servers.
pub fn begin(
    job: &Job,
    resume: Option<&Path>,
    init: Option<&mut Init<'_>>,
    (layout, groups, tables): (&Layout, &[ParamGroup], &[TableSpec]),
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
        return from_checkpoint(job, path, (layout, groups, tables), plan, room);
    }
    if let Some(name) = job.train.init_job() {
        // The servers copy the weights.
        return Ok(InitialState { initial: Initial::default(), start: Some(Start::of_job(name)) });
    }
    if let Some(path) = &job.train.init {
        let (weights, from) = weights::load_into(&job.base_dir.join(path), layout, room)?;
        let start = Start { from, step: 0, epochs: 0, stopping: Stopping::default(), rows: false };
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
    (layout, groups, tables): (&Layout, &[ParamGroup], &[TableSpec]),
    plan: &Plan,
    room: impl FnMut(usize) -> Result<Values, WorkerError>,
) -> Result<InitialState, WorkerError> {
    let checkpoint = Checkpoint::open(&Folder::find(path)?)?;
    checkpoint.verify()?;
    checkpoint.fits(layout.tensors(), &job.on_servers().optimizer, groups, tables)?;
    let manifest = checkpoint.manifest();
    let samples = u64::from(job.shares()) * job.train.batch as u64;
    let place = manifest.step_in(plan.per_epoch, samples);
    let (mut step, mut epochs) = (place.saturating_add(plan.left_out), 0);
    if plan.leased.is_some() {
        // Only the servers knew which chunks of an unfinished epoch were done, and they are gone. Steps continue,
        // so that later checkpoints have higher numbers.
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
    // The user may have changed or removed the rule to continue.
    stopping.stop = job.eval.early_stop.is_some_and(|rule| stopping.bad >= rule.patience);
    if let Some(evaluated) = &mut stopping.evaluated {
        evaluated.number = number_here(job, step, manifest, evaluated.number);
    }
    let (weights, slots) = checkpoint.load_into(room)?;
    let stamps = manifest.stamps_for(layout).iter().map(|s| (s.version, s.clock)).collect();
    Ok(InitialState {
        initial: Initial { weights, slots, stamps, rows: rows_of(&checkpoint, layout, tables)? },
        start: Some(Start { from: checkpoint.identity(), step, epochs, stopping, rows: !tables.is_empty() }),
    })
}

/// The rows of a checkpoint's tables, by partition of this job, in parts of at most a push.
fn rows_of(
    checkpoint: &Checkpoint,
    layout: &Layout,
    tables: &[TableSpec],
) -> Result<BTreeMap<BucketId, SavedPartition>, WorkerError> {
    const READ_AT_ONCE: u64 = 1 << 14;
    let mut all = BTreeMap::new();
    for (t, table) in tables.iter().enumerate() {
        let (file, row) = (checkpoint.table(table)?, table.row_bytes() as usize);
        let mut partitions = vec![Vec::new(); table.partitions as usize];
        for first in (0..file.rows()).step_by(READ_AT_ONCE as usize) {
            let some = first..(first + READ_AT_ONCE).min(file.rows());
            let (ids, rows) = (file.ids(some.clone())?, file.read(some)?);
            for (id, row) in ids.into_iter().zip(rows.chunks_exact(row)) {
                partitions[table.partition_of(id) as usize].extend_from_slice(row);
            }
        }
        let most = MAX_PUSH_BYTES / row * row;
        let history = match checkpoint.manifest().tables.iter().find(|old| old.name == table.name) {
            Some(old) if old.counts_like(table) => file.history()?,
            _ => vec![Vec::new(); partitions.len()],
        };
        for ((bucket, rows), history) in layout.partitions(t).zip(partitions).zip(history) {
            let (rows, len) = (Bytes::from(rows), most.max(row));
            let parts = (0..rows.len().max(1)).step_by(len);
            let rows = parts.map(|at| rows.slice(at.min(rows.len())..(at + len).min(rows.len()))).collect();
            let history = history.into_iter().map(Bytes::from).collect();
            all.insert(BucketId(bucket), SavedPartition { rows, history });
        }
    }
    Ok(all)
}

/// The number in this job, which continues at `step`, of an evaluation of the checkpoint's job: a step if
/// `eval.every_steps` is set, else an epoch. A number of the other kind would hide evaluations of this job.
fn number_here(job: &Job, step: u64, from: &Manifest, number: u64) -> u64 {
    let is_by_steps = |job: &Job| job.eval.every_steps.is_some();
    let before = Job::parse(&from.job, Path::new("checkpoint.json"), &[]);
    match (before.map_or(is_by_steps(job), |before| is_by_steps(&before)), is_by_steps(job)) {
        (true, false) => number.saturating_sub(from.steps_left_out) / from.steps_per_epoch.max(1),
        (false, true) => {
            number.saturating_mul(from.steps_per_epoch).saturating_add(from.steps_left_out).min(step)
        }
        _ => number,
    }
}
