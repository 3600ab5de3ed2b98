//! `paraft bench fanout`: how the cost of a push grows with workers, buckets and shards.
//!
//! Every worker pushes and pulls a model as fast as it can, in buckets of the same length, so that a push is the same work
//! everywhere and only the number of those who make it, of the buckets and of the shards that take it differs. Workers are
//! clients on threads of this process; what the servers need is given apart. Counted is what happens between two moments in
//! the middle of the run.

use super::{
    figure::{self, Figure},
    load::{BenchFleet, Pusher, Shape, Via, go_on, while_they_push},
    meter::Meter,
    wire::{named, size},
};
use clap::Args;
use paraft_common::{Durability, codec::F32_BYTES};
use paraft_fleet::{failure::Failure, launch};
use paraft_proto::limits::MAX_BUCKET_BYTES;
use paraft_worker::exit;
use std::{
    collections::BTreeMap,
    path::Path,
    sync::atomic::{AtomicI32, AtomicU64, Ordering::Relaxed},
    time::{Duration, Instant},
};

#[derive(Args)]
pub struct FanoutBenchArgs {
    /// Cases, comma-separated: workers x buckets of the model x shards. The first is what the others are compared with.
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "1x16x1,4x16x1,16x16x1,64x16x1,1x16x4,16x16x4,64x16x4,1x16x16,16x16x16,64x16x16"
    )]
    pub cases: Vec<Of>,
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
    /// Milliseconds that are counted in each run; at least as many pushes as one of every worker to every bucket.
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

/// How many there are of each in a case: `64x4096x1`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Of {
    workers: u32,
    buckets: u32,
    shards: u32,
}

impl std::str::FromStr for Of {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let numbers: Vec<u32> = text.split('x').map_while(|n| n.parse().ok()).collect();
        match numbers[..] {
            [workers @ 1..=512, buckets @ 1..=65536, shards @ 1..=64] if text.split('x').count() == 3 => {
                if shards > buckets {
                    return Err(format!("{buckets} buckets leave some of {shards} shards empty"));
                }
                Ok(Self { workers, buckets, shards })
            }
            _ => Err("workers (to 512) x buckets (to 65536) x shards (to 64), as in 64x4096x1".into()),
        }
    }
}

impl std::fmt::Display for Of {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} x {} x {}", self.workers, self.buckets, self.shards)
    }
}

/// What is measured of a case, one value for each run.
type Case = BTreeMap<&'static str, Vec<f64>>;

const FIGURES: [(&str, &str); 3] =
    [("cpu", "us/push, all processes"), ("server cpu", "us/push"), ("pushes", "pushes/s")];

pub fn run(args: &FanoutBenchArgs) -> Result<i32, Failure> {
    let scratch = tempfile::tempdir().map_err(|e| Failure::new(exit::IO, e))?;
    let interrupted = launch::interrupts();
    let mut cases: Vec<Case> = vec![Case::new(); args.cases.len()];
    for repeat in 0..args.repeats {
        for (i, (of, case)) in args.cases.iter().zip(&mut cases).enumerate() {
            let dir = scratch.path().join(format!("{i}-{repeat}"));
            for ((what, _), value) in FIGURES.iter().zip(one(args, *of, &dir, &interrupted)?) {
                case.entry(what).or_default().push(value);
            }
            let _ = std::fs::remove_dir_all(&dir);
        }
    }
    figure::show(&figures(args, &cases), args.json);
    Ok(exit::OK)
}

/// One run: what [`FIGURES`] names.
fn one(args: &FanoutBenchArgs, of: Of, dir: &Path, interrupted: &AtomicI32) -> Result<[f64; 3], Failure> {
    go_on(interrupted)?;
    let mut set = args.set.clone();
    set.push(format!("cluster.bucket_bytes={}", args.bucket));
    let shape = Shape {
        values: of.buckets as usize * (args.bucket / F32_BYTES),
        workers: of.workers,
        shards: of.shards,
        replicas: args.replicas,
        set: &set,
        ..Shape::timed(args.durability)
    };
    let fleet = BenchFleet::start(shape, dir)?;
    let (all, servers) = (Meter::new(fleet.servers()), Meter::of(fleet.servers()));
    let pushes = AtomicU64::new(0);
    let slots = (0..of.workers).map(|worker| fleet.seat_via(worker, args.via)).collect();
    let made = |_, pusher: &Pusher| _ = pushes.fetch_add(pusher.buckets() as u64, Relaxed);
    let (before, after, took) = while_they_push(slots, interrupted, made, |wait| {
        let snapshot = || (all.cpu(), servers.cpu(), pushes.load(Relaxed));
        // For this time, and until as many pushes have been made as one of each worker to each bucket.
        let wait = |time: Duration| {
            let before = pushes.load(Relaxed);
            wait(time, &|| pushes.load(Relaxed) - before >= u64::from(of.workers) * u64::from(of.buckets));
        };
        let time = Duration::from_millis(args.millis);
        wait(time / 4); // nobody's first step counts
        let (before, began) = (snapshot(), Instant::now());
        wait(time);
        (before, snapshot(), began.elapsed())
    })?;
    let count = (after.2 - before.2) as f64;
    if count == 0.0 {
        let what = format!("{of}: no step was made in {took:?}");
        return Err(Failure::new(exit::FAILED, what).help("give fewer workers or buckets"));
    }
    let us = |seconds: f64| seconds / count * 1e6;
    Ok([us(after.0 - before.0), us(after.1 - before.1), count / took.as_secs_f64()])
}

fn figures(args: &FanoutBenchArgs, cases: &[Case]) -> Vec<Figure> {
    let Some((reference, first)) = args.cases.first().zip(cases.first()) else { return Vec::new() };
    let mut figures = Vec::new();
    for (what, unit) in FIGURES {
        for (of, case) in args.cases.iter().zip(cases) {
            let (values, theirs) = (&case[what], &first[what]);
            let figure = Figure::alone("fanout", &of.to_string(), what, unit, values);
            figures.extend(figure.map(|f| match of == reference {
                true => f.itself(&reference.to_string()),
                false => f.against(&reference.to_string(), values, theirs),
            }));
        }
    }
    figures
}
