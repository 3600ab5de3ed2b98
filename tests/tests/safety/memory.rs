//! Memory runs out: a job that asks for too much is refused with the numbers, and an entry of the log stops
//! only those replicas that have no room for it.

use anyhow::{Context, Result, ensure};
use paraft_common::{Durability, Mode, ShardId, config::ServerJob, optim::OptimizerConfig};
use paraft_proto::{Advice, Refused, from_shard, to_shard::Kind};
use paraft_server::{
    replicated::Change,
    shard::{Command, begin::JOB_FORM},
};
use paraft_tests::{
    fleet::{Fleet, FleetOptions},
    ledger::Ledger,
    stream::{Stream, open},
    wait,
};

/// The largest possible job: 64 GiB of weights, and Adam's slots.
fn largest(durability: Durability) -> ServerJob {
    let adam: OptimizerConfig = toml::from_str("kind = \"adam\"\nlr = 0.1").expect("valid");
    ServerJob { optimizer: adam, durability, ..ServerJob::new("largest", Mode::Bsp, 1 << 34, 1 << 18) }
}

fn on_disk() -> Result<Fleet> {
    Fleet::start(FleetOptions { durability: Durability::QuorumDisk, ..FleetOptions::replicated(2) })
}

/// The refusal of a job by the leader of shard 0.
fn refused(fleet: &Fleet, job: &ServerJob) -> Result<Refused> {
    let ask = || {
        fleet.at.addresses.iter().find_map(|address| {
            let mut stream = Stream::connect(address).ok()?;
            stream.send(Kind::Open(open(job, 0).ok()?));
            match stream.receive().ok()?? {
                from_shard::Kind::Refused(r) => {
                    let passes = matches!(r.advice(), Advice::Redirect | Advice::Retry);
                    (!passes).then_some(r)
                }
                other => panic!("it was taken: {other:?}"),
            }
        })
    };
    wait::until("a leader's word on the job", ask, Option::is_some).context("no word")
}

#[test]
fn job_larger_than_its_servers_is_refused_with_numbers() -> Result<()> {
    let mut fleet = on_disk()?;
    for _ in 0..3 {
        let refused = refused(&fleet, &largest(Durability::QuorumDisk))?;
        assert_eq!(refused.advice(), Advice::Fix);
        for word in ["too large for this fleet", "weights 192.0 GiB", "slots 384.0 GiB", " free of "] {
            ensure!(refused.message.contains(word), "`{word}` is not in: {}", refused.message);
        }
    }
    for id in 0..3 {
        let status = fleet.status(id, false)?;
        ensure!(status.shards.iter().all(|s| s.buckets == 0 && s.trouble.is_empty()), "{status:?}");
        ensure!(status.memory.is_some_and(|m| m.free > 0 && m.promised == 0));
    }
    // It is in no log either.
    (0..3).for_each(|id| fleet.kill(id));
    (0..3).try_for_each(|id| fleet.restart_server(id))?;
    fleet.whole()?;
    let ledger = Ledger { durability: Durability::QuorumDisk, ..Ledger::new(Mode::Asp, 1, 12) };
    assert_eq!(ledger.join(&fleet.at, 0)?.run()?, vec![-1.0; ledger.len()]);
    Ok(())
}

#[test]
fn log_with_oversized_job_stops_only_its_replicas() -> Result<()> {
    let mut fleet = on_disk()?;
    let (leader, _) = fleet.leader(ShardId(1));
    let command = Command::Admit { form: JOB_FORM, job: largest(Durability::QuorumDisk).to_toml()? };
    let group = fleet.replica(leader, ShardId(1))?.group;
    let runtime = tokio::runtime::Runtime::new()?;
    let written = runtime.block_on(group.propose(Change::Shard(command.into())));
    // No replica can apply it, so its outcome never arrives.
    let outcome = written.map_err(|e| anyhow::anyhow!("{e}"))?;
    let trouble = |fleet: &Fleet| {
        fleet.alive().into_iter().find_map(|id| {
            // It waits for memory, and is tried again now and then.
            let waits = fleet.status(id, false).ok()?.stopped.into_iter();
            waits.map(|w| w.why).find(|why| why.contains("shard 1 needs"))
        })
    };
    let why = wait::until("a replica that says what it lacks", || trouble(&fleet), Option::is_some);
    let why = why.context("no word")?;
    for word in ["weights 32.0 GiB", "slots 64.0 GiB", " free of "] {
        ensure!(why.contains(word), "`{word}` is not in: {why}");
    }
    // Every server runs, and the other shard trains: the job has one bucket, on shard 0.
    let ledger =
        Ledger { durability: Durability::QuorumDisk, bucket_len: 64, ..Ledger::new(Mode::Asp, 1, 12) };
    assert_eq!(ledger.join(&fleet.at, 0)?.run()?, vec![-1.0; ledger.len()]);
    // A held group keeps the log of its server open, as a process that has not ended would.
    drop((outcome, group));
    (0..3).for_each(|id| fleet.kill(id));
    (0..3).try_for_each(|id| fleet.restart_server(id))?;
    let held = || fleet.leader(ShardId(0)).1;
    wait::until("what was acknowledged", held, |s| (s.buckets, s.pushes) == (1, 12));
    for id in 0..3 {
        fleet.status(id, false)?;
    }
    Ok(())
}

#[test]
fn a_job_with_values_that_cannot_be_is_refused_by_name() -> Result<()> {
    let fleet = Fleet::start(FleetOptions::default())?;
    let job = || ServerJob::new("values", Mode::Bsp, 10, 4);
    let stop = |patience, min_delta| Some(paraft_common::config::EarlyStop { patience, min_delta });
    let cases = [
        (ServerJob { name: "n".repeat(60_000), ..job() }, "has 60000 characters"),
        (ServerJob { name: "a\0b".into(), ..job() }, "it has '\\0'"),
        (ServerJob { name: "\u{1b}[2J".into(), ..job() }, "cannot be a job's name"),
        (ServerJob { grace_ms: i64::MAX as u64, ..job() }, "more than a day"),
        (ServerJob { early_stop: stop(0, 0.0), ..job() }, "patience 0"),
        (ServerJob { early_stop: stop(1, f64::NAN), ..job() }, "min_delta NaN"),
    ];
    for (job, word) in cases {
        let refused = refused(&fleet, &job)?;
        ensure!(refused.message.contains(word), "`{word}` is not in: {}", refused.message);
        let printable = |c: char| c == '\n' || !c.is_control();
        ensure!(refused.message.chars().all(printable) && refused.message.len() < 1000, "{refused:?}");
    }
    Ok(())
}
