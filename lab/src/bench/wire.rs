//! `paraft bench wire`: what the way between a worker and its servers makes of the machine's sockets.
//!
//! For each payload one fleet, and beside it a process that answers on plain sockets. A repeat measures them in turn, so
//! that both have the same machine. A *push* is timed from the first call until the last acknowledgement, a *pull* until
//! the weights are in the worker's vector, a *round* is a training step's: push the model and pull it. Between timed
//! pulls the model is pushed, and not timed, so that every pull has something to bring. CPU time is that of all processes
//! of an operation.
//!
//! Over TCP the fleet speaks TLS, and its figures have raw TLS as a second reference. With `--insecure` it speaks plain
//! text, and raw TLS is left out. With `--delay-ms` fleet and references are behind the same simulated link: a proxy of
//! this process delays each byte.

use super::{
    far::{self, FarSide},
    figure::{self, Figure},
    flags::{named, repeats, replicas, size},
    load::{BenchFleet, Pusher, Shape, Via},
    meter::{Meter, OpTime, median_of},
    raw::{self, Raw, Reference},
    scratch,
};
use clap::Args;
use paraft_common::{Durability, codec::F32_BYTES};
use paraft_fleet::{failure::Failure, launch};
use paraft_tls::Access;
use paraft_worker::exit;
use std::{collections::BTreeMap, path::Path, sync::atomic::AtomicI32, time::Duration};

#[derive(Args)]
pub struct WireBenchArgs {
    /// Payloads, comma-separated: bytes of the model, a multiple of 4 up to 1G; K, M and G are powers of 1024.
    #[arg(long, value_delimiter = ',', default_value = "64K,256K,1M,4M,16M,64M,256M", value_parser = size)]
    pub sizes: Vec<usize>,
    /// Ways to the server, comma-separated.
    #[arg(long, value_delimiter = ',', default_value = "tcp,unix")]
    pub via: Vec<Via>,
    /// Replicas of the shard, and servers.
    #[arg(long, default_value_t = 1, value_parser = replicas)]
    pub replicas: u32,
    /// What an acknowledgement promises.
    #[arg(long, default_value = "quorum-memory")]
    pub durability: Durability,
    /// One-way delay between worker and server, in milliseconds, over a link of 1 Gbit/s; needs
    /// `--via tcp`.
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..=10_000))]
    pub delay_ms: Option<u64>,
    /// Milliseconds of each measure in each repeat; at least three operations are made.
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u64).range(1..=60_000))]
    pub millis: u64,
    /// Repeats, interleaved; the median counts.
    #[arg(long, default_value_t = 5, value_parser = repeats)]
    pub repeats: usize,
    /// Overrides a key of the job; may be given often.
    #[arg(long, value_name = "KEY=VALUE")]
    pub set: Vec<String>,
    /// One JSON object for each figure.
    #[arg(long)]
    pub json: bool,
}

/// The measured operations, with the same keys for ours and for the references.
const MEASURES: [&str; 3] = ["push", "pull", "round"];

/// For each operation its repeats: seconds and CPU seconds of one operation.
#[derive(Default)]
struct Case(BTreeMap<&'static str, (Vec<f64>, Vec<f64>)>);

impl Case {
    fn add(&mut self, measure: &'static str, took: OpTime) {
        let (seconds, cpu) = self.0.entry(measure).or_default();
        seconds.push(took.seconds);
        cpu.push(took.cpu);
    }

    /// Converts each repeat's seconds or CPU seconds to a figure.
    fn each(&self, measure: &str, of: impl Fn(&(Vec<f64>, Vec<f64>)) -> Vec<f64>) -> Vec<f64> {
        self.0.get(measure).map(of).unwrap_or_default()
    }
}

/// All measures of one payload.
#[derive(Default)]
struct Cases {
    ours: BTreeMap<Via, Case>,
    raw: BTreeMap<Reference, Case>,
}

/// The references that are measured beside a transport.
fn references(via: Via) -> &'static [Reference] {
    match via {
        Via::Tcp => &[Reference::Plain(Via::Tcp), Reference::Tls],
        Via::Unix => &[Reference::Plain(Via::Unix)],
    }
}

/// Whether our figures of this transport are compared with this reference: for the Unix socket, plain TCP is a second one.
fn compares(via: Via, reference: Reference) -> bool {
    match reference {
        Reference::Plain(raw) => raw == via || raw == Via::Tcp,
        Reference::Tls => via == Via::Tcp,
    }
}

pub fn run(args: &WireBenchArgs) -> Result<i32, Failure> {
    if args.delay_ms.is_some() && args.via != [Via::Tcp] {
        return Err(Failure::new(exit::USAGE, "only TCP has a simulated link").help("give `--via tcp`, too"));
    }
    let scratch = scratch::folder()?;
    let interrupted = launch::interrupts();
    for bytes in &args.sizes {
        let dir = scratch.path().join(bytes.to_string());
        let cases = one(args, *bytes, &dir, &interrupted)?;
        figure::show(&figures(args, *bytes, &cases), args.json);
        let _ = std::fs::remove_dir_all(&dir);
    }
    Ok(exit::OK)
}

