//! `paraft bench apply`: how near each optimizer comes to the memory's speed.
//!
//! The limit is what the memory allows. An update must read each byte of the gradient once, and read and write each byte of
//! the weights and of every slot of the optimizer's state: `1 + 2 * (1 + slots)` bytes touched for each byte of
//! gradient (3 for SGD, 5 with a momentum buffer, 7 for Adam). A `memcpy` touches 2 bytes for each byte that it copies: it
//! reads one and writes one. So the limit in GB/s of gradient is the bandwidth in bytes touched of a memcpy, measured just
//! before in pieces of a bucket, over arrays as long as the shard, on as many threads, divided by the bytes that the
//! optimizer must touch. What a processor reads of a line before it writes it is not counted, neither here nor there: a
//! memcpy pays for it and an update does not, so a ratio above 1 is possible.

use super::{
    figure::{self, Figure},
    flags::{named, repeats, size},
};
use clap::Args;
use paraft_common::{
    Encoding, Payload,
    codec::{F32_BYTES, put_f32_le},
    optim::{Gradient, Hyper, OptimizerConfig},
};
use paraft_fleet::{failure::Failure, launch};
use paraft_worker::exit;
use std::{
    collections::BTreeMap,
    hint::black_box,
    sync::{Barrier, atomic::AtomicI32},
    thread,
    time::{Duration, Instant},
};

#[derive(Args)]
pub struct ApplyBenchArgs {
    /// Bytes of the shard's weights, comma-separated: one that fits no cache, and one that does with the optimizer's state.
    #[arg(long, value_delimiter = ',', default_value = "64M,2M", value_parser = size)]
    pub sizes: Vec<usize>,
    /// Numbers of threads, comma-separated; buckets go round them. Default: 1, and as many as there are cores.
    #[arg(long, value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..=512))]
    pub threads: Vec<u32>,
    /// Milliseconds of each measure in each repeat; at least one pass over the shard is made.
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u64).range(1..=60_000))]
    pub millis: u64,
    /// Repeats, interleaved; the median counts.
    #[arg(long, default_value_t = 7, value_parser = repeats)]
    pub repeats: usize,
    /// One JSON object for each figure.
    #[arg(long)]
    pub json: bool,
}

/// The optimizers, with their default options.
const OPTIMIZERS: [&str; 7] = ["sgd", "momentum", "nesterov", "adagrad", "rmsprop", "adam", "adamw"];
/// Bytes of a bucket.
const BUCKET: usize = 1 << 20;

fn optimizer(kind: &str) -> Result<OptimizerConfig, Failure> {
    // At this rate the weights stay finite, for any number of updates.
    let table = format!("kind = {kind:?}\nlr = 1e-9\n");
    toml::from_str(&table).map_err(|e| Failure::new(exit::FAILED, e.message()))
}

pub fn run(args: &ApplyBenchArgs) -> Result<i32, Failure> {
    let interrupted = launch::interrupts();
    let cores = thread::available_parallelism().map_or(1, |n| n.get() as u32);
    let mut threads = if args.threads.is_empty() { vec![1, cores] } else { args.threads.clone() };
    threads.dedup();
    let optimizers = OPTIMIZERS.map(optimizer).into_iter().collect::<Result<Vec<_>, _>>()?;
    for bytes in &args.sizes {
        for threads in &threads {
            let figures = one(args, &optimizers, *bytes, *threads, &interrupted)?;
            figure::show(&figures, args.json);
        }
    }
    Ok(exit::OK)
}

/// One bucket, as on a server.
struct Bucket {
    weights: Vec<f32>,
    slots: Vec<Vec<f32>>,
    gradient: Payload,
    updates: u64,
}

/// One piece of a copy.
struct Piece {
    from: Vec<f32>,
    to: Vec<f32>,
}

