//! Workers whose ranks each hold a stage of the model: they learn what a worker with the whole model learns,
//! whichever rank dies.

use anyhow::{Result, ensure};
use paraft_checkpoint::Folder;
use paraft_common::{ShardId, Step};
use paraft_tests::{
    fleet::{At, Fleet, FleetOptions},
    train::{data, distance, job, job_on, replay, run_worker, train, worker, worker_from, worker_until},
    wait,
};
use paraft_worker::{Job, WorkerReport};
use std::{
    collections::BTreeMap,
    fs,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::SeqCst},
    },
    thread,
};

pub(crate) fn fleet(shards: u32) -> Result<Fleet> {
    Fleet::start(FleetOptions { servers: 3, shards, replicas: 3, ..FleetOptions::default() })
}

pub(crate) const MLP: &str = "[model]\nkind = \"mlp\"\nhidden = [40, 31, 37, 20, 24]";
const AUTOENCODER: &str = "[model]\nkind = \"autoencoder\"\nhidden = [40, 9, 40]";
const TRANSFORMER: &str = "[model]\nkind = \"transformer\"\nlayers = 3\nheads = 2\nwidth = 32";

const SET: [&str; 3] = ["train.device=cpu", "optimizer.kind=adam", "optimizer.lr=0.001"];

pub(crate) fn on_digits(at: &At, model: &str, more: &[&str]) -> Result<Job> {
    let set = ["train.batch=30", "train.max_steps=40", "cluster.bucket_bytes=1024"];
    job(at, model, &[&SET[..], &set, more].concat())
}

/// A transformer on a text.
pub(crate) fn on_text(at: &At, folder: &Path, more: &[&str]) -> Result<Job> {
    let path = folder.join("sums.txt");
    let sum = |i: u32| format!("{} and {} are {}; ", i % 7, i % 11, i % 7 + i % 11);
    fs::write(&path, (0..1500).map(sum).collect::<String>())?;
    let text = format!(
        "[data]\nkind = \"text\"\npath = {path:?}\ncontext = 16\n[eval]\nevery_epoch = false\n{TRANSFORMER}"
    );
    let set = ["train.batch=8", "train.max_steps=30", "cluster.bucket_bytes=4096"];
    job_on(at, &text, &[&SET[..], &set, more].concat())
}

/// Runs all ranks of the job; returns the final weights, which each worker's leader has.
pub(crate) fn learn(job: &Job) -> Result<Vec<f32>> {
    learn_from(job, None)
}

pub(crate) fn learn_from(job: &Job, checkpoint: Option<&Path>) -> Result<Vec<f32>> {
    let start = |rank| checkpoint.map_or_else(|| worker(job, rank), |from| worker_from(job, rank, from));
    let reports = thread::scope(|s| {
        let all: Vec<_> = (0..job.ranks()).map(|rank| s.spawn(move || start(rank))).collect();
        all.into_iter()
            .map(|t| t.join().map_err(|_| anyhow::anyhow!("a rank panicked"))?)
            .collect::<Result<Vec<WorkerReport>>>()
    })?;
    let size = job.ranks_of_worker() as usize;
    let first = reports[0].weights.clone();
    ensure!(!first.is_empty(), "the leader has no weights");
    ensure!(reports.iter().step_by(size).all(|r| r.weights == first), "workers ended with different weights");
    Ok(first)
}

/// With one micro-batch the sums have the same order, so the bits are equal; with more they are nearly equal.
#[test]
fn a_pipeline_learns_what_a_worker_with_the_whole_model_learns() -> Result<()> {
    for (model, stages) in [(MLP, &[2, 3, 4][..]), (AUTOENCODER, &[2])] {
        let whole = train(&on_digits(&fleet(4)?.at, model, &["train.workers=2"])?)?;
        for stages in stages {
            let with = |more: &[&str]| {
                let pipeline = format!("parallel.pipeline={stages}");
                let set = [&["train.workers=2", &pipeline][..], more].concat();
                learn(&on_digits(&fleet(4)?.at, model, &set)?)
            };
            let one = with(&["parallel.micro_batches=1"])?;
            assert!(one == whole, "{model}, {stages} stages: other bits");
            let gpipe = with(&["parallel.micro_batches=5", "parallel.schedule=gpipe"])?;
            let alternating = with(&["parallel.micro_batches=5"])?;
            assert!(gpipe == alternating, "{model}, {stages} stages: the schedules differ");
            let far = distance(&gpipe, &whole);
            assert!(far < 1e-3, "{model}, {stages} stages: {far} away");
        }
    }
    Ok(())
}

