//! `paraft bench failover`: how long no push is acknowledged after a leader is killed, and the cost for
//! other pushes while the restarted server catches up.

use super::{
    figure::{self, Figure},
    load::{BenchFleet, Shape, WorkerSlot, ended},
    scratch,
};
use crate::{
    health,
    statistics::{median, quantile},
};
use clap::Args;
use paraft_client::{Acked, ClientError};
use paraft_common::{BucketId, Durability};
use paraft_fleet::{failure::Failure, launch};
use paraft_worker::exit;
use std::{
    path::Path,
    sync::{
        Mutex,
        atomic::{AtomicBool, AtomicI32, Ordering::Relaxed},
        mpsc::RecvTimeoutError,
    },
    thread,
    time::{Duration, Instant},
};

#[derive(Args)]
pub struct FailoverBenchArgs {
    /// Leaders killed (SIGKILL), one after the other; each comes back before the next.
    #[arg(long, default_value_t = 50, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub kills: u32,
    /// What an acknowledgement promises.
    #[arg(long, default_value = "quorum-memory")]
    pub durability: Durability,
    /// Values of the model for the snapshot; 0 leaves it out.
    #[arg(long, default_value_t = 32_000_000, value_parser = clap::value_parser!(u32).range(0..=1 << 28))]
    pub snapshot_values: u32,
    /// Snapshots sent to a follower that comes back.
    #[arg(long, default_value_t = 5)]
    pub snapshots: usize,
    /// Overrides a key of the job; may be given often (cluster.election_ms=300, say).
    #[arg(long, value_name = "KEY=VALUE")]
    pub set: Vec<String>,
    /// One JSON object for each figure.
    #[arg(long)]
    pub json: bool,
}

/// Values of the model for the gap; each push carries 4 bytes for each.
const GAP_VALUES: u32 = 256;
/// A restarted server must be a voter again within this time.
const REPAIR_TIMEOUT: Duration = Duration::from_secs(120);

pub fn run(args: &FailoverBenchArgs) -> Result<i32, Failure> {
    let scratch = scratch::folder()?;
    let interrupted = launch::interrupts();
    let mut figures = Vec::new();
    let mut gaps = gaps(args, &scratch.path().join("gaps"), &interrupted)?;
    gaps.sort_by(f64::total_cmp);
    let election =
        paraft_worker::Job::parse("name = \"b\"\n", Path::new("bench"), &args.set)?.cluster.election_ms;
    let case = format!("{}, {} kills, election {election} ms", args.durability, gaps.len());
    for (what, share) in [("gap p50", 0.5), ("gap p90", 0.9), ("gap p99", 0.99), ("gap max", 1.0)] {
        let Some(value) = quantile(&gaps, share) else { continue };
        figures.push(Figure {
            bench: "failover",
            case: case.clone(),
            what,
            value: value * 1e3,
            unit: "ms",
            reference: "election timeout".into(),
            ratio: Some(value * 1e3 / election as f64),
            spread: None,
        });
    }
    if args.snapshot_values > 0 && args.snapshots > 0 {
        let (before, ratios, took) = snapshots(args, &scratch.path().join("snapshot"), &interrupted)?;
        let mib = f64::from(args.snapshot_values) * 4.0 / f64::from(1 << 20);
        let case = format!("{}, state of {mib:.0} MiB", args.durability);
        let mut figure = |what, values: &[f64], unit, ratio: Option<f64>| {
            if let Some((value, spread)) = median(values) {
                let (case, reference) = (case.clone(), "before".to_string());
                figures.push(Figure { bench: "snapshot", case, what, value, unit, reference, ratio, spread });
            }
        };
        figure("goodput before", &before, "MB/s", Some(1.0));
        let ratio = median(&ratios).map(|m| m.0);
        let during: Vec<f64> = before.iter().zip(&ratios).map(|(b, r)| b * r).collect();
        figure("goodput while it is sent", &during, "MB/s", ratio);
        figure("until it votes again", &took, "s", None);
    }
    figure::show(&figures, args.json);
    Ok(exit::OK)
}

fn fleet(args: &FailoverBenchArgs, values: u32, dir: &Path) -> Result<BenchFleet, Failure> {
    let (values, durability) = (values as usize, args.durability);
    BenchFleet::start(Shape { values, durability, set: &args.set, ..Shape::default() }, dir)
}

/// The seconds without an acknowledgement around each kill.
fn gaps(args: &FailoverBenchArgs, dir: &Path, interrupted: &AtomicI32) -> Result<Vec<f64>, Failure> {
    let mut fleet = fleet(args, GAP_VALUES, dir)?;
    let (stop, acks) = (AtomicBool::new(false), Mutex::new(Vec::new()));
    let slot = fleet.slot(0);
    let values = fleet.server_job.params_len;
    thread::scope(|s| {
        let pusher = s.spawn(|| push(slot, values, &stop, &acks));
        let mut kill = || -> Result<Vec<f64>, Failure> {
            let mut gaps = Vec::new();
            for _ in 0..args.kills {
                let leader = whole(&fleet, interrupted)?;
                acks.lock().map_err(|_| panicked())?.clear();
                wait_for(|| acks.lock().is_ok_and(|a| a.len() > 2), interrupted)?;
                let killed = Instant::now();
                fleet.fleet.servers[leader].kill();
                // The first acknowledgement on a stream opened after the kill comes from the next
                // leader.
                let first = || {
                    let acks = acks.lock().ok()?;
                    acks.iter().find(|a: &&Acked| a.opened > killed).map(|a| a.at)
                };
                wait_for(|| first().is_some(), interrupted)?;
                gaps.extend(first().map(|at| at.duration_since(killed).as_secs_f64()));
                fleet.fleet.restart_server(leader)?;
            }
            Ok(gaps)
        };
        let gaps = kill();
        stop.store(true, Relaxed);
        ended(pusher.join())?;
        gaps
    })
}

