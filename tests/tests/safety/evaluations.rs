//! Held-out evaluations: each sample once an epoch, the final weights once; visible while they last, and
//! ended at once.

use anyhow::{Context, Result, ensure};
use paraft_checkpoint::Folder;
use paraft_models::{Batch, CpuDevice, Evaluation, Flat, Layer, Model, ModelError};
use paraft_record::{Event, METRICS_FILE, read_events};
use paraft_tests::{
    fleet::{Fleet, FleetOptions},
    train::{data, job},
};
use paraft_worker::{
    Job, WorkerOptions, WorkerReport, exit,
    samples::{fill, shape_of},
    worker::WorkerError,
};
use std::{
    collections::VecDeque,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering::SeqCst},
    },
    thread,
    time::Duration,
};

const MLP: &str = "[model]\nkind = \"mlp\"\nhidden = [24]\n[optimizer]\nkind = \"sgd\"\nlr = 0.1\n";
/// Held-out samples of the digits.
const HELD_OUT: u64 = 360;

/// The job's model, which counts the samples that it evaluates.
struct CountingModel {
    model: Box<dyn Model>,
    evaluated: Arc<AtomicU64>,
    /// Set when it has evaluated once.
    interrupt: Option<Arc<AtomicBool>>,
    takes: Duration,
    says: LossScript,
}

/// The mean loss that each evaluation returns instead of the true one; `None`: it fails. After the last entry
/// all are true.
type LossScript = Arc<Mutex<VecDeque<Option<f64>>>>;

impl Model for CountingModel {
    fn tensors(&self) -> Vec<paraft_common::TensorSpec> {
        self.model.tensors()
    }

    fn init(&self, seed: u64, params: &mut [f32]) {
        self.model.init(seed, params);
    }

    fn step(
        &mut self,
        params: &[f32],
        grads: &mut [f32],
        batch: &Batch,
        ready: &mut dyn FnMut(usize, &[f32]),
    ) -> Result<f32, ModelError> {
        self.model.step(params, grads, batch, ready)
    }

    fn layers(&self) -> Vec<Layer> {
        self.model.layers()
    }

    fn step_by_layers(&mut self, flat: &mut dyn Flat<CpuDevice>, batch: &Batch) -> Result<f32, ModelError> {
        self.model.step_by_layers(flat, batch)
    }

    fn evaluate(&mut self, params: &[f32], batch: &Batch) -> Result<Evaluation, ModelError> {
        self.evaluated.fetch_add(batch.n as u64, SeqCst);
        thread::sleep(self.takes);
        if let Some(interrupt) = &self.interrupt {
            interrupt.store(true, SeqCst);
        }
        let right = self.model.evaluate(params, batch)?;
        match self.says.lock().expect("held by nobody who panicked").pop_front() {
            Some(None) => Err(ModelError::new("asked to fail")),
            Some(Some(loss)) => Ok(Evaluation { loss_sum: loss * batch.n as f64, ..right }),
            None => Ok(right),
        }
    }
}

fn built(job: &Job) -> Result<Box<dyn Model>> {
    Ok(job.model.as_ref().context("a model")?.build(shape_of(&data(job)?.train))?)
}

struct Run {
    evaluated: Arc<AtomicU64>,
    interrupt: Option<Arc<AtomicBool>>,
    takes: Duration,
    dir: Option<PathBuf>,
    resume: Option<PathBuf>,
    says: LossScript,
}

impl Run {
    fn new() -> Self {
        Self {
            evaluated: Arc::default(),
            interrupt: None,
            takes: Duration::ZERO,
            dir: None,
            resume: None,
            says: LossScript::default(),
        }
    }

    fn worker(&self, job: &Job, rank: u32) -> Result<Result<WorkerReport, WorkerError>> {
        let mut model = CountingModel {
            model: built(job)?,
            evaluated: self.evaluated.clone(),
            interrupt: self.interrupt.clone(),
            takes: self.takes,
            says: self.says.clone(),
        };
        let options = WorkerOptions {
            rank,
            servers: job.cluster.addresses.clone(),
            run_dir: self.dir.clone(),
            weights: None,
            resume: self.resume.clone(),
            metrics: None,
            trace: None,
            slow: Default::default(),
            interrupt: self.interrupt.clone().unwrap_or_default(),
        };
        Ok(paraft_worker::run(job, &options, &mut model, data(job)?))
    }

    fn all(&self, job: &Job) -> Result<Vec<WorkerReport>> {
        thread::scope(|s| {
            let all: Vec<_> = (0..job.ranks()).map(|rank| s.spawn(move || self.worker(job, rank))).collect();
            let joined =
                all.into_iter().map(|t| t.join().map_err(|_| anyhow::anyhow!("a worker panicked"))?);
            joined.map(|r| Ok(r??)).collect()
        })
    }
}

