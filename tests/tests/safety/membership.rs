//! Workers die, return and join late.

use anyhow::Result;
use paraft_common::{Durability, Mode, ShardId, Step};
use paraft_proto::{from_shard, to_shard};
use paraft_tests::{
    fleet::{Fleet, FleetOptions},
    ledger::Ledger,
    stream::{Stream, push},
    wait,
};
use std::thread;

const WAYS: [(Mode, Durability); 5] = [
    (Mode::Bsp, Durability::QuorumMemory),
    (Mode::Ssp(1), Durability::QuorumMemory),
    (Mode::Asp, Durability::QuorumMemory),
    (Mode::Ssp(1), Durability::Leader),
    (Mode::Asp, Durability::Leader),
];

/// Three workers; the last one dies without a goodbye after `alive` steps, with the next step's pushes in
/// flight if `pushed`.
fn one_of_three_dies((mode, durability): (Mode, Durability), alive: u64, pushed: bool) -> Result<()> {
    const STEPS: u64 = 12;
    let fleet = Fleet::start(FleetOptions { servers: 1, shards: 2, replicas: 1, ..Default::default() })?;
    let ledger = Ledger { grace_ms: 50, durability, ..Ledger::new(mode, 3, STEPS) };
    let workers: Vec<_> = (0..3u32)
        .map(|w| {
            let at = fleet.at.clone();
            thread::spawn(move || -> Result<Option<Vec<f32>>> {
                let mut page = ledger.join(&at, w)?;
                page.begin()?;
                if w < 2 {
                    return Ok(Some(page.run()?));
                }
                while page.done.0 < alive {
                    page.step()?;
                }
                if pushed {
                    page.push();
                }
                Ok(None) // the drop is the death: no Finish
            })
        })
        .collect();
    for w in workers {
        let Some(weights) = w.join().map_err(|_| anyhow::anyhow!("a worker panicked"))?? else { continue };
        for w in 0..2 {
            for step in (1..=STEPS).map(Step) {
                let share = -weights[ledger.place(w, step)];
                let right = match mode {
                    // A mean over the workers of the round: with the dead one still, or without.
                    Mode::Bsp => share == 1.0 / 3.0 || share == 0.5,
                    _ => share == 1.0,
                };
                assert!(right, "{mode} {alive} {pushed}: worker {w}'s {step} counts {share} times");
            }
        }
    }
    for s in fleet.status(0, false)?.shards {
        assert_eq!(s.workers_lost, 1, "{mode} shard {}", s.shard);
    }
    Ok(())
}

#[test]
fn the_others_finish_when_a_worker_dies_between_two_steps() -> Result<()> {
    WAYS.into_iter().try_for_each(|way| one_of_three_dies(way, 4, false))
}

#[test]
fn others_finish_when_a_worker_dies_with_pushes_in_flight() -> Result<()> {
    WAYS.into_iter().try_for_each(|way| one_of_three_dies(way, 4, true))
}

#[test]
fn the_others_finish_when_a_worker_dies_before_its_first_step() -> Result<()> {
    WAYS.into_iter().try_for_each(|way| one_of_three_dies(way, 0, false))
}

