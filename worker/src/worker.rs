//! The training loop.
//!
//! ```text
//!   join ─▶ pull ─▶ ┌─ minibatch (prefetched) ─▶ forward, backward ──bucket ready──▶ push ─┐
//!                   │                                                                      │
//!                   └── [epoch's end: evaluate a share, report] ◀── pull (the rule waits) ◀┘
//!   finish ─▶ final pull (when all have finished) ─▶ lowest finisher evaluates everything
//! ```
//!
//! Where workers have weights of their own, what lies between two pulls is in `local_steps`. With the leased sampler the loop is that of `leased`. Where a group of ranks is one worker, its leader runs this loop, and the
//! others do what it says (`follower`). Where ranks apply the gradients themselves the loop is that of `reduce`.
//!
//! A worker holds nothing that is worth keeping: weights, optimizer state and clocks are on the servers.

mod clock;
mod error;
mod evaluate;
mod follower;
mod leased;
mod local_steps;
mod plan;
mod reduce;
mod streaming;

pub use error::WorkerError;
pub use plan::{Minibatches, Plan};

use self::{
    clock::Clock,
    evaluate::{Share, evaluate},
    local_steps::Made,
};
use crate::{
    checkpoints::{self, Checkpoints},
    engine::{Engine, Stepped},
    group::Ranks,
    job::{Exchange, Job, TransportConfig},
    metrics::{self, Gauges},
    recorder::{Progress, Recorder, wall},
    slow::{Slow, Slowness},
    start,
};
use paraft_checkpoint::{MODEL_FILE, weights};
use paraft_client::{
    Client, ClientError, ClientOptions, HANDOVER, Pulled, Reported, Transport, groups::MemberOptions,
};
use paraft_common::{BucketId, Encoding, Layout, Step, WorkerId, local::LocalWeights};
use paraft_data::{DataDigest, Dataset, Prefetcher, Split};
use paraft_models::{Batch, Evaluation, Model, Part};
use paraft_record::{Event, event};
use paraft_trace::Stages;
use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::Duration,
};

/// Where a worker stands in its fleet.
#[derive(Clone, Debug)]
pub struct WorkerOptions {
    /// The process's rank, from 0. The ranks of a group follow each other.
    pub rank: u32,
    /// All servers, the same list as theirs.
    pub servers: Vec<String>,
    /// Where `metrics.jsonl` goes; nothing is written without.
    pub run_dir: Option<PathBuf>,
    /// Write the final weights here, whoever else does.
    pub weights: Option<PathBuf>,
    /// Go on from this checkpoint, or the latest in this folder.
    pub resume: Option<PathBuf>,
    /// Where `/metrics` is served.
    pub metrics: Option<std::net::SocketAddr>,
    /// Where a trace of the stages goes, and of how many steps (`paraft_trace::DEFAULT_STEPS`).
    pub trace: Option<(PathBuf, u64)>,
    /// A straggler, for comparisons.
    pub slow: Slowness,
    /// Set to end the run at the next step, or where it waits for others.
    pub interrupt: Arc<AtomicBool>,
}

/// What a worker did.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct WorkerReport {
    /// Steps done.
    pub steps: u64,
    /// Samples trained on.
    pub samples: u64,
    /// Training clock.
    pub seconds: f64,
    /// The final weights, buffers included.
    pub weights: Vec<f32>,
    /// The evaluation of the final weights, if this worker made it.
    pub evaluation: Option<Evaluation>,
}

