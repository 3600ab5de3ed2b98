//! Seeded schedules against the real leaders of three replicas: push, retry, drop, duplicate, reorder, crash,
//! partition, failover, snapshot, leave. Raft is a model of its guarantees ([`cluster`]); the workers run the real
//! session code ([`worker`]); admission, rounds, deltas, all of [`Leader`](crate::shard::leader::Leader) and the
//! replicated state are the real ones. There is no runtime and no clock: the schedule alone advances time, and
//! nothing else is random, so a seed determines a schedule.
//!
//! `PARAFT_SCHEDULES=20000` for a long run, `PARAFT_SEED=N` for one schedule.

mod cluster;
mod invariants;
mod worker;

use crate::shard::leader::{Event, RequestedMode};
use cluster::Cluster;
use invariants::History;
use paraft_common::{
    Durability, LeaderWindow, Mode, ModeChoice, SessionId,
    algorithm::{AlgorithmConfig, DcAsgdC},
    auto::Report,
    config::ServerJob,
    round::{Backup, RoundConfig},
};
use rand_chacha::{
    ChaCha8Rng,
    rand_core::{Rng, SeedableRng},
};
use std::{cell::RefCell, panic::AssertUnwindSafe, rc::Rc};
use worker::{BUCKETS, PLACES, Stream, Worker};

const NODES: usize = 3;
const WORKERS: u32 = 3;
/// Number of schedules without `PARAFT_SCHEDULES`.
const SCHEDULES: u64 = 8000;
/// Number of faults in [`Schedule::fails`] that can be the theme of a schedule.
const FAULT_THEMES: usize = 14;
const NO_ANSWERS: usize = 16;
/// A schedule's events before everything heals.
const EVENTS: u64 = 400;

struct Schedule {
    rng: ChaCha8Rng,
    cluster: Cluster,
    workers: Vec<Worker>,
    /// Streams that their workers have given up.
    broken: Vec<Stream>,
    /// The last session that was sent to a worker, whether it has read it or not.
    told: SessionId,
    history: History,
    conns: u64,
    /// The leader cannot reach a majority: nothing is committed.
    cut_off: bool,
    /// For this many events nothing is committed.
    slow: usize,
    /// The most frequent fault of [`Self::fails`].
    theme: Option<usize>,
    /// The job's mode is switched from time to time.
    switches: bool,
    /// How often the leader lost its proposals' outcomes.
    doubts: u64,
    /// Pushes that were applied during the faults, before everything healed.
    amid: u64,
    trace: Rc<RefCell<Vec<String>>>,
}

impl Schedule {
    fn new(seed: u64, trace: Rc<RefCell<Vec<String>>>) -> Self {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let mode = [Mode::Bsp, Mode::Ssp(1), Mode::Asp][(rng.next_u64() % 3) as usize];
        let theme = [Some(NO_ANSWERS), Some(FAULT_THEMES), None, None][(rng.next_u64() % 4) as usize];
        let lossy = mode != Mode::Bsp && rng.next_u64().is_multiple_of(2);
        let window = LeaderWindow { ms: 60, pushes: 1 + rng.next_u64() % 32 };
        let workers = 1 + (rng.next_u64() % u64::from(WORKERS)) as u32;
        let job = ServerJob {
            workers,
            grace_ms: 300,
            durability: if lossy { Durability::Leader } else { Durability::QuorumMemory },
            leader_window: if lossy { window } else { LeaderWindow::default() },
            ..ServerJob::new("simulation", mode, BUCKETS * PLACES, PLACES)
        };
        let switches = rng.next_u64().is_multiple_of(2);
        // With weight 0: pulls are in the log, and pushes count once.
        let records = !lossy && rng.next_u64().is_multiple_of(3);
        let algorithm = AlgorithmConfig::DcAsgdC(DcAsgdC { lambda: 0.0 });
        let algorithm = if records { algorithm } else { AlgorithmConfig::default() };
        let averages = mode.averages() || switches && !lossy;
        let spares = averages && workers > 1 && rng.next_u64().is_multiple_of(2);
        let backup = RoundConfig::Backup(Backup { spare: 1 });
        let round = if spares { backup } else { RoundConfig::default() };
        let job = ServerJob { algorithm, round, ..job };
        trace
            .borrow_mut()
            .push(format!("{mode}, {workers} workers, {}, switches {switches}", job.durability));
        let steps = 4 + rng.next_u64() % 12;
        let text = job.to_toml().expect("a valid job");
        // A worker has no gradient every n-th step.
        let skips = [0, 0, 3, 6][(rng.next_u64() % 4) as usize];
        let workers = (0..workers).map(|w| Worker::new(w, text.clone(), steps, skips)).collect();
        let cluster = Cluster::new(NODES);
        Self {
            rng,
            cluster: cluster.clone(),
            workers,
            broken: Vec::new(),
            told: SessionId(0),
            history: History::new(averages, round.drops_late(), lossy, cluster),
            switches,
            conns: 0,
            cut_off: false,
            slow: 0,
            theme,
            doubts: 0,
            amid: 0,
            trace,
        }
    }

