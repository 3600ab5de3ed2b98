//! `paraft bench push`: what replication and each durability level cost a push.

use super::{
    figure::{self, Figure},
    load::{Bed, Shape, ended, loopback_bytes},
};
use crate::{
    failure::Failure,
    statistics::{median, quantile},
    status::ask_all,
    train,
};
use clap::Args;
use paraft_client::ClientError;
use paraft_common::{BucketId, Durability};
use paraft_worker::exit;
use std::{
    collections::BTreeMap,
    path::Path,
    sync::atomic::{AtomicI32, Ordering::Relaxed},
    thread,
    time::{Duration, Instant},
};

#[derive(Args)]
pub struct PushBenchArgs {
    /// Values of the model for the goodput; each step pushes 4 bytes for each, in buckets of at most 1 MiB.
    #[arg(long, default_value_t = 4_000_000, value_parser = clap::value_parser!(u32).range(1..=1 << 28))]
    pub values: u32,
    /// Values of the one bucket for the latency, with one push under way.
    #[arg(long, default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..=1 << 18))]
    pub small: u32,
    /// Replicas, comma-separated; the first is what the others are compared with.
    #[arg(long, value_delimiter = ',', default_value = "1,3")]
    pub replicas: Vec<u32>,
    /// Durability levels, comma-separated.
    #[arg(long, value_delimiter = ',', default_value = "quorum-memory,quorum-disk,leader")]
    pub durability: Vec<Durability>,
    /// Seconds of each run: half of it for the goodput, half for the latency.
    #[arg(long, default_value_t = 6, value_parser = clap::value_parser!(u64).range(2..=3600))]
    pub seconds: u64,
    /// Runs of each case, interleaved; the median counts.
    #[arg(long, default_value_t = 5)]
    pub repeats: usize,
    /// Overrides a key of the job; may be given often.
    #[arg(long, value_name = "KEY=VALUE")]
    pub set: Vec<String>,
    /// One JSON object for each figure.
    #[arg(long)]
    pub json: bool,
}

/// The figures of one case, by name.
type Case = BTreeMap<&'static str, Vec<f64>>;

const FIGURES: [(&str, &str); 4] =
    [("goodput", "MB/s"), ("ack p50", "ms"), ("ack p99", "ms"), ("wire", "bytes/byte pushed")];

pub fn run(args: &PushBenchArgs) -> Result<i32, Failure> {
    let scratch = tempfile::tempdir().map_err(|e| Failure::new(exit::IO, e))?;
    let interrupted = train::interrupts();
    let mut cases: BTreeMap<(Durability, u32), Case> = BTreeMap::new();
    for repeat in 0..args.repeats.max(1) {
        for durability in &args.durability {
            for replicas in &args.replicas {
                let dir = scratch.path().join(format!("{durability}-{replicas}-{repeat}"));
                let case = cases.entry((*durability, *replicas)).or_default();
                for (name, value) in one(args, *durability, *replicas, &dir, &interrupted)? {
                    case.entry(name).or_default().push(value);
                }
                let _ = std::fs::remove_dir_all(&dir); // logs of gigabytes, on disk
            }
        }
    }
    let mut figures = Vec::new();
    let first = args.replicas.first().copied().unwrap_or(1);
    for ((durability, replicas), case) in &cases {
        for (what, unit) in FIGURES {
            let Some((value, spread)) = case.get(what).and_then(|v| median(v)) else { continue };
            let alone = cases.get(&(*durability, first)).and_then(|c| c.get(what)).and_then(|v| median(v));
            figures.push(Figure {
                bench: "push",
                case: format!("{durability}, replicas {replicas}"),
                what,
                value,
                unit,
                reference: format!("replicas {first}"),
                ratio: alone.filter(|a| a.0 > 0.0).map(|a| value / a.0),
                spread,
            });
        }
    }
    if args.json {
        figure::print_json(&figures);
    } else {
        figure::print(&figures);
    }
    Ok(exit::OK)
}

