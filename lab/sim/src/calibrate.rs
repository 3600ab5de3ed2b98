//! Fits a setup to a real run, and compares a simulated run with a real one.
//!
//! A run of one worker shows the cost of a step alone: compute time ([`Measured::compute_ms`]), the CPU
//! time of its process and of the servers for an exchange, and the wait. The CPU times enter the setup
//! as measured. The latency is the remainder and is fitted, so that the simulated run waits as long as
//! the real one. The simulator predicts how much several workers slow each other down, so calibrate
//! with a run other than the one to predict.
//!
//! Not modelled: how much one busy core slows another (memory, clock rates), and how the kernel
//! schedules more threads than cores beyond equal shares.

use crate::{Setup, SimError, Sink, simulate};
use paraft_data::Split;
use paraft_models::Model;
use paraft_record::{Event, Run, RunRecord, total};
use paraft_worker::Job;
use serde::Serialize;
use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, PoisonError},
};

/// The measured cost of a step, in milliseconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Measured {
    /// A step's forward and backward pass.
    pub compute_ms: f64,
    /// Standard deviation of that time over its mean.
    pub compute_spread: f64,
    /// Other CPU time of the worker's process, per step.
    pub exchange_ms: f64,
    /// CPU time of all servers, per push.
    pub servers_ms: f64,
    /// Time in pulls, per step.
    pub wait_ms: f64,
}

/// Fewer steps give no reliable measurement.
const MIN_STEPS: u64 = 20;

impl Measured {
    /// Measures a run's record. The run must have ended, and no worker may have shared one of the
    /// host's `cores`.
    pub fn of(record: &RunRecord, cores: u32) -> Result<Self, SimError> {
        let name = &record.run.name;
        let bad = |why: String| Err(SimError::Calibration(format!("the run `{name}` {why}")));
        if record.run.simulated {
            return bad("was simulated: it says nothing of a real fleet".into());
        }
        if record.run.workers > cores {
            let workers = record.run.workers;
            return bad(format!(
                "had {workers} workers on {cores} cores: what a step costs alone is not in it; take a run of one worker"
            ));
        }
        let steps: u64 = record.workers.iter().map(|w| w.steps).sum();
        if steps < MIN_STEPS || record.workers.len() != record.run.workers as usize {
            return bad(format!(
                "has {steps} steps of workers that ended in order; take one that came to its end, of {MIN_STEPS} or more"
            ));
        }
        let n = steps as f64;
        let wait = total(record.workers.iter().map(|w| w.wait_seconds));
        let compute = total(record.workers.iter().map(|w| w.seconds)) - wait;
        let cpu = total(record.workers.iter().map(|w| w.cpu_seconds));
        let pushes: u64 = record.shards.iter().map(|s| s.pushes).sum();
        let servers = total(record.servers.iter().map(|s| s.cpu_seconds));
        Ok(Self {
            compute_ms: 1e3 * compute.max(0.0) / n,
            compute_spread: spread(record),
            exchange_ms: 1e3 * (cpu - compute).max(0.0) / n,
            servers_ms: 1e3 * servers / pushes.max(1) as f64,
            wait_ms: 1e3 * wait / n,
        })
    }
}

/// The standard deviation of a step's time over its mean. Each line of a worker is a mean over some
/// steps, so its variance is that of a step divided by their number.
fn spread(record: &RunRecord) -> f64 {
    let mut last = BTreeMap::new();
    let mut lines: Vec<(f64, f64)> = Vec::new();
    for t in &record.train {
        let now = (t.step.0, t.seconds, t.wait_seconds);
        if let Some((step, seconds, wait)) = last.insert(t.worker, now) {
            let steps = now.0.saturating_sub(step) as f64;
            if steps > 0.0 {
                lines.push((steps, (now.1 - seconds - (now.2 - wait)) / steps));
            }
        }
    }
    let steps = total(lines.iter().map(|(n, _)| *n));
    let mean = total(lines.iter().map(|(n, each)| n * each)) / steps;
    let variance =
        total(lines.iter().map(|(n, each)| n * (each - mean).powi(2))) / (lines.len() as f64 - 1.0);
    let spread = variance.sqrt() / mean;
    if spread.is_finite() { spread.min(2.0) } else { 0.0 }
}

/// Creates a model and its data; called once per simulation.
pub type Make<'a> = dyn FnMut() -> Result<(Box<dyn Model>, Split), SimError> + 'a;

/// Steps of the simulations for the fit.
const FIT_STEPS: u64 = 60;
/// Bisection steps: the last interval is a thousandth of the range.
const HALVINGS: u32 = 10;