/// Trains two workers; returns the number of evaluated samples. The reported evaluation is that of the final
/// weights.
fn evaluated(set: &[&str]) -> Result<u64> {
    let fleet = Fleet::start(FleetOptions { shards: 2, ..FleetOptions::default() })?;
    let all = [&["train.batch=35", "train.epochs=3", "cluster.bucket_bytes=1024"], set].concat();
    let job = job(&fleet.at, MLP, &all)?;
    let run = Run::new();
    let reports = run.all(&job)?;
    let mut made = reports.iter().filter_map(|r| r.evaluation);
    let (e, test) = (made.next().context("nobody reports it")?, data(&job)?.test);
    ensure!(made.next().is_none(), "two workers report it");
    let bits = |r: &WorkerReport| r.weights.iter().map(|w| w.to_bits()).collect::<Vec<_>>();
    ensure!(reports.iter().all(|r| bits(r) == bits(&reports[0])), "{set:?}: other final weights");
    let mut batch = Batch::default();
    fill(&test, &(0..test.len() as u32).collect::<Vec<_>>(), &mut batch)?;
    let want = built(&job)?.evaluate(&reports[0].weights, &batch)?;
    ensure!((e.correct, e.count) == (want.correct, want.count), "{set:?}: {e:?}, not {want:?}");
    ensure!((e.loss_sum / want.loss_sum - 1.0).abs() < 1e-5, "{set:?}: {e:?}, not {want:?}");
    Ok(run.evaluated.load(SeqCst))
}

#[test]
fn the_final_weights_are_evaluated_once() -> Result<()> {
    for set in [
        &["train.mode=bsp"][..],
        &["train.mode=ssp:2"],
        &["train.mode=asp"],
        &["train.mode=asp", "train.max_steps=50"],
        &["train.mode=asp", "local.steps=1"],
        &["train.mode=bsp", "local.steps=8"],
        &["train.mode=asp", "train.sampler=leased"],
        // Its pulls bring other weights than the servers'.
        &["train.mode=asp", "algorithm.kind=dana-zero", "optimizer.kind=nesterov", "optimizer.lr=0.01"],
    ] {
        let once = evaluated(set)?;
        ensure!(once == HELD_OUT, "{set:?}: {once} samples for the final evaluation");
        let each = evaluated(&[set, &["eval.every_epoch=true"]].concat())?;
        ensure!(each == 3 * HELD_OUT, "{set:?}: {each} samples for three epochs");
    }
    Ok(())
}

#[test]
fn within_epochs_each_due_step_is_evaluated_once() -> Result<()> {
    for mode in ["train.mode=bsp", "train.mode=ssp:2", "train.mode=asp"] {
        let mut weights = Vec::new();
        for every in [&[][..], &["eval.every_steps=8"]] {
            let fleet = Fleet::start(FleetOptions { shards: 2, ..FleetOptions::default() })?;
            // Twenty steps an epoch.
            let set = [
                "train.batch=35",
                "train.epochs=2",
                "cluster.bucket_bytes=1024",
                "eval.every_epoch=true",
                mode,
            ];
            let job = job(&fleet.at, MLP, &[&set[..], every].concat())?;
            let folder = tempfile::tempdir()?;
            let run = Run { dir: Some(folder.path().to_path_buf()), ..Run::new() };
            weights.push(run.all(&job)?.swap_remove(0).weights);
            if every.is_empty() {
                continue;
            }
            let events = read_events(folder.path().join(METRICS_FILE))?;
            let of_shares = events.iter().filter_map(|e| match e {
                Event::Eval(e) if !e.is_final => Some((e.epoch, e.step.map(|s| s.0), e.count)),
                _ => None,
            });
            let mut heard: Vec<_> = of_shares.collect();
            heard.sort_unstable();
            heard.dedup(); // both workers have heard of it
            let due = [(0, 8), (0, 16), (1, 20), (1, 24), (1, 32), (2, 40)];
            let due = due.map(|(epoch, step)| (epoch, Some(step), HELD_OUT));
            ensure!(heard == due, "{mode}: {heard:?}");
            let n = run.evaluated.load(SeqCst);
            ensure!(n == 6 * HELD_OUT, "{mode}: {n} samples for six evaluations");
        }
        let bits = |w: &[f32]| w.iter().map(|w| w.to_bits()).collect::<Vec<_>>();
        ensure!(
            mode != "train.mode=bsp" || bits(&weights[0]) == bits(&weights[1]),
            "evaluations move no weight"
        );
    }
    Ok(())
}

