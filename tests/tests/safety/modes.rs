//! Which workers wait for which, in each mode.

use anyhow::{Context, Result, ensure};
use paraft_common::{Mode, Step};
use paraft_tests::{
    fleet::{Fleet, FleetOptions},
    ledger::Ledger,
    wait::{self, DEADLINE},
};
use std::{
    collections::BTreeSet,
    sync::mpsc::{Receiver, Sender, channel},
    thread,
};

const WORKERS: u32 = 3;

/// A worker that may continue, and its finished steps.
type ReleasedWorker = (u32, Step);

/// The consistency rule alone: which workers each line of a script must release.
struct Model {
    mode: Mode,
    done: Vec<Step>,
    held: BTreeSet<u32>,
}

impl Model {
    fn step(&mut self, w: u32) -> BTreeSet<ReleasedWorker> {
        self.done[w as usize] = self.done[w as usize].next();
        self.held.insert(w);
        let slowest = self.done.iter().copied().min().unwrap_or_default();
        let freed = self.held.iter().map(|w| (*w, self.done[*w as usize]));
        let freed: BTreeSet<_> = freed.filter(|(_, done)| self.mode.may_proceed(slowest, *done)).collect();
        self.held.retain(|w| !freed.iter().any(|(f, _)| f == w));
        freed
    }
}

/// Plays a script over real clients (each line: this worker does its next step, unless it is blocked), and
/// checks every line against the rule. Returns the workers that each line released.
fn play(mode: Mode, script: &[u32]) -> Result<Vec<BTreeSet<ReleasedWorker>>> {
    let fleet = Fleet::start(FleetOptions::default())?;
    let ledger = Ledger::new(mode, WORKERS, 64);
    let (tell, freed): (Sender<ReleasedWorker>, Receiver<ReleasedWorker>) = channel();
    let mut orders = Vec::new();
    let mut actors = Vec::new();
    for w in 0..WORKERS {
        let (order, lines) = channel::<()>();
        let (tell, at) = (tell.clone(), fleet.at.clone());
        orders.push(order);
        // Not scoped: if a line fails, a worker that is blocked for ever must not block the test, too.
        actors.push(thread::spawn(move || -> Result<()> {
            let mut page = ledger.join(&at, w)?;
            tell.send((w, page.begin()?.done))?;
            for () in lines {
                tell.send((w, page.step()?.done))?;
            }
            Ok(())
        }));
    }
    for _ in 0..WORKERS {
        ensure!(freed.recv_timeout(DEADLINE).context("all workers to begin")?.1 == Step(0));
    }
    let mut model = Model { mode, done: vec![Step(0); WORKERS as usize], held: BTreeSet::new() };
    let line = |model: &mut Model, w: u32| -> Result<BTreeSet<ReleasedWorker>> {
        let waited = fleet.shard().pulls_waited;
        let expected = model.step(w);
        let held = u64::from(model.held.contains(&w));
        orders[w as usize].send(())?;
        let mut seen = BTreeSet::new();
        let look = || {
            seen.extend(freed.try_iter());
            (seen.clone(), fleet.shard().pulls_waited - waited)
        };
        // Done when all workers that must continue have, and the server blocks this worker if it must.
        wait::until(
            &format!("{mode}: worker {w} steps; {expected:?} go, {held} is held"),
            look,
            |(seen, waited)| !seen.is_subset(&expected) || (*seen == expected && *waited >= held),
        );
        ensure!(seen == expected, "{mode}: after worker {w}'s step {seen:?} went on, not {expected:?}");
        Ok(seen)
    };
    let mut lines = Vec::new();
    for &w in script {
        // A blocked worker does nothing, in every mode.
        lines.push(if model.held.contains(&w) { BTreeSet::new() } else { line(&mut model, w)? });
    }
    // The slowest worker catches up until none is blocked.
    while !model.held.is_empty() {
        let slowest = (0..WORKERS).min_by_key(|w| model.done[*w as usize]).unwrap_or(0);
        line(&mut model, slowest)?;
    }
    drop(orders);
    for a in actors {
        a.join().map_err(|_| anyhow::anyhow!("a worker panicked"))??;
    }
    Ok(lines)
}

