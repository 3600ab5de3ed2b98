//! Workers with local weights: what they learn, what they push, and a job that loses one.

use anyhow::{Context, Result, ensure};
use paraft_tests::{
    fleet::{Fleet, FleetOptions},
    train::{distance, job, train, train_from, worker, worker_until},
    wait,
};
use paraft_worker::{Job, WorkerReport};
use std::{
    sync::{Arc, atomic::AtomicBool, atomic::Ordering::SeqCst},
    thread,
};

const MLP: &str = "[model]\nkind = \"mlp\"\nhidden = [24]\n[optimizer]\nkind = \"sgd\"\nlr = 0.1\n";

/// A job on a fleet of its own. 1437 samples, 35 in a minibatch: 20 minibatches per epoch for each of two
/// workers.
fn fleet_and_job(set: &[&str]) -> Result<(Fleet, Job)> {
    let fleet = Fleet::start(FleetOptions { shards: 2, ..FleetOptions::default() })?;
    let all = [&["train.batch=35", "train.epochs=10", "cluster.bucket_bytes=1024"], set].concat();
    let job = job(&fleet.at, MLP, &all)?;
    Ok((fleet, job))
}

fn weights_of(set: &[&str]) -> Result<Vec<f32>> {
    let (_fleet, job) = fleet_and_job(set)?;
    train(&job)
}

/// The reports of all workers, by rank.
fn reports(job: &Job) -> Result<Vec<WorkerReport>> {
    thread::scope(|s| {
        let all: Vec<_> = (0..job.train.workers).map(|rank| s.spawn(move || worker(job, rank))).collect();
        all.into_iter().map(|t| t.join().map_err(|_| anyhow::anyhow!("a worker panicked"))?).collect()
    })
}

fn accuracy(reports: &[WorkerReport]) -> Result<f64> {
    let e = reports.iter().find_map(|r| r.evaluation.as_ref()).context("nobody evaluated")?;
    Ok(e.correct as f64 / e.count as f64)
}

/// Steps and samples of each worker, pushed bytes of all, and the accuracy.
fn run(set: &[&str]) -> Result<(u64, u64, u64, f64)> {
    let (fleet, job) = fleet_and_job(set)?;
    let reports = reports(&job)?;
    let bytes = fleet.status(0, false)?.shards.iter().map(|s| s.bytes_pushed).sum();
    Ok((reports[0].steps, reports[0].samples, bytes, accuracy(&reports)?))
}

fn bits(weights: &[f32]) -> Vec<u32> {
    weights.iter().map(|w| w.to_bits()).collect()
}

#[test]
fn twenty_inner_steps_push_a_twentieth_of_the_bytes() -> Result<()> {
    let every = run(&["train.epochs=20"])?;
    let diloco = run(&["train.epochs=20", "local.steps=20"])?;
    ensure!((every.0, diloco.0) == (400, 20), "{every:?} {diloco:?}");
    ensure!(every.1 == diloco.1, "not the same samples: {every:?} {diloco:?}");
    ensure!(every.2 == 20 * diloco.2, "{} bytes, and {}", every.2, diloco.2);
    ensure!(diloco.3 > 0.9, "diloco came to {}, every step to {}", diloco.3, every.3);
    Ok(())
}

#[test]
fn the_last_step_of_an_epoch_takes_what_is_left_of_it() -> Result<()> {
    // 20 minibatches in steps of 8, 8 and 4.
    let (steps, samples, _, _) = run(&["train.epochs=3", "local.steps=8"])?;
    ensure!((steps, samples) == (9, 3 * 20 * 35), "{steps} steps, {samples} samples");
    // train.max_steps counts steps.
    let (steps, samples, _, _) = run(&["train.max_steps=4", "local.steps=8"])?;
    ensure!((steps, samples) == (4, 28 * 35), "{steps} steps, {samples} samples");
    Ok(())
}

#[test]
fn one_local_step_with_outer_sgd_equals_lock_step_training() -> Result<()> {
    let local = ["local.steps=1", "local.outer.kind=sgd", "local.outer.lr=1.0"];
    let (plain, diloco) = (weights_of(&[])?, weights_of(&local)?);
    let apart = distance(&plain, &diloco);
    // 200 updates, each rounded at the size of a weight instead of at the size of its change.
    ensure!(apart < 1e-4, "{apart:e} apart");
    // Two steps give other weights.
    let other = weights_of(&[&local[..], &["local.steps=2"]].concat())?;
    ensure!(distance(&plain, &other) > 1e-2, "local steps did nothing");
    Ok(())
}

