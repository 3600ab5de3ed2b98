//! The level `leader`, with leaders that die.

use anyhow::{Context, Result, ensure};
use paraft_common::{Durability, LeaderWindow, Mode, ShardId};
use paraft_proto::{from_shard, to_shard};
use paraft_tests::{
    fleet::{Fleet, FleetOptions},
    ledger::Ledger,
    stream::{Stream, push},
    train::{distance, job, train},
    wait::{self, DEADLINE},
};
use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::SeqCst},
        mpsc::channel,
    },
    thread,
};

fn ledger(mode: Mode, workers: u32, steps: u64) -> Ledger {
    Ledger { durability: Durability::Leader, ..Ledger::new(mode, workers, steps) }
}

/// Trains the ledger on three servers; at step `at` of any worker, the leader of `shard` dies. Returns each
/// worker's final weights, and the fleet.
fn leader_dies(ledger: Ledger, shards: u32, shard: u32, at: u64) -> Result<(Vec<Vec<f32>>, Fleet)> {
    let mut fleet = Fleet::start(FleetOptions::replicated(shards))?;
    let furthest = Arc::new(AtomicU64::new(0));
    let (tell, ended) = channel();
    for w in 0..ledger.workers {
        let (place, furthest, tell) = (fleet.at.clone(), furthest.clone(), tell.clone());
        let work = move || -> Result<Vec<f32>> {
            let mut page = ledger.join(&place, w)?;
            page.begin()?;
            while page.done.0 < ledger.steps {
                page.step()?;
                furthest.fetch_max(page.done.0, SeqCst);
            }
            Ok(page.finish()?)
        };
        // Not joined: a worker that waits for ever must fail the test, not block it.
        thread::spawn(move || tell.send(work()));
    }
    // Looked up before, so that nothing delays the kill.
    let (leader, _) = fleet.leader(ShardId(shard));
    wait::until("the job to get going", || furthest.load(SeqCst), |f| *f >= at);
    fleet.kill(leader);
    let mut weights = Vec::new();
    for _ in 0..ledger.workers {
        weights.push(ended.recv_timeout(DEADLINE).context("a worker waits for ever")??);
    }
    fleet.replicas_agree()?;
    for s in (0..shards).map(|s| fleet.leader(ShardId(s)).1) {
        ensure!(s.workers_lost == 0, "{s:?}");
    }
    Ok((weights, fleet))
}

#[test]
fn level_leader_loses_at_most_its_window_and_reports_it() -> Result<()> {
    // One bucket holds the ledger, so every push has its own place. The window's time is so long that its
    // count decides: nothing is replicated before half of it is full.
    const WINDOW: u64 = 64;
    let mut seen = 0;
    for (mode, at) in [(Mode::Asp, 40), (Mode::Ssp(3), 70), (Mode::Asp, 111), (Mode::Asp, 150)] {
        let ledger = Ledger {
            leader_window: LeaderWindow { ms: 60_000, pushes: WINDOW },
            bucket_len: 1 << 10,
            ..ledger(mode, 2, 300)
        };
        let (weights, fleet) = leader_dies(ledger, 1, 0, at)?;
        let reported = fleet.shard().pushes_lost;
        for weights in weights {
            assert!(weights.iter().all(|w| [-1.0, 0.0].contains(w)), "{mode}: a push counts twice");
            let lost = weights.iter().filter(|w| **w == 0.0).count() as u64;
            assert!(lost <= WINDOW, "{mode}: {lost} lost, the window is {WINDOW}");
            assert_eq!(lost, reported, "{mode}: lost, and reported");
        }
        seen += reported;
    }
    assert!(seen > 0, "four kills in the middle of a window: a leader that loses nothing was not asked");
    Ok(())
}

