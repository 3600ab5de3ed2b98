//! The live switch of the mode: under load, with a leader that dies, each acknowledged push is applied
//! exactly once.

use anyhow::{Context, Result, anyhow, ensure};
use paraft_common::{Mode, ModeChoice, ShardId};
use paraft_proto::{PROTOCOL, SwitchModeRequest};
use paraft_tests::{
    fleet::{Fleet, FleetOptions},
    ledger::Ledger,
    wait,
};
use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::SeqCst},
    },
    thread,
    time::Duration,
};

/// Asks the shard's current leader; returns the switch's number.
fn switch(fleet: &Fleet, shard: u32, mode: ModeChoice, number: u64) -> Result<u64> {
    switch_job(fleet, ("ledger", shard), mode, number)
}

/// As [`switch`], for another job.
pub(super) fn switch_job(
    fleet: &Fleet,
    (job, shard): (&str, u32),
    mode: ModeChoice,
    number: u64,
) -> Result<u64> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let mut why = String::new();
    for _ in 0..100 {
        let (leader, _) = fleet.leader(ShardId(shard));
        let address = fleet.status(leader, false)?.address;
        let (job, mode) = (job.into(), mode.to_string());
        let request = SwitchModeRequest { protocol: PROTOCOL, shard, job, mode, number };
        match runtime.block_on(paraft_client::switch_mode(&address, request, Duration::from_secs(5))) {
            Ok((number, _)) => return Ok(number),
            Err(refused) => why = refused.message,
        }
        thread::sleep(Duration::from_millis(50));
    }
    Err(anyhow!("shard {shard} does not switch to {mode}: {why}"))
}

/// Three workers on three shards; the job is switched to each of `modes` in turn while it trains. `only`:
/// asks one shard, and leaves the others to the workers.
fn play(first: Mode, modes: &[Mode], only: Option<u32>, kill: bool) -> Result<()> {
    const STEPS: u64 = 90;
    let mut fleet = Fleet::start(FleetOptions::replicated(3))?;
    let ledger = Ledger { whole: true, ..Ledger::new(first, 3, STEPS) };
    let furthest = Arc::new(AtomicU64::new(0));
    let worker = |w| {
        let (place, furthest) = (fleet.at.clone(), furthest.clone());
        thread::spawn(move || -> Result<Vec<f32>> {
            let mut page = ledger.join(&place, w)?;
            page.begin()?;
            while page.done.0 < STEPS {
                page.step()?;
                furthest.fetch_max(page.done.0, SeqCst);
            }
            Ok(page.finish()?)
        })
    };
    let workers: Vec<_> = (0..3).map(worker).collect();
    let every = STEPS / (modes.len() as u64 + 2);
    for (i, mode) in (1..).zip(modes) {
        wait::until("the job to come further", || furthest.load(SeqCst), |f| *f >= i * every);
        if kill && i == 2 {
            let (leader, _) = fleet.leader(ShardId(1));
            fleet.kill(leader);
        }
        match only {
            Some(shard) => _ = switch(&fleet, shard, (*mode).into(), 0)?,
            None => {
                let number = switch(&fleet, 0, (*mode).into(), 0)?;
                ensure!(number >= i, "{mode} is switch {number}, after {i} of them");
                (1..3).try_for_each(|shard| switch(&fleet, shard, (*mode).into(), number).map(drop))?;
            }
        }
        // The other shards learn of it from the workers.
        for shard in 0..3 {
            let now = || fleet.leader(ShardId(shard)).1.mode;
            wait::until("the shard to switch", now, |m| *m == mode.to_string());
        }
    }
    for w in workers {
        let weights = w.join().map_err(|_| anyhow!("a worker panicked"))?.context("a worker")?;
        let wrong: Vec<_> = weights.iter().enumerate().filter(|(_, w)| **w != -1.0).collect();
        ensure!(wrong.is_empty(), "{first} to {modes:?}: {wrong:?} are not -1");
    }
    fleet.replicas_agree()?;
    let pushes: u64 = (0..3).map(|s| fleet.leader(ShardId(s)).1.pushes).sum();
    let places: u64 = (0..3).map(|s| u64::from(fleet.leader(ShardId(s)).1.buckets)).sum();
    ensure!(pushes == 3 * STEPS * places, "{pushes} pushes are in, of {}", 3 * STEPS * places);
    Ok(())
}

#[test]
fn job_switched_through_all_modes_loses_and_doubles_no_push() -> Result<()> {
    play(Mode::Bsp, &[Mode::Asp, Mode::Ssp(2), Mode::Bsp, Mode::Ssp(0), Mode::Asp], None, false)
}

#[test]
fn a_leader_that_dies_beside_a_switch_loses_and_doubles_no_push() -> Result<()> {
    play(Mode::Asp, &[Mode::Bsp, Mode::Asp, Mode::Bsp], None, true)
}

#[test]
fn workers_tell_the_shards_that_nobody_asked() -> Result<()> {
    play(Mode::Asp, &[Mode::Bsp, Mode::Ssp(1)], Some(2), false)
}

/// One worker is slower than the others, and the loss stops decreasing: the rule loosens for the first and
/// tightens for the second. Its state dies with the leader of the control group; the next one continues.
#[test]
fn dying_control_leader_does_not_end_the_rule() -> Result<()> {
    const STEPS: u64 = 1200;
    let mut fleet = Fleet::start(FleetOptions::replicated(1))?;
    let ledger = Ledger { bucket_len: 4096, ..Ledger::new(Mode::Ssp(1), 3, STEPS) };
    let hurry = Arc::new(AtomicBool::new(false));
    let worker = |w: u32| {
        let (place, hurry) = (fleet.at.clone(), hurry.clone());
        thread::spawn(move || -> Result<Vec<f32>> {
            let mut page = ledger.join(&place, w)?;
            page.begin()?;
            while page.done.0 < STEPS {
                if !hurry.load(SeqCst) {
                    thread::sleep(Duration::from_millis(if w == 0 { 16 } else { 4 }));
                }
                page.client.note_loss(1.0);
                page.step()?;
            }
            Ok(page.finish()?)
        })
    };
    let workers: Vec<_> = (0..3).map(worker).collect();
    let asked = switch(&fleet, 0, ModeChoice::Auto, 0)?;
    let shard = |fleet: &Fleet| fleet.leader(ShardId(0)).1;
    let first = wait::until("a switch by the rule", || shard(&fleet), |s| s.mode_number > asked);
    let leader = fleet.hello(0)?.leader;
    let leader =
        fleet.at.addresses.iter().position(|a| *a == leader).context("who leads the control group")?;
    fleet.kill(leader as u32);
    // One may have been in flight; the next one comes from a leader that has seen all of its windows itself.
    let next = wait::until("two more", || shard(&fleet), |s| s.mode_number >= first.mode_number + 2);
    hurry.store(true, SeqCst);
    ensure!(!next.mode_auto.is_empty(), "the rule goes on, whatever it chooses: {next:?}");
    for w in workers {
        let weights = w.join().map_err(|_| anyhow!("a worker panicked"))?.context("a worker")?;
        ensure!(weights.iter().all(|w| *w == -1.0), "a push is lost, or in twice");
    }
    fleet.replicas_agree()?;
    Ok(())
}
