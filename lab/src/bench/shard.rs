//! `paraft bench shard`: the cost of admission, log and apply of one shard, by replicas and durability.
//!
//! One worker pushes over TCP, with one push of every bucket in flight and without pulls: 16 buckets of
//! 1 MiB for the goodput, 512 buckets of 1 KiB for the pushes per second, and one push of 1 KiB at a
//! time for the latency of acknowledgements. *Wire* is the bytes on the loopback interface per pushed
//! byte: with three replicas, 3 means that every byte was sent once to each.
//!
//! The baseline for three replicas is the cost of copying the same bytes three times (see [`copies`]): in plain TCP
//! and in the records of TLS, each to its own process, and at `quorum-disk` to three files with an fsync each.
//!
//! With `--delay-ms` the servers, and the raw transfers, have this one-way delay between them, over
//! links of 1 Gbit/s: a proxy of this process delays each byte. The worker has no delay.

use super::{
    copies,
    far::{self, FarSide},
    figure::{self, Figure},
    flags::{repeats, replicas},
    load::{BenchFleet, Shape, Via, loopback_bytes},
    raw::{self, Reference},
    scratch,
};
use crate::statistics::quantile;
use clap::Args;
use paraft_common::{Durability, codec::F32_BYTES};
use paraft_fleet::{failure::Failure, faults::link::Link, launch};
use paraft_tls::Access;
use paraft_worker::exit;
use std::{collections::BTreeMap, path::Path, sync::atomic::AtomicI32, time::Duration};

#[derive(Args)]
pub struct ShardBenchArgs {
    /// Replicas, comma-separated; the first is what the others are compared with.
    #[arg(long, value_delimiter = ',', default_value = "1,3", value_parser = replicas)]
    pub replicas: Vec<u32>,
    /// Durability levels, comma-separated.
    #[arg(long, value_delimiter = ',', default_value = "quorum-memory,quorum-disk,leader")]
    pub durability: Vec<Durability>,
    /// Milliseconds of each measure in each run; the goodput's is preceded by as many that do not count.
    #[arg(long, default_value_t = 2000, value_parser = clap::value_parser!(u64).range(1..=3_600_000))]
    pub millis: u64,
    /// Runs of each case, interleaved; the median counts.
    #[arg(long, default_value_t = 3, value_parser = repeats)]
    pub repeats: usize,
    /// One-way delay between two servers, in milliseconds.
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..=10_000))]
    pub delay_ms: Option<u64>,
    /// Overrides a key of the job; may be given often.
    #[arg(long, value_name = "KEY=VALUE")]
    pub set: Vec<String>,
    /// One JSON object for each figure.
    #[arg(long)]
    pub json: bool,
}

/// Values of the model for the goodput: 16 buckets of 1 MiB.
const VALUES: usize = 4 << 20;
/// Bytes of each of the small buckets.
const SMALL_BYTES: usize = 1 << 10;
/// Small buckets; as many pushes are in flight.
const SMALL_BUCKETS: usize = 512;
/// The figures of one case by name, with one value per run.
type Case = BTreeMap<&'static str, Vec<f64>>;

const GOODPUT: &str = "goodput";
const FIGURES: [(&str, &str); 5] = [
    (GOODPUT, "MB/s"),
    ("small pushes", "pushes/s"),
    ("ack p50", "ms"),
    ("ack p99", "ms"),
    ("wire", "bytes/byte pushed"),
];
/// What goodput is compared with; the last one for the record only.
const RAW_TCP: &str = "raw tcp";
const RAW_TLS: &str = "raw tls";
const FILES: &str = "bare file";
const IN_TURN: &str = "raw tcp in turn";

pub fn run(args: &ShardBenchArgs) -> Result<i32, Failure> {
    let scratch = scratch::folder()?;
    let interrupted = launch::interrupts();
    let most = args.replicas.iter().copied().max().unwrap_or(1) as usize;
    let mut far: Vec<FarSide> = (0..most)
        .map(|i| FarSide::start(raw::COMMAND, &format!("raw-{i}"), scratch.path()))
        .collect::<Result<_, _>>()?;
    let link = args.link();
    let _proxies = link.map(|link| far::behind(&mut far, link, scratch.path())).transpose()?;
    let mut raws: BTreeMap<(Durability, u32), BTreeMap<String, Vec<f64>>> = BTreeMap::new();
    let mut cases: BTreeMap<(Durability, u32), Case> = BTreeMap::new();
    for repeat in 0..args.repeats {
        for durability in &args.durability {
            for replicas in &args.replicas {
                launch::check_interrupted(&interrupted)?;
                let dir = scratch.path().join(format!("{durability}-{replicas}-{repeat}"));
                let raw = raws.entry((*durability, *replicas)).or_default();
                let to = &far[..*replicas as usize];
                for (name, value) in references(args, *durability, to, &dir, &interrupted)? {
                    raw.entry(name).or_default().push(value);
                }
                let case = cases.entry((*durability, *replicas)).or_default();
                for (name, value) in one(args, *durability, *replicas, &dir, &interrupted)? {
                    case.entry(name).or_default().push(value);
                }
                let _ = std::fs::remove_dir_all(&dir); // gigabytes of logs on disk
            }
        }
    }
    figure::show(&figures(args, &cases, &raws), args.json);
    Ok(exit::OK)
}

impl ShardBenchArgs {
    fn link(&self) -> Option<Link> {
        self.delay_ms.map(far::link)
    }
}