#[test]
fn lock_step_local_steps_have_the_bits_of_one_process() -> Result<()> {
    for local in [
        vec!["local.steps=6", "optimizer.kind=adam", "optimizer.lr=0.01", "clip.norm=0.5"],
        // Steps of 7, 7 and 6 minibatches.
        vec!["local.steps=7", "local.fragments=3", "optimizer.kind=adam", "optimizer.lr=0.01"],
        vec!["local.steps=9", "local.fragments=3", "train.encoding=top-k:0.2"],
        vec!["local.steps=5", "local.fragments=2", "train.workers=3"],
    ] {
        let (_fleet, job) = fleet_and_job(&[&["train.workers=2", "train.epochs=4"], &local[..]].concat())?;
        let (fleet, oracle) = (train(&job)?, paraft_proof::oracle(&job, paraft_proof::Order::Shares)?);
        ensure!(bits(&fleet) == bits(&oracle), "{local:?}: {:e} apart", distance(&fleet, &oracle));
    }
    Ok(())
}

#[test]
fn fragments_push_the_same_bytes_and_learn_in_every_mode() -> Result<()> {
    let diloco = ["train.epochs=20", "local.steps=10"];
    let whole = run(&diloco)?;
    for (mode, level) in
        [("bsp", "quorum-memory"), ("ssp:1", "quorum-memory"), ("asp", "quorum-memory"), ("asp", "leader")]
    {
        let (mode, level) = (format!("train.mode={mode}"), format!("cluster.durability={level}"));
        let more = ["local.fragments=5", "local.outer.kind=sgd", "local.outer.lr=0.8", &mode, &level];
        let found = run(&[&diloco[..], &more].concat())?;
        ensure!(
            (found.0, found.1, found.2) == (whole.0, whole.1, whole.2),
            "{mode} {level}: {found:?}, {whole:?}"
        );
        ensure!(found.3 > 0.88, "{mode} {level} came to {}, whole to {}", found.3, whole.3);
    }
    Ok(())
}

#[test]
fn worker_dying_in_its_local_steps_is_replaced() -> Result<()> {
    for more in [&[][..], &["local.fragments=5"]] {
        let set = ["train.epochs=200", "local.steps=5", "cluster.grace_ms=1000"];
        let (fleet, job) = fleet_and_job(&[&set[..], more].concat())?;
        let interrupt = Arc::<AtomicBool>::default();
        let (dying, soon) = (job.clone(), interrupt.clone());
        let dies = thread::spawn(move || worker_until(&dying, 1, soon));
        let lives = job.clone();
        let lives = thread::spawn(move || worker(&lives, 0));
        wait::until("the job to get going", || fleet.shard().version, |v| *v > 20);
        interrupt.store(true, SeqCst);
        let died = dies.join().map_err(|_| anyhow::anyhow!("a worker panicked"))?;
        ensure!(died.is_err(), "{more:?}: it was done before it could die");
        let again = worker(&job, 1)?;
        let lived = lives.join().map_err(|_| anyhow::anyhow!("a worker panicked"))??;
        ensure!(
            again.steps > 0 && bits(&again.weights) == bits(&lived.weights),
            "{more:?}: {} steps",
            again.steps
        );
        let found = accuracy(&[lived, again])?;
        ensure!(found > 0.9, "{more:?}: it came to {found}");
    }
    Ok(())
}

#[test]
fn a_checkpoint_holds_the_center_and_the_outer_optimizer() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let folder = format!("checkpoint.dir={}", dir.path().display());
    // Plain SGD inside: a worker that restarts has lost nothing.
    let local = ["local.steps=5"];
    let set = [&local[..], &[&folder, "checkpoint.every_epochs=2", "train.epochs=2"]].concat();
    weights_of(&set)?;
    let on = [&local[..], &["train.epochs=4"]].concat();
    let whole = weights_of(&on)?;
    let (_fleet, job) = fleet_and_job(&on)?;
    let resumed = train_from(&job, dir.path())?;
    assert_eq!(bits(&whole), bits(&resumed));
    Ok(())
}
