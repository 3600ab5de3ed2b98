//! A whole run: everything put together, started, and what is left of it.

use crate::{
    SimError,
    clock::{Clock, nanos},
    cores::Cores,
    fleet,
    learner::Learner,
    network::Network,
    recording::{Recording, Sink},
    servers::{Placement, Servers},
    setup::Setup,
    step_lead::StepLead,
    training::Finished,
    world::World,
};
use bytes::Bytes;
use paraft_common::{
    BucketId, Layout, ModeChoice, ServerId, Version, WorkerId, codec::put_f32_le, placement,
};
use paraft_data::Split;
use paraft_models::{Evaluation, Model};
use paraft_record::{Event, event};
use paraft_server::shard::staleness::OfWorker;
use paraft_worker::{
    Job,
    job::{Exchange, SamplerKind},
    start,
    worker::Plan,
};
use parking_lot::Mutex;
use std::{
    collections::BTreeSet,
    sync::{Arc, atomic::Ordering::Relaxed},
    time::Duration,
};
use tokio::task::JoinSet;

/// Without a step for so long, in simulated time and beyond what steps and restarts take, nobody will make one.
const QUIET_SECONDS: f64 = 600.0;

/// What a simulated run came to, beside its record.
#[derive(Clone, Debug, PartialEq)]
pub struct Outcome {
    /// Simulated seconds from the first worker's start to the last one's end.
    pub seconds: f64,
    /// Things that happened: messages that arrived, work that was done, entries that were committed.
    pub happened: u64,
    /// The final weights, buffers included.
    pub weights: Vec<f32>,
    /// With the model's tensor names.
    pub layout: Layout,
    /// Steps done by the furthest worker.
    pub steps: u64,
    /// Of the final weights.
    pub evaluation: Option<Evaluation>,
    /// The furthest that a worker has gone on ahead of the slowest, in steps.
    pub largest_lead: u64,
    /// How often a worker failed.
    pub worker_failures: u64,
    /// How often a server failed.
    pub server_failures: u64,
    /// Pushes that `apply` recognised as being in already.
    pub duplicates: u64,
}

/// Whether the simulator has a model of what the job asks for.
pub fn check(job: &Job, setup: &Setup) -> Result<(), SimError> {
    let no = |what, instead| Err(SimError::Unsupported { what, instead });
    setup.check(job.train.workers)?;
    if job.train.exchange == Exchange::AllReduce || job.train.group_size > 1 {
        return no("groups of ranks", "set train.group_size = 1 and train.exchange = \"servers\"");
    }
    if job.parallel.pipeline > 1 {
        return no("stages of a model", "take [parallel] out");
    }
    if job.train.sampler == SamplerKind::Leased {
        return no("the leased sampler", "set train.sampler = \"static\"");
    }
    if job.train.init_job().is_some() {
        return no("weights of another job", "give train.init a file, or leave it out");
    }
    if setup.server_mttf_s.is_some() && job.cluster.replicas == 1 {
        return no(
            "failing servers without replicas",
            "set cluster.replicas = 3, or leave --server-mttf-s out",
        );
    }
    Ok(())
}

/// Simulates a job: `model` is trained on `data` by a fleet like `setup`. `sink` gets the lines of the record but the first
/// (what was run) and the last (its summary).
///
/// One job, setup and model give the same lines and the same weights, bit for bit. Blocks until the run is over; the
/// calling thread does everything.
pub fn simulate(
    job: &Job,
    setup: &Setup,
    model: Box<dyn Model>,
    data: Split,
    sink: Sink,
) -> Result<Outcome, SimError> {
    check(job, setup)?;
    let plan = Plan::new(job, &data.train)?;
    let tensors = model.tensors();
    let mut server_job = job.server_job(&tensors);
    let bad = |e: &dyn std::fmt::Display| paraft_worker::WorkerError::Job(e.to_string());
    let layout = job.layout(tensors).map_err(|e| bad(&e))?;
    let beginning = start::begin(
        job,
        None,
        Some(&mut |seed, w| model.init(seed, w)),
        &layout,
        &plan,
        &std::env::temp_dir(),
    )?;
    server_job.start = beginning.start;
    let job_text = server_job.to_toml().map_err(|e| bad(&e))?;
    let initial = beginning.initial.weights.to_vec();
    let initial = layout.buckets().iter().map(|b| le(&initial[b.range()])).collect();
    let mut holding = BTreeSet::new();
    for b in 0..layout.buckets().len() as u32 {
        holding.insert(placement::shard_of(&layout, BucketId(b), job.shards()));
    }
    let placement = Placement {
        servers: job.servers(),
        shards: job.shards(),
        replicas: job.cluster.replicas,
        election_ms: job.cluster.election_ms,
        holding,
    };
    let learner = Mutex::new(Learner::new(model, data, layout.clone()));
    let workers = job.train.workers;
    Clock::run(|clock| async move {
        let network = Arc::new(Network::new(clock.clone(), setup, workers, placement.servers));
        let cores = Cores::new(clock.clone(), setup.cores);
        let servers = Servers::start(&clock, &network, &cores, setup, &placement);
        let world = Arc::new(World {
            recording: Recording::new(clock.clone(), workers, sink),
            clock,
            cores,
            servers,
            setup: setup.clone(),
            seed: setup.seed,
            shards: job.shards(),
            workers,
            timeout: Duration::from_millis(job.cluster.timeout_ms),
            file: job.clone(),
            job: server_job,
            job_text: job_text.into(),
            plan,
            layout,
            initial,
            learner,
            step_lead: Mutex::new(StepLead::default()),
            over: false.into(),
            failures: 0.into(),
        });
        if world.file.train.mode == ModeChoice::Auto {
            tokio::spawn(world.servers.clone().steer());
        }
        let finished = tokio::select! {
            biased;
            finished = all_workers(&world) => finished?,
            at = no_step(&world) => return Err(SimError::Stuck(at)),
        };
        note_shards(&world)?;
        outcome(&world, finished)
    })
}

