//! `paraft verify ledger`: kills and other faults under load, then a count of every push.

use super::{
    clients::Clients,
    cluster::{Shape, TestCluster},
    verdict::{Counts, Verdict},
};
use crate::{
    fault_schedule::{FaultSchedule, Kind},
    health::View,
};
use clap::Args;
use paraft_client::{ClientError, SessionError};
use paraft_common::{Durability, Mode, Step, durability};
use paraft_fleet::{failure::Failure, faults::Faults, launch};
use paraft_proof::{Ledger, LedgerRows};
use paraft_worker::exit;
use std::{
    path::PathBuf,
    sync::{Arc, atomic::AtomicI32},
    time::{Duration, Instant},
};

#[derive(Args)]
pub struct LedgerArgs {
    /// How often a leader is killed (SIGKILL).
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub kills: u32,
    /// The same seed draws the same faults in the same order.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// bsp, ssp:S or asp.
    #[arg(long, default_value = "asp")]
    pub mode: Mode,
    /// quorum-disk, quorum-memory or leader.
    #[arg(long, default_value = "quorum-memory")]
    pub durability: Durability,
    /// Servers; a minority of them is down at any time.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(3..=7))]
    pub servers: u32,
    /// Clients that push.
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=8))]
    pub workers: u32,
    /// Kinds of faults, comma-separated, all at once; kill is always among them.
    #[arg(long, value_delimiter = ',', default_value = "kill", value_enum)]
    pub faults: Vec<Kind>,
    /// A run with fewer acknowledged pushes a second than this does not count (exit code 75).
    #[arg(long, default_value_t = 100.0)]
    pub pushes_floor: f64,
    /// Steps that each client begins in a second, at most; a step is 4 pushes on each shard.
    #[arg(long, default_value_t = 25, value_parser = clap::value_parser!(u64).range(1..=1000))]
    pub pace: u64,
    /// A follower that hears nothing for three to four times so many milliseconds stands for election.
    #[arg(long, default_value_t = 150, value_parser = clap::value_parser!(u64).range(50..=2000))]
    pub election_ms: u64,
    /// A table of so many rows beside the vector: each step adds 1 to 16 of them, and the first steps to all.
    #[arg(long, default_value_t = 0, value_parser = clap::value_parser!(u64).range(0..=100_000_000))]
    pub sparse: u64,
    /// Where the servers' logs and data go. Default: a temporary folder, which stays if the promise is broken.
    #[arg(long)]
    pub run_dir: Option<PathBuf>,
    /// One JSON object instead of a table.
    #[arg(long)]
    pub json: bool,
}

const BUCKETS_PER_SHARD: u32 = 4;
/// The ledger has room for this many seconds of pushes per kill.
const SECONDS_PER_KILL: u64 = 4;
/// A fleet that is not whole after this time has failed the proof: no schedule causes that.
const CALM_TIMEOUT: Duration = Duration::from_secs(60);

pub fn run(args: &LedgerArgs) -> Result<i32, Failure> {
    let shards = args.servers.min(8);
    let buckets = (shards * BUCKETS_PER_SHARD) as usize;
    let rounds = (u64::from(args.kills) * SECONDS_PER_KILL + 10) * args.pace;
    let mut ledger = Ledger::in_every_bucket(args.mode, args.workers, rounds, buckets);
    ledger.durability = args.durability;
    ledger.rows = (args.sparse > 0).then_some(LedgerRows {
        rows: args.sparse,
        per_step: 16,
        partitions: shards * BUCKETS_PER_SHARD,
        workers: args.workers,
    });
    // A client that a fault cuts off for a while must keep its lease.
    ledger.grace_ms = 60_000;
    let window = ledger.leader_window;
    durability::check(args.mode, args.durability, window)
        .map_err(|e| Failure::new(exit::USAGE, e).help("see --mode and --durability"))?;
    if args.pushes_floor.is_nan() || args.pushes_floor < 0.0 {
        return Err(Failure::new(exit::USAGE, "--pushes-floor is a number from 0"));
    }
    let scratch = Scratch::new(args.run_dir.clone())?;
    let shape = Shape {
        servers: args.servers,
        shards,
        replicas: 3,
        durability: args.durability,
        election_ms: args.election_ms,
    };
    let mut storm = Storm {
        args,
        cluster: TestCluster::start(shape, &scratch.path)?,
        schedule: FaultSchedule::new(args.seed, &[&[Kind::Kill], args.faults.as_slice()].concat()),
        counts: Counts::default(),
        fading: Vec::new(),
        drained: None,
        installed: Vec::new(),
        interrupted: launch::interrupts(),
        said: Instant::now(),
    };
    let verdict = storm.run(&ledger);
    match &verdict {
        Ok(v) if v.held() => scratch.remove(),
        _ => eprintln!("the servers' logs and data are in {}", scratch.path.display()),
    }
    let verdict = verdict?;
    match args.json {
        true => out!("{}", verdict.json()),
        false => out!("{}", verdict.table()),
    }
    Ok(verdict.exit_code())
}

