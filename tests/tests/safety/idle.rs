//! Groups without work sleep, and lose nothing by it.

use anyhow::{Result, ensure};
use paraft_common::ShardId;
use paraft_tests::{
    fleet::{Fleet, FleetOptions},
    train::{job, train},
    wait,
};

const SHARDS: u32 = 2;
const JOB: &str =
    "[model]\nkind = \"mlp\"\nhidden = [16]\n[train]\nworkers = 2\nbatch = 32\nepochs = 1\nmode = \"bsp\"\n";

/// Replicas that are awake, as (server, shard).
fn awake(fleet: &Fleet) -> Vec<(u32, u32)> {
    let all = fleet.alive().into_iter().flat_map(|id| (0..SHARDS).map(move |s| (id, s)));
    let asleep = |(id, s): &(u32, u32)| fleet.replica(*id, ShardId(*s)).is_ok_and(|r| r.group.is_asleep());
    all.filter(|r| !asleep(r)).collect()
}

fn all_asleep(fleet: &Fleet) {
    wait::until("every replica to sleep", || awake(fleet), Vec::is_empty);
}

fn trained(fleet: &Fleet) -> Result<Vec<f32>> {
    train(&job(&fleet.at, JOB, &[])?)
}

#[test]
fn groups_without_work_sleep_and_train_as_if_they_had_not() -> Result<()> {
    let fleet = Fleet::start(FleetOptions::replicated(SHARDS))?;
    all_asleep(&fleet);
    let before: Vec<u64> = (0..SHARDS).map(|s| fleet.leader(ShardId(s)).1.term).collect();
    assert_eq!(trained(&fleet)?, trained(&Fleet::start(FleetOptions::replicated(SHARDS))?)?, "bit for bit");
    let after: Vec<u64> = (0..SHARDS).map(|s| fleet.leader(ShardId(s)).1.term).collect();
    assert_eq!(before, after, "nobody was elected: the leaders woke");
    // The job is done: they sleep again, with their state; even if another client has woken one.
    all_asleep(&fleet);
    let (leader, _) = fleet.leader(ShardId(1));
    fleet.replica(leader, ShardId(1))?.group.wake();
    all_asleep(&fleet);
    fleet.replicas_agree()?;
    Ok(())
}

#[test]
fn a_leader_that_dies_in_its_sleep_is_replaced() -> Result<()> {
    let mut fleet = Fleet::start(FleetOptions::replicated(SHARDS))?;
    all_asleep(&fleet);
    let (dead, before) = fleet.leader(ShardId(0));
    fleet.kill(dead);
    // No worker comes: its server notices that the leader's is gone.
    let others = || fleet.alive().into_iter().find_map(|id| fleet.status(id, false).ok());
    let led = || {
        let shards = others().map(|s| s.shards).unwrap_or_default();
        shards.into_iter().find(|s| s.shard == 0).and_then(|s| s.leader)
    };
    wait::until("another leader", led, |l| l.is_some_and(|l| l != u64::from(dead)));
    let (leader, after) = fleet.leader(ShardId(0));
    ensure!(leader != dead && after.term > before.term, "{after:?}");
    Ok(())
}

/// The followers sleep, too, when the leader dies and a worker comes at once: the server it asks wakes.
#[test]
fn worker_finds_next_leader_after_a_sleeping_one_died() -> Result<()> {
    let mut fleet = Fleet::start(FleetOptions::replicated(SHARDS))?;
    all_asleep(&fleet);
    fleet.kill(fleet.leader(ShardId(0)).0);
    assert_eq!(trained(&fleet)?, trained(&Fleet::start(FleetOptions::replicated(SHARDS))?)?, "bit for bit");
    Ok(())
}