/// The bytes of a raw transfer over a link: its reply must take a small part of the time.
const LINK_BYTES: usize = 128 << 20;

/// Goodput in MB/s of what a fleet with so many replicas is compared with, by name.
fn references(
    args: &ShardBenchArgs,
    durability: Durability,
    to: &[FarSide],
    dir: &Path,
    interrupted: &AtomicI32,
) -> Result<Vec<(String, f64)>, Failure> {
    let least = args.link().map_or(0, |_| LINK_BYTES);
    let payload = vec![1; (VALUES * F32_BYTES).max(least)];
    let time = Duration::from_millis(args.millis) / 4;
    let (replicas, mut figures) = (to.len() as u32, Vec::new());
    let mut add = |name: &str, rate: f64| figures.push((copies_name(replicas, name), rate / 1e6));
    let plain = Reference::Plain(Via::Tcp);
    add(RAW_TCP, copies::sent_at_once(to, plain, &payload, time, interrupted)?);
    if !matches!(Access::ours(), Access::Insecure) {
        add(RAW_TLS, copies::sent_at_once(to, Reference::Tls, &payload, time, interrupted)?);
    }
    if replicas > 1 {
        add(IN_TURN, copies::sent_in_turn(to, &payload, time, interrupted)?);
    }
    if durability == Durability::QuorumDisk {
        add(FILES, copies::written_at_once(replicas, &dir.join("bare"), &payload, time, interrupted)?);
    }
    Ok(figures)
}

fn one(
    args: &ShardBenchArgs,
    durability: Durability,
    replicas: u32,
    dir: &Path,
    interrupted: &AtomicI32,
) -> Result<Vec<(&'static str, f64)>, Failure> {
    let time = Duration::from_millis(args.millis);
    let timed = Shape::timed(durability);
    let shape = Shape { values: VALUES, replicas, set: &args.set, between: args.link(), ..timed };
    let mut figures = Vec::new();

    let fleet = BenchFleet::start(shape, &dir.join("large"))?;
    let mut pusher = fleet.slot(0).pusher()?;
    // Warm-up: at first the logs grow to their length, and every page is new.
    pusher.stream(time, interrupted)?;
    let before = loopback_bytes();
    let streamed = pusher.stream(time, interrupted)?;
    figures.push((GOODPUT, streamed.bytes as f64 / streamed.took.as_secs_f64() / 1e6));
    if let (Some(from), Some(to)) = (before, loopback_bytes()) {
        figures.push(("wire", (to - from) as f64 / streamed.bytes as f64));
    }
    drop((pusher, fleet));
    launch::check_interrupted(interrupted)?;

    let mut set = args.set.clone();
    set.push(format!("cluster.bucket_bytes={SMALL_BYTES}"));
    let values = SMALL_BYTES / F32_BYTES * SMALL_BUCKETS;
    let fleet = BenchFleet::start(Shape { values, set: &set, ..shape }, &dir.join("small"))?;
    let mut pusher = fleet.slot(0).pusher()?;
    pusher.push()?;
    let streamed = pusher.stream(time, interrupted)?;
    figures.push(("small pushes", streamed.pushes as f64 / streamed.took.as_secs_f64()));
    let mut acks = pusher.one_by_one(time, interrupted)?;
    acks.sort_by(f64::total_cmp);
    for (name, share) in [("ack p50", 0.5), ("ack p99", 0.99)] {
        figures.extend(quantile(&acks, share).map(|v| (name, v * 1e3)));
    }
    launch::check_interrupted(interrupted)?;
    Ok(figures)
}

fn figures(
    args: &ShardBenchArgs,
    cases: &BTreeMap<(Durability, u32), Case>,
    raws: &BTreeMap<(Durability, u32), BTreeMap<String, Vec<f64>>>,
) -> Vec<Figure> {
    let mut figures = Vec::new();
    let mut all: BTreeMap<&str, Vec<f64>> = BTreeMap::new();
    for (name, values) in raws.values().flatten() {
        all.entry(name).or_default().extend(values);
    }
    for (name, values) in all {
        figures.extend(Figure::alone("shard", name, GOODPUT, "MB/s", &values));
    }
    let first = args.replicas.first().copied().unwrap_or(1);
    for ((durability, replicas), case) in cases {
        let name = format!("{durability}, replicas {replicas}");
        for (what, unit) in FIGURES {
            let Some(values) = case.get(what) else { continue };
            let figure = || Figure::alone("shard", &name, what, unit, values);
            let reference = format!("replicas {first}");
            if *replicas == first {
                figures.extend(figure().map(|f| f.itself(&reference)));
            } else if let Some(alone) = cases.get(&(*durability, first)).and_then(|c| c.get(what)) {
                figures.extend(figure().map(|f| f.against(&reference, values, alone)));
            }
            if what != GOODPUT {
                continue;
            }
            let Some(raw) = raws.get(&(*durability, *replicas)) else { continue };
            for reference in [RAW_TCP, RAW_TLS, FILES].map(|name| copies_name(*replicas, name)) {
                if let Some(raw) = raw.get(&reference) {
                    figures.extend(figure().map(|f| f.against(&reference, values, raw)));
                }
            }
        }
    }
    figures
}

/// The name of copies, at once unless it says otherwise.
fn copies_name(copies: u32, of: &str) -> String {
    match (copies, of) {
        (1, of) => of.into(),
        (n, FILES) => format!("{n} {FILES}s at once"),
        (n, IN_TURN) => format!("{n} {IN_TURN}"),
        (n, of) => format!("{n} {of} at once"),
    }
}