/// The servers' folder, which is removed unless it is needed.
struct Scratch {
    path: PathBuf,
    temporary: bool,
}

impl Scratch {
    fn new(given: Option<PathBuf>) -> Result<Self, Failure> {
        let temporary = given.is_none();
        let path = match given {
            Some(path) => {
                let made = std::fs::create_dir_all(&path).and_then(|()| std::fs::canonicalize(&path));
                let path = made.map_err(|e| Failure::write(&path, e))?;
                if path.join("server-0").exists() {
                    return Err(Failure::new(exit::CONFIG, format!("{} holds another run", path.display()))
                        .help("choose another --run-dir, or remove it"));
                }
                path
            }
            None => {
                let dir = tempfile::Builder::new().prefix("paraft-verify-").tempdir();
                dir.map_err(|e| Failure::new(exit::IO, format!("no temporary folder: {e}")))?.keep()
            }
        };
        Ok(Self { path, temporary })
    }

    fn remove(&self) {
        if self.temporary {
            let _ = std::fs::remove_dir_all(&self.path);
        }
    }
}

/// The faults of one run.
pub(super) struct Storm<'a> {
    pub args: &'a LedgerArgs,
    pub cluster: TestCluster,
    pub schedule: FaultSchedule,
    pub counts: Counts,
    /// Faults that harm no client and may overlap with others, with their ends.
    pub fading: Vec<(Instant, Kind)>,
    /// The server that is drained.
    pub drained: Option<usize>,
    /// Snapshots installed by each server's process at the last observation.
    installed: Vec<u64>,
    interrupted: Arc<AtomicI32>,
    said: Instant,
}

