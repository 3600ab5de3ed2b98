//! Pulls that any replica answers: what a worker reads there keeps the job's consistency rule, shows its own pushes, and
//! never goes back.

use anyhow::{Result, ensure};
use paraft_common::{LogForm, Mode, PullFrom, ShardId, Step};
use paraft_proto::to_shard;
use paraft_tests::{
    fleet::{At, Fleet, FleetOptions},
    ledger::Ledger,
    stream::{Stream, push},
    wait,
};
use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::SeqCst},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

const WORKERS: u32 = 3;

fn ledger(mode: Mode, steps: u64) -> Ledger {
    let log = LogForm::Updates;
    Ledger {
        pull_from: PullFrom::Any,
        log,
        grace_ms: 60_000,
        whole: true,
        ..Ledger::new(mode, WORKERS, steps)
    }
}

/// Steps of `worker` that `weights` show: they must be the first ones, each once.
fn shown(ledger: &Ledger, weights: &[f32], worker: u32) -> Result<u64> {
    let at = |step| weights[ledger.place(worker, Step(step))];
    let steps = (1..=ledger.steps).take_while(|s| at(*s) == -1.0).count() as u64;
    for step in 1..=ledger.steps {
        let expected = if step <= steps { -1.0 } else { 0.0 };
        ensure!(at(step) == expected, "worker {worker}: {} at step {step} behind {steps}", at(step));
    }
    Ok(steps)
}

/// Runs all steps, and holds every pull against the rule.
fn work(at: &At, ledger: Ledger, worker: u32, pushed: &AtomicU64) -> Result<Vec<f32>> {
    let mut page = ledger.join(at, worker)?;
    page.begin()?;
    let mut before = vec![0; WORKERS as usize];
    while page.done.0 < ledger.steps {
        page.push();
        pushed.fetch_add(1, SeqCst);
        let pulled = page.pull()?;
        ensure!(!pulled.rejoined, "worker {worker} lost its session");
        let done = page.done.0;
        for other in 0..WORKERS {
            let steps = shown(&ledger, &page.weights, other)?;
            let least = match ledger.mode {
                _ if other == worker => done,
                Mode::Bsp => done,
                Mode::Ssp(s) => done.saturating_sub(s.into()),
                Mode::Asp => 0,
            };
            ensure!(
                steps >= least,
                "{}: after {done} steps worker {worker} saw {steps} of {other}",
                ledger.mode
            );
            ensure!(
                steps >= before[other as usize],
                "worker {worker} saw fewer steps of {other} than before"
            );
            ensure!(ledger.mode != Mode::Bsp || steps == done, "BSP: a step that nobody may have done");
            before[other as usize] = steps;
        }
        // Workers of different speeds.
        thread::sleep(Duration::from_millis(u64::from(worker)));
    }
    Ok(page.finish()?)
}

type Workers = (Arc<AtomicU64>, Vec<JoinHandle<Result<Vec<f32>>>>);

fn start(fleet: &Fleet, ledger: Ledger) -> Workers {
    let pushed = Arc::new(AtomicU64::new(0));
    let workers = (0..WORKERS)
        .map(|w| {
            let (at, pushed) = (fleet.at.clone(), pushed.clone());
            thread::spawn(move || work(&at, ledger, w, &pushed))
        })
        .collect();
    (pushed, workers)
}

/// Every push is in once, for everyone.
fn end(fleet: &Fleet, ledger: &Ledger, (_, workers): Workers) -> Result<()> {
    for w in workers {
        let weights = w.join().map_err(|_| anyhow::anyhow!("a worker panicked"))??;
        for worker in 0..WORKERS {
            ensure!(
                shown(ledger, &weights, worker)? == ledger.steps,
                "worker {worker}'s pushes are not all in"
            );
        }
    }
    fleet.replicas_agree()?;
    Ok(())
}

/// Pulled from the followers of shard 0, in bytes.
fn pulled_from_followers(fleet: &Fleet) -> Result<u64> {
    let mut bytes = 0;
    for id in fleet.alive() {
        let status = fleet.status(id, false)?;
        bytes += status.shards.iter().filter(|s| s.role == "follower").map(|s| s.bytes_pulled).sum::<u64>();
    }
    Ok(bytes)
}

