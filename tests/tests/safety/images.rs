//! Image cuts, the second way into the log, and the level `leader`, under leaders that die.

use anyhow::{Context, Result, ensure};
use paraft_common::{Durability, LeaderWindow, LogForm, Mode, ShardId};
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
    time::Duration,
};

fn images(mode: Mode, workers: u32, steps: u64) -> Ledger {
    Ledger { log: LogForm::Images, ..Ledger::new(mode, workers, steps) }
}

/// Trains the ledger on three servers; at step `at` of any worker, the leader of `shard` dies. Gives each worker's final
/// weights, and the fleet.
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
        // Not joined: a worker that waits for ever must fail the test, not hold it.
        thread::spawn(move || tell.send(work()));
    }
    // Asked for before, so that nothing lies between the moment and the kill.
    let (leader, _) = fleet.leader(ShardId(shard));
    wait::until("the job to get going", || furthest.load(SeqCst), |f| *f >= at);
    fleet.kill(leader);
    let mut weights = Vec::new();
    for _ in 0..ledger.workers {
        weights.push(ended.recv_timeout(DEADLINE).context("a worker waits for ever")??);
    }
    fleet.replicas_agree()?;
    for s in (0..shards).map(|s| fleet.leader(ShardId(s)).1) {
        ensure!(s.log_form == "images" && s.workers_lost == 0, "{s:?}");
    }
    Ok((weights, fleet))
}

#[test]
fn no_acknowledged_push_is_lost_or_doubled_when_a_leader_dies() -> Result<()> {
    for mode in [Mode::Asp, Mode::Ssp(2)] {
        for (shard, at) in [(0, 3), (1, 100), (2, 190)] {
            let (weights, fleet) = leader_dies(images(mode, 2, 200), 3, shard, at)?;
            for weights in weights {
                let wrong: Vec<_> = weights.iter().enumerate().filter(|(_, w)| **w != -1.0).collect();
                assert!(wrong.is_empty(), "{mode}, shard {shard} killed at {at}: {wrong:?} are not -1");
            }
            for s in (0..3).map(|s| fleet.leader(ShardId(s)).1) {
                assert_eq!(s.pushes_lost, 0, "{mode} shard {}", s.shard);
            }
        }
    }
    Ok(())
}