impl Storm<'_> {
    fn run(&mut self, ledger: &Ledger) -> Result<Verdict, Failure> {
        let first = self.calm(None)?;
        let clients =
            Clients::start(ledger, &self.cluster.at(), Duration::from_secs(1) / self.args.pace as u32);
        clients.allow(2.0 / f64::from(self.args.kills + 2));
        let begun = Instant::now();
        while clients.acknowledged() == 0 {
            self.checked(&clients)?;
            if begun.elapsed() > CALM_TIMEOUT {
                return Err(Failure::new(exit::UNAVAILABLE, "no push was acknowledged in the first minute"));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        let (began, before) = (Instant::now(), clients.acknowledged());
        while self.counts.leader_kills < u64::from(self.args.kills) {
            let view = self.calm(Some(&clients))?;
            let fault = self.schedule.draw();
            self.inject(fault, &view, &clients)?;
            let share = (self.counts.leader_kills + 2) as f64 / f64::from(self.args.kills + 2);
            clients.allow(share);
            self.say(&clients);
        }
        self.cluster.put(Faults::default())?;
        let last = self.calm(Some(&clients))?;
        let (seconds, pushes) = (began.elapsed().as_secs_f64(), clients.acknowledged() - before);
        let outcome = clients.finish().map_err(|e| self.gave_up(&e.to_string(), &e))?;
        let first_weights = outcome.weights.first().cloned().unwrap_or_default();
        let same = outcome.weights.iter().all(|w| *w == first_weights);
        let replicas = self.replicas_agree();
        let terms = |v: &View| v.terms.iter().sum::<u64>();
        let mut tally =
            ledger.read(&first_weights, |worker, step, bucket| outcome.fate(worker, step.0, bucket));
        if let Some(rows) = ledger.rows {
            let fate =
                |worker, step: Step, partition| outcome.fate(worker, step.0, ledger.copies + partition);
            rows.count(&outcome.rows, |worker| outcome.begun(worker), fate, &mut tally);
        }
        Ok(Verdict {
            tally,
            clients_agree: same,
            replicas,
            counts: std::mem::take(&mut self.counts),
            seconds,
            pushes_per_s: pushes as f64 / seconds,
            floor: self.args.pushes_floor,
            unseen: outcome.unseen,
            gaps: outcome.gaps,
            mode: self.args.mode,
            durability: self.args.durability,
            seed: self.args.seed,
            servers: self.args.servers,
            workers: self.args.workers,
            per_place: ledger.per_place,
            reported_lost: self.cluster.reported_lost(),
            // Terms without a leader count too, which only makes the bound larger.
            bound: (terms(&last) - terms(&first)) * ledger.leader_window.pushes,
        })
    }

    /// Waits until the fleet is whole and every client is served; fading faults end in the meantime.
    fn calm(&mut self, clients: Option<&Clients>) -> Result<View, Failure> {
        let began = Instant::now();
        loop {
            self.fade()?;
            if let Some(clients) = clients {
                self.checked(clients)?;
            }
            let state = self.cluster.whole();
            match state {
                Ok(view) if clients.is_none_or(Clients::served) => {
                    self.count_snapshots(&view);
                    return Ok(view);
                }
                Ok(_) if began.elapsed() > CALM_TIMEOUT => {
                    // A client whose push is acknowledged does not push it again, and would wait for a
                    // lost step for ever.
                    let done = self.counts.leader_kills;
                    let what = format!(
                        "BROKEN after {done} kills: the fleet is whole, but for {CALM_TIMEOUT:?} a client has had no ack: a push that was acknowledged may be gone"
                    );
                    return Err(Failure::new(exit::FAILED, what).help("see the servers' logs"));
                }
                Err(why) if began.elapsed() > CALM_TIMEOUT => {
                    let done = self.counts.leader_kills;
                    let what =
                        format!("after {done} kills the fleet is not whole within {CALM_TIMEOUT:?}: {why}");
                    return Err(Failure::new(exit::UNAVAILABLE, what).help("see the servers' logs"));
                }
                _ => std::thread::sleep(Duration::from_millis(20)),
            }
        }
    }

    /// A process that has restarted counts from 0.
    fn count_snapshots(&mut self, view: &View) {
        self.installed.resize(view.installed.len(), 0);
        for (before, now) in self.installed.iter_mut().zip(&view.installed) {
            let new = if *now >= *before { now - *before } else { *now };
            self.counts.snapshots += new;
            *before = *now;
        }
    }

    /// Servers that are unreachable for too long only fail the run. Servers that refuse or have lost
    /// acknowledged data break the promise.
    fn gave_up(&self, what: &str, why: &ClientError) -> Failure {
        let done = self.counts.leader_kills;
        match why {
            ClientError::Session(SessionError::Unreachable { .. })
            | ClientError::Control { .. }
            | ClientError::Options(_)
            | ClientError::Interrupted => {
                Failure::new(exit::UNAVAILABLE, format!("after {done} kills {what}"))
            }
            ClientError::Session(_) => {
                Failure::new(exit::FAILED, format!("BROKEN after {done} kills: {what}"))
            }
        }
    }

    /// Ends the run if the user interrupts, a client gives up or a server dies by itself.
    fn checked(&mut self, clients: &Clients) -> Result<(), Failure> {
        launch::check_interrupted(&self.interrupted)?;
        if let Some((worker, why)) = clients.failed() {
            return Err(self.gave_up(&format!("client {worker}: {why}"), &why));
        }
        match self.cluster.dead().into_iter().next() {
            Some((place, how)) => {
                let what = format!("server {place} ended though nobody killed it: {how}");
                Err(Failure::new(exit::FAILED, what))
            }
            None => Ok(()),
        }
    }

    fn replicas_agree(&self) -> Result<(), String> {
        let began = Instant::now();
        loop {
            match self.cluster.replicas_agree() {
                Err(_) if began.elapsed() < Duration::from_secs(10) => {
                    std::thread::sleep(Duration::from_millis(50));
                }
                r => return r,
            }
        }
    }

    fn say(&mut self, clients: &Clients) {
        const INTERVAL: Duration = Duration::from_secs(5);
        if !self.args.json && self.said.elapsed() > INTERVAL {
            self.said = Instant::now();
            let (done, all) = (self.counts.leader_kills, self.args.kills);
            eprintln!("{done} of {all} kills  {} pushes acknowledged", clients.acknowledged());
        }
    }
}