/// Returns when no step was done for so long that none will be: servers that fail and come back are no progress.
async fn no_step(world: &World) -> f64 {
    let s = &world.setup;
    let slowest = s.slow.values().copied().fold(1.0, f64::max) * s.straggle.map_or(1.0, |s| s.factor);
    let step = slowest * (s.compute_ms + s.exchange_ms) / 1e3;
    let timeout =
        QUIET_SECONDS + 100.0 * step + 10.0 * s.restart_s.unwrap_or(0.0) + 2.0 * world.timeout.as_secs_f64();
    let mut before = None;
    loop {
        let steps = world.step_lead.lock().steps();
        if before == Some(steps) {
            return world.clock.seconds();
        }
        before = Some(steps);
        world.clock.sleep(nanos(timeout)).await;
    }
}

async fn all_workers(world: &Arc<World>) -> Result<Vec<Finished>, SimError> {
    let mut running = JoinSet::new();
    for worker in 0..world.workers {
        running.spawn(fleet::lives(world.clone(), WorkerId(worker)));
    }
    let mut finished: Vec<Finished> = Vec::new();
    while let Some(ended) = running.join_next().await {
        let ended = ended.map_err(|e| SimError::Runtime(format!("a simulated worker panicked: {e}")))?;
        let Some(mut ended) = ended? else { continue };
        // Who evaluated has the weights that count; of the others they would only fill the memory.
        if ended.evaluation.is_none() && !finished.is_empty() {
            ended.weights = Vec::new();
        }
        finished.push(ended);
    }
    Ok(finished)
}

fn outcome(world: &World, mut finished: Vec<Finished>) -> Result<Outcome, SimError> {
    let steps = finished.iter().map(|f| f.steps).max().ok_or(SimError::AllLost)?;
    let who = finished.iter().position(|f| f.evaluation.is_some()).unwrap_or(0);
    let Finished { weights, evaluation, .. } = finished.swap_remove(who);
    let duplicates = world.servers.hosts.values().map(|h| h.state.read(|m| m.duplicates)).sum();
    Ok(Outcome {
        seconds: world.clock.seconds(),
        happened: world.clock.happened(),
        weights,
        layout: world.layout.clone(),
        steps,
        evaluation,
        largest_lead: world.step_lead.lock().largest(),
        worker_failures: world.failures.load(Relaxed),
        server_failures: world.servers.failures.load(Relaxed),
        duplicates,
    })
}

/// What the shards have counted.
fn staleness((worker, of): (WorkerId, OfWorker)) -> event::Staleness {
    let OfWorker { delay, distance, age } = of;
    event::Staleness { worker, delay: delay.counts().to_vec(), distance, age }
}

fn note_shards(world: &World) -> Result<(), SimError> {
    for host in world.servers.hosts.values() {
        let (c, version) = (&host.counters, host.state.version());
        let line = host.state.read(|m| event::Shard {
            wall: world.clock.seconds(),
            shard: host.id,
            server: ServerId(host.server.load(Relaxed)),
            version: Version(version),
            delay: m.delays.counts().to_vec(),
            pushes: m.pushes,
            pulls_waited: c.pulls_waited.load(Relaxed),
            bytes_pushed: m.bytes_pushed,
            bytes_pulled: c.bytes_pulled.load(Relaxed),
            pushes_lost: m.pushes_lost,
            dropped: m.dropped,
            staleness: c.staleness.workers().into_iter().map(staleness).collect(),
        });
        world.recording.write(&Event::Shard(line))?;
    }
    Ok(())
}

fn le(values: &[f32]) -> Bytes {
    let mut out = Vec::new();
    put_f32_le(values, &mut out);
    out.into()
}