fn one(
    args: &PushBenchArgs,
    durability: Durability,
    replicas: u32,
    dir: &Path,
    interrupted: &AtomicI32,
) -> Result<Vec<(&'static str, f64)>, Failure> {
    let time = Duration::from_secs(args.seconds) / 2;
    let values = args.values as usize;
    let shape = Shape { values, replicas, durability, set: &args.set, ..Shape::default() };
    let mut figures = Vec::new();

    let bed = Bed::start(shape, &dir.join("goodput"))?;
    let before = (loopback_bytes(), counters(&bed));
    let took = ended(thread::scope(|s| s.spawn(|| stream(&bed, time, interrupted)).join()))?;
    let after = (loopback_bytes(), counters(&bed));
    drop(bed);
    let [pushed, pulled] = [0, 1].map(|i| (after.1[i] - before.1[i]) as f64);
    figures.push(("goodput", pushed / took.as_secs_f64() / 1e6));
    if let (Some(from), Some(to)) = (before.0, after.0) {
        figures.push(("wire", ((to - from) as f64 - pulled) / pushed));
    }

    let bed = Bed::start(Shape { values: args.small as usize, ..shape }, &dir.join("latency"))?;
    let mut latencies = ended(thread::scope(|s| s.spawn(|| one_by_one(&bed, time, interrupted)).join()))?;
    latencies.sort_by(f64::total_cmp);
    for (name, share) in [("ack p50", 0.5), ("ack p99", 0.99)] {
        figures.extend(quantile(&latencies, share).map(|v| (name, v * 1e3)));
    }
    let number = interrupted.load(Relaxed);
    if number != 0 {
        return Err(Failure::new(128 + number, "interrupted; the fleet has ended"));
    }
    Ok(figures)
}

/// Payload pushed and applied, and pulled.
fn counters(bed: &Bed) -> [u64; 2] {
    let mut all = [0; 2];
    for s in ask_all(&bed.fleet.addresses, false).into_iter().flatten().flat_map(|r| r.shards) {
        all[0] = all[0].max(s.bytes_pushed);
        all[1] += s.bytes_pulled;
    }
    all
}

/// Steps as fast as the servers let it: push everything, pull. Gives how long it took until all was acknowledged.
fn stream(bed: &Bed, time: Duration, interrupted: &AtomicI32) -> Result<Duration, ClientError> {
    let mut weights = vec![0.0; bed.server_job.params_len];
    let (mut client, mut step) = bed.seat(0).join(&mut weights)?;
    let acks = client.acks();
    let buckets = client.layout().buckets().to_vec();
    let gradient = vec![1e-3; weights.len()];
    let (began, mut open) = (Instant::now(), 0u64);
    while began.elapsed() < time && interrupted.load(Relaxed) == 0 {
        step = step.next();
        for (i, b) in buckets.iter().enumerate().rev() {
            client.push(BucketId(i as u32), step, &gradient[b.range()]);
            open += 1;
        }
        client.pull(step, &mut weights)?;
        open -= acks.try_iter().count() as u64;
    }
    while open > 0 && acks.recv_timeout(Duration::from_secs(10)).is_ok() {
        open -= 1;
    }
    let took = began.elapsed();
    client.finish();
    client.pull_final(step, &mut weights)?;
    Ok(took)
}

/// One small push at a time; the seconds from each to its ack.
fn one_by_one(bed: &Bed, time: Duration, interrupted: &AtomicI32) -> Result<Vec<f64>, ClientError> {
    let mut weights = vec![0.0; bed.server_job.params_len];
    let (mut client, mut step) = bed.seat(0).join(&mut weights)?;
    let acks = client.acks();
    let buckets = client.layout().buckets().to_vec();
    let gradient = vec![1e-3; weights.len()];
    let mut latencies = Vec::new();
    let began = Instant::now();
    while began.elapsed() < time && interrupted.load(Relaxed) == 0 {
        step = step.next();
        for (i, b) in buckets.iter().enumerate() {
            let pushed = Instant::now();
            client.push(BucketId(i as u32), step, &gradient[b.range()]);
            if let Ok(ack) = acks.recv_timeout(Duration::from_secs(10)) {
                latencies.push(ack.at.duration_since(pushed).as_secs_f64());
            }
        }
    }
    client.finish();
    client.pull_final(step, &mut weights)?;
    Ok(latencies)
}
