//! A worker's record: lines of `metrics.jsonl`, and numbers for Prometheus.

use crate::{WorkerError, job::Job, metrics::Gauges};
use paraft_common::{Step, WorkerId};
use paraft_record::{Event, Follow, METRICS_FILE, MetricsWriter, RecordError, begin, event};
use std::{
    collections::BTreeMap,
    path::Path,
    sync::{Arc, atomic::Ordering::Relaxed},
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

/// The minimum time between training lines: a line costs a system call, and a step may take 0.1 ms.
pub const LINE_INTERVAL: Duration = Duration::from_millis(50);

/// The most names of values, and their bytes: a script that invents a new name in each step would fill the memory.
pub const MAX_VALUES: usize = 64;
/// See [`MAX_VALUES`].
pub const MAX_NAME: usize = 64;

/// Unix time in seconds.
pub fn wall() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |d| d.as_secs_f64())
}

/// The first line of a run's record: `parameters` trained values, a `budget` of samples, and the step `resumed` from
/// which it continues, with the numbers up to there that no step of the job has.
pub fn described(job: &Job, parameters: u64, budget: u64, resumed: Option<(Step, u64)>) -> event::Run {
    let t = &job.train;
    let run = event::Run {
        wall: wall(),
        name: job.name.clone(),
        mode: t.mode.to_string(),
        model: job.model.as_ref().map_or("custom", |m| m.name()).to_string(),
        data: job.data.as_ref().map_or("custom", |d| d.name()).to_string(),
        workers: t.workers,
        servers: job.servers(),
        shards: job.shards(),
        replicas: job.cluster.replicas,
        batch: t.batch as u64 * u64::from(t.group_size),
        seed: job.seed,
        epochs: t.epochs,
        parameters,
        // A short last minibatch (drop_last = false) reduces it slightly.
        samples_budget: budget,
        optimizer: job.optimizer.kind().to_string(),
        algorithm: job.algorithm.kind().to_string(),
        encoding: t.encoding.to_string(),
        round: t.round().kind().to_string(),
        lr: job.optimizer.lr(),
        target_accuracy: job.eval.target_accuracy,
        resumed_step: resumed.map(|(step, _)| step),
        steps_left_out: resumed.map_or(0, |(_, numbers)| numbers),
        founding: String::new(),
        simulated: false,
    };
    match job.cluster.script.is_empty() {
        true => run,
        // The job file's values are defaults of the built-in loop.
        false => event::Run {
            model: event::SCRIPT.into(),
            data: event::SCRIPT.into(),
            optimizer: event::SCRIPT.into(),
            batch: 0,
            epochs: 0,
            lr: 0.0,
            ..run
        },
    }
}

/// Creates the run's folder and fails if a record cannot be written there. It runs before the worker contacts the
/// servers, so that this error does not have to wait for them.
pub fn try_out(run_dir: Option<&Path>) -> Result<(), RecordError> {
    let Some(dir) = run_dir else { return Ok(()) };
    begin::make_folder(dir)?;
    MetricsWriter::append(dir.join(METRICS_FILE)).map(drop)
}

pub struct Recorder {
    worker: WorkerId,
    file: Option<MetricsWriter>,
    /// Writes TensorBoard files, if no launcher does.
    _follow: Option<Follow>,
    gauges: Arc<Gauges>,
    /// When the last line was written; `None`: the first step writes one at once.
    since: Option<Instant>,
    /// Sum and number of the known losses.
    losses: (f64, u64),
    /// Likewise of further values, by name.
    values: BTreeMap<String, (f64, u64)>,
    last: (f64, u64),
    /// Progress since the last line.
    unsaid: Option<Progress>,
}

/// A worker's progress after a step.
#[derive(Clone, Copy, Debug)]
pub struct Progress {
    pub step: Step,
    pub epoch: u64,
    /// Samples trained by this worker.
    pub samples: u64,
    /// The training clock, which stops during evaluations.
    pub seconds: f64,
    pub wait_seconds: f64,
}

