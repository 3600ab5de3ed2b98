//! A training loop of a user: it gives the same weights as ours, in every way of training, and reports
//! misuse.

use anyhow::{Context, Result, ensure};
use paraft_tests::{
    fleet::{Fleet, FleetOptions},
    train::{data, job, model, train},
};
use paraft_worker::{
    Batch, ErrorKind, Evaluation, Job, LoopAction, Run, Setup, WorkerError, WorkerOptions, WorkerReport,
    samples::fill,
};
use std::thread;

const MLP: &str = "[model]\nkind = \"mlp\"\nhidden = [24]\n[optimizer]\nkind = \"adam\"\nlr = 0.01\n";

fn fleet_and_job(set: &[&str]) -> Result<(Fleet, Job)> {
    let fleet = Fleet::start(FleetOptions { shards: 2, ..FleetOptions::default() })?;
    // Small buckets: a tensor lies in several, and several tensors in one.
    let all = [&["train.batch=35", "train.epochs=3", "cluster.bucket_bytes=1024"], set].concat();
    let job = job(&fleet.at, MLP, &all)?;
    Ok((fleet, job))
}

/// Numbers of minibatches and evaluations of a loop.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct LoopCounts {
    minibatches: u64,
    evaluated: u64,
}

/// A worker with its loop here. `first_layer_first`: gradients are passed in the reverse of the usual order.
fn own(job: &Job, rank: u32, first_layer_first: bool) -> Result<(WorkerReport, LoopCounts)> {
    let split = data(job)?;
    let mut model = model(job, &split)?;
    let options = WorkerOptions::new(rank, job.cluster.addresses.clone());
    let init = model_init(job)?;
    let setup = Setup {
        classifies: true,
        held_out: split.test.len(),
        ..Setup::new(model.tensors(), split.train.len(), |_, w: &mut [f32]| w.copy_from_slice(&init))
    };
    let mut run = Run::join(job, &options, setup)?;
    let mut ranges: Vec<_> = run.tensors().map(|(_, range)| range).enumerate().collect();
    if !first_layer_first {
        ranges.reverse();
    }
    let (mut seen, mut batch) = (LoopCounts::default(), Batch::default());
    let mut grads = vec![f32::NAN; run.weights().len()];
    loop {
        match run.next()? {
            LoopAction::Train(minibatch) => {
                seen.minibatches += 1;
                fill(&split.train, &minibatch.samples, &mut batch)?;
                let loss = model.step(run.weights(), &mut grads, &batch, &mut |_, _| {})?;
                for (tensor, range) in &ranges {
                    run.ready(*tensor, &grads[range.clone()])?;
                }
                run.trained(loss)?;
            }
            LoopAction::Evaluate { samples } => {
                let mine: Vec<u32> = samples.iter().map(|i| *i as u32).collect();
                fill(&split.test, &mine, &mut batch)?;
                run.evaluated(model.evaluate(run.weights(), &batch)?)?;
                seen.evaluated += mine.len() as u64;
            }
            LoopAction::Over => return Ok((run.finish()?, seen)),
        }
    }
}

fn model_init(job: &Job) -> Result<Vec<f32>> {
    let model = model(job, &data(job)?)?;
    let mut weights = vec![0.0; model.tensors().iter().map(paraft_worker::TensorSpec::len).sum()];
    model.init(job.seed, &mut weights);
    Ok(weights)
}

fn all(job: &Job) -> Result<Vec<(WorkerReport, LoopCounts)>> {
    thread::scope(|s| {
        let threads: Vec<_> =
            (0..job.train.workers).map(|rank| s.spawn(move || own(job, rank, rank == 1))).collect();
        threads.into_iter().map(|t| t.join().map_err(|_| anyhow::anyhow!("a worker panicked"))?).collect()
    })
}