/// Trains `model` on its share of `data` until the job is done. Blocks; the calling thread computes.
pub fn run(
    job: &Job,
    options: &WorkerOptions,
    model: &mut dyn Model,
    data: Split,
) -> Result<WorkerReport, WorkerError> {
    let world = job.ranks();
    if options.rank >= world {
        let who = match job.train.group_size {
            1 => format!("{world} workers"),
            n => format!("{} workers of {n} ranks each", job.train.workers),
        };
        return Err(WorkerError::Job(format!(
            "--rank {} in a job of {who} (ranks are 0 to {})",
            options.rank,
            world - 1
        )));
    }
    let plan = Plan::new(job, &data.train)?;
    let gauges = Arc::new(Gauges::default());
    if let Some(at) = options.metrics {
        let listener = std::net::TcpListener::bind(at)
            .map_err(|e| WorkerError::Job(format!("--metrics {at}: {e}; choose another port or 0")))?;
        let at = listener.local_addr().map_or(at, |a| a);
        tracing::info!(%at, "serving /metrics");
        metrics::serve(listener, gauges.clone())
            .map_err(|e| WorkerError::Job(format!("--metrics {at}: {e}")))?;
    }
    let digest = data.digest();
    let data = Shared { train: Arc::new(data.train), test: Arc::new(data.test), digest, plan, gauges };
    let reduces = job.train.exchange == Exchange::AllReduce;
    if job.train.group_size == 1 && !reduces {
        return lead(job, options, model, data, None);
    }
    let member = MemberOptions {
        servers: options.servers.clone(),
        transport: transport(job),
        job: job.name.clone(),
        settings: job.server_job_on(&model.tensors(), &data.digest).fingerprint,
        worker: options.rank / job.train.group_size,
        size: job.train.group_size,
        rank: options.rank % job.train.group_size,
        address: String::new(),
        patience: Duration::from_millis(job.cluster.patience_ms),
    };
    let mut ranks = Ranks::new(member, options.interrupt.clone())?;
    if !ranks.form(model)? {
        return Ok(WorkerReport::default());
    }
    if reduces {
        return reduce::run(job, options, model, &data, &mut ranks);
    }
    loop {
        if ranks.leads() {
            match lead(job, options, model, data.clone(), Some(&mut ranks)) {
                Err(WorkerError::Deposed) => tracing::warn!("another rank leads this group now"),
                // Another rank, or another group, has been this worker while this process was stopped.
                Err(WorkerError::Client(e)) if e.is_displaced() || ranks.breaks() => {
                    tracing::warn!(error = %e, "this rank has lost its group");
                    if !ranks.form(model)? {
                        return Ok(WorkerReport::default());
                    }
                    continue;
                }
                ended => return ended,
            }
        }
        if let Some(report) = follower::follow(job, options, model, &data, &mut ranks)? {
            return Ok(report);
        }
    }
}

/// What every rank has, whether it leads or not.
#[derive(Clone)]
struct Shared {
    train: Arc<Dataset>,
    test: Arc<Dataset>,
    /// Of both: workers with other data are refused.
    digest: DataDigest,
    plan: Plan,
    gauges: Arc<Gauges>,
}

fn transport(job: &Job) -> Transport {
    match job.cluster.transport {
        TransportConfig::Auto => Transport::Auto,
        TransportConfig::Tcp => Transport::Tcp,
    }
}

/// As which worker the servers know this process, or the group that it leads.
fn client_options(
    job: &Job,
    options: &WorkerOptions,
    server_job: paraft_common::config::ServerJob,
    leads: bool,
) -> ClientOptions {
    ClientOptions {
        servers: options.servers.clone(),
        shards: job.shards(),
        replicas: job.cluster.replicas,
        worker: WorkerId(options.rank / job.train.group_size),
        job: server_job,
        transport: transport(job),
        patience: Duration::from_millis(job.cluster.patience_ms),
        handover: match leads {
            false => HANDOVER,
            // Who led this group may only have stopped: its lease has to end.
            true => HANDOVER + Duration::from_millis(job.cluster.grace_ms),
        },
    }
}

