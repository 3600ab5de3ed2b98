//! Jobs on the embedded digits, workers in threads, and the oracle: one process that computes the result that
//! a cluster of `n` workers must reach.

use crate::fleet::At;
use anyhow::{Context, Result};
use paraft_client::Transport;
use paraft_data::Split;
use paraft_models::Model;
pub use paraft_proof::distance;
use paraft_worker::{
    Job, WorkerOptions, WorkerReport, job::TransportConfig, samples::shape_of, worker::WorkerError,
};
use std::{
    path::Path,
    sync::{Arc, atomic::AtomicBool},
    thread,
};

/// A job on the digits: `text` is TOML, and each line of `set` is an assignment as for `--set`.
pub fn job(fleet: &At, text: &str, set: &[&str]) -> Result<Job> {
    job_on(fleet, &format!("[data]\nkind = \"digits\"\n[eval]\nevery_epoch = false\n{text}"), set)
}

/// A job on other data, which `text` names.
pub fn job_on(fleet: &At, text: &str, set: &[&str]) -> Result<Job> {
    let set: Vec<String> = set.iter().map(ToString::to_string).collect();
    let mut job = Job::parse(text, Path::new("test.toml"), &set)?;
    job.cluster.addresses = fleet.addresses.clone();
    job.cluster.shards = Some(fleet.shards);
    job.cluster.replicas = fleet.replicas;
    job.cluster.transport = match fleet.transport {
        Transport::Tcp => TransportConfig::Tcp,
        Transport::Auto => TransportConfig::Auto,
    };
    Ok(job)
}

/// The job's data.
pub fn data(job: &Job) -> Result<Split> {
    Ok(job.data.as_ref().context("the job has no data")?.load(Path::new("."))?)
}

/// The job's model, on the CPU.
pub fn model(job: &Job, data: &Split) -> Result<Box<dyn Model>> {
    let config = job.model.as_ref().context("the job has no model")?;
    Ok(config.build(shape_of(&data.train))?)
}

/// Runs one worker; returns when the whole job is done.
pub fn worker(job: &Job, rank: u32) -> Result<WorkerReport> {
    worker_until(job, rank, Arc::default())
}

/// Runs one worker that continues from a checkpoint.
pub fn worker_from(job: &Job, rank: u32, checkpoint: &Path) -> Result<WorkerReport> {
    run_worker(job, rank, |o| o.resume = Some(checkpoint.to_path_buf()))
}

/// Runs one worker that leaves at the first step after `interrupt` is set.
pub fn worker_until(job: &Job, rank: u32, interrupt: Arc<AtomicBool>) -> Result<WorkerReport> {
    run_worker(job, rank, |o| o.interrupt = interrupt)
}

/// Runs one worker with these options.
pub fn run_worker(job: &Job, rank: u32, with: impl FnOnce(&mut WorkerOptions)) -> Result<WorkerReport> {
    let data = data(job)?;
    let mut model = model(job, &data)?;
    // A worker with a part of the model gives no weights.
    let in_parts = job.memory.resident.is_some() || job.parallel.is_cut();
    let folder = in_parts.then(tempfile::tempdir).transpose()?;
    let weights = folder.as_ref().map(|f| f.path().join("weights"));
    let mut options = WorkerOptions { weights, ..WorkerOptions::new(rank, job.cluster.addresses.clone()) };
    with(&mut options);
    let report: Result<WorkerReport, WorkerError> = paraft_worker::run(job, &options, model.as_mut(), data);
    let report = report.with_context(|| format!("worker {rank}"))?;
    let layout = job.layout(model.tensors()).map_err(|e| anyhow::anyhow!("{e}"))?;
    // Of a worker's ranks only the leader has them.
    Ok(match options.weights.filter(|path| path.exists()) {
        Some(path) => WorkerReport { weights: paraft_checkpoint::weights::load(&path, &layout)?.0, ..report },
        None => report,
    })
}

/// Runs all workers of the job, each in a thread; returns the final weights, which must be equal for all.
pub fn train(job: &Job) -> Result<Vec<f32>> {
    train_all(job, |rank| worker(job, rank))
}

/// As [`train`], from a checkpoint.
pub fn train_from(job: &Job, checkpoint: &Path) -> Result<Vec<f32>> {
    train_all(job, |rank| worker_from(job, rank, checkpoint))
}

fn train_all(job: &Job, work: impl Fn(u32) -> Result<WorkerReport> + Sync) -> Result<Vec<f32>> {
    let work = &work;
    let reports = thread::scope(|s| {
        let threads: Vec<_> = (0..job.ranks()).map(|rank| s.spawn(move || work(rank))).collect();
        threads
            .into_iter()
            .map(|t| t.join().map_err(|_| anyhow::anyhow!("a worker panicked"))?)
            .collect::<Result<Vec<_>>>()
    })?;
    let first = reports.first().context("a job without workers")?.weights.clone();
    anyhow::ensure!(reports.iter().all(|r| r.weights == first), "workers ended with different weights");
    Ok(first)
}

/// The oracle with the same bits.
pub fn replay(job: &Job) -> Result<Vec<f32>> {
    Ok(paraft_proof::oracle(job, paraft_proof::Order::Shares)?)
}

/// The oracle of [`paraft_proof::oracle`].
pub fn oracle(job: &Job) -> Result<Vec<f32>> {
    Ok(paraft_proof::oracle(job, paraft_proof::Order::Union)?)
}
