//! Failover on evidence: a leader whose process has ended is replaced at once, and false evidence loses
//! nothing.

use anyhow::{Context, Result, anyhow, ensure};
use paraft_common::{Durability, Mode, ShardId, Step};
use paraft_fleet::faults::Faults;
use paraft_tests::{
    fleet::{Fleet, FleetOptions},
    ledger::{Fate, Ledger},
    wait,
};
use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::SeqCst},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

/// A follower that waits for silence starts an election after three to four times this long: longer than any
/// test waits.
const LONG_ELECTION: Duration = Duration::from_secs(25);

/// A worker that trains: what it did, and its last weights.
type Training = JoinHandle<Result<(u64, Vec<f32>, u64)>>;

/// Two workers with more steps than they will make, until the test stops them.
struct Work {
    ledger: Ledger,
    furthest: Arc<AtomicU64>,
    stop: Arc<AtomicBool>,
    workers: Vec<Training>,
}

impl Work {
    fn begin(fleet: &Fleet, durability: Durability) -> Self {
        const STEPS: u64 = 4_000;
        // No worker may lose its session: it would continue at the other's step. After a repeated or skipped
        // step the weights cannot show whose fault it was.
        let ledger = Ledger { durability, grace_ms: 60_000, ..Ledger::new(Mode::Asp, 2, STEPS) };
        let (furthest, stop) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
        let workers = (0..2)
            .map(|w| {
                let (place, furthest, stop) = (fleet.at.clone(), furthest.clone(), stop.clone());
                thread::spawn(move || -> Result<(u64, Vec<f32>, u64)> {
                    let mut page = ledger.join(&place, w)?;
                    page.begin()?;
                    while page.done.0 < STEPS && !stop.load(SeqCst) {
                        page.step()?;
                        furthest.fetch_max(page.done.0, SeqCst);
                        thread::sleep(Duration::from_millis(10));
                    }
                    let rejoins = page.client.counters().rejoins;
                    Ok((page.done.0, page.finish()?, rejoins))
                })
            })
            .collect();
        Self { ledger, furthest, stop, workers }
    }

    /// Returns when a worker has made this many more steps.
    fn goes_on(&self, steps: u64) {
        let from = self.furthest.load(SeqCst);
        wait::until("the workers to go on", || self.furthest.load(SeqCst), |f| *f >= from + steps);
    }

    /// Ends the workers; every push must have been applied exactly once.
    fn ends(self) -> Result<()> {
        self.stop.store(true, SeqCst);
        let ends = self.workers.into_iter().map(|w| w.join().map_err(|_| anyhow!("a worker panicked"))?);
        let ends: Vec<(u64, Vec<f32>, u64)> = ends.collect::<Result<_>>()?;
        let rejoins: Vec<u64> = ends.iter().map(|e| e.2).collect();
        ensure!(rejoins == [0, 0], "sessions lost by each: {rejoins:?}");
        let (_, weights, _) = ends.first().context("no worker")?;
        let made =
            |worker: u32, step: Step| ends.get(worker as usize).is_some_and(|(made, ..)| step.0 <= *made);
        let tally = self.ledger.read(weights, |worker, step, _| match made(worker, step) {
            true => Fate::Acknowledged,
            false => Fate::Unmade,
        });
        ensure!(tally.lost + tally.doubled + tally.damaged == 0, "{tally:?}");
        Ok(())
    }
}

fn fleet(options: FleetOptions) -> Result<Fleet> {
    Fleet::start(FleetOptions { servers: 3, replicas: 3, ..options })
}

#[test]
fn leader_with_ended_process_is_replaced_without_timer() -> Result<()> {
    for durability in [Durability::QuorumMemory, Durability::QuorumDisk] {
        let mut fleet =
            fleet(FleetOptions { shards: 3, durability, election: LONG_ELECTION, ..Default::default() })?;
        let work = Work::begin(&fleet, durability);
        work.goes_on(5);
        let (leader, before) = fleet.leader(ShardId(0));
        fleet.kill(leader);
        work.goes_on(20);
        let (next, after) = fleet.leader(ShardId(0));
        assert_ne!(next, leader);
        assert!(after.term > before.term);
        // All its groups had to find another leader, and each found one.
        for shard in 1..3 {
            assert_ne!(fleet.leader(ShardId(shard)).0, leader);
        }
        fleet.describe().context("the control group")?;
        work.ends()?;
        fleet.replicas_agree()?;
    }
    Ok(())
}

#[test]
fn control_and_sleeping_groups_find_leader_without_timer() -> Result<()> {
    let mut fleet = fleet(FleetOptions { shards: 2, election: LONG_ELECTION, ..Default::default() })?;
    let asleep = |fleet: &Fleet| {
        let all = fleet.alive().into_iter().flat_map(|id| [(id, ShardId(0)), (id, ShardId(1))]);
        all.into_iter().all(|(id, s)| fleet.replica(id, s).is_ok_and(|r| r.group.is_asleep()))
    };
    wait::until("every shard to sleep", || asleep(&fleet), |a| *a);
    let leads = fleet.describe()?.leader;
    let leads = fleet.at.addresses.iter().position(|a| *a == leads).context("its address is of the list")?;
    fleet.kill(leads as u32);
    fleet.describe().context("the control group")?;
    // A worker wakes the shards, and they notice it then.
    let work = Work::begin(&fleet, Durability::default());
    work.goes_on(5);
    work.ends()
}

