//! A worker: from its options to its report.
//!
//! What a worker does next is decided by `paraft_trainer`; `training` does it. Where a group of ranks is one worker, its leader
//! runs that loop, and the others do what it says (`follower`). Where ranks apply the gradients themselves the loop is that of
//! `reduce`.
//!
//! A worker holds nothing that is worth keeping: weights, optimizer state and clocks are on the servers.

mod clock;
mod error;
mod evaluate;
mod follower;
mod plan;
mod reduce;
mod training;

pub use error::WorkerError;
pub use plan::{Minibatches, Plan};

use self::{clock::Clock, training::Training};
use crate::{
    checkpoints::{self, Checkpoints},
    engine::Engine,
    group::Ranks,
    job::{Exchange, Job, TransportConfig},
    metrics::{self, Gauges},
    recorder::Recorder,
    slow::{Slow, Slowness},
    start,
};
use paraft_client::{
    Client, ClientError, ClientOptions, Counters, HANDOVER, Transport, groups::MemberOptions,
};
use paraft_common::{BucketId, Encoding, WorkerId, local::LocalWeights};
use paraft_data::{DataDigest, Dataset, Split};
use paraft_models::{Evaluation, Model, Part};
use paraft_trace::Stages;
use paraft_trainer::Trainer;
use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    sync::{Arc, atomic::AtomicBool},
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
    let digest = data.digest()?;
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
        timeout: Duration::from_millis(job.cluster.timeout_ms),
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
        timeout: Duration::from_millis(job.cluster.timeout_ms),
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
    let trainer = Trainer::new(
        paraft_trainer::Options {
            worker,
            steps: plan.steps,
            local: job.local.clone(),
            layout: layout.clone(),
            batch: job.train.batch,
            evaluates: job.eval.every_epoch,
            due: job.checkpoint.as_ref().map(|c| checkpoints::due(c, &plan)),
            leased: plan.leased,
            begun,
            timeout: Duration::from_millis(job.cluster.timeout_ms),
        },
        start,
    );
    let mut training = Training {
        job,
        options,
        plan,
        train,
        test,
        engine,
        local,
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
        at_end: Counters::default(),
        switches: 0,
        slow: Slow::new(options.slow, job.seed, options.rank),
        begun,
        ends: BTreeMap::new(),
        reported: None,
    };
    match training.run(trainer) {
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