#[test]
fn late_worker_starts_at_the_others_step_and_loses_no_push() -> Result<()> {
    const STEPS: u64 = 30;
    for (mode, durability) in WAYS {
        let fleet = Fleet::start(FleetOptions { servers: 1, shards: 2, replicas: 1, ..Default::default() })?;
        let ledger = Ledger { pages: 3, durability, ..Ledger::new(mode, 2, STEPS) };
        let workers: Vec<_> = (0..2u32)
            .map(|w| {
                let at = fleet.at.clone();
                thread::spawn(move || -> Result<Vec<f32>> {
                    let mut page = ledger.join(&at, w)?;
                    page.begin()?;
                    while page.done.0 < 10 {
                        page.step()?;
                    }
                    // From here on together with the third, so that it certainly arrives in the middle.
                    if w == 0 {
                        let mut late = ledger.join(&at, 2)?;
                        let from = late.done;
                        assert!(
                            (9..=11).contains(&from.0) || mode == Mode::Asp,
                            "{mode}: it starts at {from}"
                        );
                        let late = thread::spawn(move || late.begin().and_then(|_| late.run()));
                        let own = page.run()?;
                        let other =
                            late.join().map_err(|_| anyhow::anyhow!("the late worker panicked"))??;
                        assert_eq!(own, other, "{mode}");
                        let counted: Vec<f32> =
                            (from.0 + 1..=STEPS).map(|s| -own[ledger.place(2, Step(s))]).collect();
                        let share = if mode == Mode::Bsp { 1.0 / 3.0 } else { 1.0 };
                        assert!(counted.iter().all(|c| *c == share), "{mode}: from {from} on {counted:?}");
                        return Ok(own);
                    }
                    Ok(page.run()?)
                })
            })
            .collect();
        for w in workers {
            w.join().map_err(|_| anyhow::anyhow!("a worker panicked"))??;
        }
        assert_eq!(fleet.shard().workers_lost, 0, "{mode}");
    }
    Ok(())
}

#[test]
fn worker_back_in_its_open_round_blocks_no_other() -> Result<()> {
    let fleet = Fleet::start(FleetOptions::default())?;
    let ledger = Ledger { bucket_len: 4, grace_ms: 600_000, ..Ledger::new(Mode::Bsp, 2, 2) };
    let address = &fleet.at.addresses[0];
    let (mut first, _) = Stream::open(address, &ledger.job(), 0, &[(0, 4)])?;
    let (mut other, _) = Stream::open(address, &ledger.job(), 1, &[(0, 4)])?;
    first.pull(0)?;
    other.pull(0)?;
    first.send(to_shard::Kind::Push(push(1, 1, 0, 100.0, 4)));
    first.send(to_shard::Kind::Push(push(9, 9, 0, 1.0, 4)));
    assert_eq!(first.refused()?.seq, 9, "the push before it is in the open round by now");
    drop(first);
    let (mut back, opened) = Stream::open(address, &ledger.job(), 0, &[])?;
    assert_eq!(opened.clock, 0);
    back.send(to_shard::Kind::Push(push(1, 1, 0, 1.0, 4)));
    other.send(to_shard::Kind::Push(push(1, 1, 0, 3.0, 4)));
    assert_eq!((back.ack()?, other.ack()?), ((1, 1), (1, 1)));
    let weights = back.pull(1)?;
    assert_eq!(weights[0].payload[..], (-2f32).to_le_bytes().repeat(4)[..], "the new session's push counts");
    assert_eq!(other.pull(1)?[0].payload, weights[0].payload);
    Ok(())
}

