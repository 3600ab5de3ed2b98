//! The live switch of the mode: under load, with a leader that dies, each acknowledged push is applied exactly once.

use anyhow::{Context, Result, anyhow, ensure};
use paraft_common::{Mode, ShardId};
use paraft_proto::{PROTOCOL, SwitchModeRequest};
use paraft_tests::{
    fleet::{Fleet, FleetOptions},
    ledger::Ledger,
    wait,
};
use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::SeqCst},
    },
    thread,
    time::Duration,
};

/// Asks the shard's leader, whoever that is by then; gives the switch's number.
fn switch(fleet: &Fleet, shard: u32, mode: Mode, number: u64) -> Result<u64> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let mut why = String::new();
    for _ in 0..100 {
        let (leader, _) = fleet.leader(ShardId(shard));
        let address = fleet.status(leader, false)?.address;
        let (job, mode) = ("ledger".into(), mode.to_string());
        let request = SwitchModeRequest { protocol: PROTOCOL, shard, job, mode, number };
        match runtime.block_on(paraft_client::switch_mode(&address, request, Duration::from_secs(5))) {
            Ok((number, _)) => return Ok(number),
            Err(refused) => why = refused.message,
        }
        thread::sleep(Duration::from_millis(50));
    }
    Err(anyhow!("shard {shard} does not switch to {mode}: {why}"))
}

/// Three workers on three shards; with each of `modes` the fleet is switched once it has come further. `only`: asks one
/// shard, and leaves the others to the workers.
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
            Some(shard) => _ = switch(&fleet, shard, *mode, 0)?,
            None => {
                let number = switch(&fleet, 0, *mode, 0)?;
                ensure!(number >= i, "{mode} is switch {number}, after {i} of them");
                (1..3).try_for_each(|shard| switch(&fleet, shard, *mode, number).map(drop))?;
            }
        }
        // Those that were not asked hear of it from the workers.
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
fn a_job_that_is_switched_through_all_modes_loses_and_doubles_no_push() -> Result<()> {
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