/// Trains as a worker of the servers: alone, or for the group that this rank leads.
fn lead(
    job: &Job,
    options: &WorkerOptions,
    model: &mut dyn Model,
    data: Shared,
    ranks: Option<&mut Ranks>,
) -> Result<WorkerReport, WorkerError> {
    let Shared { train, test, digest, plan, gauges } = data;
    let tensors = model.tensors();
    let mut server_job = job.server_job_on(&tensors, &digest);
    let layout = job.layout(tensors).map_err(|e| WorkerError::Job(e.to_string()))?;
    if job.local.is_local() && model.resident().is_some() {
        return Err(WorkerError::Job(format!(
            "local.kind = \"{}\" keeps a worker's weights in the host's memory, and this model is on a device; set train.device \
             = \"cpu\", or take [local] out",
            job.local.kind()
        )));
    }
    let local = LocalWeights::new(&job.local, &job.descent(), layout.params_len(), layout.len());
    let beginning = start::begin(job, options.resume.as_deref(), model, &layout, &plan)?;
    let begun = beginning.start.as_ref().map_or(0, |s| s.epochs);
    server_job.start = beginning.start;
    server_job.chunks = plan.leased;
    let client = client_options(job, options, server_job, ranks.is_some());
    let worker = client.worker;
    // Before the servers hear of this worker: a folder that cannot be written is no reason to wait for them.
    let recorder = Recorder::new(worker, options.run_dir.as_deref(), gauges.clone())?;
    let checkpoints = Checkpoints::start(job, options, &plan, layout.tensors(), &client)?;
    let (mut client, start) = Client::join_from(client, beginning.initial)?;
    client.encode_by(&layout, job.train.feeds_back());
    if ranks.is_none() {
        client.interrupted_by(options.interrupt.clone());
    }
    gauges.stages(client.stages().clone());
    let _flush =
        options.trace.as_ref().map(|(folder, steps)| begin_trace(&client, folder, *steps)).transpose()?;
    let mut ranks = ranks;
    if let Some(ranks) = ranks.as_deref_mut().filter(|r| start.0 >= plan.total && r.generation() > 1) {
        // Who led before has been silent while the other workers finished.
        tracing::info!("the job is done; nothing is left for this group");
        client.finish();
        let mut weights = vec![0.0; layout.len()];
        client.pull_final(start, &mut weights)?;
        ranks.over(model);
        return Ok(WorkerReport { weights, ..WorkerReport::default() });
    }
    if plan.leased.is_none() && start.0 >= plan.total {
        let refused = format!(
            "these servers have done this job's {} steps already; to train it again, or for longer, use other servers, or \
             start these with other data folders (with --resume it goes on from a checkpoint)",
            plan.total
        );
        // It has joined: the job has finished only once this member has too.
        client.finish();
        if let Err(e) = client.pull_final(start, &mut vec![0.0; layout.len()]) {
            tracing::warn!(error = %e, "this worker's session could not be ended in order");
        }
        return Err(WorkerError::Job(refused));
    }
    let part = |(i, b): (u32, &paraft_common::BucketSpec)| Part {
        range: b.range(),
        encoding: client.device_encoding(BucketId(i)).unwrap_or(Encoding::F32),
    };
    let parts = (0..).zip(client.layout().buckets()).map(part).collect();
    // Of a group another rank goes on in the same session.
    let alone = ranks.is_none();
    let engine = Engine::new(model, parts, ranks);
    let mut training = Training {
        job,
        options,
        plan,
        train,
        test,
        engine,
        local,
        under: None,
        client,
        recorder,
        checkpoints,
        gauges,
        worker,
        layout,
        clock: Clock::default(),
        samples: 0,
        steps: 0,
        waited_at_start: Duration::ZERO,
        switches: 0,
        slow: Slow::new(options.slow, job.seed, options.rank),
        begun,
        ends: BTreeMap::new(),
    };
    let ended = match training.plan.leased {
        None => training.run(start),
        Some(chunks) => training.run_leased(start, chunks),
    };
    match ended {
        Err(WorkerError::Interrupted | WorkerError::Client(ClientError::Interrupted)) => {
            if alone && !training.client.leave(LEAVE_PATIENCE) {
                tracing::warn!(
                    "not every shard has answered that this worker leaves; there its lease has to end"
                );
            }
            Err(WorkerError::Interrupted)
        }
        ended => Ok(training.report(ended?)),
    }
}

/// A worker that is told to end waits so long for the shards' word that they know. Less than signals wait for the worker.
const LEAVE_PATIENCE: Duration = Duration::from_millis(800);

/// Brings the trace into its file when the run ends, however it does.
struct Flush(Arc<Stages>);

impl Drop for Flush {
    fn drop(&mut self) {
        self.0.flush();
    }
}