/// Goodput before a follower restarts, its ratio while the follower receives its snapshot, and the
/// seconds of that.
#[allow(clippy::type_complexity)]
fn snapshots(
    args: &FailoverBenchArgs,
    dir: &Path,
    interrupted: &AtomicI32,
) -> Result<(Vec<f64>, Vec<f64>, Vec<f64>), Failure> {
    let mut fleet = fleet(args, args.snapshot_values, dir)?;
    let (stop, acks) = (AtomicBool::new(false), Mutex::new(Vec::new()));
    let slot = fleet.slot(0);
    let (values, bucket) = (fleet.server_job.params_len, fleet.server_job.bucket_len as f64 * 4.0);
    let rate = |acks: &Mutex<Vec<Acked>>, from: Instant, to: Instant| {
        let count = acks.lock().map_or(0, |a| a.iter().filter(|a| a.at > from && a.at <= to).count());
        count as f64 * bucket / 1e6 / to.duration_since(from).as_secs_f64()
    };
    thread::scope(|s| {
        let pusher = s.spawn(|| push(slot, values, &stop, &acks));
        let mut work = || -> Result<_, Failure> {
            let (mut before, mut ratios, mut took) = (Vec::new(), Vec::new(), Vec::new());
            for _ in 0..args.snapshots {
                let leader = whole(&fleet, interrupted)?;
                wait_for(|| acks.lock().is_ok_and(|a| a.len() > 2), interrupted)?;
                let victim = (leader + 1) % fleet.fleet.servers.len();
                fleet.fleet.servers[victim].kill();
                // Long enough for the log to be truncated, and for a steady rate with two replicas.
                thread::sleep(Duration::from_secs(1));
                let from = Instant::now();
                thread::sleep(Duration::from_secs(3));
                let to = Instant::now();
                let quiet = rate(&acks, from, to);
                fleet.fleet.restart_server(victim)?;
                let back = Instant::now();
                whole(&fleet, interrupted)?;
                let done = Instant::now();
                before.push(quiet);
                ratios.push(rate(&acks, back, done) / quiet);
                took.push(done.duration_since(back).as_secs_f64());
            }
            Ok((before, ratios, took))
        };
        let all = work();
        stop.store(true, Relaxed);
        ended(pusher.join())?;
        all
    })
}

/// Pushes until it is stopped, step by step as in training.
fn push(
    slot: WorkerSlot,
    values: usize,
    stop: &AtomicBool,
    told: &Mutex<Vec<Acked>>,
) -> Result<(), ClientError> {
    let mut weights = vec![0.0; values];
    let (mut client, mut step) = slot.join(&mut weights)?;
    let acks = client.acks();
    let buckets = client.layout().buckets().to_vec();
    let gradient = vec![1e-3; values];
    let tell = |ack| {
        if let Ok(mut told) = told.lock() {
            told.push(ack);
        }
    };
    while !stop.load(Relaxed) {
        step = step.next();
        for (i, b) in buckets.iter().enumerate().rev() {
            client.push(BucketId(i as u32), step, &gradient[b.range()]);
        }
        let mut open = buckets.len();
        while open > 0 && !stop.load(Relaxed) {
            match acks.recv_timeout(Duration::from_millis(100)) {
                Ok(ack) => {
                    tell(ack);
                    open -= 1;
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => {
                    // The client has failed; a pull returns the error.
                    client.pull(step, &mut weights)?;
                    return Ok(());
                }
            }
        }
    }
    client.finish();
    client.pull_final(step, &mut weights)?;
    Ok(())
}

fn panicked() -> Failure {
    Failure::new(exit::FAILED, "a worker of the benchmark panicked")
}

/// Waits until all voters of the shard are on servers that answer; returns the place of its leader.
fn whole(fleet: &BenchFleet, interrupted: &AtomicI32) -> Result<usize, Failure> {
    let mut leader = None;
    let asked = &fleet.fleet.addresses;
    wait_for(
        || {
            let view = health::look(asked).and_then(|(fleet, replies)| health::view(&fleet, &replies, 1));
            leader = view.ok().and_then(|v| v.leaders.first().copied());
            leader.is_some()
        },
        interrupted,
    )?;
    leader.ok_or_else(|| Failure::new(exit::FAILED, "the shard has no leader"))
}

fn wait_for(mut done: impl FnMut() -> bool, interrupted: &AtomicI32) -> Result<(), Failure> {
    let began = Instant::now();
    while !done() {
        launch::check_interrupted(interrupted)?;
        if began.elapsed() > REPAIR_TIMEOUT {
            return Err(Failure::new(
                exit::FAILED,
                format!("the fleet is not whole after {REPAIR_TIMEOUT:?}"),
            )
            .help("its servers' logs are in a temporary folder that is gone; try `paraft verify ledger`"));
        }
        thread::sleep(Duration::from_millis(2));
    }
    Ok(())
}
