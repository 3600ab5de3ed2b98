//! Followers that come late, logs that are cut, servers that come back without their memory.

use anyhow::Result;
use paraft_common::{LogForm, Mode, ShardId, Step};
use paraft_tests::{
    fleet::{Fleet, FleetOptions},
    ledger::Ledger,
};

/// Two of three servers take the first part of the job; the third, which starts then, can only catch up by a
/// snapshot, since the logs before it are cut. Then the first dies, and the newcomer is half of the majority.
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
fn a_follower_catches_up_by_a_snapshot_after_more_bytes_than_a_log_keeps() -> Result<()> {
    // 2 MiB a step: the log is cut at 64 MiB.
    let ledger = Ledger { bucket_len: 1 << 16, extra: 8 << 16, ..Ledger::new(Mode::Asp, 1, 60) };
    a_late_server_catches_up(ledger, 45)
}

#[test]
fn a_follower_catches_up_by_a_snapshot_after_more_entries_than_a_log_keeps() -> Result<()> {
    // 100 buckets a step: the log is cut at 4096 entries.
    let ledger = Ledger { bucket_len: 2, extra: 100, ..Ledger::new(Mode::Bsp, 1, 100) };
    a_late_server_catches_up(ledger, 60)
}

#[test]
fn a_follower_catches_up_by_a_snapshot_when_image_cuts_fill_the_log() -> Result<()> {
    let ledger = Ledger { bucket_len: 1 << 16, extra: 8 << 16, ..Ledger::new(Mode::Asp, 1, 300) };
    a_late_server_catches_up(Ledger { log: LogForm::Images, ..ledger }, 250)
}

#[test]
fn a_server_that_comes_back_without_its_memory_is_kept_out_and_the_others_go_on() -> Result<()> {
    let mut fleet = Fleet::start(FleetOptions::replicated(3))?;
    let ledger = Ledger::new(Mode::Bsp, 1, 40);
    let mut page = ledger.join(&fleet.at, 0)?;
    page.begin()?;
    for _ in 0..10 {
        page.step()?;
    }
    fleet.replicas_agree()?;
    fleet.kill(1);
    for _ in 0..5 {
        page.step()?;
    }
    fleet.restart_server(1, 4711)?;
    assert_eq!(page.run()?, [-1.0; 40]);
    let roles: Vec<String> = fleet.status(1, false)?.shards.into_iter().map(|s| s.role).collect();
    assert!(!roles.contains(&"leader".to_string()), "{roles:?}");
    // A second loss leaves no majority, whatever the one without memory says.
    fleet.kill(1);
    fleet.replicas_agree()?;
    Ok(())
}
