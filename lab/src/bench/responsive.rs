//! `paraft bench responsive`: how soon the control group's calls are answered while its servers compute.
//!
//! Every server is asked Hello over and over, which takes the same road as a heartbeat: the network, the runtime, and
//! nothing that computes. First while nothing else goes on; then while a server that was killed takes over a snapshot of
//! each shard, and thousands of digests of whole states are asked of all of them.

use super::{
    figure::{self, Figure},
    load::{BenchFleet, Shape, go_on},
};
use crate::{health, statistics::quantile};
use clap::Args;
use futures::StreamExt;
use paraft_fleet::{ask, ask::ask_all, failure::Failure, launch};
use paraft_proto::{HelloRequest, StatusRequest, control_client::ControlClient, shards_client::ShardsClient};
use paraft_tls::{Access, access::As};
use paraft_worker::exit;
use std::{
    sync::{
        Mutex,
        atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering::Relaxed},
    },
    thread,
    time::{Duration, Instant},
};
use tonic::transport::Channel;

#[derive(Args)]
pub struct ResponsiveBenchArgs {
    /// Values of the model, over all shards.
    #[arg(long, default_value_t = 48_000_000, value_parser = clap::value_parser!(u32).range(1..=1 << 28))]
    pub values: u32,
    /// Shards; three servers have a replica of each.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=64))]
    pub shards: u32,
    /// Digests that are asked for.
    #[arg(long, default_value_t = 20_000, value_parser = clap::value_parser!(u64).range(0..=1_000_000))]
    pub digests: u64,
    /// Milliseconds without any load, before it.
    #[arg(long, default_value_t = 2000, value_parser = clap::value_parser!(u64).range(1..=60_000))]
    pub millis: u64,
    /// Overrides a key of the job; may be given often.
    #[arg(long, value_name = "KEY=VALUE")]
    pub set: Vec<String>,
    /// One JSON object for each figure.
    #[arg(long)]
    pub json: bool,
}

/// Between two questions to a server.
const PAUSE: Duration = Duration::from_millis(5);
/// A question that is not answered within this counts as so long.
const TIMEOUT: Duration = Duration::from_secs(2);
/// What is aimed at: a follower stands for election after some multiples of this.
const AIM_MS: f64 = 50.0;
/// Digests that are asked for at the same time, of each server.
const AT_ONCE: usize = 200;
/// The fleet must be whole again within this.
const REPAIR: Duration = Duration::from_secs(120);

/// Seconds until each question was answered.
type Answers = Mutex<Vec<f64>>;

pub fn run(args: &ResponsiveBenchArgs) -> Result<i32, Failure> {
    let scratch = tempfile::tempdir().map_err(|e| Failure::new(exit::IO, e))?;
    let interrupted = launch::interrupts();
    let shape =
        Shape { values: args.values as usize, shards: args.shards, set: &args.set, ..Shape::default() };
    let mut fleet = BenchFleet::start(shape, scratch.path())?;
    // The job is there, and its weights.
    fleet.slot(0).pusher()?.push()?;
    whole(&fleet, args, &interrupted)?;
    let (quiet, busy) = (Answers::default(), Answers::default());
    let (loaded, over, digests) = (AtomicBool::new(false), AtomicBool::new(false), AtomicU64::new(0));
    let addresses = fleet.fleet.addresses.clone();
    // Servers ask each other so, and nobody else does.
    let access = &fleet.fleet.access(As::Peer)?;
    let (loaded_now, over_now, made, answers) = (&loaded, &over, &digests, (&quiet, &busy));
    let took = thread::scope(|s| {
        for address in &addresses {
            s.spawn(move || probe(address, access, loaded_now, over_now, answers));
        }
        let worked = (|| {
            thread::sleep(Duration::from_millis(args.millis));
            // Any server: the control group's leader too, if it must be so.
            let victim = fleet.fleet.servers.len() - 1;
            fleet.fleet.servers[victim].kill();
            thread::sleep(TIMEOUT);
            loaded.store(true, Relaxed);
            let began = Instant::now();
            let part = args.digests / addresses.len() as u64;
            for address in &addresses {
                s.spawn(move || ask_digests(address, part, made, over_now));
            }
            fleet.fleet.restart_server(victim)?;
            whole(&fleet, args, &interrupted)?;
            let whole_after = began.elapsed();
            while digests.load(Relaxed) < part * addresses.len() as u64 && began.elapsed() < REPAIR {
                go_on(&interrupted)?;
                thread::sleep(Duration::from_millis(5));
            }
            Ok::<_, Failure>((whole_after, began.elapsed()))
        })();
        over.store(true, Relaxed);
        worked
    })?;
    show(args, took, (&quiet, &busy), digests.load(Relaxed))
}

