//! `paraft bench neighbours`: what two jobs get of a fleet's servers while a third one takes all that it can get.
//!
//! The two have few workers, the greedy one a crowd. Workers are clients on threads of this process, which push and pull as fast
//! as they are let and compute nothing; they have one half of the machine's processors and the servers the other. Elsewhere a
//! worker has processors of its own, which sixteen threads of this process beside two do not: the greedy job's are nicer, by as
//! much as they are more, so that each job has as much of that half and it is the servers' time that they are short of.
//!
//! Counted is what each job pushes between two moments in the middle of the run: first of the two alone, then of all three. A
//! job's share is a third of what the three push together.

use super::{
    figure::{self, Figure},
    load::{BenchFleet, Pusher, Shape, Via, go_on, while_they_push},
    wire::size,
};
use clap::Args;
use paraft_client::Order;
use paraft_common::{Durability, codec::F32_BYTES};
use paraft_fleet::{failure::Failure, launch, orders};
use paraft_proto::{FleetShape, SubmitRequest};
use paraft_worker::exit;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use std::{
    path::Path,
    sync::atomic::{AtomicI32, AtomicU64, Ordering::Relaxed},
    time::{Duration, Instant},
};

#[derive(Args)]
pub struct NeighboursBenchArgs {
    /// Workers of each of the two.
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=256))]
    pub workers: u32,
    /// Workers of the greedy job.
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=256))]
    pub greedy: u32,
    /// Bytes of each job's model, in buckets of 1 MiB at most.
    #[arg(long, default_value = "4M", value_parser = size)]
    pub bytes: usize,
    /// The jobs' optimizer.
    #[arg(long, default_value = "adam")]
    pub optimizer: String,
    /// Way to the servers.
    #[arg(long, default_value = "unix")]
    pub via: Via,
    /// Replicas of each shard, and servers.
    #[arg(long, default_value_t = 1, value_parser = super::replicas)]
    pub replicas: u32,
    /// Milliseconds that are counted in each run.
    #[arg(long, default_value_t = 2000, value_parser = clap::value_parser!(u64).range(1..=60_000))]
    pub millis: u64,
    /// Runs, the two alone and all three in turn; the median counts.
    #[arg(long, default_value_t = 3, value_parser = super::repeats)]
    pub repeats: usize,
    /// Overrides a key of the jobs; may be given often.
    #[arg(long, value_name = "KEY=VALUE")]
    pub set: Vec<String>,
    /// One JSON object for each figure.
    #[arg(long)]
    pub json: bool,
}

/// So much more of a processor has a thread than one that is nicer by a step (sched(7)).
const NICE: f64 = 1.25;

/// The first is the one that the fleet is founded for.
const JOBS: [&str; 3] = ["bench", "neighbour", "greedy"];

pub fn run(args: &NeighboursBenchArgs) -> Result<i32, Failure> {
    let scratch = tempfile::tempdir().map_err(|e| Failure::new(exit::IO, e))?;
    let interrupted = launch::interrupts();
    let halves = halves();
    // Bytes a second, by job, of each run.
    let (mut two, mut three, w) = (Vec::new(), Vec::new(), args.workers);
    for repeat in 0..args.repeats {
        for (workers, runs) in [(&[w, w][..], &mut two), (&[w, w, args.greedy], &mut three)] {
            let dir = scratch.path().join(format!("{repeat}-{}", workers.len()));
            runs.push(one(args, workers, &dir, &halves, &interrupted)?);
            let _ = std::fs::remove_dir_all(&dir);
        }
    }
    let mut figures = Vec::new();
    for (runs, case) in [(&two, format!("two jobs of {w}")), (&three, format!("and one of {}", args.greedy))]
    {
        let of = |job: usize| runs.iter().map(|r: &Vec<f64>| r[job] / 1e6).collect::<Vec<_>>();
        let jobs = runs[0].len();
        let shares: Vec<f64> = runs.iter().map(|r| r.iter().sum::<f64>() / jobs as f64 / 1e6).collect();
        for (job, name) in JOBS.iter().enumerate().take(jobs) {
            let what = if *name == "greedy" { "the greedy job's pushes" } else { "a neighbour's pushes" };
            let values = of(job);
            let figure = Figure::alone("neighbours", &case, what, "MB/s", &values);
            figures.extend(figure.map(|f| f.against("an even share", &values, &shares)));
        }
    }
    figure::show(&figures, args.json);
    Ok(exit::OK)
}

