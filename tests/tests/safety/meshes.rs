//! Workers whose ranks have several copies of a model, in meshes with samples of their own: they learn nearly
//! what as many workers learn, whichever rank dies.

use super::pipeline::{MIDDLE, MLP, MOMENTS, fleet, learn, leave_one_by_one, on_digits, on_text};
use anyhow::{Result, ensure};
use paraft_common::ShardId;
use paraft_tests::{
    train::{distance, replay, train, worker_until},
    wait,
};
use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::SeqCst},
    },
    thread,
};

/// Meshes sum in another order.
const TOLERANCE: f64 = 2e-3;

#[test]
fn meshes_learn_what_as_many_workers_learn() -> Result<()> {
    for (meshes, cuts) in [
        (
            2,
            &[
                &["parallel.pipeline=2"][..],
                &["parallel.tensor=2", "parallel.micro_batches=1"],
                &["parallel.pipeline=2", "parallel.tensor=2", "parallel.schedule=gpipe"],
            ][..],
        ),
        (3, &[&["parallel.pipeline=3"]]),
    ] {
        let whole = train(&on_digits(&fleet(4)?.at, MLP, &[&format!("train.workers={}", 2 * meshes)])?)?;
        let group = format!("train.group_size={meshes}");
        for cut in cuts {
            let set = [&["train.workers=2", &group, "eval.every_epoch=true"][..], cut].concat();
            let far = distance(&learn(&on_digits(&fleet(4)?.at, MLP, &set)?)?, &whole);
            ensure!(far < TOLERANCE, "{meshes} of {cut:?}: {far} away");
        }
    }
    Ok(())
}

#[test]
fn meshes_of_a_transformer_learn_the_same() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let whole = train(&on_text(&fleet(4)?.at, folder.path(), &["train.workers=2"])?)?;
    for cut in [
        &["parallel.pipeline=2"][..],
        &["parallel.tensor=2"],
        &["parallel.pipeline=3", "parallel.tensor=2", "model.checkpoint_activations=true"],
    ] {
        let set = [&["train.workers=1", "train.group_size=2"][..], cut].concat();
        let far = distance(&learn(&on_text(&fleet(4)?.at, folder.path(), &set)?)?, &whole);
        ensure!(far < TOLERANCE, "{cut:?}: {far} away");
    }
    Ok(())
}

#[test]
fn pipelined_meshes_use_the_versions_of_one_process() -> Result<()> {
    for more in [
        &["parallel.tensor=1", "eval.every_epoch=true"][..],
        &["parallel.tensor=2", "train.workers=2", "train.batch=60"],
    ] {
        let set = ["train.workers=1", "train.group_size=2", "parallel.schedule=2bw", "parallel.pipeline=2"];
        let fleet = fleet(4)?;
        let job = on_digits(&fleet.at, MLP, &[&set[..], &["train.epochs=5"], more].concat())?;
        let far = distance(&learn(&job)?, &replay(&job)?);
        ensure!(far < TOLERANCE, "{more:?}: {far} away");
    }
    Ok(())
}

#[test]
fn rank_of_a_pipelined_mesh_leaves_and_the_others_continue() -> Result<()> {
    leave_one_by_one(&["train.group_size=2", "parallel.pipeline=2", "parallel.schedule=2bw"], &MIDDLE)
}

#[test]
#[ignore = "takes minutes: .ci/nightly"]
fn each_rank_of_a_mesh_leaves_at_each_moment() -> Result<()> {
    leave_one_by_one(&["train.group_size=2", "parallel.tensor=2"], &MOMENTS)?;
    leave_one_by_one(&["train.group_size=2", "parallel.pipeline=2", "parallel.schedule=2bw"], &MOMENTS)
}

#[test]
fn mesh_leader_continues_session_without_lost_meshes() -> Result<()> {
    let fleet = fleet(4)?;
    let set = ["train.group_size=3", "parallel.pipeline=2", "train.mode=asp"];
    let long = ["train.workers=1", "train.max_steps=400", "train.epochs=99"];
    let job = on_digits(&fleet.at, MLP, &[&set[..], &long].concat())?;
    let stops: Vec<Arc<AtomicBool>> = (0..job.ranks()).map(|_| Arc::default()).collect();
    thread::scope(|s| {
        let all: Vec<_> = (0u32..)
            .zip(&stops)
            .map(|(rank, stop)| {
                let job = &job;
                s.spawn(move || worker_until(job, rank, stop.clone()))
            })
            .collect();
        let session = |pushes: u64| {
            let of = || fleet.leader(ShardId(0)).1;
            let then = wait::until("steps", of, |s| s.pushes >= pushes);
            then.members.iter().map(|m| m.session).collect::<Vec<_>>()
        };
        let before = session(100);
        stops[4].store(true, SeqCst);
        // Two meshes are left.
        let after = session(fleet.leader(ShardId(0)).1.pushes + 600);
        assert_eq!((before.len(), &before), (1, &after));
        for (rank, report) in all.into_iter().map(|t| t.join()).enumerate() {
            let report = report.map_err(|_| anyhow::anyhow!("a rank panicked"))?;
            ensure!(report.is_ok() || rank == 4, "rank {rank}: {:?}", report.err());
        }
        Ok(())
    })
}