#[test]
fn followers_answer_pulls_by_the_rule_of_each_mode() -> Result<()> {
    for mode in [Mode::Bsp, Mode::Ssp(0), Mode::Ssp(2), Mode::Asp] {
        let fleet = Fleet::start(FleetOptions::replicated(1))?;
        fleet.whole()?;
        let ledger = ledger(mode, 60);
        let workers = start(&fleet, ledger);
        end(&fleet, &ledger, workers)?;
        // Of three workers two have a follower for their turn.
        let bytes = pulled_from_followers(&fleet)?;
        let least = ledger.steps * 4 * ledger.len() as u64 / 2;
        ensure!(bytes >= least, "{mode}: only {bytes} bytes were pulled from followers");
    }
    Ok(())
}

#[test]
fn workers_read_on_while_the_replicas_that_they_read_from_die() -> Result<()> {
    let mut fleet = Fleet::start(FleetOptions::replicated(1))?;
    fleet.whole()?;
    let ledger = ledger(Mode::Ssp(3), 150);
    let workers = start(&fleet, ledger);
    for round in 0..3 {
        let at = (round + 1) * 100;
        wait::until("the job to get going", || workers.0.load(SeqCst), |p| *p >= at);
        // A follower, a follower, the leader.
        let (leader, _) = fleet.leader(ShardId(0));
        let others = (0..3).filter(|s| *s != leader).collect::<Vec<_>>();
        let victim = others.get(round as usize).copied().unwrap_or(leader);
        fleet.kill(victim);
        fleet.restart_server(victim)?;
        // Not earlier: its log is gone, and the next death would be that of a majority.
        wait::until("its new replica", || fleet.replica(victim, ShardId(0)).is_ok(), |there| *there);
        fleet.whole()?;
    }
    end(&fleet, &ledger, workers)
}

/// Between two cuts a follower has old weights only: it says so, and the leader answers.
#[test]
fn where_the_log_has_cuts_the_leader_answers() -> Result<()> {
    let fleet = Fleet::start(FleetOptions::replicated(1))?;
    fleet.whole()?;
    let ledger = Ledger { log: LogForm::Images, ..ledger(Mode::Asp, 30) };
    let workers = start(&fleet, ledger);
    end(&fleet, &ledger, workers)?;
    ensure!(pulled_from_followers(&fleet)? == 0, "a follower has answered");
    Ok(())
}

/// What a follower shows is committed, and may still wait to be applied by the leader when the worker's next push comes:
/// the leader takes it then, and does not take the worker for one that has lost count.
#[test]
fn a_push_that_comes_before_the_leader_has_applied_the_one_before_waits_for_it() -> Result<()> {
    const STEPS: u64 = 50;
    let fleet = Fleet::start(FleetOptions::replicated(1))?;
    fleet.whole()?;
    let ledger = Ledger { workers: 1, pages: 1, ..ledger(Mode::Asp, STEPS) };
    let (leader, _) = fleet.leader(ShardId(0));
    let buckets: Vec<_> = ledger.job().layout().buckets().iter().map(|b| b.len).enumerate().collect();
    let buckets: Vec<(u32, usize)> = buckets.into_iter().map(|(i, len)| (i as u32, len)).collect();
    let (mut stream, _) = Stream::open(&fleet.at.addresses[leader as usize], &ledger.job(), 0, &buckets)?;
    stream.pull(0)?;
    let seq = |step: u64, bucket: u32| (step - 1) * buckets.len() as u64 + u64::from(bucket) + 1;
    for step in (1..=STEPS).step_by(2) {
        // Both before the first is applied; one push of each of two steps may be under way.
        for step in [step, step + 1] {
            for (bucket, len) in &buckets {
                stream.send(to_shard::Kind::Push(push(seq(step, *bucket), step, *bucket, 1.0, *len)));
            }
        }
        for _ in 0..2 * buckets.len() {
            stream.ack()?;
        }
    }
    let version = stream.pull(STEPS)?.iter().map(|w| w.version).sum::<u64>();
    ensure!(version == STEPS * buckets.len() as u64, "{version} updates");
    // Two steps ahead is still wrong.
    stream.send(to_shard::Kind::Push(push(seq(STEPS + 2, 0), STEPS + 2, 0, 1.0, buckets[0].1)));
    let refused = stream.refused()?;
    ensure!(refused.message.contains("next is step"), "{}", refused.message);
    Ok(())
}
