//! Several jobs on one fleet: no job is affected by another.

use anyhow::{Context, Result};
use paraft_client::ClientError;
use paraft_common::{JobId, JobShard, Mode, ShardId};
use paraft_proto::to_shard;
use paraft_tests::{
    fleet::{At, Fleet, FleetOptions},
    ledger::Ledger,
    stream::{Stream, open, push},
    train::{job, train, worker},
    wait,
};
use paraft_worker::Job;
use std::{
    collections::BTreeSet,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::SeqCst},
    },
    thread::{self, JoinHandle},
};

/// Servers that were founded for no job.
fn standing(servers: u32) -> Result<Fleet> {
    Fleet::start(FleetOptions { servers, shards: 0, replicas: 3, ..FleetOptions::default() })
}

/// A ledger's workers, each in a thread, and their progress.
struct Workers {
    furthest: Arc<AtomicU64>,
    threads: Vec<JoinHandle<Result<Vec<f32>, ClientError>>>,
}

fn begin(fleet: &Fleet, ledger: Ledger, shards: u32) -> Workers {
    let furthest = Arc::new(AtomicU64::new(0));
    let at = At { shards, ..fleet.at.clone() };
    let worker = |w| {
        let (at, furthest) = (at.clone(), furthest.clone());
        thread::spawn(move || {
            let mut page = ledger.join(&at, w)?;
            page.begin()?;
            while page.done.0 < ledger.steps {
                page.step()?;
                furthest.fetch_max(page.done.0, SeqCst);
            }
            page.finish()
        })
    };
    let threads = (0..ledger.workers).map(worker).collect();
    Workers { furthest, threads }
}

impl Workers {
    fn come_to(&self, step: u64) {
        wait::until("the job to get going", || self.furthest.load(SeqCst), |at| *at >= step);
    }

    /// Ends the workers, and checks that every push was applied once.
    fn end_exactly(self, ledger: &Ledger) -> Result<()> {
        let expected = if ledger.mode.averages() { -0.5 } else { -1.0 };
        for worker in self.threads {
            let weights = worker.join().map_err(|_| anyhow::anyhow!("a worker panicked"))??;
            let wrong: Vec<_> = weights.iter().enumerate().filter(|(_, w)| **w != expected).collect();
            assert!(wrong.is_empty(), "{}: {wrong:?} are not {expected}", ledger.name);
        }
        Ok(())
    }
}

/// The jobs of which a server holds anything.
fn held(fleet: &Fleet, server: u32) -> Result<BTreeSet<u32>> {
    Ok(fleet.status(server, false)?.shards.iter().map(|s| s.job).collect())
}

#[test]
fn jobs_stay_exact_while_servers_die_and_a_job_is_deleted() -> Result<()> {
    let mut fleet = standing(5)?;
    let names = ["bsp", "asp", "gone", "greedy"];
    let ids: Vec<JobId> = [(names[0], 2), (names[1], 3), (names[2], 2), (names[3], 2)]
        .into_iter()
        .map(|(name, shards)| fleet.submit(name, shards))
        .collect::<Result<_>>()?;
    let ledger = |name, mode, workers, steps| Ledger { name, ..Ledger::new(mode, workers, steps) };
    let all = [
        ledger(names[0], Mode::Bsp, 2, 120),
        ledger(names[1], Mode::Asp, 2, 120),
        ledger(names[2], Mode::Asp, 2, 9_000),
        ledger(names[3], Mode::Asp, 12, 150),
    ];
    let [bsp, asp, gone, greedy] =
        [(0, 2), (1, 3), (2, 2), (3, 2)].map(|(i, shards)| begin(&fleet, all[i], shards));
    [&bsp, &asp, &gone, &greedy].iter().for_each(|w| w.come_to(5));
    fleet.kill(fleet.leader_of(JobShard::first(ids[0])).0);
    bsp.come_to(30);
    fleet.end_job("gone", true)?;
    // Before the next server dies, others have the replicas of the first: a shard survives one of its three.
    wait::until(
        "the dead server's replicas to be replaced",
        || fleet.describe(),
        |d| d.as_ref().is_ok_and(|d| d.shards.len() == 7 && d.shards.iter().all(|s| s.state == "serving")),
    )?;
    let shard = JobShard::new(ids[1], ShardId(1)).context("a shard")?;
    fleet.kill(fleet.leader_of(shard).0);
    bsp.end_exactly(&all[0])?;
    asp.end_exactly(&all[1])?;
    greedy.end_exactly(&all[3])?;
    for worker in gone.threads {
        let ended = worker.join().map_err(|_| anyhow::anyhow!("a worker panicked"))?;
        let why = ended.expect_err("its job is gone").to_string();
        assert!(why.contains("no job `gone`"), "{why}");
    }
    // Nothing of it is left, in memory or in files.
    for id in fleet.alive() {
        wait::until(
            "what is left of it to go",
            || held(&fleet, id),
            |jobs| jobs.as_ref().is_ok_and(|jobs| !jobs.contains(&ids[2].0)),
        )?;
    }
    let finished = ["bsp", "asp", "greedy"].map(|name| (name.to_string(), "finished".to_string()));
    wait::until(
        "what has become of them to be known",
        || fleet.describe(),
        |d| {
            d.as_ref()
                .is_ok_and(|d| d.jobs.iter().map(|j| (j.name.clone(), j.state.clone())).eq(finished.clone()))
        },
    )?;
    Ok(())
}

