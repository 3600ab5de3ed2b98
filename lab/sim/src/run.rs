//! A whole simulated run: setup, start and results.

use crate::{
    clock::{Clock, nanos},
    cores::Cores,
    error::SimError,
    fleet,
    learner::Learner,
    network::Network,
    recording::{Recording, Sink},
    servers::{Placement, Servers},
    setup::Setup,
    stages::{
        OfRank,
        cut::{Cut, Part},
    },
    step_lead::StepLead,
    training::Finished,
    watched::{Watcher, said, slowed},
    world::World,
};
use bytes::Bytes;
use paraft_common::{
    BucketId, Durability, Layout, ModeChoice, ServerId, Version, WorkerId, codec::put_f32_le,
    histogram::DelayHistogram, layout::Cuts, placement,
};
use paraft_data::Split;
use paraft_models::{Evaluation, Model, Stages};
use paraft_record::{Event, event};
use paraft_server::shard::staleness::PushStaleness;
use paraft_worker::{
    Job,
    job::{Exchange, SamplerKind},
    start,
    worker::Plan,
};
use parking_lot::Mutex;
use serde::Serialize;
use std::{
    collections::BTreeSet,
    ops::Range,
    sync::{Arc, atomic::Ordering::Relaxed},
    time::Duration,
};
use tokio::task::JoinSet;

/// Without a step for this simulated time, beyond the time of steps and restarts, the run is stuck.
const QUIET_SECONDS: f64 = 600.0;

/// The result of a simulated run, beside its record.
#[derive(Clone, Debug, PartialEq)]
pub struct Outcome {
    /// Simulated seconds from the first worker's start to the last one's end.
    pub seconds: f64,
    /// Events: messages that arrived, work that was done, entries that were committed.
    pub happened: u64,
    /// The final weights, buffers included.
    pub weights: Vec<f32>,
    /// The layout, with the model's tensor names.
    pub layout: Layout,
    /// Steps of the furthest worker.
    pub steps: u64,
    /// The evaluation of the final weights.
    pub evaluation: Option<Evaluation>,
    /// The largest lead of a worker over the slowest, in steps.
    pub largest_lead: u64,
    /// Failures of workers.
    pub worker_failures: u64,
    /// Failures of servers.
    pub server_failures: u64,
    /// Pushes that `apply` recognised as duplicates.
    pub duplicates: u64,
    /// The result of each stage, for workers with pipeline stages.
    pub stages: Vec<StageOutcome>,
    /// Steps that overlap without an idle time between them, at the start.
    pub steps_between_ends: usize,
}

/// The result of the ranks of one stage, over all workers.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct StageOutcome {
    /// Its layers.
    pub layers: Range<usize>,
    /// Its share of the model's compute cost.
    pub cost: f64,
    /// The share of the time that it computed nothing, from a worker's first micro-batch to its last:
    /// in a step, or over overlapping steps. Mean over workers.
    pub idle: f64,
    /// Updates of its shards between the weights of a push and the push. Mean over pushes.
    pub delay: f64,
    /// Bytes to the servers.
    pub pushed: u64,
    /// Bytes from the servers.
    pub pulled: u64,
    /// Bytes to the ranks of other stages.
    pub sent: u64,
}

