//! A worker whose loop decides itself what is trained, and when it ends: that of a PyTorch script, for one.

use super::{
    ErrorKind, Plan, Setup, WorkerError, WorkerOptions,
    driver::{Driver, DriverAction, End, Landing},
    join::{Flush, JoinedWorker, join},
    pushes::{Pushes, misuse},
};
use crate::{
    checkpoints,
    job::{Job, SamplerKind},
    metrics::{self, Gauges},
    slow::Slowdown,
};
use paraft_client::Counters;
use paraft_common::{Layout, Mode, Step};
use paraft_data::chunk_of;
use paraft_models::Evaluation;
use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::Instant,
};

/// What the loop does next.
enum NextAction {
    /// A gradient at the pulled weights; whether the weights behind it were asked for.
    Gradient { step: Step, ask_ahead: bool },
    /// A minibatch at weights of its own.
    Local,
    /// The minibatches of a chunk.
    Chunk,
    /// Nothing: the job is over for this worker, or a wait was interrupted.
    Over,
    /// Nothing more: it has failed.
    Failed,
}

/// Where a worker stands after a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepOutcome {
    /// Its last step.
    pub done: Step,
    /// It goes on from elsewhere: it had been taken out, or rounds were closed without it.
    pub moved: bool,
    /// There is nothing more to train: the job has stopped early, or all chunks are trained.
    pub over: bool,
}

/// A worker's part in a job whose end is where the loops of its workers end.
///
/// ```no_run
/// use paraft_worker::{Job, OpenRun, Setup, TensorSpec, WorkerError, WorkerOptions};
/// # fn gradient(_: &[f32]) -> (f32, Vec<f32>) { (0.0, vec![0.0; 4]) }
///
/// # fn main() -> Result<(), WorkerError> {
/// let job = Job::load("job.toml".as_ref(), &[])?;
/// let options = WorkerOptions::new(0, vec!["10.0.0.1:7070".into()]);
/// let setup = Setup::new(vec![TensorSpec::param("w", &[4])], 0, |_, weights| weights.fill(0.1));
///
/// let mut run = OpenRun::join(&job, &options, setup, Box::new(vec![0.0; 4]))?;
/// for _ in 0..1_000 {
///     let (loss, w) = gradient(run.weights());
///     run.ready(0, &w)?;
///     run.step(loss, 64)?;
/// }
/// run.finish()?;
/// # Ok(()) }
/// ```
pub struct OpenRun {
    driver: Driver,
    /// Where the next gradient is computed; with local steps, the servers' weights.
    into: Box<dyn Landing + Send>,
    pushes: Pushes,
    asked: NextAction,
    job: Job,
    /// Of the leased sampler: the epoch's order.
    order: (u64, Vec<u32>),
    /// The samples of the chunk that is to be trained.
    chunk: Vec<u32>,
    moved: bool,
    /// A step is pushed, and its wait is not over.
    waits: bool,
    slow: Slowdown,
    /// The loop computes since; not known before its first step, which may have to build what it computes with.
    computes: Option<Instant>,
    saved: Option<End>,
    /// That were said last.
    rates: Vec<f64>,
    _flush: Option<Flush>,
}