#[test]
fn a_loop_of_ones_own_gives_the_weights_of_ours() -> Result<()> {
    for set in [
        &["train.workers=2"][..],
        &["train.workers=2", "train.encoding=bf16", "clip.norm=0.5"],
        &["train.workers=2", "local.steps=5"],
        &["train.workers=2", "local.steps=6", "local.fragments=3"],
        &["train.workers=1", "train.mode=asp"],
        &["train.workers=1", "train.mode=asp", "train.sampler=leased"],
    ] {
        let (_ours_fleet, job_of_ours) = fleet_and_job(set)?;
        let ours = train(&job_of_ours)?;
        let (_fleet, job) = fleet_and_job(set)?;
        let reports = all(&job)?;
        for (report, _) in &reports {
            let same = report.weights.iter().zip(&ours).all(|(a, b)| a.to_bits() == b.to_bits());
            ensure!(
                same && report.weights.len() == ours.len(),
                "other weights than those of our loop: {set:?}"
            );
        }
        let evaluated: Vec<Evaluation> = reports.iter().filter_map(|(r, _)| r.evaluation).collect();
        ensure!(
            evaluated.len() == 1,
            "the final weights are one worker's to evaluate: {set:?} {evaluated:?}"
        );
    }
    Ok(())
}

#[test]
fn the_shares_of_an_evaluation_are_all_held_out_samples() -> Result<()> {
    let (_fleet, job) = fleet_and_job(&["train.workers=2", "eval.every_epoch=true", "train.epochs=2"])?;
    let held_out = data(&job)?.test.len() as u64;
    let reports = all(&job)?;
    let evaluated: u64 = reports.iter().map(|(_, seen)| seen.evaluated).sum();
    // Each epoch by shares; if the last is not the final evaluation, one more.
    ensure!(
        [2, 3].contains(&(evaluated / held_out)) && evaluated.is_multiple_of(held_out),
        "{evaluated} of {held_out}"
    );
    Ok(())
}

#[test]
fn what_is_called_out_of_turn_is_said_and_changes_nothing() -> Result<()> {
    let (_fleet, job) = fleet_and_job(&["train.workers=1", "train.max_steps=3"])?;
    let init = model_init(&job)?;
    let model = model(&job, &data(&job)?)?;
    let setup = || Setup::new(model.tensors(), 1437, |_, w: &mut [f32]| w.copy_from_slice(&init));
    let options = WorkerOptions::new(0, job.cluster.addresses.clone());
    let lengths: Vec<usize> = model.tensors().iter().map(paraft_worker::TensorSpec::len).collect();
    let mut run = Run::join(&job, &options, setup())?;
    let says = |got: Result<(), WorkerError>, what: &str| {
        let e = got.err().with_context(|| format!("no error: {what}"))?;
        ensure!(e.kind() == ErrorKind::Config && e.to_string().contains(what), "{e}, not {what}");
        Ok(())
    };
    says(run.ready(0, &vec![0.0; lengths[0]]), "no minibatch is in training")?;
    says(run.trained(1.0), "no minibatch is in training")?;
    says(run.evaluated(Evaluation::default()), "no evaluation is asked for")?;
    ensure!(matches!(run.next()?, LoopAction::Train(_)));
    says(run.next().map(drop), "call trained")?;
    says(run.ready(99, &[]), "tensor 99 of a model of 4")?;
    says(run.ready(0, &[0.0]), "which has")?;
    for (tensor, len) in lengths.iter().enumerate().skip(1) {
        run.ready(tensor, &vec![0.0; *len])?;
    }
    says(run.ready(1, &vec![0.0; lengths[1]]), "handed over before")?;
    says(run.trained(1.0), "is missing: call ready")?;
    run.ready(0, &vec![0.0; lengths[0]])?;
    ensure!(run.trained(f32::NAN).is_err_and(|e| e.kind() == ErrorKind::Diverged));
    run.trained(1.0)?;
    while let LoopAction::Train(_) = run.next()? {
        lengths.iter().enumerate().try_for_each(|(t, len)| run.ready(t, &vec![0.0; *len]))?;
        run.trained(1.0)?;
    }
    ensure!(run.next()? == LoopAction::Over, "it stays over");
    let report = run.finish()?;
    // Adam without gradients does not move.
    ensure!(report.steps == 3 && report.weights == init, "{} steps", report.steps);

    let refused = |job: &Job, setup: Setup| Run::join(job, &options, setup).map(drop);
    says(refused(&job, Setup { data: "a, b".into(), ..setup() }), "without commas")?;
    says(refused(&job, Setup { samples: 3, ..setup() }), "training samples")?;
    let mut grouped = job.clone();
    grouped.train.group_size = 2;
    says(refused(&grouped, setup()), "train.group_size")?;
    let other = Setup { data: "another set".into(), ..setup() };
    says(refused(&job, other), "another set")
}
