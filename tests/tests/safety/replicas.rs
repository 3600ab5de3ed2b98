//! Followers that come late, logs that are cut, servers that return without their memory.

use anyhow::{Context, Result};
use paraft_common::{Durability, Mode, ShardId, Step};
use paraft_proto::{DescribeReply, ShardInfo};
use paraft_tests::{
    fleet::{Fleet, FleetOptions},
    ledger::{Ledger, Page},
    wait,
};

/// Two of three servers take the first part of the job. The third, which starts then, can only catch up by a
/// snapshot, since the earlier log is cut. Then the first dies, and the newcomer is half of the majority.
fn a_late_server_catches_up(ledger: Ledger, late_at: u64) -> Result<()> {
    let mut fleet = Fleet::bind(FleetOptions::replicated(1))?;
    fleet.start_server(0)?;
    fleet.start_server(1)?;
    let mut page = ledger.join(&fleet.at, 0)?;
    page.begin()?;
    while page.done.0 < late_at {
        page.step()?;
    }
    fleet.start_server(2)?;
    fleet.whole()?;
    fleet.replicas_agree()?;
    let (leader, _) = fleet.leader(ShardId(0));
    fleet.kill(leader);
    let weights = page.run()?;
    let pushed: Vec<f32> = (1..=ledger.steps).map(|s| weights[ledger.place(0, Step(s))]).collect();
    assert_eq!(pushed, vec![-1.0; ledger.steps as usize]);
    assert!(weights[ledger.pages as usize * ledger.steps as usize..].iter().all(|w| *w == 0.0));
    fleet.replicas_agree()?;
    Ok(())
}

#[test]
fn follower_behind_cut_bytes_catches_up_by_snapshot() -> Result<()> {
    // 2 MiB per step: the log is cut at 64 MiB.
    let ledger = Ledger { bucket_len: 1 << 16, extra: 8 << 16, ..Ledger::new(Mode::Asp, 1, 60) };
    a_late_server_catches_up(ledger, 45)
}

#[test]
fn follower_behind_cut_entries_catches_up_by_snapshot() -> Result<()> {
    // 100 buckets per step: the log is cut at 4096 entries.
    let ledger = Ledger { bucket_len: 2, extra: 100, ..Ledger::new(Mode::Bsp, 1, 100) };
    a_late_server_catches_up(ledger, 60)
}

#[test]
fn a_follower_catches_up_by_a_snapshot_at_the_level_leader() -> Result<()> {
    let ledger = Ledger { bucket_len: 1 << 16, extra: 8 << 16, ..Ledger::new(Mode::Asp, 1, 300) };
    a_late_server_catches_up(Ledger { durability: Durability::Leader, ..ledger }, 250)
}

/// A deposed leader of the control group may plan from outdated state: it must not retire a replica that has
/// become a member since.
#[test]
fn a_replica_that_a_later_membership_has_is_not_retired() -> Result<()> {
    let mut fleet = Fleet::start(FleetOptions::replicated(1))?;
    let first = fleet.replica(2, ShardId(0))?.group.membership();
    fleet.kill(2);
    fleet.restart_server(2)?;
    // In the first membership its server had another replica; this one comes later.
    let votes = || {
        let group = fleet.replica(2, ShardId(0)).ok()?.group;
        Some(group.membership()).filter(|m| m.voters.contains(&group.me()) && !m.changing)
    };
    let member = wait::until("the new replica to vote", votes, Option::is_some);
    let member = member.context("none")?;
    let refused = fleet.retire(2, ShardId(0), first.index).expect_err("it is a member");
    assert!(refused.to_string().contains("it stays"), "{refused}");
    assert_eq!(fleet.replica(2, ShardId(0))?.group.membership(), member);
    Ok(())
}

/// Every server dies in turn and returns, in rising and then in falling order: it learns the others' state,
/// votes again, and is then half of the majority that the next loss leaves.
fn restart_servers_in_turn(durability: Durability, orders: u64) -> Result<()> {
    let mut fleet = Fleet::start(FleetOptions { durability, ..FleetOptions::replicated(2) })?;
    let steps = 30 * orders + 10;
    let ledger = Ledger { bucket_len: 8, durability, ..Ledger::new(Mode::Bsp, 1, steps) };
    let mut page = ledger.join(&fleet.at, 0)?;
    page.begin()?;
    for order in 0..orders {
        for place in 0..3 {
            let victim = if order % 2 == 0 { place } else { 2 - place };
            for _ in 0..5 {
                page.step()?;
            }
            fleet.kill(victim);
            for _ in 0..5 {
                page.step()?;
            }
            fleet.restart_server(victim)?;
            fleet.whole()?;
            // A new leader of the control group hears of a shard's voters a moment later.
            let all_vote = |d: &Result<DescribeReply>| {
                let votes = |s: &ShardInfo| s.voters == [0, 1, 2] && s.learners.is_empty();
                d.as_ref().is_ok_and(|d| d.shards.iter().all(votes))
            };
            wait::until("every server to vote in each shard", || fleet.describe(), all_vote)?;
        }
    }
    assert_eq!(page.run()?, vec![-1.0; steps as usize]);
    fleet.replicas_agree()?;
    Ok(())
}

#[test]
fn servers_that_lost_their_memory_learn_it_and_vote_again() -> Result<()> {
    restart_servers_in_turn(Durability::QuorumMemory, 2)
}

#[test]
fn servers_with_their_log_on_disk_come_back_under_their_name() -> Result<()> {
    restart_servers_in_turn(Durability::QuorumDisk, 2)
}

#[test]
#[ignore = "takes minutes: .ci/nightly"]
fn servers_restarted_in_turn_for_20_rounds_lose_nothing() -> Result<()> {
    restart_servers_in_turn(Durability::QuorumMemory, 40)?;
    restart_servers_in_turn(Durability::QuorumDisk, 40)
}

/// A page that is half full when every server of its fleet dies; they are started again.
fn the_whole_fleet_dies(durability: Durability) -> Result<(Fleet, Page)> {
    let mut fleet = Fleet::start(FleetOptions { durability, ..FleetOptions::replicated(2) })?;
    let ledger = Ledger { bucket_len: 8, durability, ..Ledger::new(Mode::Bsp, 1, 40) };
    let mut page = ledger.join(&fleet.at, 0)?;
    page.begin()?;
    for _ in 0..20 {
        page.step()?;
    }
    for id in 0..3 {
        fleet.kill(id);
    }
    for id in 0..3 {
        fleet.restart_server(id)?;
    }
    Ok((fleet, page))
}

#[test]
fn acknowledged_pushes_on_disk_survive_death_of_the_fleet() -> Result<()> {
    let (fleet, page) = the_whole_fleet_dies(Durability::QuorumDisk)?;
    assert_eq!(page.run()?, [-1.0; 40], "the session goes on where it was");
    fleet.replicas_agree()?;
    Ok(())
}

#[test]
fn the_whole_fleet_dies_and_the_loss_of_its_memory_is_said() -> Result<()> {
    let (fleet, page) = the_whole_fleet_dies(Durability::default())?;
    let error = page.run().expect_err("what was acknowledged is gone");
    assert!(error.to_string().contains("has lost its state"), "{error:#}");
    // The fleet itself is there, and can be given the job again.
    let again = Ledger { bucket_len: 8, ..Ledger::new(Mode::Bsp, 1, 10) };
    assert_eq!(again.join(&fleet.at, 0)?.run()?, [-1.0; 10]);
    Ok(())
}