    fn below(&mut self, n: usize) -> usize {
        (self.rng.next_u64() % n as u64) as usize
    }

    fn say(&self, what: String) {
        self.trace.borrow_mut().push(what);
    }

    /// Lets the leaders do their pending work.
    fn leaders_work(&mut self) {
        self.cluster.run_pending();
        let told = self.told;
        for w in &mut self.workers {
            self.told = self.told.max(w.sent(told));
            self.broken.extend(w.gone.drain(..).map(|s| s.break_off(0)));
        }
    }

    /// Normal operation, with or without faults.
    fn run_normally(&mut self) {
        if self.switches {
            match self.below(60) {
                0 => self.switch(),
                1..8 => self.steer(),
                _ => {}
            }
        }
        let w = self.below(self.workers.len());
        match self.below(10) {
            0..5 if self.workers[w].stream.is_none() => self.connect(w, true),
            0..3 => {
                let count = 1 + self.below(4);
                let w = &mut self.workers[w];
                if !w.hangs {
                    w.streams().for_each(|s| _ = s.deliver(count));
                }
            }
            3..5 if !self.workers[w].hangs => {
                let old = self.workers[w].hears(&mut self.history);
                self.broken.extend(old.map(|s| s.break_off(0)));
            }
            5 => {
                self.connect(w, true);
                self.connect_beside(w, true);
            }
            6 if !self.cut_off && self.slow == 0 => {
                let count = 1 + self.below(4);
                self.cluster.commit(count);
            }
            7 | 8 => {
                let leader = self.cluster.0.lock().leader;
                let node = if self.below(2) == 0 { leader } else { self.below(NODES) };
                let count = 1 + self.below(5);
                self.cluster.apply(node, count);
            }
            _ => {
                let ms = [1, 5, 20, 120][self.below(4)];
                self.advance_time(ms);
            }
        }
    }

    /// Advances time, with the workers' heartbeats.
    fn advance_time(&self, ms: u64) {
        self.cluster.advance_time(ms);
        self.workers
            .iter()
            .filter(|w| !w.hangs)
            .filter_map(|w| w.stream.as_ref())
            .for_each(Stream::send_heartbeat);
    }

    fn connect(&mut self, w: usize, anywhere: bool) {
        if self.workers[w].stream.is_some() || self.workers[w].finished {
            return;
        }
        let node = if anywhere { self.below(NODES) } else { self.cluster.0.lock().leader };
        self.conns += 1;
        let of = |n: usize| {
            let g = self.cluster.0.lock();
            (g.nodes[n].events.clone(), g.nodes[n].shard.clone())
        };
        self.workers[w].connect(node, of, self.conns);
    }

    /// As `connect`, the stream on which a worker asks about its leader.
    fn connect_beside(&mut self, w: usize, anywhere: bool) {
        if !self.workers[w].wants_beside() {
            return;
        }
        let node = if anywhere { self.below(NODES) } else { self.cluster.0.lock().leader };
        // No worker asks a leader about itself.
        if self.workers[w].stream.as_ref().is_some_and(|s| s.is_to(node)) {
            return;
        }
        self.conns += 1;
        let at = {
            let g = self.cluster.0.lock();
            (g.nodes[node].events.clone(), g.nodes[node].shard.clone())
        };
        self.workers[w].connect_beside(node, at, self.conns);
    }