fn begin_trace(client: &Client, folder: &Path, steps: u64) -> Result<Flush, WorkerError> {
    let process = format!("worker-{}", client.worker().0);
    let cannot = |e| WorkerError::Trace(folder.to_path_buf(), e);
    client.stages().trace(folder, &process, steps).map_err(cannot)?;
    Ok(Flush(client.stages().clone()))
}

struct Training<'a> {
    job: &'a Job,
    options: &'a WorkerOptions,
    plan: Plan,
    train: Arc<Dataset>,
    test: Arc<Dataset>,
    engine: Engine<'a>,
    /// Where the worker has weights of its own.
    local: Option<LocalWeights>,
    /// Where its weights stream: the fragment that is under way.
    under: Option<streaming::Under>,
    client: Client,
    recorder: Recorder,
    checkpoints: Option<Checkpoints>,
    gauges: Arc<Gauges>,
    worker: WorkerId,
    /// With the model's tensor names.
    layout: Layout,
    clock: Clock,
    samples: u64,
    steps: u64,
    waited_at_start: Duration,
    /// Switches of the mode that it has heard of.
    switches: u64,
    slow: Slow,
    /// Epochs that were done when the job began.
    begun: u64,
    /// Leased sampler: the steps at which epochs were over.
    ends: BTreeMap<u64, Step>,
}

