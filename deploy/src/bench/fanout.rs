//! `paraft bench fanout`: how the cost of a push grows with workers and shards.
//!
//! Every worker pushes and pulls a model of the same length as fast as it can, in buckets of the same length, so that a
//! push is the same work everywhere and only the number of those who make it and of the shards that take it differs.
//! Workers are clients on threads of this process; their CPU time counts as the servers' does. Counted is what happens
//! between two moments in the middle of the run.

use super::{
    figure::{self, Figure},
    load::{Bed, Pusher, Shape, Via, go_on},
    meter::Meter,
    wire::{named, size},
};
use crate::{failure::Failure, train};
use clap::Args;
use paraft_common::{Durability, codec::F32_BYTES};
use paraft_proto::limits::MAX_BUCKET_BYTES;
use paraft_worker::exit;
use std::{
    collections::BTreeMap,
    path::Path,
    sync::{
        Barrier,
        atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering::Relaxed},
    },
    thread,
    time::{Duration, Instant},
};

#[derive(Args)]
pub struct FanoutBenchArgs {
    /// Numbers of workers, comma-separated; the first, with the first number of shards, is what the others are compared with.
    #[arg(long, value_delimiter = ',', default_value = "1,4,16,64", value_parser = clap::value_parser!(u32).range(1..=512))]
    pub workers: Vec<u32>,
    /// Numbers of shards, comma-separated.
    #[arg(long, value_delimiter = ',', default_value = "1,4,16", value_parser = clap::value_parser!(u32).range(1..=64))]
    pub shards: Vec<u32>,
    /// Bytes of the model that each worker pushes and pulls in a step.
    #[arg(long, default_value = "1M", value_parser = size)]
    pub size: usize,
    /// Bytes of a bucket, at most 1 MiB: one push.
    #[arg(long, default_value = "64K", value_parser = bucket)]
    pub bucket: usize,
    /// Way to the servers.
    #[arg(long, default_value = "tcp")]
    pub via: Via,
    /// Replicas of each shard, and servers.
    #[arg(long, default_value_t = 1, value_parser = super::replicas)]
    pub replicas: u32,
    /// What an acknowledgement promises.
    #[arg(long, default_value = "quorum-memory")]
    pub durability: Durability,
    /// Milliseconds that are counted in each run; at least as many steps as there are workers.
    #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u64).range(1..=60_000))]
    pub millis: u64,
    /// Runs of each case, interleaved; the median counts.
    #[arg(long, default_value_t = 3, value_parser = super::repeats)]
    pub repeats: usize,
    /// Overrides a key of the job; may be given often.
    #[arg(long, value_name = "KEY=VALUE")]
    pub set: Vec<String>,
    /// One JSON object for each figure.
    #[arg(long)]
    pub json: bool,
}

/// A size that a bucket may have.
fn bucket(text: &str) -> Result<usize, String> {
    let bytes = size(text)?;
    if bytes <= MAX_BUCKET_BYTES { Ok(bytes) } else { Err(format!("at most {}", named(MAX_BUCKET_BYTES))) }
}

/// Steps that take longer than this are an error.
const PATIENCE: Duration = Duration::from_secs(30);

/// The runs of one case.
#[derive(Default)]
struct Case {
    /// CPU microseconds of all processes for each push.
    cpu: Vec<f64>,
    pushes_per_s: Vec<f64>,
}

pub fn run(args: &FanoutBenchArgs) -> Result<i32, Failure> {
    let scratch = tempfile::tempdir().map_err(|e| Failure::new(exit::IO, e))?;
    let interrupted = train::interrupts();
    let buckets = args.size.div_ceil(args.bucket);
    if let Some(shards) = args.shards.iter().find(|s| **s as usize > buckets) {
        let what = format!(
            "{} in buckets of {} leave some of {shards} shards empty",
            named(args.size),
            named(args.bucket)
        );
        return Err(Failure::new(exit::USAGE, what).help("give a longer --size or a shorter --bucket"));
    }
    let mut cases: BTreeMap<(u32, u32), Case> = BTreeMap::new();
    for repeat in 0..args.repeats {
        for workers in &args.workers {
            for shards in &args.shards {
                let dir = scratch.path().join(format!("{workers}-{shards}-{repeat}"));
                let (cpu, pushes_per_s) = one(args, *workers, *shards, &dir, &interrupted)?;
                let case = cases.entry((*workers, *shards)).or_default();
                case.cpu.push(cpu);
                case.pushes_per_s.push(pushes_per_s);
                let _ = std::fs::remove_dir_all(&dir);
            }
        }
    }
    figure::show(&figures(args, &cases), args.json);
    Ok(exit::OK)
}