    fn fails(&mut self) {
        let w = self.below(self.workers.len());
        // A quarter of the schedules is about a leader that keeps its term and loses outcomes; another is about one
        // that loses its term without its knowledge.
        let theme = if self.below(3) > 0 { self.theme } else { None };
        let which = theme.unwrap_or_else(|| self.below(17));
        match which {
            0 | 1 => {
                self.say(format!("worker {w}'s stream breaks"));
                let lost = self.below(4);
                let old = self.workers[w].disconnect(&mut self.history);
                self.broken.extend(old.map(|s| s.break_off(lost)));
            }
            2 | 3 => self.workers[w].repeats(),
            4 | 5 => {
                // Messages of a broken stream arrive late.
                if !self.broken.is_empty() {
                    let i = self.below(self.broken.len());
                    let count = 1 + self.below(4);
                    if !self.broken[i].deliver(count) {
                        self.broken.swap_remove(i);
                    }
                }
            }
            6 => {
                self.cut_off = !self.cut_off;
                self.say(format!("the leader is cut off: {}", self.cut_off));
            }
            7 | 8 => self.elect(),
            9 => {
                let node = self.below(NODES);
                self.say(format!("node {node} hears who leads"));
                self.cluster.hears(node);
            }
            10 => {
                let node = self.below(NODES);
                self.say(format!("node {node} crashes"));
                self.crash(node);
            }
            11 => {
                let node = self.below(NODES);
                self.say(format!("node {node} gets a snapshot"));
                self.cluster.snapshot(node);
            }
            13 => {
                let worker = &mut self.workers[w];
                worker.hangs = !worker.hangs;
                let what = if worker.hangs { "hangs" } else { "goes on" };
                self.say(format!("worker {w} {what}"));
            }
            FAULT_THEMES => self.depose_unnoticed(w),
            15 if self.workers[w].stream.is_some() => {
                self.say(format!("worker {w} is impatient"));
                self.workers[w].is_impatient();
                let anywhere = self.below(2) == 0;
                self.connect_beside(w, anywhere);
            }
            12 if self.below(2) == 0 && !self.workers[w].finished => {
                self.say(format!("worker {w} dies"));
                let old = self.workers[w].kill(&mut self.history);
                let lost = self.below(4);
                self.broken.extend(old.map(|s| s.break_off(lost)));
            }
            _ => {
                let leader = self.cluster.0.lock().leader;
                self.say(format!("the leader {leader} gets no answers"));
                self.doubts += 1;
                self.slow = self.below(250);
                self.cluster.lose_outcomes(leader);
            }
        }
    }

    /// Asks a node, mostly the leader, for another mode.
    fn switch(&mut self) {
        let fixed = [Mode::Bsp, Mode::Ssp(0), Mode::Ssp(2), Mode::Asp];
        let mode = fixed.get(self.below(5)).map_or(ModeChoice::Auto, |m| (*m).into());
        let leader = self.cluster.0.lock().leader;
        let node = if self.below(4) > 0 { leader } else { self.below(NODES) };
        self.say(format!("node {node} is asked for {mode}"));
        let events = self.cluster.0.lock().nodes[node].events.clone();
        let wanted = RequestedMode::Choice(mode);
        let _ = events.try_send(Event::SwitchMode { number: None, wanted, tx: None }); // its queue may be full
    }

    /// Plays the control group: takes a node's counts, if the rule is in force there, and sends it a switch. The
    /// mode is drawn among the remaining ones: a window of the rule is longer than a schedule, and several control
    /// leaders may not know of each other's switches.
    fn steer(&mut self) {
        let leader = self.cluster.0.lock().leader;
        let node = if self.below(4) > 0 { leader } else { self.below(NODES) };
        let (report, events) = {
            let g = self.cluster.0.lock();
            (g.nodes[node].counters.take_auto(&g.nodes[node].shard), g.nodes[node].events.clone())
        };
        let mode = [Mode::Ssp(0), Mode::Ssp(1), Mode::Ssp(4), Mode::Asp][self.below(4)];
        let tightens = self.below(2) == 0;
        let bound = |m: Mode| m.staleness().unwrap_or(u64::MAX);
        let left = |r: &Report| mode != r.mode && bound(mode) <= bound(r.loosest);
        let Some(report) = report.filter(left) else { return };
        let loosest = if tightens { mode } else { report.loosest };
        self.say(format!("node {node} is to switch to {mode}, at most {loosest}"));
        let (number, wanted) = (Some(report.number + 1), RequestedMode::Decided { mode, loosest });
        let _ = events.try_send(Event::SwitchMode { number, wanted, tx: None });
    }