#[test]
fn the_level_leader_loses_nothing_when_no_leader_dies() -> Result<()> {
    let fleet = Fleet::start(FleetOptions::replicated(2))?;
    let ledger = ledger(Mode::Asp, 2, 100);
    let other = {
        let at = fleet.at.clone();
        thread::spawn(move || ledger.join(&at, 1)?.run())
    };
    let weights = ledger.join(&fleet.at, 0)?.run()?;
    assert_eq!(weights, vec![-1.0; ledger.len()]);
    assert_eq!(
        weights,
        other.join().map_err(|_| anyhow::anyhow!("a worker panicked"))??,
        "both get the same"
    );
    fleet.replicas_agree()?;
    Ok(())
}

/// A leader whose followers are dead gets this many pushes, one for each step. Returns the acks that it sends
/// before it gives up.
fn pushed_to_a_leader_alone(ledger: Ledger, pushes: u64) -> Result<Vec<u64>> {
    let mut fleet = Fleet::start(FleetOptions::replicated(1))?;
    let (leader, _) = fleet.leader(ShardId(0));
    let len = ledger.bucket_len;
    let (mut stream, _) = Stream::open(&fleet.at.addresses[leader as usize], &ledger.job(), 0, &[(0, len)])?;
    stream.pull(0)?;
    for id in fleet.alive().into_iter().filter(|id| *id != leader) {
        fleet.kill(id);
    }
    for step in 1..=pushes {
        stream.send(to_shard::Kind::Push(push(step, step, 0, 1.0, len)));
    }
    stream.send(to_shard::Kind::Pull(paraft_proto::Pull { done: 1, ..paraft_proto::Pull::default() }));
    let mut acks = Vec::new();
    loop {
        match stream.receive()? {
            Some(from_shard::Kind::Ack(a)) => acks.push(a.seq),
            Some(from_shard::Kind::Weights(_)) => {}
            Some(from_shard::Kind::Refused(_)) | None => return Ok(acks),
            Some(other) => anyhow::bail!("unexpected: {other:?}"),
        }
    }
}

#[test]
fn leader_without_majority_acknowledges_at_most_its_window() -> Result<()> {
    for window in [1, 4] {
        let ledger = Ledger {
            bucket_len: 16,
            leader_window: LeaderWindow { ms: 60_000, pushes: window },
            ..ledger(Mode::Asp, 1, 16)
        };
        let acks = pushed_to_a_leader_alone(ledger, 6)?;
        assert_eq!(acks, (1..=window).collect::<Vec<_>>(), "window {window}");
    }
    Ok(())
}

#[test]
fn one_worker_gets_the_same_bits_as_at_the_level_quorum_memory() -> Result<()> {
    let run = |kind: &str, clip: &str, durability: &str| -> Result<Vec<f32>> {
        let text = format!("[model]\nkind = \"mlp\"\nhidden = [24]\n[clip]\n{clip}");
        let fleet = Fleet::start(FleetOptions::replicated(2))?;
        let (kind, level) = (format!("optimizer.kind={kind}"), format!("cluster.durability={durability}"));
        let set = [
            "train.workers=1",
            "train.mode=asp",
            "train.max_steps=150",
            "train.batch=16",
            "train.epochs=9",
            "optimizer.lr=0.01",
            "cluster.bucket_bytes=1024",
            &kind,
            &level,
        ];
        let job = job(&fleet.at, &text, &set)?;
        let (tell, trained) = channel();
        thread::spawn(move || tell.send(train(&job)));
        let weights = trained.recv_timeout(DEADLINE).context("the training waits for ever")??;
        fleet.replicas_agree()?;
        Ok(weights)
    };
    for (kind, clip) in [("adam", "norm = 0.3"), ("momentum", "value = 0.1")] {
        let (updates, images) = (run(kind, clip, "quorum-memory")?, run(kind, clip, "leader")?);
        let same = updates.iter().zip(&images).all(|(a, b)| a.to_bits() == b.to_bits());
        assert!(same, "{kind}: {:e} apart", distance(&updates, &images));
    }
    Ok(())
}
