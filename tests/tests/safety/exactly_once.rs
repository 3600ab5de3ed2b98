//! An acknowledged push is applied exactly once, whichever server dies.

use anyhow::{Context, Result};
use paraft_common::{Mode, ShardId, Step};
use paraft_proto::to_shard;
use paraft_tests::{
    fleet::{Fleet, FleetOptions},
    ledger::Ledger,
    stream::{Stream, push},
    train::{distance, job, train},
    wait,
};
use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::SeqCst},
    },
    thread,
};

/// Trains the ledger with two workers on three servers; once the job reaches step `at`, the leader of `shard`
/// dies.
fn leader_dies(mode: Mode, shard: u32, at: u64) -> Result<()> {
    const STEPS: u64 = 60;
    let mut fleet = Fleet::start(FleetOptions::replicated(3))?;
    let ledger = Ledger::new(mode, 2, STEPS);
    let furthest = Arc::new(AtomicU64::new(0));
    let workers: Vec<_> = (0..2)
        .map(|w| {
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
        })
        .collect();
    wait::until("the job to get going", || furthest.load(SeqCst), |f| *f >= at);
    let (leader, _) = fleet.leader(ShardId(shard));
    fleet.kill(leader);
    for w in workers {
        let weights = w.join().map_err(|_| anyhow::anyhow!("a worker panicked"))??;
        let expected = if mode.averages() { -0.5 } else { -1.0 };
        let wrong: Vec<_> = weights.iter().enumerate().filter(|(_, w)| **w != expected).collect();
        assert!(
            wrong.is_empty(),
            "{mode}, leader of shard {shard} killed at {at}: {wrong:?} are not {expected}"
        );
    }
    fleet.replicas_agree()?;
    for s in (0..3).map(|s| fleet.leader(ShardId(s)).1) {
        assert_eq!(s.workers_lost, 0, "{mode}: nobody was taken out");
    }
    Ok(())
}

#[test]
fn asp_pushes_are_applied_exactly_once_when_a_leader_dies() -> Result<()> {
    [(0, 3), (1, 17), (2, 40)].into_iter().try_for_each(|(shard, at)| leader_dies(Mode::Asp, shard, at))
}

#[test]
fn bsp_pushes_are_applied_exactly_once_when_a_leader_dies() -> Result<()> {
    [(0, 3), (1, 17), (2, 40)].into_iter().try_for_each(|(shard, at)| leader_dies(Mode::Bsp, shard, at))
}

#[test]
fn ssp_pushes_are_applied_exactly_once_when_a_leader_dies() -> Result<()> {
    leader_dies(Mode::Ssp(2), 0, 23)
}

/// Trains on three servers; with `kill`, the leader of that shard dies once its buckets have this many
/// updates.
fn train_through(set: &[&str], kill: Option<(u32, u64)>) -> Result<Vec<f32>> {
    let text =
        "[model]\nkind = \"mlp\"\nhidden = [24]\n[optimizer]\nkind = \"adam\"\nlr = 0.01\n[clip]\nnorm = 0.3";
    let mut fleet = Fleet::start(FleetOptions::replicated(3))?;
    let all = [&["train.max_steps=60", "train.batch=16", "train.epochs=9", "cluster.bucket_bytes=1024"], set]
        .concat();
    let job = job(&fleet.at, text, &all)?;
    let training = thread::spawn(move || train(&job));
    if let Some((shard, at)) = kill {
        let (leader, _) = wait::until(
            "the shard to be far enough",
            || fleet.leader(ShardId(shard)),
            |(_, s)| s.version >= at * u64::from(s.buckets.max(1)),
        );
        fleet.kill(leader);
    }
    let weights = training.join().map_err(|_| anyhow::anyhow!("training panicked"))??;
    fleet.replicas_agree()?;
    Ok(weights)
}