    fn elect(&mut self) {
        let (node, kept) = (self.below(NODES), self.below(6));
        self.say(format!("node {node} is elected and has {kept} open entries"));
        self.cluster.elect(node, kept);
        // Some workers find the new leader before the old one learns of it.
        if self.below(2) == 0 {
            for w in 0..self.workers.len() {
                if self.below(2) == 0 {
                    let old = self.workers[w].disconnect(&mut self.history);
                    self.broken.extend(old.map(|s| s.break_off(0)));
                }
            }
        }
    }

    /// A worker finds a successor that trains with it at once. The old leader applies the successor's entries,
    /// learns nothing else of it, and still has its other workers.
    fn depose_unnoticed(&mut self, w: usize) {
        let old = self.cluster.0.lock().leader;
        let successor = (old + 1 + self.below(NODES - 1)) % NODES;
        let kept = self.below(3);
        self.say(format!(
            "leader {old} is deposed by {successor} unawares, with {kept} open entries; worker {w} goes"
        ));
        self.cluster.elect(successor, kept);
        // It asks, and leaves for the successor while the old leader still has its stream; or it has lost that
        // stream.
        let asks = self.below(2) == 0;
        if !asks {
            let broken = self.workers[w].disconnect(&mut self.history);
            self.broken.extend(broken.map(|s| s.break_off(0)));
            self.connect(w, false);
        }
        for _ in 0..1 + self.below(8) {
            if asks {
                self.workers[w].is_impatient();
                self.connect_beside(w, false);
            }
            self.workers[w].streams().for_each(|s| _ = s.deliver(usize::MAX));
            self.advance_time(30);
            self.leaders_work();
            self.cluster.commit(usize::MAX);
            self.cluster.apply(successor, usize::MAX);
            self.leaders_work();
            let broken = self.workers[w].hears(&mut self.history);
            self.broken.extend(broken.map(|s| s.break_off(0)));
            self.cluster.apply(old, usize::MAX);
            for other in (0..self.workers.len()).filter(|other| *other != w) {
                if let Some(s) = &mut self.workers[other].stream {
                    s.deliver(usize::MAX);
                }
                self.leaders_work();
                let broken = self.workers[other].hears(&mut self.history);
                self.broken.extend(broken.map(|s| s.break_off(0)));
            }
        }
    }

    fn crash(&mut self, node: usize) {
        let leads = self.cluster.0.lock().leader == node;
        if leads {
            let other = (node + 1 + self.below(NODES - 1)) % NODES;
            let kept = self.below(6);
            self.cluster.elect(other, kept);
        }
        self.cluster.crash(node);
    }

    fn check(&self) {
        let g = self.cluster.0.lock();
        self.history.check(&g);
    }

    fn pushes(&self) -> u64 {
        self.cluster.0.lock().truth.read(|m| m.pushes)
    }

    fn run(&mut self) {
        // If faults start at the first moment, hardly any worker trains before all is healed.
        if self.below(4) > 0 {
            self.run_until_weights();
        }
        let events = 20 + self.rng.next_u64() % EVENTS;
        // Half of the schedules leave the workers time to train between two faults.
        let trains = self.below(2) == 0;
        let trouble = match (trains, self.theme == Some(NO_ANSWERS)) {
            (true, _) => 40 + self.below(40),
            (false, true) => 15 + self.below(12),
            (false, false) => 2 + self.below(12),
        };
        let begun = self.pushes();
        for _ in 0..events {
            // Room for the pushes of the remaining steps.
            if self.history.len() + 60 > PLACES {
                break;
            }
            self.slow = self.slow.saturating_sub(1);
            if self.below(trouble) == 0 {
                self.fails()
            } else {
                for _ in 0..if trains { 3 } else { 0 } {
                    self.run_normally();
                    self.leaders_work();
                }
                self.run_normally()
            }
            self.leaders_work();
            self.check();
        }
        self.amid = self.pushes() - begun;
        invariants::replicas(&self.cluster);
        self.heal();
    }

    /// Runs without faults until every worker has weights.
    fn run_until_weights(&mut self) {
        self.say("a quiet beginning".into());
        for _ in 0..100 {
            if self.workers.iter().all(Worker::has_begun) {
                return;
            }
            self.run_without_faults();
        }
        panic!("nothing fails, and the workers do not begin: {:#?}", self.states());
    }