#[test]
fn ssp_with_staleness_0_lets_workers_go_exactly_when_bsp_does() -> Result<()> {
    let script = [0, 1, 2, 2, 1, 0, 1, 1, 0, 0, 2, 0, 2, 1, 2, 1, 1, 0, 2, 2, 0, 1];
    assert_eq!(play(Mode::Bsp, &script)?, play(Mode::Ssp(0), &script)?);
    Ok(())
}

#[test]
fn ssp_lets_a_worker_go_exactly_as_far_ahead_as_the_rule_says() -> Result<()> {
    let script = [0, 0, 0, 1, 0, 2, 0, 1, 2, 2, 2, 2, 2, 1, 0, 0, 1, 1, 1, 1, 1, 1, 1, 0, 0, 2];
    play(Mode::Ssp(2), &script)?;
    play(Mode::Asp, &script)?;
    Ok(())
}

#[test]
fn the_step_lead_in_ssp_reaches_the_bound_and_never_exceeds_it() -> Result<()> {
    const BOUND: u32 = 3;
    const STEPS: u64 = 40;
    let fleet = Fleet::start(FleetOptions { servers: 1, shards: 2, replicas: 1, ..Default::default() })?;
    let ledger = Ledger::new(Mode::Ssp(BOUND), 2, STEPS);
    let (tell, fast_is_at) = channel::<Step>();
    let at = fleet.at.clone();
    let fast = thread::spawn(move || -> Result<()> {
        let mut page = ledger.join(&at, 0)?;
        page.begin()?;
        while page.done.0 < STEPS {
            let pulled = page.step()?;
            ensure!(pulled.slowest.0 + u64::from(BOUND) >= pulled.done.0, "{pulled:?}");
            let _ = tell.send(pulled.done); // no receiver is left after the slow one's last step
        }
        page.finish()?;
        Ok(())
    });
    let mut slow = ledger.join(&fleet.at, 1)?;
    slow.begin()?;
    let mut other = Step(0);
    while slow.done.0 < STEPS {
        // As slow as possible: a step only once the other is as far ahead as it may get.
        let furthest = (slow.done.0 + u64::from(BOUND)).min(STEPS);
        while other.0 < furthest {
            other = fast_is_at.recv_timeout(DEADLINE).context("the fast worker was held too early")?;
        }
        slow.step()?;
    }
    slow.finish()?;
    fast.join().map_err(|_| anyhow::anyhow!("the fast worker panicked"))??;
    let status = fleet.status(0, false)?;
    for s in status.shards {
        assert_eq!(s.max_step_lead, u64::from(BOUND), "shard {}", s.shard);
    }
    Ok(())
}

/// Two workers; the second starts a step only when the first is blocked or has finished.
fn waits(mode: Mode) -> Result<u64> {
    const STEPS: u64 = 20;
    let fleet = Fleet::start(FleetOptions::default())?;
    let ledger = Ledger::new(mode, 2, STEPS);
    let at = fleet.at.clone();
    let first = thread::spawn(move || -> Result<()> {
        let mut page = ledger.join(&at, 0)?;
        page.begin()?;
        page.run()?;
        Ok(())
    });
    let mut second = ledger.join(&fleet.at, 1)?;
    second.begin()?;
    let ahead = || {
        let s = fleet.shard();
        let first = s.members.iter().find(|m| m.worker == 0).map(|m| (m.clock, m.finished));
        (first, s.pulls_waited)
    };
    wait::until("the first to be held or to finish", ahead, |(first, waited)| {
        *waited > 0 || first.is_some_and(|(_, finished)| finished)
    });
    second.run()?;
    first.join().map_err(|_| anyhow::anyhow!("a worker panicked"))??;
    Ok(fleet.shard().pulls_waited)
}

#[test]
fn nobody_waits_in_asp_and_somebody_does_in_bsp() -> Result<()> {
    assert_eq!(waits(Mode::Asp)?, 0);
    assert!(waits(Mode::Bsp)? > 0);
    assert!(waits(Mode::Ssp(1))? > 0);
    Ok(())
}