#[test]
fn job_starts_from_anothers_weights_despite_leader_death() -> Result<()> {
    // Three of five servers have a replica: a leader's source is often on another one.
    let mut fleet = standing(5)?;
    let text = "[model]\nkind = \"mlp\"\nhidden = [96]";
    let shards = |n| At { shards: n, ..fleet.at.clone() };
    let (first, second) = (shards(2), shards(5));
    fleet.submit("first", 2)?;
    let learned =
        train(&job(&first, text, &["name=first", "train.workers=2", "cluster.bucket_bytes=1024"])?)?;
    // Nothing is learned: its final weights are its first.
    let like = |name: &str, more: &[&str]| {
        let name = format!("name={name}");
        let set = [&[&*name, "train.workers=2", "cluster.bucket_bytes=1024", "train.init=job:first"], more]
            .concat();
        job(&second, text, &set)
    };
    let still = ["optimizer.kind=sgd", "optimizer.lr=0"];
    let id = fleet.submit("second", 5)?;
    let inherits = like("second", &still)?;
    let trains = thread::spawn(move || train(&inherits));
    let shard = JobShard::first(id);
    wait::until("it to begin", || fleet.leader_of(shard).1.buckets, |buckets| *buckets > 0);
    fleet.kill(fleet.leader_of(shard).0);
    let began = trains.join().map_err(|_| anyhow::anyhow!("a worker panicked"))??;
    assert!(began == learned, "other weights");
    // The errors name what does not fit, and what is missing.
    fleet.submit("third", 5)?;
    let refused = |job: &Job| worker(job, 0).expect_err("refused");
    let larger = like("third", &["model.hidden=[97]"])?;
    let why = format!("{:#}", refused(&larger));
    assert!(why.contains("job `first`") && why.contains("parameters"), "{why}");
    fleet.end_job("first", true)?;
    let why = format!("{:#}", refused(&like("third", &[])?));
    assert!(why.contains("job `first`") && why.contains("not there"), "{why}");
    let why = format!("{:#}", refused(&like("third", &["train.init=job:third"])?));
    assert!(why.contains("its own weights"), "{why}");
    // A job does not wait for another that no worker has begun.
    fleet.submit("fourth", 5)?;
    fleet.submit("fifth", 5)?;
    let why = format!("{:#}", refused(&like("fifth", &["train.init=job:fourth"])?));
    assert!(why.contains("job `fourth`") && why.contains("has not begun"), "{why}");
    Ok(())
}

#[test]
fn stopped_job_ends_at_its_step_and_the_other_continues() -> Result<()> {
    let fleet = standing(3)?;
    let neighbour = Ledger { name: "b", ..Ledger::new(Mode::Bsp, 2, 100) };
    for name in ["bsp", "asp", "b"] {
        fleet.submit(name, 2)?;
    }
    let at = At { shards: 2, ..fleet.at.clone() };
    let text = "[model]\nkind = \"mlp\"\nhidden = [24]";
    let trains = |mode: &str| -> Result<_> {
        let (mode, name) = (format!("train.mode={mode}"), format!("name={mode}"));
        let job = job(&at, text, &[&mode, &name, "train.workers=2", "train.epochs=100000"])?;
        Ok(thread::spawn(move || train(&job)))
    };
    let (bsp, asp) = (trains("bsp")?, trains("asp")?);
    let short = begin(&fleet, neighbour, 2);
    for (id, name) in [(0, "bsp"), (1, "asp")] {
        let first = JobShard::first(JobId(id));
        wait::until("it to train", || fleet.leader_of(first).1.pushes, |pushes| *pushes > 50);
        let was = fleet.end_job(name, false)?;
        assert!(["running", "waiting"].contains(&&*was), "{was}: what its leader has told");
    }
    for stopped in [bsp, asp] {
        let weights = stopped.join().map_err(|_| anyhow::anyhow!("training panicked"))??;
        assert!(weights.iter().any(|w| *w != 0.0));
    }
    short.end_exactly(&neighbour)?;
    let states = || -> Result<Vec<_>> {
        Ok(fleet.describe()?.jobs.into_iter().map(|j| (j.name, j.state, j.bytes > 0)).collect())
    };
    let expected = [("bsp", "stopped", true), ("asp", "stopped", true), ("b", "finished", true)];
    let there = |s: &Result<Vec<(String, String, bool)>>| {
        let same = |(a, b): (&(String, String, bool), &(&str, &str, bool))| (&*a.0, &*a.1, a.2) == *b;
        s.as_ref().is_ok_and(|s| s.len() == 3 && s.iter().zip(&expected).all(same))
    };
    wait::until("all to have ended, with their weights kept", states, there)?;
    Ok(())
}

#[test]
fn a_worker_of_one_job_is_none_of_another() -> Result<()> {
    let fleet = standing(3)?;
    fleet.submit("a", 1)?;
    fleet.submit("b", 1)?;
    let address = || fleet.at.addresses[fleet.leader_of(JobShard::first(JobId(0))).0 as usize].clone();
    let ledger = |name| Ledger { name, ..Ledger::new(Mode::Asp, 1, 4) };
    // The leader of the control group knows all names.
    let leader = fleet.describe()?.leader;
    let mut stranger = Stream::connect(&leader)?;
    stranger.send(to_shard::Kind::Open(open(&ledger("c").job(), 0)?));
    let why = stranger.refused()?.message;
    assert!(why.contains("no job `c`") && why.contains("`a`, `b`"), "{why}");
    let (mut of_a, _) = Stream::open(&address(), &ledger("a").job(), 0, &[(0, 4)])?;
    of_a.send(to_shard::Kind::Push(push(1, 1, 0, 1.0, 4)));
    of_a.ack()?;
    let version = |job| fleet.leader_of(JobShard::first(JobId(job))).1.version;
    assert_eq!((version(0), version(1)), (1, 0), "the other has heard nothing");
    Ok(())
}