/// One run: CPU microseconds for each push, and pushes a second.
fn one(
    args: &FanoutBenchArgs,
    workers: u32,
    shards: u32,
    dir: &Path,
    interrupted: &AtomicI32,
) -> Result<(f64, f64), Failure> {
    go_on(interrupted)?;
    let buckets = args.size.div_ceil(args.bucket);
    let mut set = args.set.clone();
    set.push(format!("cluster.bucket_bytes={}", args.bucket));
    let shape = Shape {
        values: args.size / F32_BYTES,
        workers,
        shards,
        replicas: args.replicas,
        set: &set,
        ..Shape::timed(args.durability)
    };
    let bed = Bed::start(shape, dir)?;
    let meter = Meter::new(bed.servers());
    let (stop, pushes) = (AtomicBool::new(false), AtomicU64::new(0));
    let joined = Barrier::new(workers as usize + 1);
    let (before, after, took) = thread::scope(|s| {
        let threads: Vec<_> = (0..workers)
            .map(|worker| {
                let (bed, joined, stop, pushes) = (&bed, &joined, &stop, &pushes);
                s.spawn(move || {
                    // Whatever happened: nobody may wait for this one for ever.
                    let pusher = bed.seat_via(worker, args.via).pusher().and_then(|mut p| {
                        p.pull()?;
                        Ok(p)
                    });
                    joined.wait();
                    let worked = pusher.and_then(|p| work(p, stop, pushes));
                    if worked.is_err() {
                        stop.store(true, Relaxed);
                    }
                    worked
                })
            })
            .collect();
        joined.wait();
        let snapshot = || (meter.cpu(), pushes.load(Relaxed));
        // For this time, and until as many steps have been made as there are workers.
        let wait = |time: Duration| {
            let (began, before) = (Instant::now(), pushes.load(Relaxed));
            let steps = || pushes.load(Relaxed) - before >= u64::from(workers) * buckets as u64;
            while (began.elapsed() < time || !steps() && began.elapsed() < PATIENCE)
                && interrupted.load(Relaxed) == 0
                && !stop.load(Relaxed)
            {
                thread::sleep(Duration::from_millis(5).min(time));
            }
        };
        let time = Duration::from_millis(args.millis);
        wait(time / 4); // nobody's first step counts
        let (before, began) = (snapshot(), Instant::now());
        wait(time);
        let (after, took) = (snapshot(), began.elapsed());
        stop.store(true, Relaxed);
        let panicked = |_| Failure::new(exit::FAILED, "a worker of the benchmark panicked");
        threads.into_iter().try_for_each(|t| t.join().map_err(panicked)?)?;
        Ok::<_, Failure>((before, after, took))
    })?;
    go_on(interrupted)?;
    let count = (after.1 - before.1) as f64;
    if count == 0.0 {
        let what = format!("{workers} workers on {shards} shards made no step in {PATIENCE:?}");
        return Err(Failure::new(exit::FAILED, what).help("give a shorter --size"));
    }
    Ok(((after.0 - before.0) / count * 1e6, count / took.as_secs_f64()))
}

/// Steps of a worker that computes nothing, until it is told to stop.
fn work(mut pusher: Pusher, stop: &AtomicBool, pushes: &AtomicU64) -> Result<(), Failure> {
    while !stop.load(Relaxed) {
        pusher.round()?;
        pushes.fetch_add(pusher.buckets() as u64, Relaxed);
    }
    Ok(())
}

fn figures(args: &FanoutBenchArgs, cases: &BTreeMap<(u32, u32), Case>) -> Vec<Figure> {
    let (Some(workers), Some(shards)) = (args.workers.first(), args.shards.first()) else {
        return Vec::new();
    };
    let Some(first) = cases.get(&(*workers, *shards)) else { return Vec::new() };
    let reference = name(*workers, *shards);
    type Of = fn(&Case) -> &[f64];
    let rows: [(&str, &str, Of); 2] =
        [("cpu", "us/push, all processes", |c| &c.cpu), ("pushes", "pushes/s", |c| &c.pushes_per_s)];
    let mut figures = Vec::new();
    for (what, unit, of) in rows {
        for ((workers, shards), case) in cases {
            let figure = Figure::alone("fanout", &name(*workers, *shards), what, unit, of(case));
            figures.extend(figure.map(|f| match std::ptr::eq(case, first) {
                true => f.itself(&reference),
                false => f.against(&reference, of(case), of(first)),
            }));
        }
    }
    figures
}

fn name(workers: u32, shards: u32) -> String {
    format!("{workers} x {shards}")
}