/// A transformer with these cuts learns nearly what a worker with the whole model does.
pub(super) fn text_learns_the_same(cuts: &[&[&str]]) -> Result<()> {
    let folder = tempfile::tempdir()?;
    let job = |at: &At, cut: &[&str]| on_text(at, folder.path(), &[&["train.workers=1"], cut].concat());
    let whole = train(&job(&fleet(4)?.at, &[])?)?;
    for cut in cuts {
        let fleet = fleet(4)?;
        let far = distance(&learn(&job(&fleet.at, cut)?)?, &whole);
        assert!(far < 2e-3, "{cut:?}: {far} away");
    }
    Ok(())
}

#[test]
fn pipeline_with_tied_embedding_learns_the_same() -> Result<()> {
    text_learns_the_same(&[
        &["parallel.pipeline=2"],
        &["parallel.pipeline=3"],
        &["parallel.pipeline=4", "parallel.schedule=gpipe", "model.checkpoint_activations=true"],
    ])
}

/// Each minibatch uses one version of the weights, forward and backward: the version before the last update,
/// unless an evaluation came between.
#[test]
fn minibatches_in_flight_use_weights_before_last_update() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let place = format!("checkpoint.dir={:?}", folder.path());
    for (model, stages, workers, more) in [
        (MLP, 2, 1, &["parallel.pipeline=2", "parallel.micro_batches=5"][..]),
        (MLP, 2, 2, &["parallel.pipeline=2", "parallel.micro_batches=2"]),
        (MLP, 3, 1, &["parallel.pipeline=3", "parallel.micro_batches=7", "train.mode=asp"]),
        (MLP, 4, 2, &["parallel.pipeline=4", "train.batch=29", "train.drop_last=false"]),
        (AUTOENCODER, 2, 2, &["parallel.pipeline=2", "optimizer.kind=sgd", "optimizer.lr=0.05"]),
        (
            MLP,
            3,
            1,
            &["parallel.pipeline=3", "eval.every_epoch=true", "train.batch=120", "train.max_steps=60"],
        ),
        (MLP, 3, 2, &["parallel.pipeline=3", "train.max_steps=35", "checkpoint.every_steps=10", &place]),
        (MLP, 2, 1, &["parallel.pipeline=2", "train.mode=asp", "checkpoint.every_steps=15", &place]),
    ] {
        let workers = format!("train.workers={workers}");
        let set = [&["parallel.schedule=2bw", "train.epochs=5", &workers][..], more].concat();
        let fleet = fleet(4)?;
        let job = on_digits(&fleet.at, model, &set)?;
        let learned = learn(&job)?;
        let replayed = replay(&job)?;
        // Counted from the version of its computation: one for each minibatch of one worker, except the first
        // after an evaluation.
        let (delays, steps) = (fleet.leader(ShardId(0)).1.delay_counts, plan_of(&job)?);
        if job.train.workers == 1 {
            let late: u64 = delays.iter().skip(1).sum();
            let prompt = delays.first().copied().unwrap_or(0);
            assert!(
                delays.len() <= 2 && prompt * (steps.0 - steps.1) == late * steps.1,
                "{more:?}: {delays:?} of {steps:?}"
            );
        }
        assert!(learned == replayed, "{stages} stages, {more:?}: {} away", distance(&learned, &replayed));
        let flushed = Job {
            parallel: paraft_worker::job::ParallelConfig {
                schedule: Default::default(),
                ..job.parallel.clone()
            },
            ..job
        };
        assert!(learned != replay(&flushed)?, "{more:?}: it was not late");
    }
    Ok(())
}

/// The job's steps, and those preceded by something else than a step.
fn plan_of(job: &Job) -> Result<(u64, u64)> {
    let plan = paraft_worker::worker::Plan::new(job, &data(job)?.train)?;
    let first = (0..plan.total).filter(|k| *k == 0 || plan.ends_at(job, Step(*k))).count();
    Ok((plan.total, first as u64))
}

/// A shared parameter comes from the stage that owns it, at the same version.
#[test]
fn a_borrowed_embedding_is_of_the_version_of_the_other_weights() -> Result<()> {
    let folder = tempfile::tempdir()?;
    for more in
        [&["parallel.pipeline=2"][..], &["parallel.pipeline=3", "eval.every_epoch=true", "train.batch=32"]]
    {
        let set = [&["train.workers=1", "train.epochs=3", "parallel.schedule=2bw"][..], more].concat();
        let fleet = fleet(4)?;
        let job = on_text(&fleet.at, folder.path(), &set)?;
        let (learned, replayed) = (learn(&job)?, replay(&job)?);
        let far = distance(&learned, &replayed);
        assert!(far < 1e-4, "{more:?}: {far} away");
    }
    Ok(())
}