impl Recorder {
    /// For a worker that has joined. `run` describes the job, which the servers identify by `founding`.
    pub fn new(
        worker: WorkerId,
        run_dir: Option<&Path>,
        gauges: Arc<Gauges>,
        run: event::Run,
        founding: u64,
    ) -> Result<Self, WorkerError> {
        // 0: a pipeline rank without the first shard does not receive it.
        let founding = if founding == 0 { String::new() } else { format!("{founding:016x}") };
        let run = event::Run { founding, ..run };
        let file = run_dir.map(|d| begin::join(d, &run)).transpose()?;
        let say = |e: &RecordError| tracing::warn!(why = %e, "no more event files for TensorBoard");
        let follow = run_dir.map(|d| Follow::beside(d, say));
        Ok(Self {
            worker,
            file,
            _follow: follow,
            gauges,
            since: None,
            losses: (0.0, 0),
            values: BTreeMap::new(),
            last: (0.0, 0),
            unsaid: None,
        })
    }

    pub fn write(&mut self, event: &Event) -> Result<(), RecordError> {
        self.file.as_mut().map_or(Ok(()), |f| f.write(event))
    }

    /// Counts a value of the current step, besides the loss. One that is not finite is left out. Returns whether there is
    /// room for its name.
    pub fn value(&mut self, name: &str, value: f64) -> bool {
        if !value.is_finite() {
            return true;
        }
        // Not by `entry`: nearly always the name is there, and needs no copy.
        if let Some(of) = self.values.get_mut(name) {
            *of = (of.0 + value, of.1 + 1);
            return true;
        }
        let has_room = self.values.len() < MAX_VALUES && name.len() <= MAX_NAME;
        if has_room {
            self.values.insert(name.to_string(), (value, 1));
        }
        has_room
    }

    /// Counts a step. It writes a line at intervals, and whenever `now` is set. `loss`: NaN if unknown.
    pub fn step(&mut self, p: Progress, loss: f32, now: bool) -> Result<(), RecordError> {
        if !loss.is_nan() {
            self.losses.0 += f64::from(loss);
            self.losses.1 += 1;
        }
        self.gauges.step.store(p.step.0, Relaxed);
        self.gauges.samples.store(p.samples, Relaxed);
        if !now && self.since.is_some_and(|since| since.elapsed() < LINE_INTERVAL) {
            self.unsaid = Some(p);
            return Ok(());
        }
        self.line(p)
    }

    /// Writes what was counted since the last line, at the end of the run.
    pub fn rest(&mut self) -> Result<(), RecordError> {
        self.unsaid.map_or(Ok(()), |p| self.line(p))
    }

    fn line(&mut self, p: Progress) -> Result<(), RecordError> {
        self.unsaid = None;
        self.since = Some(Instant::now());
        // 0/0 is NaN: no loss is known.
        let loss = self.losses.0 / self.losses.1 as f64;
        self.losses = (0.0, 0);
        let values = self.values.iter_mut().filter(|(_, of)| of.1 > 0).map(|(name, of)| {
            let (sum, n) = std::mem::take(of);
            (name.clone(), sum / n as f64)
        });
        let values = values.collect();
        let elapsed = p.seconds - self.last.0;
        let rate = if elapsed > 0.0 { (p.samples - self.last.1) as f64 / elapsed } else { 0.0 };
        self.last = (p.seconds, p.samples);
        self.gauges.loss(loss);
        self.gauges.waited(p.wait_seconds);
        self.write(&Event::Train(event::Train {
            wall: wall(),
            worker: self.worker,
            step: p.step,
            epoch: p.epoch,
            samples: p.samples,
            seconds: p.seconds,
            loss,
            samples_per_s: rate,
            wait_seconds: p.wait_seconds,
            delay_mean: None,
            values,
        }))
    }
}
