//! Leases of workers, and of their chunks of data.

use anyhow::{Context, Result, ensure};
use paraft_checkpoint::{Checkpoint, Folder};
use paraft_common::{Mode, ShardId, Step, TensorSpec};
use paraft_data::{Dataset, Samples, Split};
use paraft_models::{Batch, Evaluation, Model, ModelError};
use paraft_proto::{Acquire, ShardStatus, from_shard, to_shard};
use paraft_tests::{
    fleet::{Fleet, FleetOptions},
    ledger::Ledger,
    stream::Stream,
};
use paraft_worker::{Job, WorkerOptions, WorkerReport, job::TransportConfig, worker::WorkerError};
use std::{
    path::{Path, PathBuf},
    sync::{
        Arc, Barrier, Mutex,
        atomic::{AtomicBool, Ordering::SeqCst},
    },
    thread,
};

#[test]
fn a_member_whose_process_hangs_loses_its_lease() -> Result<()> {
    let fleet = Fleet::start(FleetOptions { servers: 1, shards: 1, replicas: 1, ..Default::default() })?;
    let ledger = Ledger { grace_ms: 50, ..Ledger::new(Mode::Bsp, 2, 4) };
    let buckets: Vec<_> = (0..).zip(ledger.job().layout().buckets().iter().map(|b| b.len)).collect();
    // Its connection stays open and its kernel answers; only the worker is silent.
    let (mut hung, opened) = Stream::open_and_hang(&fleet.at.addresses[0], &ledger.job(), 1, &buckets)?;
    let weights = ledger.join(&fleet.at, 0)?.run()?;
    assert_eq!(weights[ledger.place(0, Step(4))], -1.0, "the others go on");
    assert_eq!(fleet.shard().workers_lost, 1);
    // It wakes up: its stream and its session are gone.
    ensure!(hung.receive()?.is_none(), "its stream has ended");
    let mut again = Stream::connect(&fleet.at.addresses[0])?;
    let open = paraft_tests::stream::open(&ledger.job(), 1)?;
    again.send(to_shard::Kind::Open(paraft_proto::Open { session: opened.session, ..open }));
    let refused = again.refused()?;
    assert!(refused.message.contains("taken out"), "{}", refused.message);
    Ok(())
}

#[test]
fn a_long_step_is_no_silence() -> Result<()> {
    let fleet = Fleet::start(FleetOptions::default())?;
    let ledger = Ledger { grace_ms: 50, ..Ledger::new(Mode::Bsp, 2, 3) };
    let at = fleet.at.clone();
    let other = thread::spawn(move || ledger.join(&at, 0)?.run());
    let mut page = ledger.join(&fleet.at, 1)?;
    page.begin()?;
    // It computes for longer than two leases; this thread sends nothing.
    thread::sleep(ledger.job().lease() * 5 / 2);
    let weights = page.run()?;
    assert_eq!(other.join().map_err(|_| anyhow::anyhow!("a worker panicked"))??, weights);
    assert_eq!(fleet.shard().workers_lost, 0);
    assert!(weights.iter().all(|w| *w == -0.5), "both took part in every step: {weights:?}");
    Ok(())
}

const SAMPLES: usize = 150;
const BATCH: usize = 1;
/// Samples of a chunk: 16 minibatches.
const CHUNK: usize = 16 * BATCH;

/// Sample i is the unit vector i, and the gradient of a minibatch is the sum of its samples: with plain SGD and rate 1,
/// each weight is minus the times that its sample was trained (in BSP: divided by the members of each round).
struct CountingModel {
    steps: u64,
    hook: Box<dyn FnMut(u64) + Send>,
    crash: Option<u64>,
}

impl Model for CountingModel {
    fn tensors(&self) -> Vec<TensorSpec> {
        vec![TensorSpec::param("times", &[SAMPLES])]
    }

    fn init(&self, _: u64, params: &mut [f32]) {
        params.fill(0.0);
    }

    fn step(
        &mut self,
        _: &[f32],
        grads: &mut [f32],
        batch: &Batch,
        ready: &mut dyn FnMut(usize, &[f32]),
    ) -> Result<f32, ModelError> {
        self.steps += 1;
        (self.hook)(self.steps);
        if self.crash == Some(self.steps) {
            return Err(ModelError::new("this is where it dies"));
        }
        grads.fill(0.0);
        for sample in batch.inputs.chunks(SAMPLES) {
            grads.iter_mut().zip(sample).for_each(|(g, x)| *g += x);
        }
        ready(0, grads);
        Ok(1.0)
    }