/// According to the traces of its ranks.
#[test]
fn micro_batch_goes_back_at_its_forward_version() -> Result<()> {
    let (fleet, folder) = (fleet(4)?, tempfile::tempdir()?);
    let job =
        on_digits(&fleet.at, MLP, &["train.workers=1", "parallel.pipeline=3", "parallel.schedule=2bw"])?;
    thread::scope(|s| {
        let trace = |rank| run_worker(&job, rank, |o| o.trace = Some((folder.path().to_path_buf(), 99)));
        let all: Vec<_> = (0..job.ranks()).map(|rank| s.spawn(move || trace(rank))).collect();
        all.into_iter().try_for_each(|t| t.join().map_err(|_| anyhow::anyhow!("a rank panicked"))?.map(drop))
    })?;
    for rank in ["worker-0", "worker-0-rank-1", "worker-0-rank-2"] {
        let mut seen = [BTreeMap::new(), BTreeMap::new()];
        for span in paraft_trace::spans(&folder.path().join(rank).with_extension("jsonl"))? {
            let (Some(pass), way) = (span.pass, usize::from(span.stage == paraft_trace::Stage::Backward))
            else {
                continue;
            };
            let of = [span.step.0, u64::from(pass.micro_batch)];
            assert_eq!(seen[way].insert(of, pass.version.0), None, "{rank}: {of:?} twice");
        }
        let [forward, backward] = seen;
        assert_eq!(backward.len(), 40 * 12, "{rank}: of each micro-batch");
        for ([step, m], version) in backward {
            assert_eq!(version, step.saturating_sub(2), "{rank}: step {step}, micro-batch {m} back");
            assert_eq!(
                forward.get(&[step, m]),
                Some(&version),
                "{rank}: step {step}, micro-batch {m} forward"
            );
        }
    }
    Ok(())
}

/// A checkpoint of a model in stages, read by a worker without stages, and the reverse.
#[test]
fn a_checkpoint_is_of_the_whole_model_whatever_has_written_it() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let place = format!("checkpoint.dir={:?}", folder.path());
    let job = |at: &At, more: &[&str]| {
        let set = [
            "train.workers=2",
            "train.epochs=9",
            "checkpoint.every_steps=20",
            "parallel.micro_batches=1",
            &place,
        ];
        on_digits(at, MLP, &[&set[..], more].concat())
    };
    let whole = train(&on_digits(&fleet(4)?.at, MLP, &["train.workers=2", "train.epochs=9"])?)?;
    for (first, then) in
        [("parallel.pipeline=3", "parallel.pipeline=1"), ("parallel.pipeline=1", "parallel.pipeline=2")]
    {
        ensure!(learn(&job(&fleet(4)?.at, &[first])?)? == whole, "{first}");
        let half = folder.path().join(Folder::name(20));
        let rest = learn_from(&job(&fleet(4)?.at, &[then])?, Some(&half))?;
        ensure!(rest == whole, "{then} from {first}: other bits");
        let after = folder.path().join(Folder::name(40));
        ensure!(after.exists(), "the last is written too");
        [half, after].iter().try_for_each(fs::remove_dir_all)?;
    }
    Ok(())
}

/// Interrupted ranks leave as if they were killed: their group forms again.
#[test]
fn rank_of_a_pipeline_leaves_and_the_others_continue() -> Result<()> {
    leave_one_by_one(&["parallel.pipeline=2"], &MIDDLE)
}

#[test]
#[ignore = "takes minutes: .ci/nightly"]
fn each_rank_of_a_pipeline_leaves_at_each_moment() -> Result<()> {
    for schedule in ["1f1b", "2bw"] {
        leave_one_by_one(&["parallel.pipeline=3", &format!("parallel.schedule={schedule}")], &MOMENTS)?;
    }
    Ok(())
}

/// Percent of a run's pushes: when a rank leaves in its middle.
pub(crate) const MIDDLE: [u64; 1] = [33];
/// And where the others evaluate and end.
pub(crate) const MOMENTS: [u64; 3] = [33, 99, 100];

/// A scope waits for its threads even in a panic: this ends them.
struct StopAll<'a>(&'a [Arc<AtomicBool>]);