/// Checks that the simulator models all features of the job.
pub fn check(job: &Job, setup: &Setup) -> Result<(), SimError> {
    let no = |what, instead| Err(SimError::Unsupported { what, instead });
    setup.check(job.train.workers)?;
    if job.train.exchange == Exchange::AllReduce || job.train.group_size > 1 {
        return no("groups of ranks", "set train.group_size = 1 and train.exchange = \"servers\"");
    }
    if job.parallel.tensor > 1 {
        return no("tensor slices", "take parallel.tensor out");
    }
    if job.parallel.pipeline > 1 {
        if setup.mttf_s.is_some() {
            return no(
                "failing workers whose ranks hold stages",
                "leave --mttf-s out, or take [parallel] out",
            );
        }
        if job.cluster.durability == Durability::Leader && setup.server_mttf_s.is_some() {
            return no(
                "stages whose shards lose pushes with their leader",
                "set cluster.durability = \"quorum-memory\", or leave --server-mttf-s out",
            );
        }
        if job.clip.norm.is_some() {
            return no(
                "stages that clip by the norm of the whole gradient (clip.norm)",
                "take clip.norm or [parallel] out, or use clip.value",
            );
        }
        if job.parallel.schedule.overlaps_minibatches() && job.eval.early_stop.is_some() {
            return no(
                "early stopping between minibatches that go in behind each other",
                "set parallel.schedule = \"1f1b\", or take [eval.early_stop] out",
            );
        }
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

/// Simulates a job: a fleet like `setup` trains `model` on `data`. `sink` receives the lines of the
/// record except the first (the configuration) and the last (the summary).
///
/// The same job, setup and model give the same lines and the same weights, bit for bit. Blocks until
/// the run is over, on the calling thread.
pub fn simulate(
    job: &Job,
    setup: &Setup,
    model: Box<dyn Model>,
    data: Split,
    sink: Sink,
) -> Result<Outcome, SimError> {
    go(job, setup, model, data, (sink, None))
}

/// As [`simulate`], slowed down for observers: a simulated second takes at least a second of real time.
/// The lines and the weights are the same.
pub fn simulate_watched(
    job: &Job,
    setup: &Setup,
    model: Box<dyn Model>,
    data: Split,
    sink: Sink,
    watcher: Watcher,
) -> Result<Outcome, SimError> {
    go(job, setup, model, data, (sink, Some(watcher)))
}

fn go(
    job: &Job,
    setup: &Setup,
    model: Box<dyn Model>,
    data: Split,
    (sink, watcher): (Sink, Option<Watcher>),
) -> Result<Outcome, SimError> {
    check(job, setup)?;
    let plan = Plan::new(job, &data.train)?;
    let tensors = model.tensors();
    let layers = model.layers();
    let stages = job.stages(&layers).map_err(paraft_worker::WorkerError::Job);
    let stages = if job.parallel.pipeline > 1 { Some(stages?) } else { None };
    let of_stages = stages.as_ref().map(Stages::values).unwrap_or_default();
    let cuts = Cuts { stages: &of_stages, ..Cuts::default() };
    let mut server_job = job.server_job_cut(&tensors, cuts);
    let bad = |e: &dyn std::fmt::Display| paraft_worker::WorkerError::Job(e.to_string());
    let layout = job.layout_cut(tensors, cuts).map_err(|e| bad(&e))?;
    let how = (job.parallel.schedule, job.micro_batches());
    let cut = stages.as_ref().map(|stages| Arc::new(Cut::new(how, &layers, stages, &layout)));
    let beginning = start::begin(
        job,
        None,
        Some(&mut |seed, w| model.init(seed, w)),
        (&layout, &[], &[]),
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
        let processes = workers * cut.as_ref().map_or(1, |cut| cut.ranks() as u32);
        let network = Arc::new(Network::new(clock.clone(), setup, processes, placement.servers));
        let cores = Cores::new(clock.clone(), setup.cores);
        let servers = Servers::start(&clock, &network, &cores, setup, &placement);
        let world = Arc::new(World {
            recording: Recording::new(clock.clone(), workers, sink),
            clock,
            cores,
            network,
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
            cut,
            initial,
            learner,
            step_lead: Mutex::new(StepLead::default()),
            over: false.into(),
            failures: 0.into(),
        });
        if world.file.train.mode == ModeChoice::Auto {
            tokio::spawn(world.servers.clone().steer());
        }
        let watcher = watcher.map(|w| Arc::new(Mutex::new(w)));
        if let Some(watcher) = &watcher {
            tokio::spawn(slowed(world.clone(), watcher.clone()));
        }
        let finished = tokio::select! {
            biased;
            finished = all_workers(&world) => finished?,
            at = no_step(&world) => return Err(SimError::Stuck(at)),
        };
        note_shards(&world)?;
        if let Some(watcher) = &watcher {
            (watcher.lock())(said(&world, true));
        }
        outcome(&world, finished)
    })
}

/// Returns when the run is stuck: no step for too long. Servers that fail and recover are no progress.
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
        // Only the weights of the worker that evaluated count; the others would only use memory.
        if ended.evaluation.is_none() && !finished.is_empty() {
            ended.weights = Vec::new();
        }
        finished.push(ended);
    }
    Ok(finished)
}

fn outcome(world: &World, mut finished: Vec<Finished>) -> Result<Outcome, SimError> {
    let stages = world.cut.iter().flat_map(|cut| of_stages(world, cut, &finished)).collect();
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
        stages,
        steps_between_ends: world.plan.between_ends(&world.file),
    })
}

/// The result of each stage.
fn of_stages(world: &World, cut: &Cut, finished: &[Finished]) -> Vec<StageOutcome> {
    let of = |(at, part): (usize, &Part)| {
        let shards: BTreeSet<_> = (part.buckets.clone())
            .map(|b| placement::shard_of(&world.layout, BucketId(b as u32), world.shards))
            .collect();
        let hosts = shards.iter().filter_map(|shard| world.servers.hosts.get(shard));
        let mut delays = DelayHistogram::default();
        for host in hosts {
            host.state.read(|m| delays.merge(&m.delays));
        }
        let ranks = finished.iter().filter_map(|f| f.ranks.get(at));
        let sum = |of: fn(&OfRank) -> u64| ranks.clone().map(of).sum();
        StageOutcome {
            layers: part.layers.clone(),
            cost: part.share,
            idle: ranks.clone().map(|r| r.idle).sum::<f64>() / finished.len().max(1) as f64,
            delay: delays.mean().unwrap_or(0.0),
            pushed: sum(|r| r.bytes_pushed),
            pulled: sum(|r| r.bytes_pulled),
            sent: sum(|r| r.bytes_sent),
        }
    };
    cut.stages.iter().enumerate().map(of).collect()
}

/// What the shards have counted.
fn staleness((worker, of): (WorkerId, PushStaleness)) -> event::Staleness {
    let PushStaleness { delay, distance, age } = of;
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
            waits: Vec::new(),
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