#[test]
fn worker_back_while_round_awaits_norm_blocks_no_other() -> Result<()> {
    let fleet = Fleet::start(FleetOptions { servers: 1, shards: 2, replicas: 1, ..Default::default() })?;
    let ledger = Ledger { bucket_len: 4, grace_ms: 600_000, ..Ledger::new(Mode::Bsp, 2, 4) };
    let mut job = ledger.job();
    job.clip.norm = Some(1e6);
    let address = &fleet.at.addresses[0];
    // Shard 0 holds bucket 0. The norm needs shard 1, too; here the test sends it, in the workers' place.
    let (mut first, _) = Stream::open(address, &job, 0, &[(0, 4)])?;
    let (mut other, _) = Stream::open(address, &job, 1, &[])?;
    first.pull(0)?;
    other.pull(0)?;
    first.send(to_shard::Kind::Push(push(1, 1, 0, 1.0, 4)));
    other.send(to_shard::Kind::Push(push(1, 1, 0, 3.0, 4)));
    let round = |s: &mut Stream| match s.receive()? {
        Some(from_shard::Kind::RoundNorm(n)) => Ok((n.step, n.sum_of_squares)),
        other => anyhow::bail!("the round's norm was expected, not {other:?}"),
    };
    assert_eq!((round(&mut first)?, round(&mut other)?), ((1, 16.0), (1, 16.0)));
    drop(first);
    let (mut back, _) = Stream::open(address, &job, 0, &[])?;
    assert_eq!(round(&mut back)?, (1, 16.0), "who comes back is told what is waited for");
    // Its predecessor's push is in the sum already: this push is not needed, and the round must not wait for
    // it.
    back.send(to_shard::Kind::Push(push(1, 1, 0, 1.0, 4)));
    back.send(to_shard::Kind::Push(push(9, 9, 0, 1.0, 4)));
    assert_eq!(back.refused()?.seq, 9, "the push before it was looked at by now");
    other.send(to_shard::Kind::Norm(paraft_proto::Norm { step: 1, sum_of_squares: 17.0, bound: None }));
    assert_eq!(other.ack()?, (1, 1));
    assert_eq!(back.ack()?, (1, 1), "it need not be kept any longer");
    assert_eq!(back.pull(1)?[0].payload[..], (-2f32).to_le_bytes().repeat(4)[..]);
    other.pull(1)?;
    Ok(())
}

#[test]
fn job_continues_when_its_only_worker_returns() -> Result<()> {
    for grace_ms in [1, 600_000] {
        let fleet = Fleet::start(FleetOptions { servers: 1, shards: 2, replicas: 1, ..Default::default() })?;
        let ledger = Ledger { grace_ms, ..Ledger::new(Mode::Bsp, 1, 8) };
        let mut page = ledger.join(&fleet.at, 0)?;
        page.begin()?;
        for _ in 0..5 {
            page.step()?;
        }
        drop(page);
        if grace_ms == 1 {
            wait::until("the worker to be taken out", || fleet.shard().members.len(), |n| *n == 0);
        }
        let page = ledger.join(&fleet.at, 0)?;
        assert_eq!(page.done, Step(5), "grace {grace_ms} ms");
        assert_eq!(page.run()?, vec![-1.0; 8]);
    }
    Ok(())
}

/// Two servers join that no server reaches. They vote nowhere, `status` names them, another server's death
/// stops nothing, and they can be forgotten.
#[test]
fn unreached_server_never_votes_and_can_be_forgotten() -> Result<()> {
    let mut fleet = Fleet::start(FleetOptions::replicated(1))?;
    let ledger = Ledger { bucket_len: 4, ..Ledger::new(Mode::Asp, 1, 60) };
    let mut page = ledger.join(&fleet.at, 0)?;
    page.begin()?;
    let (first, _deaf) = fleet.join_unreachable()?;
    let (second, _too) = fleet.join_unreachable()?;
    let named = || {
        let servers = fleet.describe().map(|d| d.servers).unwrap_or_default();
        servers.iter().filter(|s| s.state == "unreachable" && s.trouble.contains("do not reach it")).count()
    };
    wait::until("both to be named", named, |n| *n == 2);
    for _ in 0..20 {
        page.step()?;
    }
    let now = fleet.describe()?;
    let joined = [u64::from(first), u64::from(second)];
    assert!(now.control_voters.iter().all(|v| !joined.contains(v)), "{:?}", now.control_voters);
    assert!(now.shards[0].voters.iter().all(|v| !joined.contains(v)), "{:?}", now.shards[0]);
    // As before they joined: one of three dies, and nothing stops.
    let (leader, _) = fleet.leader(ShardId(0));
    fleet.kill(leader);
    let weights = page.run()?;
    assert_eq!(weights[..60], [-1.0; 60]);
    fleet.restart_server(leader)?;
    fleet.forget(first)?;
    fleet.forget(second)?;
    let listed = || fleet.describe().map_or(0, |d| d.servers.len());
    wait::until("three servers to be listed", listed, |n| *n == 3);
    fleet.whole()?;
    Ok(())
}