fn show(
    args: &ResponsiveBenchArgs,
    (whole, all): (Duration, Duration),
    (quiet, busy): (&Answers, &Answers),
    digests: u64,
) -> Result<i32, Failure> {
    let mut figures = Vec::new();
    let mib = f64::from(args.values) * 4.0 / f64::from(1 << 20);
    let loaded = format!("{} snapshots of {mib:.0} MiB together, {digests} digests", args.shards);
    for (case, answers) in [("nothing else", quiet), (&*loaded, busy)] {
        let mut answers = answers.lock().unwrap_or_else(|e| e.into_inner()).clone();
        answers.sort_by(f64::total_cmp);
        for (what, share) in [("hello p50", 0.5), ("hello p99", 0.99), ("hello max", 1.0)] {
            let Some(value) = quantile(&answers, share).map(|s| s * 1e3) else {
                return Err(Failure::new(exit::FAILED, format!("no server answered ({case})")));
            };
            let (case, reference, ratio) = (case.into(), format!("{AIM_MS} ms"), Some(value / AIM_MS));
            let unit = "ms";
            figures.push(Figure {
                bench: "responsive",
                case,
                what,
                value,
                unit,
                reference,
                ratio,
                spread: None,
            });
        }
    }
    for (what, value) in [("until it is whole", whole), ("until all digests are there", all)] {
        figures.extend(Figure::alone("responsive", &loaded, what, "s", &[value.as_secs_f64()]));
    }
    figure::show(&figures, args.json);
    Ok(exit::OK)
}

/// Asks a server until it is over. While it does not run, nobody could answer: only what was connected counts.
fn probe(
    address: &str,
    access: &Access,
    loaded: &AtomicBool,
    over: &AtomicBool,
    (quiet, busy): (&Answers, &Answers),
) {
    in_runtime(async {
        let Ok(channel) = paraft_client::connect::lazy(address, access) else { return };
        let mut client = ControlClient::new(channel);
        while !over.load(Relaxed) {
            // The first answer shows that there is a connection.
            if !matches!(tokio::time::timeout(TIMEOUT, client.hello(HelloRequest {})).await, Ok(Ok(_))) {
                tokio::time::sleep(PAUSE).await;
                continue;
            }
            while !over.load(Relaxed) {
                let asked = Instant::now();
                let said = tokio::time::timeout(TIMEOUT, client.hello(HelloRequest {})).await;
                if matches!(said, Ok(Err(_))) {
                    break; // it was killed
                }
                let answers = if loaded.load(Relaxed) { busy } else { quiet };
                answers.lock().unwrap_or_else(|e| e.into_inner()).push(asked.elapsed().as_secs_f64());
                tokio::time::sleep(PAUSE).await;
            }
        }
    });
}

/// Asks a server for digests of all its replicas, `count` times.
fn ask_digests(address: &str, count: u64, made: &AtomicU64, over: &AtomicBool) {
    in_runtime(async {
        // The one that was killed is on its way.
        let channel = loop {
            match connect(address).await {
                Some(channel) => break channel,
                None if over.load(Relaxed) => return,
                None => tokio::time::sleep(PAUSE).await,
            }
        };
        let ask = |_| {
            let mut client = ShardsClient::new(channel.clone());
            async move {
                if !over.load(Relaxed)
                    && client.status(StatusRequest { digest: true, ..StatusRequest::default() }).await.is_ok()
                {
                    made.fetch_add(1, Relaxed);
                }
            }
        };
        futures::stream::iter(0..count).map(ask).buffer_unordered(AT_ONCE).collect::<Vec<()>>().await;
    });
}

async fn connect(address: &str) -> Option<Channel> {
    paraft_client::connect::channel(address, paraft_client::Transport::Tcp).await.ok()
}

fn in_runtime(work: impl Future<Output = ()>) {
    if let Ok(runtime) = tokio::runtime::Builder::new_current_thread().enable_all().build() {
        runtime.block_on(work);
    }
}

/// Waits until every shard has all its voters.
fn whole(fleet: &BenchFleet, args: &ResponsiveBenchArgs, interrupted: &AtomicI32) -> Result<(), Failure> {
    let (asked, began) = (&fleet.fleet.addresses, Instant::now());
    loop {
        let view = health::whole(&ask_all(asked, false), args.shards, fleet.job.cluster.replicas);
        let settled = || ask::describe(asked).is_some_and(|f| health::settled(&f).is_ok());
        match view {
            Ok(_) if settled() => return Ok(()),
            Err(why) if began.elapsed() > REPAIR => {
                let what = format!("the fleet is not whole after {REPAIR:?}: {why}");
                return Err(Failure::new(exit::FAILED, what));
            }
            _ => {}
        }
        go_on(interrupted)?;
        thread::sleep(Duration::from_millis(20));
    }
}