impl Training<'_> {
    fn run(&mut self, start: Step) -> Result<Option<Evaluation>, WorkerError> {
        let mut done = start;
        let mut batches = self.prefetch(done)?;
        let pulled = self.pull(done, Client::pull)?;
        let pulled = self.warm_start(pulled)?;
        self.begin_local();
        self.waited_at_start = self.client.counters().waited;
        if pulled.done != done {
            done = pulled.done;
            batches = self.prefetch(done)?;
        }
        // The epoch that has just ended is evaluated after the step is cut into a checkpoint: who goes on from there
        // does it now. Where it was done already, the servers know.
        if done.0 > 0 && done.0.is_multiple_of(self.plan.per_epoch) && self.job.eval.every_epoch {
            self.evaluate_share(done.0 / self.plan.per_epoch)?;
        }
        self.clock.start();
        while done.0 < self.plan.total && !pulled.stop {
            if self.options.interrupt.load(Relaxed) {
                return Err(WorkerError::Interrupted);
            }
            let step = done.next();
            if let Some(c) = &self.checkpoints {
                c.clear_the_way(step);
            }
            let due = self.checkpoints.as_ref().is_some_and(|c| c.due(step));
            let made = match &self.local {
                None => self.one_minibatch(step, &mut batches, due)?,
                Some(_) => self.local_step(step, &mut batches, due)?,
            };
            let (loss, pulled) = match made {
                None => break,
                Some(Made::Elsewhere(pulled)) => (None, pulled),
                Some(Made::Pushed(stepped)) => {
                    self.steps += 1;
                    self.samples += stepped.samples;
                    self.client.note_loss(stepped.loss);
                    let pulled = if due {
                        self.pull(step, Client::pull_for_checkpoint)?
                    } else {
                        self.pull_behind(step)?
                    };
                    (Some(stepped.loss), pulled)
                }
            };
            let rejoined = pulled.done != step;
            done = pulled.done;
            let epoch = done.0.div_ceil(self.plan.per_epoch);
            let last = done.0 >= self.plan.total || pulled.stop;
            let epoch_ends = done.0.is_multiple_of(self.plan.per_epoch) || last;
            if let Some(loss) = loss {
                self.note_step(done, epoch, loss, epoch_ends)?;
            }
            if epoch_ends && self.job.eval.every_epoch {
                self.evaluate_share(epoch)?;
            }
            if let Some(c) = self.checkpoints.as_mut().filter(|_| due && !rejoined) {
                c.pulled(done, &pulled);
            }
            self.note_evaluations()?;
            self.note_checkpoints(false)?;
            if pulled.stop {
                break;
            }
            if rejoined {
                match pulled.rejoined {
                    true => {
                        tracing::warn!(%step, %done, "this worker had been taken out; it goes on with the others")
                    }
                    false => {
                        tracing::info!(%step, %done, "rounds were closed without this worker; it goes on with the others")
                    }
                }
                self.begin_local();
                batches = self.prefetch(done)?;
            }
        }
        drop(batches);
        self.end(done)
    }

    /// One minibatch at the pulled weights; each bucket of its gradient is pushed as soon as it is there. `due`: a checkpoint is
    /// cut behind it. `None`: no data is left.
    fn one_minibatch(
        &mut self,
        step: Step,
        batches: &mut Prefetcher<Batch>,
        due: bool,
    ) -> Result<Option<Made>, WorkerError> {
        let Some(batch) = batches.next() else { return Ok(None) };
        let batch = batch?;
        if !due {
            self.client.ask_ahead(step);
        }
        let stepped = self.step(step, &batch)?;
        batches.recycle(batch);
        Ok(Some(Made::Pushed(stepped)))
    }

    /// The worker's own weights, if it has any, are what was pulled.
    fn begin_local(&mut self) {
        if let Some(local) = &mut self.local {
            local.begin(self.engine.weights());
        }
        self.under = None;
    }

    /// Writes down where the worker stands after a step: now and then, and always when `now` says so.
    fn note_step(&mut self, done: Step, epoch: u64, loss: f32, now: bool) -> Result<(), WorkerError> {
        let counters = self.client.counters();
        let progress = Progress {
            step: done,
            epoch,
            samples: self.samples,
            seconds: self.clock.seconds(),
            wait_seconds: (counters.waited - self.waited_at_start).as_secs_f64(),
        };
        self.gauges.bytes_pushed.store(counters.bytes_pushed, Relaxed);
        self.gauges.bytes_pulled.store(counters.bytes_pulled, Relaxed);
        Ok(self.recorder.step(progress, loss, now)?)
    }

    /// Everything is trained.
    fn end(&mut self, done: Step) -> Result<Option<Evaluation>, WorkerError> {
        self.clock.stop();
        let counters = self.client.counters();
        let waited = counters.waited - self.waited_at_start;
        self.client.finish();
        let last = self.pull(done, Client::pull_final)?;
        self.engine.over();
        self.note_evaluations()?;
        let first = last.finishers.first() == Some(&self.worker);
        let own = self.options.weights.clone();
        let run = self.options.run_dir.as_ref().filter(|_| first).map(|d| d.join(MODEL_FILE));
        for path in own.into_iter().chain(run) {
            weights::save(&path, &self.layout, self.engine.weights(), done.0)?;
        }
        self.note_checkpoints(true)?;
        let evaluation = first.then(|| self.evaluate_all(done)).transpose()?;
        let usage = paraft_host::usage();
        self.recorder.write(&Event::Worker(event::Worker {
            wall: wall(),
            worker: self.worker,
            steps: self.steps,
            samples: self.samples,
            seconds: self.clock.seconds(),
            wait_seconds: waited.as_secs_f64(),
            bytes_pushed: counters.bytes_pushed,
            bytes_pulled: counters.bytes_pulled,
            cpu_seconds: self.clock.cpu_seconds(),
            peak_rss_bytes: usage.peak_rss_bytes,
        }))?;
        Ok(evaluation)
    }

    fn report(self, evaluation: Option<Evaluation>) -> WorkerReport {
        WorkerReport {
            steps: self.steps,
            samples: self.samples,
            seconds: self.clock.seconds(),
            weights: self.engine.into_weights(),
            evaluation,
        }
    }

    /// Pulls in one of the client's ways, to where the model wants its weights.
    fn pull(
        &mut self,
        step: Step,
        pull: fn(&mut Client, Step, &mut [f32]) -> Result<Pulled, ClientError>,
    ) -> Result<Pulled, WorkerError> {
        let pulled = pull(&mut self.client, step, self.engine.landing()?)?;
        self.engine.landed(&pulled, &self.layout)?;
        if let Some(local) = &mut self.local {
            local.pulled(self.engine.weights());
        }
        self.takes_over_rest();
        self.note_mode(pulled.done)?;
        Ok(pulled)
    }

    /// Writes down a switch of the mode.
    fn note_mode(&mut self, step: Step) -> Result<(), WorkerError> {
        let (number, mode) = self.client.mode();
        if number == self.switches {
            return Ok(());
        }
        self.switches = number;
        tracing::info!(%mode, number, %step, "the mode was switched");
        Ok(self.recorder.write(&Event::Mode(event::ModeSwitch {
            wall: wall(),
            worker: self.worker,
            step,
            samples: self.samples,
            seconds: self.clock.seconds(),
            number,
            mode: mode.to_string(),
        }))?)
    }

    fn step(&mut self, step: Step, batch: &Batch) -> Result<Stepped, WorkerError> {
        let stepped = self.slow.step(|| self.engine.step(&mut self.client, step, batch))?;
        finite(stepped, step, self.worker)
    }

    fn prefetch(&self, done: Step) -> Result<Prefetcher<Batch>, WorkerError> {
        self.plan.prefetch(self.job, &self.train, self.options.rank, done)
    }

    /// Every worker evaluates a share of the held-out part at the same time, so none waits for another; shard
    /// 0 adds the shares up.
    fn evaluate_share(&mut self, epoch: u64) -> Result<(), WorkerError> {
        self.clock.stop();
        let share = Share::of(self.job, self.options);
        let test = self.test.clone();
        let e = self
            .engine
            .evaluate_share(epoch, |engine, place| evaluate(engine, &test, share.part(place, test.len())))?;
        self.client.report(epoch, e.loss_sum, e.correct, e.count);
        self.clock.start();
        Ok(())
    }

    fn evaluate_all(&mut self, done: Step) -> Result<Evaluation, WorkerError> {
        let e = evaluate(&mut self.engine, &self.test, 0..self.test.len())?;
        let epoch = match self.plan.leased {
            Some(_) => self.ends.keys().next_back().copied().unwrap_or(self.begun),
            None => done.0.div_ceil(self.plan.per_epoch),
        };
        let all = Reported { epoch, loss_sum: e.loss_sum, correct: e.correct, count: e.count, stop: false };
        self.write_evaluation(&all, true)?;
        Ok(e)
    }

    fn note_evaluations(&mut self) -> Result<(), WorkerError> {
        for e in self.client.evaluations() {
            if let Some(c) = &self.checkpoints {
                let step = match self.plan.leased {
                    Some(_) => self.ends.get(&e.epoch).copied(),
                    None => Some(Step(e.epoch.saturating_mul(self.plan.per_epoch).min(self.plan.total))),
                };
                if let Some(step) = step {
                    c.loss(step, e.loss_sum / e.count.max(1) as f64);
                }
            }
            self.write_evaluation(&e, false)?;
        }
        Ok(())
    }

    /// Writes what the checkpoints' thread has done; `wait`s for it at the end.
    fn note_checkpoints(&mut self, wait: bool) -> Result<(), WorkerError> {
        checkpoints::note(&mut self.checkpoints, &mut self.recorder, wait)
    }

    fn write_evaluation(&mut self, e: &Reported, is_final: bool) -> Result<(), WorkerError> {
        let n = e.count.max(1) as f64;
        let accuracy = self.test.classes().filter(|_| self.job.classifies()).map(|_| e.correct as f64 / n);
        let event = event::Eval {
            wall: wall(),
            epoch: e.epoch,
            samples: match self.plan.leased {
                Some(_) => e.epoch.saturating_sub(self.begun) * self.train.len() as u64,
                None => self.samples * u64::from(self.job.train.workers),
            },
            seconds: self.clock.seconds(),
            loss: e.loss_sum / n,
            accuracy,
            count: e.count,
            is_final,
        };
        Ok(self.recorder.write(&Event::Eval(event))?)
    }
}

/// A loss that is no number ends the training, on every rank.
fn finite(stepped: Stepped, step: Step, worker: WorkerId) -> Result<Stepped, WorkerError> {
    match stepped.loss.is_finite() {
        true => Ok(stepped),
        false => Err(WorkerError::NotFinite { loss: stepped.loss, step, worker }),
    }
}