impl OpenRun {
    /// Joins the job on its servers, and waits for its first weights, which are there once all workers of the job have joined.
    /// `weights` is as long as the setup's tensors together: weights land there; with local steps they are the worker's own, and the
    /// loop moves them. [`Setup::samples`] counts where the job leases chunks, and there alone.
    ///
    /// # Errors
    /// As of [`super::Run::join`].
    pub fn join(
        job: &Job,
        options: &WorkerOptions,
        setup: Setup,
        mut weights: Box<dyn Landing + Send>,
    ) -> Result<Self, WorkerError> {
        setup.check(job, options)?;
        let plan = match job.train.sampler {
            SamplerKind::Static => Plan::open(job)?,
            SamplerKind::Leased => Plan::of(job, setup.samples)?,
        };
        let gauges = Arc::new(Gauges::default());
        metrics::serve_at(options.metrics, &gauges, &job.name)?;
        let JoinedWorker { mut driver, flush, .. } = join(job, options, setup, &plan, gauges, false, None)?;
        let (len, has) = (driver.layout.len(), weights.weights().len());
        if has != len {
            return Err(misuse(format!("{has} values for the weights of a model of {len}")));
        }
        if driver.local.is_some() {
            driver.theirs = Some(weights);
            weights = Box::new(vec![0.0; len]);
        }
        let mut run = Self {
            into: weights,
            pushes: Pushes::new(&driver.layout),
            driver,
            asked: NextAction::Over,
            job: job.clone(),
            order: (u64::MAX, Vec::new()),
            chunk: Vec::new(),
            moved: false,
            waits: false,
            slow: Slowdown::new(options.slow, job.seed, options.rank),
            computes: None,
            saved: None,
            rates: Vec::new(),
            _flush: flush,
        };
        run.next()?;
        run.computes = None;
        Ok(run)
    }

    /// The model's tensors and buckets, and where they lie.
    pub fn layout(&self) -> &Layout {
        &self.driver.layout
    }

    /// This worker's last step.
    pub fn done(&self) -> Step {
        self.driver.done()
    }

    /// Whether there is nothing more to train.
    pub fn is_over(&self) -> bool {
        matches!(self.asked, NextAction::Over)
    }

    /// The mode in force, and how often it was switched.
    pub fn mode(&self) -> (u64, Mode) {
        self.driver.client.mode()
    }

    /// What was moved and waited for so far.
    pub fn counters(&self) -> Counters {
        self.driver.client.counters()
    }

    /// Where the next gradient is computed; with local steps the servers' weights, as they were pulled last.
    pub fn weights(&mut self) -> &[f32] {
        self.into.weights()
    }

    /// The epoch (from 0) and the samples of the chunk that is to be trained, in their order, each below [`Setup::samples`]; none
    /// without the leased sampler, and once all are trained. [`Self::prepared`] says that its minibatches begin.
    pub fn chunk(&self) -> Option<(u64, &[u32])> {
        matches!(self.asked, NextAction::Chunk).then_some((self.order.0, &self.chunk))
    }

    /// The next gradients are of the minibatches of [`Self::chunk`], which the job's batch cuts it into.
    ///
    /// # Errors
    /// There is no chunk to begin, or nothing in it.
    pub fn prepared(&mut self) -> Result<(), WorkerError> {
        if !matches!(self.asked, NextAction::Chunk) {
            return Err(misuse("no chunk is to be begun"));
        }
        self.driver.prepared(self.chunk.len().div_ceil(self.job.train.batch) as u64);
        self.next()
    }

    /// The gradient of a tensor is computed, row-major, as the mean over the minibatch; of a buffer: what the servers are to
    /// subtract from it. In any order; the last layer first lets pushes go out while the first is computed.
    ///
    /// # Errors
    /// There is no such tensor, it was handed over before, has another length, or the job has local steps.
    pub fn ready(&mut self, tensor: usize, gradient: &[f32]) -> Result<(), WorkerError> {
        let step = self.pushing()?;
        self.pushes.take(&mut self.driver, Some(step), tensor, gradient)
    }

    /// The step whose gradients come; asks for the weights behind it once.
    fn pushing(&mut self) -> Result<Step, WorkerError> {
        match &mut self.asked {
            NextAction::Gradient { step, ask_ahead } => {
                if std::mem::take(ask_ahead) {
                    self.driver.client.ask_ahead(*step);
                }
                Ok(*step)
            }
            NextAction::Local => Err(misuse("with local steps no gradient is pushed: move the weights")),
            NextAction::Chunk => Err(misuse("a chunk is to be begun: call prepared")),
            NextAction::Over => Err(misuse("the job is over: nothing is trained any more")),
            NextAction::Failed => Err(failed()),
        }
    }

    /// The rates at which the next gradients are applied, of each group ([`Setup::groups`]; one without groups): on this worker's clock,
    /// instead of the job's schedule. None: that again.
    pub fn rates(&mut self, rates: Vec<f64>) {
        self.rates.clone_from(&rates);
        if let Some(checkpoints) = &mut self.driver.checkpoints {
            checkpoints.rates.clone_from(&rates);
        }
        self.driver.client.rates(rates);
    }

