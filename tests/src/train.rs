//! Jobs on the embedded digits, workers in threads, and the oracle: one process that does what a cluster of
//! `n` workers must come to.

use crate::fleet::At;
use anyhow::{Context, Result};
use paraft_common::{
    Layout, ShardId, TensorKind,
    codec::{put_f32_le, sum_of_squares_le},
    optim::{Gradient, Hyper, apply_buffer, norm_factor},
    placement,
};
use paraft_data::{Sampler, Split};
use paraft_models::{Batch, Model};
use paraft_worker::{Job, WorkerOptions, WorkerReport, job::TransportConfig, worker::WorkerError};
use std::{
    path::{Path, PathBuf},
    sync::{Arc, atomic::AtomicBool},
    thread,
};

/// A job on the digits: `text` is TOML, each line of `set` an assignment as `--set` takes it.
pub fn job(fleet: &At, text: &str, set: &[&str]) -> Result<Job> {
    let text = format!("[data]\nkind = \"digits\"\n[eval]\nevery_epoch = false\n{text}");
    let set: Vec<String> = set.iter().map(ToString::to_string).collect();
    let mut job = Job::parse(&text, Path::new("test.toml"), &set)?;
    job.cluster.addresses = fleet.addresses.clone();
    job.cluster.shards = Some(fleet.shards);
    job.cluster.replicas = fleet.replicas;
    job.cluster.transport = TransportConfig::Tcp;
    Ok(job)
}

/// The job's data.
pub fn data(job: &Job) -> Result<Split> {
    Ok(job.data.as_ref().context("the job has no data")?.load(Path::new("."))?)
}

fn model(job: &Job, data: &Split) -> Result<Box<dyn Model>> {
    let config = job.model.as_ref().context("the job has no model")?;
    Ok(config.build(data.train.input_len(), data.train.classes())?)
}

/// One worker; returns when the whole job is done.
pub fn worker(job: &Job, rank: u32) -> Result<WorkerReport> {
    worker_until(job, rank, Arc::default())
}

/// One worker that goes on from a checkpoint.
pub fn worker_from(job: &Job, rank: u32, checkpoint: &Path) -> Result<WorkerReport> {
    run_worker(job, rank, Some(checkpoint.to_path_buf()), Arc::default())
}

/// One worker that ends, without a word to the servers, at the first step after `interrupt` is set.
pub fn worker_until(job: &Job, rank: u32, interrupt: Arc<AtomicBool>) -> Result<WorkerReport> {
    run_worker(job, rank, None, interrupt)
}

fn run_worker(
    job: &Job,
    rank: u32,
    resume: Option<PathBuf>,
    interrupt: Arc<AtomicBool>,
) -> Result<WorkerReport> {
    let data = data(job)?;
    let mut model = model(job, &data)?;
    let options = WorkerOptions {
        rank,
        servers: job.cluster.addresses.clone(),
        run_dir: None,
        weights: None,
        resume,
        metrics: None,
        interrupt,
    };
    let report: Result<WorkerReport, WorkerError> = paraft_worker::run(job, &options, model.as_mut(), data);
    report.with_context(|| format!("worker {rank}"))
}

/// All workers of the job, each in a thread; the final weights, which must be the same for all.
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
        let threads: Vec<_> = (0..job.train.workers).map(|rank| s.spawn(move || work(rank))).collect();
        threads
            .into_iter()
            .map(|t| t.join().map_err(|_| anyhow::anyhow!("a worker panicked"))?)
            .collect::<Result<Vec<_>>>()
    })?;
    let first = reports.first().context("a job without workers")?.weights.clone();
    anyhow::ensure!(reports.iter().all(|r| r.weights == first), "workers ended with different weights");
    Ok(first)
}

/// The oracle: plain minibatch training in this thread. Step `k` is one update by the mean gradient over the
/// union of what the job's workers see in their step `k`, cut into the same buckets.
pub fn oracle(job: &Job) -> Result<Vec<f32>> {
    let data = data(job)?;
    let mut model = model(job, &data)?;
    let layout = job.layout(model.tensors())?;
    let mut weights = vec![0.0; layout.len()];
    model.init(job.seed, &mut weights);
    let mut gradient = vec![0.0; layout.len()];
    let mut slots: Vec<Vec<Vec<f32>>> =
        layout.buckets().iter().map(|b| job.optimizer.new_slots(b.len)).collect();
    let t = &job.train;
    let mut sampler = Sampler::new(data.train.len(), job.seed);
    (sampler.shuffle, sampler.drop_last, sampler.drop_last_batch) = (t.shuffle, t.drop_last, t.drop_last);
    let world = t.workers as usize;
    let per_epoch = sampler.steps(world, t.batch) as u64;
    let total = (per_epoch * t.epochs).min(t.max_steps.unwrap_or(u64::MAX));
    let mut shares = Vec::new();
    for k in 0..total {
        if k % per_epoch == 0 {
            shares = (0..world).map(|r| sampler.batches(k / per_epoch, r, world, t.batch)).collect();
        }
        let union: Vec<u32> = shares.iter_mut().filter_map(Iterator::next).flatten().collect();
        let mut batch = Batch { n: union.len(), ..Batch::default() };
        data.train.fill(&union, &mut batch.inputs, &mut batch.labels);
        model.step(&weights, &mut gradient, &batch, &mut |_, _| {})?;
        let pushes: Vec<Vec<u8>> = layout.buckets().iter().map(|b| le(&gradient[b.range()])).collect();
        let clip = job.clip.norm.map_or(1.0, |max| norm_factor(max, norm(&layout, &pushes, job.shards())));
        for ((spec, push), slots) in layout.buckets().iter().zip(&pushes).zip(&mut slots) {
            let into = &mut weights[spec.range()];
            if spec.kind == TensorKind::Buffer {
                apply_buffer(into, Gradient { le: push, scale: 1.0 });
                continue;
            }
            let lr = job.optimizer.lr() * job.schedule.factor(k as f64, world);
            let hyper = Hyper { lr: lr as f32, t: k + 1, clip_value: job.clip.value };
            job.optimizer.apply(&hyper, into, slots, Gradient { le: push, scale: clip });
        }
    }
    Ok(weights)
}

/// The sum of squares of the trained part, added up as the system does it: bucket by bucket within a shard,
/// then shard by shard, since the order of a floating-point sum shows in its last bit.
fn norm(layout: &Layout, pushes: &[Vec<u8>], shards: u32) -> f64 {
    let part = |s: u32| -> f64 {
        placement::buckets_of(layout, ShardId(s), shards)
            .iter()
            .filter(|(_, spec)| spec.kind == TensorKind::Param)
            .map(|(id, _)| sum_of_squares_le(&pushes[id.0 as usize]))
            .sum()
    };
    (0..shards).map(part).sum()
}

fn le(values: &[f32]) -> Vec<u8> {
    let mut out = Vec::new();
    put_f32_le(values, &mut out);
    out
}

/// How far two weight vectors are apart at most, as a share of the largest weight.
pub fn distance(a: &[f32], b: &[f32]) -> f64 {
    assert_eq!(a.len(), b.len(), "vectors of different lengths");
    let largest = a.iter().fold(0f32, |m, x| m.max(x.abs()));
    let apart = a.iter().zip(b).fold(0f32, |m, (x, y)| m.max((x - y).abs()));
    f64::from(apart) / f64::from(largest)
}