impl Drop for StopAll<'_> {
    fn drop(&mut self) {
        if thread::panicking() {
            self.0.iter().for_each(|stop| stop.store(true, SeqCst));
        }
    }
}

/// Stops each rank of one worker, at each of these moments (percent of a run's pushes).
pub(crate) fn leave_one_by_one(mesh: &[&str], moments: &[u64]) -> Result<()> {
    let set = [&["train.workers=1", "train.max_steps=200", "train.epochs=99"][..], mesh].concat();
    // The number of updates that the first stage's shard has to apply.
    let all = {
        let fleet = fleet(4)?;
        learn(&on_digits(&fleet.at, MLP, &set)?)?;
        fleet.leader(ShardId(0)).1.pushes
    };
    // In the middle, and while the others evaluate and end.
    let ranks = on_digits(&fleet(4)?.at, MLP, &set)?.ranks();
    let leaving = (0..ranks).flat_map(|rank| moments.iter().map(move |m| (rank, all * m / 100)));
    for (leaves, when) in leaving {
        let fleet = fleet(4)?;
        let job = on_digits(&fleet.at, MLP, &set)?;
        let stops: Vec<Arc<AtomicBool>> = (0..job.ranks()).map(|_| Arc::default()).collect();
        let reports: Vec<Result<WorkerReport>> = thread::scope(|s| {
            let all: Vec<_> = (0..job.ranks())
                .map(|rank| {
                    let (job, stop) = (&job, stops[rank as usize].clone());
                    s.spawn(move || worker_until(job, rank, stop))
                })
                .collect();
            let on_panic = StopAll(&stops);
            wait::until("steps", || fleet.leader(ShardId(0)).1.pushes, |at| *at >= when);
            drop(on_panic);
            stops[leaves as usize].store(true, SeqCst);
            all.into_iter().map(|t| t.join().map_err(|_| anyhow::anyhow!("a rank panicked"))?).collect()
        });
        let mut learned = Vec::new();
        for (rank, report) in (0u32..).zip(reports) {
            // At the end a rank may be done before it receives the order to leave.
            ensure!(
                report.is_ok() || rank == leaves,
                "{mesh:?}: rank {leaves} left, and rank {rank}: {:?}",
                report.err()
            );
            learned.extend(report.ok().map(|r| r.weights).filter(|w| !w.is_empty()));
        }
        ensure!(
            !learned.is_empty(),
            "{mesh:?}: rank {leaves} left at {when} of {all}, and nobody has the weights"
        );
        ensure!(learned.iter().flatten().all(|w| w.is_finite()) && learned.iter().all(|w| w.len() > 4000));
        fleet.replicas_agree()?;
    }
    Ok(())
}

#[test]
fn a_pipeline_that_cannot_be_is_refused_with_the_key() -> Result<()> {
    let fleet = fleet(4)?;
    let at = &fleet.at;
    for (more, says) in [
        (&["parallel.pipeline=9"][..], "6 layers"),
        (&["parallel.pipeline=0"], "parallel.pipeline"),
        (&["parallel.tensor=0"], "parallel.tensor"),
        (&["parallel.tensor=21"], "parallel.tensor: 21 slices of a layer of width 20"),
        (&["parallel.pipeline=2", "train.device=cuda", "train.precision=f16"], "train.precision"),
        (&["parallel.pipeline=2", "parallel.schedule=2bw", "clip.norm=1.0"], "clip.norm"),
        (&["parallel.pipeline=2", "train.group_size=600"], "train.group_size"),
        (&["parallel.pipeline=2", "train.mode=auto"], "train.mode"),
        (&["parallel.pipeline=2", "memory.resident=2"], "memory.resident"),
        (&["parallel.pipeline=2", "parallel.micro_batches=31"], "parallel.micro_batches"),
        (
            &["parallel.pipeline=3", "parallel.schedule=2bw", "parallel.micro_batches=2"],
            "parallel.micro_batches",
        ),
        (
            &["parallel.pipeline=2", "parallel.schedule=2bw", "algorithm.kind=dc-asgd", "train.mode=asp"],
            "algorithm.kind",
        ),
        (&["parallel.pipeline=5", "cluster.shards=4"], "cluster.shards"),
    ] {
        let why = match on_digits(at, MLP, more) {
            Ok(job) => format!("{:#}", worker(&job, 0).expect_err("refused")),
            Err(e) => format!("{e:#}"),
        };
        assert!(why.contains(says), "{more:?}: {why}");
    }
    Ok(())
}