    /// The loop has written to its weights itself, and what it wrote is not to stay: the next pull brings all of them.
    pub fn forget_weights(&mut self) {
        self.driver.client.forget_weights();
    }

    /// Writes a checkpoint of this worker's last step, as the servers have it now, and waits until it is whole on the disk; gives its
    /// folder. `folder`: into this one, of which the fleet hears nothing; else where the job's go. Several workers may save at one step;
    /// in one folder the first writes for all.
    ///
    /// # Errors
    /// There is no place for checkpoints, gradients of the next step are pushed already, the servers aren't reached or don't come to a
    /// common step within the job's timeout, files can't be written, or the wait was interrupted.
    pub fn save(&mut self, folder: Option<&Path>) -> Result<PathBuf, WorkerError> {
        match self.asked {
            NextAction::Failed => return Err(failed()),
            NextAction::Gradient { .. } if self.pushes.begun() => {
                return Err(misuse(
                    "gradients of the next step are on their way: save between two steps, behind optimizer.step()",
                ));
            }
            _ if self.saved.is_some() => return Err(misuse("the run is finished: save before")),
            _ => {}
        }
        let driver = &mut self.driver;
        if folder.is_none() {
            checkpoints::place(&self.job, driver.run_dir.as_deref())?;
            if driver.plan.leased.is_some() {
                return Err(misuse(
                    "with leased samples checkpoints are cut between epochs, when nobody trains: set checkpoint.every_epochs",
                ));
            }
        }
        driver.save_now(folder, &self.rates)
    }

    /// This worker has nothing for this step, as where a gradient is not finite: it counts as done. In a mode that averages nobody's
    /// gradients of the step are applied. [`Self::step`] follows.
    ///
    /// # Errors
    /// A gradient of the step was handed over, or the job has local steps.
    pub fn skip(&mut self) -> Result<(), WorkerError> {
        let step = self.pushing()?;
        self.pushes.skip(&self.driver.layout)?;
        self.driver.client.skip(step);
        Ok(())
    }

    /// The minibatch is trained: every tensor's gradient is handed over, or, with local steps, the weights are moved. Waits where the
    /// job's mode makes this worker wait, and pulls. `loss`: the mean over its samples, NaN where it is not known.
    ///
    /// # Errors
    /// A gradient is missing, the servers can't be reached or refuse, files can't be written, or the wait was interrupted: then the
    /// next call of [`Self::go_on`] waits on. Where a gradient holds a NaN or an infinity its buckets are left as they are, in `bsp` by
    /// all workers, and the step is done but for them: the run goes on.
    pub fn step(&mut self, loss: f32, samples: u64) -> Result<StepOutcome, WorkerError> {
        let step = self.driver.done().next();
        match self.asked {
            NextAction::Gradient { .. } => self.pushes.are_complete(&self.driver.layout)?,
            NextAction::Local => {}
            NextAction::Chunk => return Err(misuse("a chunk is to be begun: call prepared")),
            NextAction::Over if self.waits => {
                return Err(misuse("the wait of a step was interrupted: call go_on"));
            }
            NextAction::Over => return Err(misuse("the job is over: nothing is trained any more")),
            NextAction::Failed => return Err(failed()),
        }
        if let Some(since) = self.computes.take() {
            self.slow.took(since.elapsed());
        }
        self.driver.trained(Some((f64::from(loss) * samples.max(1) as f64, samples.max(1))));
        self.waits = true;
        let mut refused = None;
        loop {
            match self.go_on() {
                // The buckets that hold it are left as they are, so that nobody waits for them.
                Err(e) if e.is_not_finite() => {
                    self.driver.client.skip(step);
                    refused = refused.or(Some(e));
                }
                went => return refused.map_or(went, Err),
            }
        }
    }

