//! Workers whose ranks each have a part of the model, and clip by the norm of the whole gradient, of which
//! each rank sees a part: they learn what a worker with the whole model learns, whichever rank dies.

use super::{
    pipeline::{MIDDLE, MLP, MOMENTS, fleet, learn, leave_one_by_one, on_digits},
    switches::switch_job,
};
use anyhow::{Result, ensure};
use paraft_common::{Mode, ShardId};
use paraft_tests::{
    fleet::At,
    train::{distance, train},
    wait,
};
use paraft_worker::Job;
use std::thread;

const CLIP: &str = "clip.norm=0.05";

/// Not an optimizer that uses only a gradient's direction: it would not notice a factor.
const SET: [&str; 2] = ["optimizer.kind=momentum", "optimizer.lr=0.05"];

/// Slices and meshes sum in another order.
const TOLERANCE: f64 = 2e-3;

fn clipped(at: &At, more: &[&str]) -> Result<Job> {
    on_digits(at, MLP, &[&SET[..], &[CLIP], more].concat())
}

/// Learned by a worker with the whole model; without the bound the weights differ.
fn whole(more: &[&str]) -> Result<Vec<f32>> {
    let whole = train(&clipped(&fleet(4)?.at, more)?)?;
    let free = train(&on_digits(&fleet(4)?.at, MLP, &[&SET[..], more].concat())?)?;
    let far = distance(&free, &whole);
    ensure!(far > 20.0 * TOLERANCE, "{more:?}: without clipping it is {far} away");
    Ok(whole)
}

#[test]
fn a_pipeline_clips_by_the_norm_of_the_whole_gradient() -> Result<()> {
    for set in [
        &["train.workers=1"][..],
        &["train.workers=2"],
        &["train.workers=1", "train.mode=asp"],
        &["train.workers=1", "train.mode=ssp:2"],
    ] {
        let whole = whole(set)?;
        for stages in [2, 3] {
            let with = |more: &[&str]| {
                let pipeline = format!("parallel.pipeline={stages}");
                learn(&clipped(&fleet(4)?.at, &[set, &[&pipeline], more].concat())?)
            };
            let one = with(&["parallel.micro_batches=1"])?;
            let far = distance(&one, &whole);
            assert!(one == whole, "{set:?}, {stages} stages: other bits, {far} away");
            let far = distance(&with(&["parallel.micro_batches=5", "parallel.schedule=gpipe"])?, &whole);
            assert!(far < TOLERANCE, "{set:?}, {stages} stages: {far} away");
        }
    }
    Ok(())
}

#[test]
fn slices_and_meshes_clip_by_the_norm_of_the_whole_gradient() -> Result<()> {
    for mode in ["train.mode=bsp", "train.mode=asp"] {
        let alone = whole(&["train.workers=1", mode])?;
        for mesh in [&["parallel.tensor=2"][..], &["parallel.tensor=2", "parallel.pipeline=2"]] {
            let set = [&["train.workers=1", mode][..], mesh].concat();
            let far = distance(&learn(&clipped(&fleet(4)?.at, &set)?)?, &alone);
            assert!(far < TOLERANCE, "{mode}, {mesh:?}: {far} away");
        }
    }
    // A round's mean is over meshes or over workers.
    let two = whole(&["train.workers=2"])?;
    for mesh in [
        &["parallel.pipeline=2"][..],
        &["parallel.tensor=2"],
        &["parallel.pipeline=2", "parallel.tensor=2", "train.mode=asp"],
    ] {
        let set = [&["train.workers=1", "train.group_size=2"][..], mesh].concat();
        let far = distance(&learn(&clipped(&fleet(4)?.at, &set)?)?, &two);
        assert!(far < TOLERANCE, "{mesh:?}: {far} away");
    }
    Ok(())
}

/// One worker gets the same bits in every mode, even if its ranks learn of a switch at different steps.
#[test]
fn a_switch_of_the_mode_changes_no_bit_of_one_worker() -> Result<()> {
    let long = ["train.workers=1", "train.max_steps=400", "train.epochs=99"];
    let whole = train(&clipped(&fleet(4)?.at, &long)?)?;
    for stages in ["parallel.pipeline=1", "parallel.pipeline=2", "parallel.pipeline=3"] {
        let fleet = fleet(4)?;
        let job = clipped(&fleet.at, &[&long[..], &["parallel.micro_batches=1", stages]].concat())?;
        let learned = thread::scope(|s| {
            let learning = s.spawn(|| learn(&job));
            let mut number = 0;
            for (mode, at) in [(Mode::Asp, 60), (Mode::Bsp, 150), (Mode::Ssp(1), 240)] {
                let first = || fleet.leader(ShardId(0)).1;
                let far = |s: &paraft_proto::ShardStatus| s.version >= at * u64::from(s.buckets.max(1));
                wait::until("the job to come further", first, far);
                // As `paraft mode` does.
                number = switch_job(&fleet, (&job.name, 0), mode.into(), 0)?;
                (1..4).try_for_each(|shard| {
                    switch_job(&fleet, (&job.name, shard), mode.into(), number).map(drop)
                })?;
            }
            ensure!(number == 3, "{number} switches");
            learning.join().map_err(|_| anyhow::anyhow!("a rank panicked"))?
        })?;
        assert!(learned == whole, "{stages}: {} away", distance(&learned, &whole));
        fleet.replicas_agree()?;
    }
    Ok(())
}

/// The next leader closes its rounds again, and asks for the norm again.
#[test]
fn a_leader_that_dies_changes_no_bit() -> Result<()> {
    let long = ["train.max_steps=200", "train.epochs=99"];
    for set in [["train.workers=2", "train.mode=bsp"], ["train.workers=1", "train.mode=asp"]] {
        let whole = train(&clipped(&fleet(4)?.at, &[&set[..], &long].concat())?)?;
        for (shard, at) in [(0, 30), (1, 80), (3, 150)] {
            let mut fleet = fleet(4)?;
            let stages = ["parallel.pipeline=2", "parallel.micro_batches=1"];
            let job = clipped(&fleet.at, &[&set[..], &long, &stages].concat())?;
            let learning = thread::spawn(move || learn(&job));
            let of = || fleet.leader(ShardId(shard));
            let (leader, _) = wait::until("the shard to come further", of, |(_, s)| {
                s.version >= at * u64::from(s.buckets.max(1))
            });
            fleet.kill(leader);
            let learned = learning.join().map_err(|_| anyhow::anyhow!("a rank panicked"))??;
            let far = distance(&learned, &whole);
            assert!(learned == whole, "{set:?}, the leader of {shard} died: {far} away");
            fleet.replicas_agree()?;
        }
    }
    Ok(())
}

#[test]
fn rank_leaves_and_the_others_clip() -> Result<()> {
    leave_one_by_one(&["parallel.pipeline=2", CLIP], &MIDDLE)
}

#[test]
#[ignore = "takes minutes: .ci/nightly"]
fn each_rank_leaves_and_the_others_clip() -> Result<()> {
    leave_one_by_one(&["parallel.pipeline=2", CLIP], &MOMENTS)?;
    leave_one_by_one(&["parallel.pipeline=3", CLIP, "train.mode=asp"], &MOMENTS)?;
    leave_one_by_one(&["parallel.pipeline=2", CLIP, "train.workers=2"], &MOMENTS)?;
    leave_one_by_one(&["parallel.pipeline=2", "parallel.tensor=2", CLIP], &MOMENTS)?;
    leave_one_by_one(&["parallel.pipeline=2", CLIP, "train.workers=2", "train.mode=asp"], &MOMENTS)
}