/// All repeats of one payload.
fn one(args: &WireBenchArgs, bytes: usize, dir: &Path, interrupted: &AtomicI32) -> Result<Cases, Failure> {
    let shape = Shape {
        values: bytes / F32_BYTES,
        workers: args.via.len() as u32,
        in_turn: true,
        replicas: args.replicas,
        set: &args.set,
        link: args.delay_ms.map(far::link),
        ..Shape::timed(args.durability)
    };
    let fleet = BenchFleet::start(shape, &dir.join("fleet"))?;
    let mut far = [FarSide::start(raw::COMMAND, "raw", dir)?];
    let _proxies = args.delay_ms.map(|ms| far::behind(&mut far, far::link(ms), dir)).transpose()?;
    let [peer] = far;
    let (ours, raws) = (Meter::new(fleet.servers()), Meter::new([peer.id()]));
    let insecure = matches!(Access::ours(), Access::Insecure);
    // One worker for each transport; idle workers only send heartbeats.
    let mut ways = Vec::new();
    for (worker, via) in (0u32..).zip(&args.via) {
        let measured =
            references(*via).iter().filter(|reference| !(insecure && **reference == Reference::Tls));
        let beside = measured.map(|reference| Ok((*reference, Raw::connect(&peer, *reference)?)));
        let beside: Vec<(Reference, Raw)> = beside.collect::<Result<_, Failure>>()?;
        ways.push((*via, fleet.slot_via(worker, *via).pusher()?, beside));
    }
    let mut payload = vec![1; bytes];
    for (_, pusher, beside) in &mut ways {
        // Warm-up: connections open their windows, and allocators get their pages.
        for _ in 0..3 {
            pusher.push()?;
            pusher.pull()?;
            for (_, raw) in &mut *beside {
                raw.push(&payload)?;
                raw.pull(&mut payload)?;
            }
        }
    }
    let time = Duration::from_millis(args.millis);
    let mut cases = Cases::default();
    for _ in 0..args.repeats {
        for (via, pusher, beside) in &mut ways {
            for (reference, raw) in beside {
                let case = cases.raw.entry(*reference).or_default();
                measure_raw(&raws, raw, &mut payload, time, interrupted, case)?;
            }
            measure(&ours, pusher, time, interrupted, cases.ours.entry(*via).or_default())?;
        }
    }
    Ok(cases)
}

fn measure(
    meter: &Meter,
    pusher: &mut Pusher,
    time: Duration,
    interrupted: &AtomicI32,
    case: &mut Case,
) -> Result<(), Failure> {
    case.add("push", median_of(time, interrupted, || meter.time(|| pusher.push()))?);
    let pull = median_of(time, interrupted, || {
        pusher.push()?;
        meter.time(|| pusher.pull_whole())
    })?;
    case.add("pull", pull);
    let round = median_of(time, interrupted, || {
        let took = meter.time(|| pusher.round())?;
        pusher.wait_for_acks()?;
        Ok(took)
    })?;
    case.add("round", round);
    Ok(())
}

fn measure_raw(
    meter: &Meter,
    raw: &mut Raw,
    payload: &mut [u8],
    time: Duration,
    interrupted: &AtomicI32,
    case: &mut Case,
) -> Result<(), Failure> {
    case.add("push", median_of(time, interrupted, || meter.time(|| raw.push(payload)))?);
    case.add("pull", median_of(time, interrupted, || meter.time(|| raw.pull(payload)))?);
    let round = || {
        meter.time(|| {
            raw.push(payload)?;
            raw.pull(payload)
        })
    };
    case.add("round", median_of(time, interrupted, round)?);
    Ok(())
}

fn figures(args: &WireBenchArgs, bytes: usize, cases: &Cases) -> Vec<Figure> {
    let (size, mut figures) = (named(bytes), Vec::new());
    let payload = bytes as f64;
    let goodput = |c: &Case, m| c.each(m, |(seconds, _)| seconds.iter().map(|s| payload / s / 1e6).collect());
    let millis = |c: &Case, m| c.each(m, |(seconds, _)| seconds.iter().map(|s| s * 1e3).collect());
    let cpu = |c: &Case, m| c.each(m, |(_, cpu)| cpu.iter().map(|s| s / payload * 1e9).collect());
    type Each<'a> = &'a dyn Fn(&Case, &'static str) -> Vec<f64>;
    let [push, pull, round] = MEASURES;
    let rows: [(&'static str, &'static str, &'static str, Each); 5] = [
        ("push", "MB/s", push, &goodput),
        ("pull", "MB/s", pull, &goodput),
        ("round", "ms", round, &millis),
        ("push cpu", "s/GB, all processes", push, &cpu),
        ("pull cpu", "s/GB, all processes", pull, &cpu),
    ];
    let raws: Vec<Reference> = args.via.iter().flat_map(|via| references(*via)).copied().collect();
    for (what, unit, measure, each) in rows {
        for reference in &raws {
            let Some(raw) = cases.raw.get(reference) else { continue };
            let case = format!("{}, {size}", reference.name());
            figures.extend(Figure::alone("wire", &case, what, unit, &each(raw, measure)));
        }
        for via in &args.via {
            let Some(ours) = cases.ours.get(via) else { continue };
            let (case, values) = (format!("{}, {size}", via.name()), each(ours, measure));
            for reference in raws.iter().filter(|reference| compares(*via, **reference)) {
                let Some(raw) = cases.raw.get(reference) else { continue };
                let figure = Figure::alone("wire", &case, what, unit, &values);
                figures.extend(figure.map(|f| f.against(reference.name(), &values, &each(raw, measure))));
            }
        }
    }
    figures
}