    /// Waits on, after an interrupt; where nothing was interrupted it only says where this worker stands.
    ///
    /// # Errors
    /// As of [`Self::step`].
    pub fn go_on(&mut self) -> Result<StepOutcome, WorkerError> {
        if let NextAction::Failed = self.asked {
            return Err(failed());
        }
        if self.waits {
            self.asked = NextAction::Over;
            self.next()?;
            self.waits = false;
        }
        Ok(StepOutcome { done: self.done(), moved: std::mem::take(&mut self.moved), over: self.is_over() })
    }

    /// Sets what the loop does next.
    fn next(&mut self) -> Result<(), WorkerError> {
        self.try_next().inspect_err(|e| {
            if e.kind() != ErrorKind::Interrupted && !e.is_not_finite() {
                self.asked = NextAction::Failed;
            }
        })
    }

    fn try_next(&mut self) -> Result<(), WorkerError> {
        let before = self.driver.done();
        let mut begun = false;
        loop {
            match self.driver.next(&mut *self.into)? {
                DriverAction::Begin(done) => {
                    self.moved |= begun || before != Step(0) && done != before;
                    begun = true;
                }
                DriverAction::Gradient { step, ask_ahead, .. } => {
                    self.pushes.expect(&self.driver.layout);
                    self.asked = NextAction::Gradient { step, ask_ahead };
                    self.hold();
                    return Ok(());
                }
                DriverAction::Local { .. } => {
                    self.asked = NextAction::Local;
                    self.hold();
                    return Ok(());
                }
                DriverAction::Evaluate { .. } => self.driver.not_evaluated(),
                DriverAction::Chunk { epoch, chunk } => {
                    if self.order.0 != epoch {
                        self.order = (epoch, self.driver.order(epoch));
                    }
                    let t = &self.job.train;
                    self.chunk = chunk_of(&self.order.1, chunk, t.chunk(), t.batch).flatten().collect();
                    self.asked = NextAction::Chunk;
                    return Ok(());
                }
                DriverAction::DropChunk => {
                    self.chunk.clear();
                    self.moved = true;
                }
                DriverAction::End(end) => {
                    self.chunk.clear();
                    self.driver.save(end, &mut *self.into)?;
                    self.driver.end(end, None)?;
                    self.saved = Some(end);
                    self.asked = NextAction::Over;
                    return Ok(());
                }
            }
        }
    }

    /// The loop computes next: at once, or, where this worker is to be slow, after a while. An interrupt ends that, and is found in
    /// the next step.
    fn hold(&mut self) {
        let interrupt = &self.driver.interrupt;
        self.slow.hold(|| interrupt.is_set());
        self.computes = Some(Instant::now());
    }

    /// This worker's share of a held-out evaluation, as sums over its samples: shard 0 adds the shares of all workers up, and the
    /// record has the mean. `epoch` from 1.
    ///
    /// # Errors
    /// The record can't be written.
    pub fn report(&mut self, epoch: u64, evaluation: &Evaluation) -> Result<(), WorkerError> {
        self.driver.evaluated(epoch, evaluation)
    }

    /// The loop has ended: waits until those of all workers have, and brings the final weights.
    ///
    /// # Errors
    /// As of [`Self::step`].
    pub fn finish(&mut self) -> Result<(), WorkerError> {
        while self.saved.is_none() {
            match std::mem::replace(&mut self.asked, NextAction::Over) {
                NextAction::Gradient { .. } | NextAction::Local => self.driver.trained(None),
                NextAction::Chunk => self.driver.prepared(1), // none of which is trained
                NextAction::Over => {}
                NextAction::Failed => {
                    self.asked = NextAction::Failed;
                    return Err(failed());
                }
            }
            self.next()?;
        }
        if let Some(theirs) = &mut self.driver.theirs {
            theirs.landing()?.copy_from_slice(self.into.weights());
        }
        Ok(())
    }

    /// Ends this worker's part before its time. Others train on at once, instead of when its lease has ended.
    pub fn leave(mut self) {
        if self.saved.is_none() {
            self.driver.leave();
        }
    }
}

fn failed() -> WorkerError {
    misuse("this run has failed, and said why: it cannot go on")
}