#[test]
fn a_job_that_evaluates_by_other_steps_resumes_where_it_was() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let place = |name: &str| folder.path().join(name);
    /// Epochs, with the steps of those that were evaluated by steps.
    type Due = &'static [(u64, Option<u64>)];
    let runs: [(&str, &str, &[&str], Due); 3] = [
        ("first", "", &["train.epochs=1"], &[(1, None)]),
        // The end of the first epoch, at step 22, is repeated, as in a job that evaluates by epochs.
        (
            "then",
            "first",
            &["train.epochs=2", "eval.every_steps=30"],
            &[(1, Some(22)), (1, Some(30)), (2, Some(44))],
        ),
        ("last", "then", &["train.epochs=3"], &[(2, None), (3, None)]),
    ];
    for (name, from, set, due) in runs {
        let fleet = Fleet::start(FleetOptions { shards: 2, ..FleetOptions::default() })?;
        let checkpoints = format!("checkpoint.dir=\"{}\"", place(name).join("checkpoints").display());
        let both =
            ["eval.every_epoch=true", "checkpoint.every_epochs=1", checkpoints.as_str(), "train.batch=32"];
        let resume = (!from.is_empty()).then(|| place(from).join("checkpoints"));
        let run = Run { dir: Some(place(name)), resume, ..Run::new() };
        run.all(&job(&fleet.at, MLP, &[&both[..], set].concat())?)?;
        let events = read_events(place(name).join(METRICS_FILE))?;
        let heard = events.iter().filter_map(|e| match e {
            Event::Eval(e) if !e.is_final => Some((e.epoch, e.step.map(|s| s.0))),
            _ => None,
        });
        let mut heard: Vec<_> = heard.collect();
        heard.sort_unstable();
        heard.dedup();
        ensure!(heard == due, "{name}: {heard:?}");
    }
    Ok(())
}

#[test]
fn early_stopped_job_evaluates_its_final_weights_once() -> Result<()> {
    let stops = "eval.early_stop={patience=1,min_delta=100.0}";
    for mode in ["train.mode=bsp", "train.mode=asp"] {
        let n = evaluated(&[mode, "eval.every_epoch=true", "train.epochs=30", stops])?;
        // In asp a worker may learn of the end before it evaluates its share of an epoch that the other has
        // evaluated.
        let share = if mode.ends_with("asp") { HELD_OUT / 2 } else { HELD_OUT };
        ensure!(n < 6 * HELD_OUT && n.is_multiple_of(share), "{mode}: {n} samples");
    }
    Ok(())
}

#[test]
fn an_evaluation_that_is_interrupted_ends_at_once() -> Result<()> {
    let fleet = Fleet::start(FleetOptions::default())?;
    let job = job(&fleet.at, MLP, &["train.workers=1", "train.epochs=2", "eval.every_epoch=true"])?;
    let run = Run { interrupt: Some(Arc::default()), ..Run::new() };
    let ended = run.worker(&job, 0)?;
    let code = ended.as_ref().err().map(WorkerError::exit_code);
    ensure!(code == Some(exit::INTERRUPTED), "{ended:?}");
    // The samples that a worker evaluates between two checks for an interrupt.
    ensure!(run.evaluated.load(SeqCst) == 256, "{} samples", run.evaluated.load(SeqCst));
    Ok(())
}

#[test]
fn an_evaluation_that_takes_long_says_how_far_it_is() -> Result<()> {
    let fleet = Fleet::start(FleetOptions::default())?;
    let job = job(&fleet.at, MLP, &["train.workers=1", "train.epochs=1"])?;
    let folder = tempfile::tempdir()?;
    let run =
        Run { takes: Duration::from_millis(1100), dir: Some(folder.path().to_path_buf()), ..Run::new() };
    run.all(&job)?;
    let events = read_events(folder.path().join(METRICS_FILE))?;
    let far = events.iter().filter_map(|e| match e {
        Event::Evaluating(e) => Some((e.worker.0, e.epoch, e.done, e.of)),
        _ => None,
    });
    ensure!(far.collect::<Vec<_>>() == [(0, 1, 256, HELD_OUT)], "{events:?}");
    Ok(())
}

/// The epochs of the evaluations that the workers writing to this folder received, except that of the final
/// weights.
fn heard(folder: &Path) -> Result<Vec<(u64, u64)>> {
    let events = read_events(folder.join(METRICS_FILE))?;
    let of_shares = events.iter().filter_map(|e| match e {
        Event::Eval(e) if !e.is_final => Some((e.epoch, e.count)),
        _ => None,
    });
    let mut all: Vec<_> = of_shares.collect();
    all.sort_unstable();
    Ok(all)
}