/// What each job pushes in one run, in bytes a second: so many jobs, of so many workers.
fn one(
    args: &NeighboursBenchArgs,
    workers: &[u32],
    dir: &Path,
    (own, servers): &(CpuSet, CpuSet),
    interrupted: &AtomicI32,
) -> Result<Vec<f64>, Failure> {
    go_on(interrupted)?;
    let shape = Shape {
        values: args.bytes / F32_BYTES,
        workers: workers[0],
        replicas: args.replicas,
        optimizer: &args.optimizer,
        set: &args.set,
        ..Shape::timed(Durability::default())
    };
    // Processes and threads have the processors of the thread that started them.
    pinned(servers);
    let fleet = BenchFleet::start(shape, dir);
    pinned(own);
    let fleet = fleet?;
    for name in JOBS.iter().take(workers.len()).skip(1) {
        let request = SubmitRequest {
            name: name.to_string(),
            token: 0, // the order's
            shape: Some(FleetShape {
                shards: 1,
                replicas: args.replicas,
                durability: Durability::default().name().into(),
            }),
            keep_ms: None,
            run: String::new(),
        };
        orders::given(&fleet.fleet.addresses, &Order::Submit(request))?;
    }
    let places: Vec<(usize, u32)> =
        workers.iter().enumerate().flat_map(|(job, n)| (0..*n).map(move |w| (job, w))).collect();
    let pushed: Vec<AtomicU64> = workers.iter().map(|_| AtomicU64::new(0)).collect();
    let slot = |(job, worker): &(usize, u32)| {
        let more = f64::from(workers[*job]) / f64::from(workers[0]);
        let nice = (more.ln() / NICE.ln()).round().clamp(0.0, 19.0) as i32;
        fleet.seat_in(JOBS[*job], workers[*job], *worker, args.via).after_others(nice)
    };
    let slots = places.iter().map(slot).collect();
    let made = |place: usize, pusher: &Pusher| {
        let (job, _) = places[place];
        pushed[job].fetch_add(pusher.bytes() as u64, Relaxed);
    };
    let (counted, took) = while_they_push(slots, interrupted, made, |wait| {
        let snapshot = || pushed.iter().map(|p| p.load(Relaxed)).collect::<Vec<_>>();
        let each_since =
            |before: &[u64]| snapshot().iter().zip(before).map(|(a, b)| a - b).collect::<Vec<_>>();
        let time = Duration::from_millis(args.millis);
        wait(time / 4, &|| true); // nobody's first step counts
        let (before, began) = (snapshot(), Instant::now());
        wait(time, &|| each_since(&before).iter().all(|n| *n > 0));
        (each_since(&before), began.elapsed())
    })?;
    if let Some(job) = counted.iter().position(|n| *n == 0) {
        let what = format!("job {} pushed nothing in {took:?}", JOBS[job]);
        return Err(Failure::new(exit::FAILED, what).help("give fewer --bytes, or fewer workers"));
    }
    Ok(counted.iter().map(|n| *n as f64 / took.as_secs_f64()).collect())
}

/// The processors that this thread may use, in two halves: of the workers and of the servers; of one processor both have it.
fn halves() -> (CpuSet, CpuSet) {
    let all = sched_getaffinity(None).unwrap_or_default();
    let mine: Vec<usize> = (0..CpuSet::MAX_CPU).filter(|cpu| all.is_set(*cpu)).collect();
    let of = |some: &[usize]| {
        let mut set = CpuSet::new();
        some.iter().for_each(|cpu| set.set(*cpu));
        set
    };
    let (servers, workers) = mine.split_at(mine.len() / 2);
    if servers.is_empty() { (all, all) } else { (of(workers), of(servers)) }
}

fn pinned(to: &CpuSet) {
    // Where that is not allowed they share what there is, as elsewhere.
    let _ = sched_setaffinity(None, to);
}