#[test]
fn lost_leader_changes_no_bit_of_the_weights() -> Result<()> {
    // BSP with two workers, and every mode with one, depend only on the data; the norm of the whole gradient
    // crosses all three shards at every step.
    for set in [["train.mode=bsp", "train.workers=2"], ["train.mode=asp", "train.workers=1"]] {
        let calm = train_through(&set, None)?;
        for kill in [(0, 5), (1, 20), (2, 40)] {
            let stormy = train_through(&set, Some(kill))?;
            let same = calm.iter().zip(&stormy).all(|(a, b)| a.to_bits() == b.to_bits());
            assert!(same, "{set:?}, killed {kill:?}: {:e} apart", distance(&calm, &stormy));
        }
    }
    Ok(())
}

#[test]
fn repeated_push_is_applied_once_in_flight_and_later() -> Result<()> {
    let fleet = Fleet::start(FleetOptions::default())?;
    let ledger = Ledger { bucket_len: 4, ..Ledger::new(Mode::Bsp, 2, 2) };
    let address = &fleet.at.addresses[0];
    let (mut a, _) = Stream::open(address, &ledger.job(), 0, &[(0, 4)])?;
    let (mut b, _) = Stream::open(address, &ledger.job(), 1, &[(0, 4)])?;
    a.pull(0)?;
    b.pull(0)?;
    // In flight: the round waits for b, so nothing is applied between the three.
    for _ in 0..3 {
        a.send(to_shard::Kind::Push(push(1, 1, 0, 1.0, 4)));
    }
    // A stream keeps its order: once this refusal arrives, the pushes before it were handled.
    a.send(to_shard::Kind::Push(push(9, 9, 0, 1.0, 4)));
    assert_eq!(a.refused()?.seq, 9);
    b.send(to_shard::Kind::Push(push(1, 1, 0, 3.0, 4)));
    assert_eq!((a.ack()?, b.ack()?), ((1, 1), (1, 1)));
    // Afterwards: acknowledged again, with its original version, and not applied.
    a.send(to_shard::Kind::Push(push(1, 1, 0, 1.0, 4)));
    assert_eq!(a.ack()?, (1, 1));
    let weights = a.pull(1)?;
    let expected: Vec<u8> = (-2f32).to_le_bytes().repeat(4);
    assert_eq!((weights[0].version, &weights[0].payload[..]), (1, &expected[..]));
    assert_eq!(fleet.shard().pushes, 2);
    Ok(())
}

#[test]
fn repeated_push_after_a_break_is_acknowledged_not_applied() -> Result<()> {
    let fleet = Fleet::start(FleetOptions::default())?;
    let ledger = Ledger { bucket_len: 4, ..Ledger::new(Mode::Asp, 1, 4) };
    let address = &fleet.at.addresses[0];
    let (mut first, opened) = Stream::open(address, &ledger.job(), 0, &[(0, 4)])?;
    first.pull(0)?;
    first.send(to_shard::Kind::Push(push(1, 1, 0, 1.0, 4)));
    assert_eq!(first.ack()?, (1, 1));
    drop(first);
    let again = Stream::connect(address)?;
    let mut again = again;
    let open =
        paraft_proto::Open { session: opened.session, ..paraft_tests::stream::open(&ledger.job(), 0)? };
    again.send(to_shard::Kind::Open(open));
    let taken_up = match again.receive()?.context("an answer")? {
        paraft_proto::from_shard::Kind::Opened(o) => o,
        other => anyhow::bail!("{other:?}"),
    };
    assert_eq!((taken_up.session, taken_up.last_seq, taken_up.clock), (opened.session, 1, 1));
    again.send(to_shard::Kind::Push(push(1, 1, 0, 1.0, 4)));
    assert_eq!(again.ack()?, (1, 1));
    assert_eq!(again.pull(Step(1).0)?[0].payload[..], (-1f32).to_le_bytes().repeat(4)[..]);
    Ok(())
}