    fn evaluate(&mut self, _: &[f32], batch: &Batch) -> Result<Evaluation, ModelError> {
        Ok(Evaluation { loss_sum: batch.n as f64, correct: 0, count: batch.n as u64 })
    }
}

fn samples() -> Result<Split> {
    let one_hot = |n: usize| -> Vec<f32> {
        (0..n * SAMPLES).map(|i| f32::from(u8::from(i / SAMPLES == i % SAMPLES))).collect()
    };
    let set = |n| Dataset::new(Samples::Floats(one_hot(n)), vec![SAMPLES], None);
    Ok(Split { train: set(SAMPLES)?, test: set(10)? })
}

fn leased(fleet: &Fleet, mode: &str, set: &[&str]) -> Result<Job> {
    let text = format!(
        "[data]\nkind = \"digits\"\n[train]\nworkers = 3\nmode = \"{mode}\"\nbatch = {BATCH}\nsampler = \"leased\"\n[optimizer]\nkind = \"sgd\"\nlr = 1.0\n[cluster]\ngrace_ms = 100\nbucket_bytes = 200"
    );
    let set: Vec<String> = set.iter().map(ToString::to_string).collect();
    let mut job = Job::parse(&text, Path::new("leased.toml"), &set)?;
    job.cluster.addresses = fleet.at.addresses.clone();
    job.cluster.shards = Some(fleet.at.shards);
    job.cluster.replicas = fleet.at.replicas;
    job.cluster.transport = TransportConfig::Tcp;
    Ok(job)
}

struct HookedWorker {
    rank: u32,
    interrupt: Arc<AtomicBool>,
    hook: Box<dyn FnMut(u64) + Send>,
    crash: Option<u64>,
    resume: Option<PathBuf>,
}

impl HookedWorker {
    fn new(rank: u32) -> Self {
        Self { rank, interrupt: Arc::default(), hook: Box::new(|_| {}), crash: None, resume: None }
    }

    /// A worker that dies without a goodbye, in the middle of a chunk, at step `at`.
    fn dies(rank: u32, at: u64) -> Self {
        Self { crash: Some(at), ..Self::new(rank) }
    }

    /// A worker that is asked to end in step `at`.
    fn leaves(rank: u32, at: u64) -> Self {
        let interrupt = Arc::new(AtomicBool::new(false));
        let end = interrupt.clone();
        let hook = move |step| {
            end.fetch_or(step == at, SeqCst);
        };
        Self { hook: Box::new(hook), interrupt, ..Self::new(rank) }
    }

    fn run(self, job: &Job) -> Result<WorkerReport, WorkerError> {
        let options = WorkerOptions {
            rank: self.rank,
            servers: job.cluster.addresses.clone(),
            run_dir: None,
            weights: None,
            resume: self.resume,
            metrics: None,
            trace: None,
            slow: Default::default(),
            interrupt: self.interrupt,
        };
        let data = samples().map_err(|e| WorkerError::Job(e.to_string()))?;
        paraft_worker::run(
            job,
            &options,
            &mut CountingModel { steps: 0, hook: self.hook, crash: self.crash },
            data,
        )
    }
}

/// Runs all workers at once; returns those that end without an error.
fn together(job: &Job, workers: Vec<HookedWorker>) -> Result<Vec<WorkerReport>> {
    thread::scope(|s| {
        let threads: Vec<_> = workers.into_iter().map(|w| s.spawn(move || w.run(job))).collect();
        let mut reports = Vec::new();
        for t in threads {
            match t.join().map_err(|_| anyhow::anyhow!("a worker panicked"))? {
                Ok(report) => reports.push(report),
                Err(WorkerError::Interrupted | WorkerError::Model(_)) => {}
                Err(e) => return Err(e.into()),
            }
        }
        Ok(reports)
    })
}

fn times(reports: &[WorkerReport]) -> Result<Vec<f32>> {
    let first = &reports.first().context("nobody ended well")?.weights;
    ensure!(reports.iter().all(|r| r.weights == *first), "they ended with different weights");
    Ok(first.iter().map(|w| -w).collect())
}

fn chunks(s: &ShardStatus) -> Result<paraft_proto::Chunks> {
    s.chunks.context("no chunks in the status of shard 0")
}

const MODES: [&str; 3] = ["bsp", "ssp:1", "asp"];