#[test]
fn what_the_level_leader_loses_is_within_its_window_and_reported_push_for_push() -> Result<()> {
    // One bucket holds the ledger, so every push has its own place. The window is so long in time that the count
    // decides: nothing is replicated before half of it is full.
    const WINDOW: u64 = 64;
    let mut seen = 0;
    for (mode, at) in [(Mode::Asp, 40), (Mode::Ssp(3), 70), (Mode::Asp, 111), (Mode::Asp, 150)] {
        let ledger = Ledger {
            durability: Durability::Leader,
            log: LogForm::Auto,
            leader_window: LeaderWindow { ms: 60_000, pushes: WINDOW },
            bucket_len: 1 << 10,
            ..images(mode, 2, 300)
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
    let ledger = Ledger { durability: Durability::Leader, ..Ledger::new(Mode::Asp, 2, 100) };
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

/// A leader whose followers are dead gets this many pushes, one a step, and at the quorum levels all of them again. Gives the acks that it sends before it gives up,
/// and what its pulls showed.
fn pushed_to_a_leader_alone(ledger: Ledger, pushes: u64) -> Result<(Vec<u64>, Vec<f32>)> {
    let mut fleet = Fleet::start(FleetOptions::replicated(1))?;
    let (leader, _) = fleet.leader(ShardId(0));
    let len = ledger.bucket_len;
    let (mut stream, _) = Stream::open(&fleet.at.addresses[leader as usize], &ledger.job(), 0, &[(0, len)])?;
    stream.pull(0)?;
    for id in fleet.alive().into_iter().filter(|id| *id != leader) {
        fleet.kill(id);
    }
    let again = if ledger.durability == Durability::Leader { 0 } else { pushes };
    for step in (1..=pushes).chain(1..=again) {
        stream.send(to_shard::Kind::Push(push(step, step, 0, 1.0, len)));
    }
    stream.send(to_shard::Kind::Pull(paraft_proto::Pull { done: 1, ..paraft_proto::Pull::default() }));
    let (mut acks, mut pulled) = (Vec::new(), Vec::new());
    loop {
        match stream.receive()? {
            Some(from_shard::Kind::Ack(a)) => acks.push(a.seq),
            Some(from_shard::Kind::Weights(w)) => {
                let first = w.payload.get(..4).and_then(|b| b.try_into().ok()).context("a value")?;
                pulled.push(f32::from_le_bytes(first));
            }
            Some(from_shard::Kind::Refused(_)) | None => return Ok((acks, pulled)),
            Some(other) => anyhow::bail!("unexpected: {other:?}"),
        }
    }
}

#[test]
fn a_leader_without_a_majority_acknowledges_nothing_though_its_pulls_show_the_push() -> Result<()> {
    let ledger = Ledger { bucket_len: 16, ..images(Mode::Asp, 1, 16) };
    let (acks, pulled) = pushed_to_a_leader_alone(ledger, 3)?;
    assert_eq!((acks, pulled), (vec![], vec![-3.0]));
    Ok(())
}

#[test]
fn a_leader_without_a_majority_acknowledges_no_more_than_its_window() -> Result<()> {
    for window in [1, 4] {
        let ledger = Ledger {
            bucket_len: 16,
            durability: Durability::Leader,
            leader_window: LeaderWindow { ms: 60_000, pushes: window },
            ..images(Mode::Asp, 1, 16)
        };
        let (acks, _) = pushed_to_a_leader_alone(ledger, 6)?;
        assert_eq!(acks, (1..=window).collect::<Vec<_>>(), "window {window}");
    }
    Ok(())
}

#[test]
fn one_worker_gets_the_same_bits_from_images_as_from_updates_also_when_a_leader_dies() -> Result<()> {
    let run = |kind: &str, clip: &str, log: &str, kill: Option<u64>| -> Result<Vec<f32>> {
        let text = format!("[model]\nkind = \"mlp\"\nhidden = [24]\n[clip]\n{clip}");
        let mut fleet = Fleet::start(FleetOptions::replicated(2))?;
        let (kind, log) = (format!("optimizer.kind={kind}"), format!("cluster.log={log}"));
        let set = [
            "train.workers=1",
            "train.mode=asp",
            "train.max_steps=150",
            "train.batch=16",
            "train.epochs=9",
            "optimizer.lr=0.01",
            "cluster.bucket_bytes=1024",
            &kind,
            &log,
        ];
        let job = job(&fleet.at, &text, &set)?;
        let (tell, trained) = channel();
        thread::spawn(move || tell.send(train(&job)));
        if let Some(at) = kill {
            let far =
                |s: &(u32, paraft_proto::ShardStatus)| s.1.version >= at * u64::from(s.1.buckets.max(1));
            let (leader, _) = wait::until("the shard to be far enough", || fleet.leader(ShardId(1)), far);
            fleet.kill(leader);
        }
        let weights = trained.recv_timeout(DEADLINE).context("the training waits for ever")??;
        fleet.replicas_agree()?;
        Ok(weights)
    };
    for (kind, clip) in [("adam", "norm = 0.3"), ("momentum", "value = 0.1")] {
        let updates = run(kind, clip, "updates", None)?;
        for kill in [None, Some(5), Some(60)] {
            let images = run(kind, clip, "images", kill)?;
            let same = updates.iter().zip(&images).all(|(a, b)| a.to_bits() == b.to_bits());
            assert!(same, "{kind} {kill:?}: {:e} apart", distance(&updates, &images));
        }
    }
    Ok(())
}

#[test]
fn a_job_that_leaves_the_choice_changes_to_images_under_load_and_back_without_it() -> Result<()> {
    // 64 KiB a push, and as much for its slot: images pay from the third push of an interval on.
    let len = 1 << 14;
    let ledger =
        Ledger { bucket_len: len, extra: len - 12_000, slot: true, ..Ledger::new(Mode::Asp, 1, 12_000) };
    let mut fleet = Fleet::start(FleetOptions::replicated(1))?;
    let mut page = ledger.join(&fleet.at, 0)?;
    page.begin()?;
    let until = |page: &mut paraft_tests::ledger::Page, fleet: &Fleet, form: &str, pace| -> Result<()> {
        while fleet.shard().log_form != form {
            ensure!(page.done.0 < ledger.steps - 20, "still not {form} at {}", page.done);
            page.step()?;
            thread::sleep(Duration::from_millis(pace)); // it is the load that is tested
        }
        Ok(())
    };
    assert_eq!(fleet.shard().log_form, "updates");
    until(&mut page, &fleet, "images", 1)?;
    until(&mut page, &fleet, "updates", 150)?;
    until(&mut page, &fleet, "images", 1)?;
    // The next leader knows the form.
    let (leader, _) = fleet.leader(ShardId(0));
    fleet.kill(leader);
    page.step()?;
    assert_eq!(fleet.shard().log_form, "images");
    fleet.replicas_agree()?;
    let done = page.done.0 as usize;
    let weights = page.weights;
    assert_eq!(weights[..done], vec![-1.0; done]);
    assert!(weights[done..].iter().all(|w| *w == 0.0));
    Ok(())
}