/// The leaders seen in each term; fails if a term has two.
#[derive(Default)]
struct Leaders(BTreeMap<u64, BTreeSet<u64>>);

impl Leaders {
    fn look(&mut self, fleet: &Fleet) -> Result<()> {
        for id in fleet.alive() {
            let group = fleet.replica(id, ShardId(0))?.group;
            let seen = *group.leadership().borrow();
            if let Some(leader) = seen.leader {
                self.0.entry(seen.term).or_default().insert(leader.0);
            }
        }
        let two = self.0.iter().find(|(_, leaders)| leaders.len() > 1);
        ensure!(two.is_none(), "a term with two leaders: {two:?}");
        Ok(())
    }

    fn terms(&self) -> u64 {
        let of = |term: Option<(&u64, _)>| term.map_or(0, |(term, _)| *term);
        of(self.0.last_key_value()) - of(self.0.first_key_value())
    }
}

/// Pushes continue while all connections are reset again and again and, with `refuse`, the leader's address
/// refuses others for a while: the leader lives, and all evidence is against it. Returns the number of new
/// terms, and the seconds that it took.
fn under_false_evidence(refuse: bool) -> Result<(u64, f64)> {
    let mut fleet = fleet(FleetOptions { shards: 1, proxies: true, ..Default::default() })?;
    let work = Work::begin(&fleet, Durability::default());
    work.goes_on(5);
    let mut leaders = Leaders::default();
    leaders.look(&fleet)?;
    let (mut faults, began) = (Faults::default(), Instant::now());
    while began.elapsed() < Duration::from_secs(8) {
        let leader = fleet.leader(ShardId(0)).0;
        if refuse {
            faults.refused.insert(leader);
            fleet.put(&faults);
            thread::sleep(Duration::from_millis(20)); // until no process listens
        }
        (0..3).for_each(|server| *faults.resets.entry(server).or_default() += 1);
        fleet.put(&faults);
        thread::sleep(Duration::from_millis(60));
        leaders.look(&fleet)?;
        faults.refused.clear();
        fleet.put(&faults);
        thread::sleep(Duration::from_millis(120));
        leaders.look(&fleet)?;
    }
    let took = began.elapsed().as_secs_f64();
    work.goes_on(20);
    leaders.look(&fleet)?;
    work.ends()?;
    fleet.replicas_agree()?;
    // A leader that has ended is still noticed.
    let (leader, _) = fleet.leader(ShardId(0));
    fleet.kill(leader);
    assert_ne!(fleet.leader(ShardId(0)).0, leader);
    Ok((leaders.terms(), took))
}

/// Its streams work, but no push on them can be committed.
#[test]
fn worker_of_leader_without_majority_gives_up() -> Result<()> {
    let durability = Durability::QuorumDisk;
    let mut fleet = fleet(FleetOptions { shards: 1, durability, ..Default::default() })?;
    let ledger = Ledger { durability, ..Ledger::new(Mode::Asp, 1, 4) };
    let mut page = ledger.join(&fleet.at, 0)?;
    page.begin()?;
    page.step()?;
    let (leads, status) = fleet.leader(ShardId(0));
    assert!(status.leads, "{status:?}");
    let others: Vec<u32> = fleet.alive().into_iter().filter(|id| *id != leads).collect();
    others.iter().for_each(|id| fleet.kill(*id));
    let gives_up = page.step().err().map(|e| e.to_string());
    assert!(gives_up.as_ref().is_some_and(|e| e.contains("no leader was reached")), "{gives_up:?}");
    let shard = || fleet.status(leads, false).ok().and_then(|s| s.shards.into_iter().next());
    let says = shard().context("its status")?;
    assert!(!says.leads, "{says:?}");
    // With a majority it serves again, and pushes of unknown outcome are applied once.
    others.iter().try_for_each(|id| fleet.restart_server(*id))?;
    fleet.whole()?;
    let mut page = ledger.join(&fleet.at, 0)?;
    page.begin()?;
    while page.done.0 < 4 {
        page.step()?;
    }
    let tally = ledger.read(&page.finish()?, |_, _, _| Fate::Acknowledged);
    ensure!(tally.lost + tally.doubled + tally.damaged == 0, "{tally:?}");
    Ok(())
}

#[test]
fn connections_that_are_reset_are_no_evidence() -> Result<()> {
    let (terms, took) = under_false_evidence(false)?;
    assert!((terms as f64) < took, "{terms} elections in {took:.1} s");
    Ok(())
}

#[test]
fn false_evidence_causes_few_elections_and_loses_nothing() -> Result<()> {
    let (terms, took) = under_false_evidence(true)?;
    assert!(terms > 0, "it looked like the leader's end, and nobody stood");
    assert!((terms as f64) < took, "{terms} elections in {took:.1} s");
    Ok(())
}