#[test]
fn where_nobody_leaves_every_sample_is_trained_once_an_epoch() -> Result<()> {
    for mode in MODES {
        let fleet = Fleet::start(FleetOptions { servers: 1, shards: 2, replicas: 1, ..Default::default() })?;
        let job = leased(&fleet, mode, &["train.epochs=3"])?;
        let reports = together(&job, (0..3).map(HookedWorker::new).collect())?;
        let times = times(&reports)?;
        let trained: u64 = reports.iter().map(|r| r.samples).sum();
        assert_eq!(trained, 3 * SAMPLES as u64, "{mode}");
        // In BSP a round's mean: at least a third of each.
        let right = |n: &f32| if mode == "bsp" { (0.99..=3.0).contains(n) } else { *n == 3.0 };
        assert!(times.iter().all(right), "{mode}: {times:?}");
        let shard = fleet.leader(ShardId(0)).1;
        assert_eq!(
            (shard.workers_lost, chunks(&shard)?.returned, chunks(&shard)?.epoch),
            (0, 0, 3),
            "{mode}"
        );
    }
    Ok(())
}

fn members(fleet: &Fleet, shards: u32) -> Vec<Vec<u32>> {
    let of = |s| fleet.leader(ShardId(s)).1.members.iter().map(|m| m.worker).collect();
    (0..shards).map(of).collect()
}

/// Otherwise its lease would block the others for a minute.
#[test]
fn worker_asked_to_end_gives_back_its_lease_and_chunk() -> Result<()> {
    for mode in MODES {
        let fleet = Fleet::start(FleetOptions::replicated(2))?;
        let job = leased(&fleet, mode, &["train.epochs=2", "cluster.grace_ms=60000"])?;
        let at_once = Mutex::new(Vec::new());
        let reports = thread::scope(|s| {
            let leaves = s.spawn(|| {
                let ended = HookedWorker::leaves(1, 5).run(&job);
                *at_once.lock().expect("no panic") = members(&fleet, 2);
                assert!(matches!(ended, Err(WorkerError::Interrupted)), "{ended:?}");
            });
            let reports = together(&job, vec![HookedWorker::new(0), HookedWorker::new(2)]);
            leaves.join().map_err(|_| anyhow::anyhow!("the one that leaves panicked"))?;
            reports
        })?;
        let seen = at_once.into_inner().expect("no panic");
        assert!(seen.iter().all(|m| !m.contains(&1)), "{mode}: it has left before it ends: {seen:?}");
        let enough = if mode == "bsp" { 0.66 } else { 2.0 };
        let times = times(&reports)?;
        assert!(times.iter().all(|n| *n >= enough), "{mode}: a sample was left out: {times:?}");
        let shard = fleet.leader(ShardId(0)).1;
        assert_eq!((chunks(&shard)?.returned, chunks(&shard)?.epoch), (1, 2), "{mode}");
    }
    Ok(())
}

#[test]
fn a_worker_that_waits_for_others_can_be_told_to_end() -> Result<()> {
    let fleet = Fleet::start(FleetOptions::replicated(2))?;
    let job = leased(&fleet, "bsp", &["train.epochs=1", "cluster.grace_ms=60000", "train.workers=2"])?;
    let (go_on, held) = std::sync::mpsc::channel::<()>();
    let (tell, told) = std::sync::mpsc::channel();
    // It delays its second step until the other worker, which waits for it, has left.
    let slow = move |step| {
        if step == 2 {
            let _ = tell.send(());
            let _ = held.recv_timeout(paraft_tests::wait::DEADLINE);
        }
    };
    let slow = HookedWorker { hook: Box::new(slow), ..HookedWorker::new(1) };
    let waits = HookedWorker::new(0);
    let interrupt = waits.interrupt.clone();
    thread::scope(|s| {
        let slow = s.spawn(|| slow.run(&job));
        let waits = s.spawn(|| waits.run(&job));
        told.recv_timeout(paraft_tests::wait::DEADLINE)?;
        interrupt.store(true, SeqCst);
        let ended = waits.join().map_err(|_| anyhow::anyhow!("a worker panicked"))?;
        assert!(matches!(ended, Err(WorkerError::Interrupted)), "{ended:?}");
        assert_eq!(members(&fleet, 2), [[1], [1]], "it has left before it ends");
        go_on.send(())?;
        let report = slow.join().map_err(|_| anyhow::anyhow!("a worker panicked"))??;
        assert!(report.weights.iter().all(|w| *w <= -0.5), "the other trains what was given back");
        Ok(())
    })
}

