//! Replicas hash their states at the same log indices; a replica that differs from the majority is stopped
//! and replaced.

use anyhow::{Result, ensure};
use paraft_common::{Durability, Mode, ShardId};
use paraft_tests::{
    fleet::{Fleet, FleetOptions},
    ledger::Ledger,
    wait,
};
use std::sync::Arc;

/// Flips a bit of one weight of a replica, as failing memory does: no log entry records it.
fn flip(fleet: &Fleet, server: u32, shard: ShardId) -> Result<()> {
    let replica = fleet.replica(server, shard)?;
    let mut image = replica.shard.cut();
    let bucket = image.buckets.first_mut().expect("the shard has a bucket");
    let weight = &mut Arc::make_mut(bucket).weights[0];
    *weight = f32::from_bits(weight.to_bits() ^ 1);
    replica.shard.install(&image).map_err(anyhow::Error::msg)
}

fn a_diverged_replica_is_replaced(durability: Durability, of_leader: bool) -> Result<()> {
    let fleet = Fleet::start(FleetOptions { durability, ..FleetOptions::replicated(1) })?;
    let ledger = Ledger { bucket_len: 8, durability, ..Ledger::new(Mode::Bsp, 1, 60) };
    let mut page = ledger.join(&fleet.at, 0)?;
    page.begin()?;
    for _ in 0..10 {
        page.step()?;
    }
    let (leader, _) = fleet.leader(ShardId(0));
    let victim = if of_leader { leader } else { (leader + 1) % 3 };
    let node = fleet.replica(victim, ShardId(0))?.group.me();
    flip(&fleet, victim, ShardId(0))?;
    for _ in 0..10 {
        page.step()?;
    }
    let replaced = || fleet.replica(victim, ShardId(0)).is_ok_and(|r| r.group.me() != node);
    wait::until("another replica in the place of the diverged one", replaced, |r| *r);
    ensure!(fleet.status(victim, false)?.replicas_diverged == 1, "it is counted");
    let others = (0..3).filter(|s| *s != victim);
    for s in others {
        ensure!(fleet.status(s, false)?.replicas_diverged == 0, "server {s} was right");
    }
    fleet.whole()?;
    assert_eq!(page.run()?, [-1.0; 60], "what the majority holds goes on");
    fleet.replicas_agree()?;
    if durability.on_disk() {
        ensure!(
            fleet.data(victim).join("shard-0.aside-1").exists(),
            "its files are kept for a person to look at"
        );
    }
    Ok(())
}

#[test]
fn a_follower_that_diverged_is_stopped_and_replaced() -> Result<()> {
    a_diverged_replica_is_replaced(Durability::QuorumMemory, false)
}

#[test]
fn a_leader_that_diverged_is_stopped_and_replaced() -> Result<()> {
    a_diverged_replica_is_replaced(Durability::QuorumDisk, true)
}