fn one(
    args: &ApplyBenchArgs,
    optimizers: &[OptimizerConfig],
    bytes: usize,
    threads: u32,
    interrupted: &AtomicI32,
) -> Result<Vec<Figure>, Failure> {
    let lengths = lengths(bytes / F32_BYTES);
    let names = if threads == 1 { "thread" } else { "threads" };
    let place = format!("{}, {threads} {names}", named(bytes));
    let time = Duration::from_millis(args.millis);
    let mut pieces: Vec<Piece> =
        lengths.iter().map(|n| Piece { from: vec![1.0; *n], to: vec![0.0; *n] }).collect();
    let mut copied: BTreeMap<&str, Vec<f64>> = BTreeMap::new();
    let mut applied: BTreeMap<&str, Vec<f64>> = BTreeMap::new();
    for _ in 0..args.repeats {
        for optimizer in optimizers {
            launch::check_interrupted(interrupted)?;
            let seconds = pass(&mut pieces, threads, time, |p| {
                p.to.copy_from_slice(&p.from);
                black_box(&mut p.to);
            });
            copied.entry(optimizer.kind()).or_default().push(2.0 * bytes as f64 / seconds / 1e9);
            // Each optimizer's state is created separately, so only one is in memory at a time.
            let mut buckets: Vec<Bucket> = lengths.iter().map(|n| bucket(optimizer, *n)).collect();
            let seconds = pass(&mut buckets, threads, time, |b| {
                b.updates += 1;
                let hyper = Hyper { lr: optimizer.lr() as f32, t: b.updates, clip_value: None };
                let gradient = Gradient { payload: &b.gradient, encoding: Encoding::F32, scale: 1.0 };
                optimizer.apply(&hyper, &mut b.weights, &mut b.slots, gradient);
                black_box(&mut b.weights);
            });
            applied.entry(optimizer.kind()).or_default().push(bytes as f64 / seconds / 1e9);
        }
    }
    let mut figures = Vec::new();
    let every: Vec<f64> = copied.values().flatten().copied().collect();
    let case = format!("memcpy, {place}");
    figures.extend(Figure::alone("apply", &case, "bandwidth", "GB/s touched", &every));
    for optimizer in optimizers {
        let (Some(values), Some(copied)) = (applied.get(optimizer.kind()), copied.get(optimizer.kind()))
        else {
            continue;
        };
        let touched = touched(optimizer);
        let limit: Vec<f64> = copied.iter().map(|c| c / touched as f64).collect();
        let case = format!("{}, {place}", optimizer.kind());
        let figure = Figure::alone("apply", &case, "gradient", "GB/s", values);
        let reference = format!("memory's limit ({touched} bytes touched)");
        figures.extend(figure.map(|f| f.against(&reference, values, &limit)));
    }
    Ok(figures)
}

/// Bytes that an update must touch per byte of gradient: the gradient once, the weights and each slot
/// twice.
fn touched(optimizer: &OptimizerConfig) -> usize {
    1 + 2 * (1 + optimizer.slots())
}

/// The length of each bucket.
fn lengths(values: usize) -> Vec<usize> {
    let bucket = BUCKET / F32_BYTES;
    (0..values).step_by(bucket).map(|at| bucket.min(values - at)).collect()
}

fn bucket(optimizer: &OptimizerConfig, len: usize) -> Bucket {
    // Values of both signs and several magnitudes; none so small that its square is a denormal, which
    // is slower.
    let values: Vec<f32> = (0..len).map(|i| ((i * 7919 % 2001) as f32 - 1000.5) * 1e-5).collect();
    let mut gradient = Vec::with_capacity(len * F32_BYTES);
    put_f32_le(&values, &mut gradient);
    Bucket { weights: values, slots: optimizer.new_slots(len), gradient: gradient.into(), updates: 0 }
}

/// Applies `work` to every item repeatedly for about this time, with the items divided among the
/// threads; returns the seconds of one pass over all. The first pass of each thread is not timed.
fn pass<T: Send>(items: &mut [T], threads: u32, time: Duration, work: impl Fn(&mut T) + Sync) -> f64 {
    let threads = (threads as usize).min(items.len()).max(1);
    let began = Instant::now();
    items.iter_mut().for_each(&work);
    // The time of this pass on one thread gives the number of passes for the requested time.
    let passes = (time.as_secs_f64() * threads as f64 / began.elapsed().as_secs_f64()).ceil().max(1.0) as u64;
    let part = items.len().div_ceil(threads);
    let together = Barrier::new(items.len().div_ceil(part));
    thread::scope(|s| {
        let parts: Vec<_> = items
            .chunks_mut(part)
            .map(|part| {
                let (work, together) = (&work, &together);
                s.spawn(move || {
                    part.iter_mut().for_each(work);
                    together.wait();
                    let began = Instant::now();
                    (0..passes).for_each(|_| part.iter_mut().for_each(work));
                    (began, Instant::now())
                })
            })
            .collect();
        let times: Vec<_> = parts.into_iter().filter_map(|p| p.join().ok()).collect();
        let first = times.iter().map(|t| t.0).min();
        let last = times.iter().map(|t| t.1).max();
        first.zip(last).map_or(f64::NAN, |(f, l)| l.duration_since(f).as_secs_f64() / passes as f64)
    })
}