#[test]
fn a_chunk_whose_worker_dies_is_trained_by_another() -> Result<()> {
    for mode in MODES {
        let fleet = Fleet::start(FleetOptions { servers: 1, shards: 2, replicas: 1, ..Default::default() })?;
        let job = leased(&fleet, mode, &["train.epochs=2"])?;
        // It dies with one chunk trained, and the first minibatch of another pushed.
        let reports =
            together(&job, vec![HookedWorker::new(0), HookedWorker::dies(1, 18), HookedWorker::new(2)])?;
        assert_eq!(reports.len(), 2);
        let times = times(&reports)?;
        let enough = if mode == "bsp" { 0.66 } else { 2.0 };
        assert!(times.iter().all(|n| *n >= enough), "{mode}: a sample was left out: {times:?}");
        let twice = times.iter().filter(|n| **n > 2.0).count();
        assert!(twice <= CHUNK, "{mode}: no more than the dead one's chunk is trained again: {times:?}");
        let shard = fleet.leader(ShardId(0)).1;
        assert_eq!(
            (shard.workers_lost, chunks(&shard)?.returned, chunks(&shard)?.epoch),
            (1, 1, 2),
            "{mode}"
        );
    }
    Ok(())
}

#[test]
fn dying_leader_of_chunks_forgets_none_and_repeats_none() -> Result<()> {
    for mode in ["bsp", "asp"] {
        let mut fleet = Fleet::start(FleetOptions::replicated(2))?;
        let job = leased(&fleet, mode, &["train.epochs=6", "cluster.grace_ms=60000"])?;
        // All workers pause in the middle of a chunk while the leader dies.
        let (stop, go) = (Arc::new(Barrier::new(4)), Arc::new(Barrier::new(4)));
        let workers = (0..3).map(|rank| {
            let (stop, go) = (stop.clone(), go.clone());
            let hook = move |step| {
                if step == 24 {
                    stop.wait();
                    go.wait();
                }
            };
            HookedWorker { hook: Box::new(hook), ..HookedWorker::new(rank) }
        });
        let workers: Vec<_> = workers.collect();
        let job = &job;
        let reports = thread::scope(|s| {
            let all = s.spawn(move || together(job, workers));
            stop.wait();
            let (leader, _) = fleet.leader(ShardId(0));
            fleet.kill(leader);
            go.wait();
            all.join().map_err(|_| anyhow::anyhow!("a worker panicked"))?
        })?;
        assert_eq!(reports.iter().map(|r| r.samples).sum::<u64>(), 6 * SAMPLES as u64, "{mode}");
        let times = times(&reports)?;
        let right = |n: &f32| if mode == "bsp" { (1.99..=6.0).contains(n) } else { *n == 6.0 };
        assert!(times.iter().all(right), "{mode}: {times:?}");
        fleet.replicas_agree()?;
    }
    Ok(())
}

#[test]
fn job_of_chunks_continues_after_an_epoch_in_every_mode() -> Result<()> {
    for mode in MODES {
        let dir = tempfile::tempdir()?;
        let place = format!("checkpoint.dir=\"{}\"", dir.path().display());
        let every = ["checkpoint.every_epochs=1", "checkpoint.keep=9", &place];
        let fleet = Fleet::start(FleetOptions { servers: 1, shards: 2, replicas: 1, ..Default::default() })?;
        let job = leased(&fleet, mode, &[&every[..], &["train.epochs=2"]].concat())?;
        let first = times(&together(&job, (0..3).map(HookedWorker::new).collect())?)?;
        let latest = Folder::find(dir.path())?;
        let manifest = Checkpoint::open(&latest)?.manifest().clone();
        assert_eq!(manifest.epochs_done, Some(2), "{mode}: the last epoch's end always has one");
        let saved = Checkpoint::open(&latest)?.load()?.weights;
        assert!(saved.iter().zip(&first).all(|(s, n)| -s == *n), "{mode}: what was cut is the epoch's end");
        // Another fleet, another number of shards, and another worker lost.
        let fleet = Fleet::start(FleetOptions::default())?;
        let job = leased(&fleet, mode, &[&every[..], &["train.epochs=4"]].concat())?;
        let from = |w: HookedWorker| HookedWorker { resume: Some(latest.clone()), ..w };
        let workers =
            vec![from(HookedWorker::new(0)), from(HookedWorker::new(1)), from(HookedWorker::dies(2, 4))];
        let reports = together(&job, workers)?;
        let enough = if mode == "bsp" { 0.66 } else { 2.0 };
        let more = times(&reports)?.into_iter().zip(&first).map(|(n, before)| n - before);
        let more: Vec<f32> = more.collect();
        assert!(more.iter().all(|n| *n >= enough - 1e-3), "{mode}: {more:?}");
        assert!(more.iter().filter(|n| **n > 2.0).count() <= CHUNK, "{mode}: two epochs, not four: {more:?}");
        let last = Checkpoint::open(&Folder::find(dir.path())?)?.manifest().clone();
        assert_eq!(last.epochs_done, Some(4), "{mode}");
        assert!(last.step > manifest.step, "{mode}: {} then {}", manifest.step, last.step);
    }
    Ok(())
}