    /// Delivers, commits and applies everything, and advances time. Streams stay: a worker that waits for an answer
    /// keeps waiting, and asks no other node.
    fn run_without_faults(&mut self) {
        (0..NODES).for_each(|n| self.cluster.hears(n));
        for w in 0..self.workers.len() {
            self.workers[w].hangs = false;
            let old = self.workers[w].hears(&mut self.history);
            if let Some(old) = old {
                old.break_off(0).deliver(usize::MAX);
            }
            self.connect(w, false);
            if let Some(s) = &mut self.workers[w].stream {
                s.deliver(usize::MAX);
            }
        }
        self.cluster.commit(usize::MAX);
        (0..NODES).for_each(|n| self.cluster.apply(n, usize::MAX));
        self.advance_time(10);
        self.leaders_work();
        self.check();
    }

    fn states(&self) -> Vec<String> {
        self.workers.iter().map(Worker::state).collect()
    }

    /// Ends all faults: every worker must finish.
    fn heal(&mut self) {
        self.say("everything heals".into());
        for mut old in std::mem::take(&mut self.broken) {
            while old.deliver(1) {
                self.leaders_work();
            }
        }
        for _ in 0..4000 {
            if self.workers.iter().all(|w| w.finished) {
                invariants::replicas(&self.cluster);
                self.history.ends(&self.cluster.0.lock().truth);
                return;
            }
            self.run_without_faults();
        }
        let members = self.cluster.0.lock().truth.read(|m| m.members.clone());
        panic!("nothing fails, and the workers do not come to the end: {:#?} {members:?}", self.states());
    }
}

/// Plays one schedule.
fn play(seed: u64) {
    let trace = Rc::new(RefCell::new(Vec::new()));
    let seen = trace.clone();
    let played = std::panic::catch_unwind(AssertUnwindSafe(|| {
        Schedule::new(seed, seen).run();
    }));
    if let Err(failed) = played {
        eprintln!("schedule {seed}: {}", trace.borrow().join("; "));
        eprintln!("again: PARAFT_SEED={seed} cargo test -p paraft-server --lib simulation");
        std::panic::resume_unwind(failed);
    }
}

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

#[test]
fn every_schedule_keeps_every_promise() {
    match number("PARAFT_SEED") {
        Some(seed) => play(seed),
        None => (0..number("PARAFT_SCHEDULES").unwrap_or(SCHEDULES)).for_each(play),
    }
}

#[test]
fn a_seed_is_a_schedule() {
    let digest = |seed| {
        let mut s = Schedule::new(seed, Rc::default());
        s.run();
        let g = s.cluster.0.lock();
        (g.committed.len(), g.digests.clone())
    };
    for seed in 0..10 {
        assert_eq!(digest(seed), digest(seed), "seed {seed}");
    }
}

/// The schedules must reach the events that they are meant for.
#[test]
fn the_schedules_have_what_they_are_for() {
    let mut seen = [0u64; 10];
    for seed in 0..400 {
        let mut s = Schedule::new(seed, Rc::default());
        s.run();
        let g = s.cluster.0.lock();
        let (pushes, lost, switches, passed) =
            g.truth.read(|m| (m.pushes, m.workers_lost, m.in_force.number, m.dropped));
        let conf = g.truth.configured();
        let data = conf.iter().flat_map(|c| c.buckets.iter().map(|b| b.image()));
        let records = data.map(|d| d.kept.len() as u64).sum();
        let skipped = g.skipped.1.len() as u64;
        let turns = s.workers.iter().map(|w| w.turns).sum();
        let seen_now =
            [pushes, s.amid, s.doubts, lost, g.term - 1, switches, records, passed, skipped, turns];
        for (seen, n) in seen.iter_mut().zip(seen_now) {
            *seen += n;
        }
    }
    let [pushes, amid, doubts, lost, elections, switches, records, passed, skipped, turns] = seen;
    assert!(pushes > 10_000 && doubts > 500 && lost > 10 && elections > 900, "{seen:?}");
    assert!(switches > 100 && records > 100 && passed > 100, "{seen:?}");
    assert!(skipped > 1_000 && turns > 50, "{seen:?}");
    assert!(amid > pushes / 4, "only {amid} of {pushes} pushes were applied before everything was healed");
}