#[test]
fn resumed_job_receives_no_evaluation_before_checkpoint() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let [first, then] = ["first", "then"].map(|name| folder.path().join(name));
    let checkpoints = first.join("checkpoints");
    for (epochs, dir, resume) in [(2, &first, None), (4, &then, Some(checkpoints.clone()))] {
        let fleet = Fleet::start(FleetOptions { shards: 2, ..FleetOptions::default() })?;
        let set = [
            "cluster.bucket_bytes=1024",
            "eval.every_epoch=true",
            "checkpoint.every_epochs=1",
            &format!("checkpoint.dir=\"{}\"", dir.join("checkpoints").display()),
            &format!("train.epochs={epochs}"),
        ];
        Run { dir: Some(dir.clone()), resume, ..Run::new() }.all(&job(&fleet.at, MLP, &set)?)?;
    }
    let twice = |epochs: &[u64]| epochs.iter().flat_map(|epoch| [(*epoch, HELD_OUT); 2]).collect::<Vec<_>>();
    ensure!(heard(&first)? == twice(&[1, 2]), "{:?}", heard(&first)?);
    // The checkpoint was cut before its own weights were evaluated, so that evaluation is repeated.
    ensure!(heard(&then)? == twice(&[2, 3, 4]), "{:?}", heard(&then)?);
    Ok(())
}

#[test]
fn who_is_left_evaluates_the_share_of_a_worker_that_is_gone() -> Result<()> {
    for mode in ["train.mode=bsp", "train.mode=ssp:1"] {
        let fleet = Fleet::start(FleetOptions { shards: 2, ..FleetOptions::default() })?;
        let set = ["train.workers=3", "train.batch=35", "train.epochs=5", "eval.every_epoch=true", mode];
        let job = job(&fleet.at, MLP, &set)?;
        let folder = tempfile::tempdir()?;
        let stays = Run { dir: Some(folder.path().to_path_buf()), ..Run::new() };
        // It leaves after its first evaluation.
        let goes = Run { interrupt: Some(Arc::default()), evaluated: stays.evaluated.clone(), ..Run::new() };
        thread::scope(|s| -> Result<()> {
            let (stays, goes, job) = (&stays, &goes, &job);
            let left: Vec<_> = (0..2).map(|rank| s.spawn(move || stays.worker(job, rank))).collect();
            let gone = goes.worker(job, 2)?;
            ensure!(matches!(gone, Err(WorkerError::Interrupted)), "{mode}: {gone:?}");
            for worker in left {
                worker.join().map_err(|_| anyhow::anyhow!("a worker panicked"))???;
            }
            Ok(())
        })?;
        let events = read_events(folder.path().join(METRICS_FILE))?;
        let counts: Vec<_> = events
            .iter()
            .filter_map(|e| match e {
                Event::Eval(e) => Some((e.epoch, e.count)),
                _ => None,
            })
            .collect();
        // With a staleness bound of one, the fastest worker may have reached the second epoch's end while all
        // three were in the job.
        let whole = if mode.ends_with("bsp") { 1 } else { 3 };
        let short = counts.iter().any(|(epoch, count)| *epoch >= whole && *count != HELD_OUT);
        ensure!(!short && counts.iter().any(|(epoch, _)| *epoch == 3), "{mode}: {counts:?}");
        let n = stays.evaluated.load(SeqCst);
        ensure!(!mode.ends_with("bsp") || n == 5 * HELD_OUT, "{mode}: {n} samples for five epochs");
    }
    Ok(())
}

#[test]
fn incomplete_evaluation_makes_no_checkpoint_the_best() -> Result<()> {
    let fleet = Fleet::start(FleetOptions::default())?;
    let folder = tempfile::tempdir()?;
    let place = format!("checkpoint.dir=\"{}\"", folder.path().display());
    let set =
        ["train.batch=35", "train.epochs=4", "eval.every_epoch=true", "checkpoint.every_epochs=1", &place];
    let job = job(&fleet.at, MLP, &set)?;
    // Its share of the second epoch is easy; from then on it has all samples.
    let stays = Run::new();
    stays.says.lock().expect("held by nobody who panicked").extend([2.0, 0.5].map(Some));
    let goes = Run::new();
    goes.says.lock().expect("held by nobody who panicked").extend([Some(2.0), None]);
    let done = thread::scope(|s| -> Result<WorkerReport> {
        let (stays, job) = (&stays, &job);
        let left = s.spawn(move || stays.worker(job, 0));
        let gone = goes.worker(job, 1)?;
        ensure!(gone.is_err(), "{gone:?}");
        Ok(left.join().map_err(|_| anyhow::anyhow!("a worker panicked"))???)
    })?;
    let e = done.evaluation.context("an evaluation")?;
    let (path, best) = Folder::new(folder.path()).best().context("a best one")?;
    let last = e.loss_sum / e.count as f64;
    ensure!(e.count == HELD_OUT && last > 0.5, "{e:?}: nothing can be seen");
    ensure!(best > 0.5, "{} is the best by half of the samples: {best}", path.display());
    Ok(())
}