#[test]
fn early_stopping_ends_those_that_wait_for_a_chunk_too() -> Result<()> {
    let fleet = Fleet::start(FleetOptions::default())?;
    // The held-out loss is always 1: after two epochs without a decrease, the third is not trained.
    let job = leased(&fleet, "asp", &["train.epochs=50", "eval.early_stop={patience=2,min_delta=0.0}"])?;
    let reports = together(&job, (0..3).map(HookedWorker::new).collect())?;
    assert_eq!(reports.iter().map(|r| r.samples).sum::<u64>(), 3 * SAMPLES as u64);
    assert!(times(&reports)?.iter().all(|n| *n == 3.0));
    Ok(())
}

/// More workers than chunks: a worker without one blocks no other, even in lock-step.
#[test]
fn a_worker_without_a_chunk_holds_nobody_up() -> Result<()> {
    for mode in MODES {
        let fleet = Fleet::start(FleetOptions { servers: 1, shards: 2, replicas: 1, ..Default::default() })?;
        let job = leased(&fleet, mode, &["train.epochs=3", "train.batch=5"])?;
        let seen = Arc::new(Mutex::new(Vec::new()));
        let note = |rank| {
            let seen = seen.clone();
            let hook = move |_| seen.lock().unwrap_or_else(|e| e.into_inner()).push(rank);
            HookedWorker { hook: Box::new(hook), ..HookedWorker::new(rank) }
        };
        let reports = together(&job, (0..3).map(note).collect())?;
        assert_eq!(reports.iter().map(|r| r.samples).sum::<u64>(), 3 * SAMPLES as u64, "{mode}");
        // Chunks of 16 and 14 minibatches, three epochs.
        assert_eq!(seen.lock().unwrap_or_else(|e| e.into_inner()).len(), 3 * (16 + 14), "{mode}");
    }
    Ok(())
}

/// A worker is silent while it holds a chunk: another gets the chunk when the lease expires, and the silent
/// worker's last messages change nothing.
#[test]
fn the_chunk_of_a_worker_that_hangs_goes_to_another() -> Result<()> {
    let fleet = Fleet::start(FleetOptions::default())?;
    let mut job = leased(&fleet, "asp", &["train.workers=2", "cluster.bucket_bytes=1024"])?;
    job.name = "hang".into();
    let tensors = CountingModel { steps: 0, hook: Box::new(|_| {}), crash: None }.tensors();
    let data = samples()?;
    let mut server_job = job.server_job_on(&tensors, &data.digest()?);
    let plan = paraft_worker::worker::Plan::new(&job, &data.train)?;
    server_job.chunks = plan.leased;
    let address = &fleet.at.addresses[0];
    let (mut hung, _) = Stream::open_and_hang(address, &server_job, 1, &[(0, SAMPLES)])?;
    hung.send(to_shard::Kind::Acquire(Acquire { request: 1, epoch: 0, done: None }));
    let taken = match hung.receive()? {
        Some(from_shard::Kind::Acquired(t)) => t,
        other => anyhow::bail!("a chunk was expected, not {other:?}"),
    };
    let report = HookedWorker::new(0).run(&job)?;
    assert_eq!(report.samples, SAMPLES as u64, "it trained chunk {} too", taken.chunk);
    assert!(report.weights.iter().all(|w| *w == -1.0));
    let shard = fleet.shard();
    assert_eq!((shard.workers_lost, chunks(&shard)?.returned), (1, 1));
    Ok(())
}
