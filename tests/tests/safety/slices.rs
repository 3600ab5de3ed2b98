//! Workers whose ranks each hold a slice of the model, or of a stage of it: they learn nearly what a worker
//! with the whole model learns, whichever rank dies.

use super::pipeline::{
    MIDDLE, MLP, MOMENTS, fleet, learn, leave_one_by_one, on_digits, text_learns_the_same,
};
use anyhow::{Result, ensure};
use paraft_checkpoint::Folder;
use paraft_common::ShardId;
use paraft_tests::{
    fleet::At,
    train::{distance, replay, train},
    wait,
};
use std::{fs, thread};

/// Slices sum in another order.
const TOLERANCE: f64 = 2e-3;

#[test]
fn slices_learn_what_a_worker_with_the_whole_model_learns() -> Result<()> {
    let whole = train(&on_digits(&fleet(4)?.at, MLP, &["train.workers=2"])?)?;
    for mesh in [
        &["parallel.tensor=2"][..],
        &["parallel.tensor=4", "parallel.micro_batches=1"],
        &["parallel.tensor=2", "parallel.pipeline=2"],
        &["parallel.tensor=3", "parallel.pipeline=2", "parallel.schedule=gpipe"],
    ] {
        let learned = learn(&on_digits(&fleet(4)?.at, MLP, &[&["train.workers=2"][..], mesh].concat())?)?;
        let far = distance(&learned, &whole);
        assert!(far < TOLERANCE, "{mesh:?}: {far} away");
    }
    Ok(())
}

#[test]
fn slices_of_a_transformer_learn_the_same() -> Result<()> {
    text_learns_the_same(&[
        &["parallel.tensor=2"],
        &["parallel.tensor=2", "parallel.pipeline=2"],
        &["parallel.tensor=2", "parallel.pipeline=3", "model.checkpoint_activations=true"],
    ])
}

#[test]
fn pipelined_slices_use_the_versions_of_one_process() -> Result<()> {
    for more in [&["train.workers=1"][..], &["train.workers=2", "eval.every_epoch=true", "train.batch=120"]] {
        let set = ["parallel.schedule=2bw", "train.epochs=5", "parallel.pipeline=2", "parallel.tensor=2"];
        let fleet = fleet(4)?;
        let job = on_digits(&fleet.at, MLP, &[&set[..], more].concat())?;
        let far = distance(&learn(&job)?, &replay(&job)?);
        assert!(far < TOLERANCE, "{more:?}: {far} away");
    }
    Ok(())
}

/// If it dies among the buckets of a pull, the next leader sends them all again, and some are already
/// distributed.
#[test]
fn dying_leader_leaves_all_slices_with_the_same_weights() -> Result<()> {
    let wide = "[model]\nkind = \"mlp\"\nhidden = [500, 500]";
    let set = ["train.workers=1", "train.max_steps=60", "train.epochs=99", "cluster.bucket_bytes=4096"];
    let whole = train(&on_digits(&fleet(4)?.at, wide, &set)?)?;
    for (shard, step) in [(0, 5), (3, 32)] {
        let mut fleet = fleet(4)?;
        let slices = ["parallel.tensor=2", "parallel.micro_batches=1"];
        let job = on_digits(&fleet.at, wide, &[&set[..], &slices].concat())?;
        let learning = thread::spawn(move || learn(&job));
        let of = || fleet.leader(ShardId(shard));
        let (leader, _) = wait::until("the shard to come further", of, |(_, s)| {
            s.version >= step * u64::from(s.buckets.max(1))
        });
        fleet.kill(leader);
        let learned = learning.join().map_err(|_| anyhow::anyhow!("a rank panicked"))??;
        let far = distance(&learned, &whole);
        assert!(far < TOLERANCE, "the leader of {shard} died at {step}: {far} away");
        fleet.replicas_agree()?;
    }
    Ok(())
}

#[test]
fn a_checkpoint_of_slices_is_of_the_whole_model() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let place = format!("checkpoint.dir={:?}", folder.path());
    let set = ["train.workers=1", "train.epochs=9", "checkpoint.every_steps=20", &place];
    let job = |at: &At, mesh: &[&str]| on_digits(at, MLP, &[&set[..], mesh].concat());
    let learned = learn(&job(&fleet(4)?.at, &["parallel.tensor=2", "parallel.pipeline=2"])?)?;
    let half = folder.path().join(Folder::name(20));
    ensure!(half.exists(), "it is written");
    let rest = super::pipeline::learn_from(&job(&fleet(4)?.at, &[])?, Some(&half))?;
    let far = distance(&rest, &learned);
    ensure!(far < TOLERANCE, "{far} away");
    fs::remove_dir_all(&half)?;
    Ok(())
}

#[test]
fn slice_leaves_and_the_other_continues_with_its_part() -> Result<()> {
    leave_one_by_one(&["parallel.tensor=2"], &MIDDLE)
}

#[test]
#[ignore = "takes minutes: .ci/nightly"]
fn each_slice_leaves_at_each_moment() -> Result<()> {
    leave_one_by_one(&["parallel.tensor=2"], &MOMENTS)?;
    leave_one_by_one(&["parallel.tensor=2", "parallel.pipeline=2", "parallel.schedule=2bw"], &MOMENTS)
}