/// A setup with which the simulated `job` (that of the measured run) waits as long as the real one, on
/// a host with `cores` cores.
///
/// If the CPU work alone exceeds the measured wait, some of it ran in parallel: only a part is on the
/// path of a push, and no worker waits for the rest. Otherwise the latency is the remainder.
pub fn fit(
    job: &Job,
    measured: &Measured,
    cores: u32,
    base: &Setup,
    make: &mut Make<'_>,
) -> Result<Setup, SimError> {
    let mut job = job.clone();
    let steps = job.train.max_steps.unwrap_or(u64::MAX);
    job.train.max_steps = Some(steps.min(FIT_STEPS));
    job.eval.every_epoch = false;
    // A leader receives, forwards and answers the push; a follower receives it. They count as two parts
    // and one.
    let followers = f64::from(job.cluster.replicas.saturating_sub(1));
    let led = measured.servers_ms * 2.0 / (2.0 + followers);
    // Puts `share` of the possible work on the path of a push.
    let with = |share: f64, latency_ms: f64| Setup {
        compute_ms: measured.compute_ms,
        compute_spread: measured.compute_spread,
        exchange_ms: share * measured.exchange_ms,
        push_ms: share * led,
        follow_ms: measured.servers_ms - share * led,
        latency_ms,
        // All on one host: no wire between the processes.
        worker_gbit: 0.0,
        server_gbit: 0.0,
        cores: Some(cores),
        ..base.clone()
    };
    let mut wait = |setup: &Setup| -> Result<f64, SimError> {
        let (model, data) = make()?;
        let record = record_of(&job, setup, model, data)?;
        let steps: u64 = record.workers.iter().map(|w| w.steps).sum();
        Ok(1e3 * total(record.workers.iter().map(|w| w.wait_seconds)) / steps.max(1) as f64)
    };
    let too_long = wait(&with(1.0, 0.0))? > measured.wait_ms;
    let at = |x: f64| if too_long { with(x, 0.0) } else { with(1.0, x) };
    // A step's wait contains at least two latencies.
    let (mut low, mut high) = (0.0, if too_long { 1.0 } else { measured.wait_ms });
    for _ in 0..HALVINGS {
        let middle = (low + high) / 2.0;
        match wait(&at(middle))? > measured.wait_ms {
            true => high = middle,
            false => low = middle,
        }
    }
    Ok(at((low + high) / 2.0))
}

/// Simulates with the record in memory.
fn record_of(job: &Job, setup: &Setup, model: Box<dyn Model>, data: Split) -> Result<RunRecord, SimError> {
    let run = Run { name: job.name.clone(), workers: job.train.workers, simulated: true, ..Run::default() };
    let events = Arc::new(Mutex::new(vec![Event::Run(run)]));
    let written = events.clone();
    let sink: Sink = Box::new(move |e: &Event| {
        written.lock().unwrap_or_else(PoisonError::into_inner).push(e.clone());
        Ok(())
    });
    simulate(job, setup, model, data, sink)?;
    let events = std::mem::take(&mut *events.lock().unwrap_or_else(PoisonError::into_inner));
    RunRecord::from_events(events).ok_or_else(|| SimError::Calibration("a simulation left no record".into()))
}

/// A figure of both runs.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Row {
    /// The figure's name, with its unit.
    pub figure: &'static str,
    /// Of the simulated run.
    pub predicted: f64,
    /// Of the real one.
    pub measured: f64,
    /// The error of the prediction, in percent of the measured value; `None` if that is zero.
    pub error_percent: Option<f64>,
}

/// Checks that a simulated run is comparable with a real one: same job and same fleet.
pub fn same_job(predicted: &Run, measured: &Run) -> Result<(), SimError> {
    type Fact = (&'static str, fn(&Run) -> String);
    let facts: [Fact; 11] = [
        ("model", |r| r.model.clone()),
        ("data", |r| r.data.clone()),
        ("mode", |r| r.mode.clone()),
        ("workers", |r| r.workers.to_string()),
        ("servers", |r| r.servers.to_string()),
        ("shards", |r| r.shards.to_string()),
        ("replicas", |r| r.replicas.to_string()),
        ("batch", |r| r.batch.to_string()),
        ("seed", |r| r.seed.to_string()),
        ("samples to train on", |r| r.samples_budget.to_string()),
        ("optimizer", |r| format!("{} {}", r.optimizer, r.lr)),
    ];
    if measured.simulated {
        return Err(SimError::Calibration("the run to compare with was simulated too".into()));
    }
    for (name, fact) in facts {
        let (here, there) = (fact(predicted), fact(measured));
        if here != there {
            return Err(SimError::Calibration(format!(
                "the run to compare with has {name} {there}, the simulated one {here}: give the job file, --workers and --set with which it was run"
            )));
        }
    }
    Ok(())
}

/// Compares a simulated run with a real one.
///
/// # Errors
///
/// As [`same_job`].
pub fn against(predicted: &RunRecord, measured: &RunRecord) -> Result<Vec<Row>, SimError> {
    same_job(&predicted.run, &measured.run)?;
    let row = |figure, f: &dyn Fn(&RunRecord) -> Option<f64>| {
        let (predicted, measured) = (f(predicted)?, f(measured)?);
        let error = 100.0 * (predicted - measured) / measured;
        Some(Row { figure, predicted, measured, error_percent: error.is_finite().then_some(error) })
    };
    let rows = [
        row("seconds", &|r| Some(r.summarize().seconds)),
        row("samples/s", &|r| Some(r.summarize().samples_per_s)),
        row("waited, % of the workers' time", &|r| {
            let all = total(r.workers.iter().map(|w| w.seconds));
            Some(100.0 * total(r.workers.iter().map(|w| w.wait_seconds)) / all).filter(|s| s.is_finite())
        }),
        row("mean delay, versions", &|r| r.delays().mean()),
        row("final accuracy, %", &|r| Some(100.0 * r.summarize().final_accuracy?)),
        row("final loss", &|r| r.summarize().final_loss),
    ];
    Ok(rows.into_iter().flatten().collect())
}
