//! A worker whose own loop decides what is trained and when it ends, such as a PyTorch script.

mod ahead;
mod clipping;
mod groups;
mod mean;
mod next_action;
mod rows;

use super::{
    Plan, Setup, WorkerError, WorkerOptions,
    driver::{Driver, End, WeightBuffer},
    join::{Flush, JoinedWorker, join},
    pushes::{Pushes, misuse},
};
use crate::{
    checkpoints,
    job::{Job, SamplerKind},
    metrics::{self, Gauges},
    recorder::{MAX_NAME, MAX_VALUES},
    slow::Slowdown,
};
use ahead::Ahead;
use clipping::Clipping;
use next_action::NextAction;
use paraft_client::Counters;
use paraft_common::{Layout, Mode, Step, optim::Overrides};
use paraft_models::Evaluation;
use paraft_record::event;
use rows::Tables;
use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::Instant,
};

/// The state of a worker after a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepOutcome {
    /// Its last step.
    pub done: Step,
    /// The worker continues from another step: it was removed, or rounds were closed without it.
    pub moved: bool,
    /// Nothing is left to train: the job stopped early, or all chunks are trained.
    pub over: bool,
}

/// A worker of a job that ends when its workers' loops end.
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
    /// The weights for the next gradient; with local steps, the servers' weights.
    into: Box<dyn WeightBuffer + Send>,
    pushes: Pushes,
    asked: NextAction,
    job: Job,
    /// Leased sampler: the epoch and its sample order.
    order: (u64, Vec<u32>),
    /// The samples of the current chunk.
    chunk: Vec<u32>,
    moved: bool,
    /// Steps without the first group, which the servers count as skipped.
    left_out: u64,
    /// Groups that the last step left out, and the buckets' versions before it.
    before: Option<(Vec<u16>, Vec<u64>)>,
    /// A step is pushed, and its wait is not over.
    waits: bool,
    slow: Slowdown,
    /// When the loop started computing. Unknown before the first step, which may include one-time setup.
    computes: Option<Instant>,
    saved: Option<End>,
    clipping: Clipping,
    /// The options that the loop set last.
    overrides: Vec<Overrides>,
    tables: Tables,
    ahead: Ahead,
    _flush: Option<Flush>,
}

impl OpenRun {
    /// Joins the job on its servers, and waits for its first weights, which exist once all workers of the job have
    /// joined. `weights` has the total length of the setup's tensors and receives pulled weights. With local steps
    /// it holds the worker's own weights, and the loop changes them. [`Setup::samples`] matters only if the job
    /// leases chunks.
    ///
    /// # Errors
    /// See [`super::Run::join`].
    pub fn join(
        job: &Job,
        options: &WorkerOptions,
        setup: Setup,
        mut weights: Box<dyn WeightBuffer + Send>,
    ) -> Result<Self, WorkerError> {
        setup.check(job, options)?;
        if job.eval.every_steps.is_some() {
            let why = "eval.every_steps is for loops that Paraft asks to evaluate; a script reports its evaluations when it has them; \
                       take the key out";
            return Err(WorkerError::Job(why.into()));
        }
        let plan = match job.train.sampler {
            SamplerKind::Static => Plan::open(job)?,
            SamplerKind::Leased => Plan::of(job, setup.samples)?,
        };
        let gauges = Arc::new(Gauges::default());
        metrics::serve_at(options.metrics, &gauges, &job.name)?;
        let tables = Tables::new(&setup.tables, job)?;
        let JoinedWorker { mut driver, flush, .. } = join(job, options, setup, &plan, gauges, false, None)?;
        let (len, has) = (driver.layout.len(), weights.weights().len());
        if has != len {
            return Err(misuse(format!("{has} values for the weights of a model of {len}")));
        }
        if driver.local.is_some() {
            driver.user_weights = Some(weights);
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
            left_out: 0,
            before: None,
            waits: false,
            slow: Slowdown::new(options.slow, job.seed, options.rank),
            computes: None,
            saved: None,
            clipping: Clipping::default(),
            overrides: Vec::new(),
            tables,
            ahead: Ahead::default(),
            _flush: flush,
        };
        run.next()?;
        run.computes = None;
        Ok(run)
    }

    /// The model's tensors and buckets, with their places.
    pub fn layout(&self) -> &Layout {
        &self.driver.layout
    }

    /// This worker's last step.
    pub fn done(&self) -> Step {
        self.driver.done()
    }

    /// Whether nothing is left to train.
    pub fn is_over(&self) -> bool {
        matches!(self.asked, NextAction::Over)
    }

    /// The mode in force, and the number of switches so far.
    pub fn mode(&self) -> (u64, Mode) {
        self.driver.client.mode()
    }

    /// Bytes moved and time waited so far.
    pub fn counters(&self) -> Counters {
        let counters = self.driver.client.counters();
        Counters { skipped: counters.skipped.saturating_sub(self.left_out), ..counters }
    }

    /// The weights for the next gradient; with local steps the servers' weights of the last pull.
    pub fn weights(&mut self) -> &[f32] {
        self.into.weights()
    }

    /// The epoch (from 0) and the samples of the current chunk in their order, each below [`Setup::samples`].
    /// `None` without the leased sampler, and once all chunks are trained. Call [`Self::prepared`] before the
    /// chunk's first minibatch.
    pub fn chunk(&self) -> Option<(u64, &[u32])> {
        matches!(self.asked, NextAction::Chunk).then_some((self.order.0, &self.chunk))
    }

    /// The next gradients are of the minibatches of [`Self::chunk`], which the job's batch size divides.
    ///
    /// # Errors
    /// There is no chunk to start, or it is empty.
    pub fn prepared(&mut self) -> Result<(), WorkerError> {
        if !matches!(self.asked, NextAction::Chunk) {
            return Err(misuse("no chunk is to be begun"));
        }
        self.driver.prepared(self.chunk.len().div_ceil(self.job.train.batch) as u64);
        self.next()?;
        self.ask_ahead()
    }

    /// Hands over the gradient of a tensor, row-major, as the mean over the minibatch; for a buffer, the value that
    /// the servers subtract from it. The order is free; with the last layer first, pushes go out while the first
    /// layer is computed.
    ///
    /// # Errors
    /// There is no such tensor, its gradient was handed over before or has another length, or the job has
    /// local steps.
    pub fn ready(&mut self, tensor: usize, gradient: &[f32]) -> Result<(), WorkerError> {
        let step = self.pushing()?;
        self.pushes.take(&mut self.driver, Some(step), tensor, gradient)
    }

    /// The step of the current gradients. Asks once for the following weights.
    fn pushing(&mut self) -> Result<Step, WorkerError> {
        self.ahead.abandon();
        match &mut self.asked {
            NextAction::Gradient { step, ask_ahead } => {
                if std::mem::take(ask_ahead) {
                    self.driver.client.ask_ahead(*step);
                }
                Ok(*step)
            }
            NextAction::Apply { .. } => Err(misuse("the mean gradient is to be applied: call applied")),
            NextAction::Local => Err(misuse("with local steps no gradient is pushed: move the weights")),
            NextAction::Chunk => Err(misuse("a chunk is to be begun: call prepared")),
            NextAction::Over => Err(misuse("the job is over: nothing is trained any more")),
            NextAction::Failed => Err(failed()),
        }
    }

    /// Sets options for the next gradients, for each group ([`Setup::groups`]; one without groups), by this worker's
    /// clock: a rate replaces the job's rate and schedule. Empty: the job's again.
    pub fn override_options(&mut self, of_groups: Vec<Overrides>) {
        self.driver.rate = of_groups.first().and_then(|o| o.rate);
        self.overrides.clone_from(&of_groups);
        let rates = self.rates();
        if let Some(checkpoints) = &mut self.driver.checkpoints {
            checkpoints.in_force.rates = rates;
        }
        self.driver.client.override_options(of_groups);
    }

    /// The rates that the loop has set, of all groups; empty: the job's.
    fn rates(&self) -> Vec<f64> {
        let rates: Option<Vec<f64>> = self.overrides.iter().map(|o| o.rate).collect();
        rates.unwrap_or_default()
    }

    /// Records a value of the current step by name, besides its loss: the record has its means. A value that is not finite
    /// is left out.
    ///
    /// # Errors
    /// Paraft records a value of this name itself, the name is too long, or the loop has named too many.
    pub fn log(&mut self, name: &str, value: f64) -> Result<(), WorkerError> {
        if [event::LEARNING_RATE, event::GRADIENT_NORM, "loss"].contains(&name) {
            return Err(misuse(format!("`{name}` is recorded by itself: choose another name")));
        }
        match self.driver.recorder.value(name, value) {
            true => Ok(()),
            false => Err(misuse(format!(
                "there is no room for `{name}`: a run has at most {MAX_VALUES} names, of at most {MAX_NAME} bytes"
            ))),
        }
    }

    /// The loop has overwritten its weights, and the change must not stay: the next pull brings all weights.
    pub fn forget_weights(&mut self) {
        self.driver.client.forget_weights();
    }

    /// Writes a checkpoint of the servers' state after this worker's last step, waits until it is complete on disk,
    /// and returns its folder. `folder`: the target, without a report to the fleet; otherwise the job's folder.
    /// Several workers may save at one step; into one folder the first of them writes for all.
    ///
    /// # Errors
    /// There is no folder for checkpoints, gradients of the next step are pushed already, the servers are
    /// not reached or do not agree on a step within the job's timeout, files cannot be written, or the wait was
    /// interrupted.
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
        self.settle()?;
        let rates = self.rates();
        let driver = &mut self.driver;
        if folder.is_none() {
            checkpoints::place(&self.job, driver.run_dir.as_deref())?;
            if driver.plan.leased.is_some() {
                return Err(misuse(
                    "with leased samples checkpoints are cut between epochs, when no worker trains: set checkpoint.every_epochs",
                ));
            }
        }
        driver.save_now(folder, &rates)
    }

    /// Skips this step, for example because a gradient is not finite: it counts as done. In a mode with averaging,
    /// no worker's gradients of the step are applied. Then call [`Self::step`].
    ///
    /// # Errors
    /// A gradient of the step was handed over, or the job has local steps.
    pub fn skip(&mut self) -> Result<(), WorkerError> {
        let step = self.pushing()?;
        self.pushes.skip(&self.driver.layout)?;
        self.tables.skip();
        self.driver.client.skip(step);
        Ok(())
    }

    /// Ends a minibatch: every tensor's gradient is handed over or, with local steps, the weights have changed.
    /// Waits as the job's mode requires, and pulls. `loss`: the mean over the minibatch's samples, NaN if unknown.
    ///
    /// # Errors
    /// A gradient is missing, the servers cannot be reached or refuse, files cannot be written, or the
    /// wait was interrupted: then call [`Self::continue_wait`] to continue the wait. If a gradient has a NaN or an
    /// infinity, its buckets keep their values, in `bsp` on all workers. The step otherwise counts as done and the
    /// run continues.
    pub fn step(&mut self, loss: f32, samples: u64) -> Result<StepOutcome, WorkerError> {
        self.ahead.abandon();
        let step = self.driver.done().next();
        match self.asked {
            NextAction::Gradient { .. } => {
                self.pushes.are_complete(&self.driver.layout)?;
                self.push_rows(step);
            }
            NextAction::Apply { .. } => {
                return Err(misuse("the mean gradient is to be applied: call applied"));
            }
            NextAction::Local => {}
            NextAction::Chunk => return Err(misuse("a chunk is to be begun: call prepared")),
            NextAction::Over if self.waits => {
                return Err(misuse("the wait of a step was interrupted: call continue_wait"));
            }
            NextAction::Over => return Err(misuse("the job is over: nothing is trained any more")),
            NextAction::Failed => return Err(failed()),
        }
        if let Some(since) = self.computes.take() {
            self.slow.took(since.elapsed());
        }
        self.driver.trained(Some((f64::from(loss) * samples.max(1) as f64, samples.max(1))));
        self.waits = true;
        let mut refused = self.clipping.begin(step);
        loop {
            match self.continue_wait() {
                // Skip the buckets with such values, so that no worker waits for them.
                Err(e) if e.is_not_finite() => {
                    self.driver.client.skip(step);
                    refused = refused.or(Some(e));
                }
                went => return refused.map_or(went, Err),
            }
        }
    }

    /// Continues an interrupted wait. Without an interrupt it only returns this worker's state.
    ///
    /// # Errors
    /// See [`Self::step`].
    pub fn continue_wait(&mut self) -> Result<StepOutcome, WorkerError> {
        if let NextAction::Failed = self.asked {
            return Err(failed());
        }
        if self.waits {
            self.clip()?;
            self.asked = NextAction::Over;
            self.next()?;
            self.waits = false;
            self.tables.begin();
            self.ahead.read = false;
            self.ask_ahead()?;
        }
        Ok(StepOutcome { done: self.done(), moved: std::mem::take(&mut self.moved), over: self.is_over() })
    }

    /// Reports this worker's share of a held-out evaluation, as sums over its samples. Shard 0 adds the shares of
    /// all workers, and the record has the mean. `epoch` counts from 1.
    ///
    /// # Errors
    /// The record cannot be written.
    pub fn report(&mut self, epoch: u64, evaluation: &Evaluation) -> Result<(), WorkerError> {
        self.driver.evaluated(epoch, evaluation)
    }

    /// The loop has ended: waits until the loops of all workers have, and pulls the final weights.
    ///
    /// # Errors
    /// See [`Self::step`].
    pub fn finish(&mut self) -> Result<(), WorkerError> {
        self.settle()?;
        while self.saved.is_none() {
            match std::mem::replace(&mut self.asked, NextAction::Over) {
                NextAction::Apply { whole } => {
                    self.asked = NextAction::Apply { whole };
                    return Err(misuse("the mean gradient is to be applied: call applied"));
                }
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
        if let Some(theirs) = &mut self.driver.user_weights {
            theirs.buffer()?.copy_from_slice(self.into.weights());
        }
        Ok(())
    }

    /// Ends this worker early. The other workers continue at once, instead of after its lease.
    pub fn leave(mut self) {
        if self.saved.is_none() {
            self.driver.leave();
        }
    }
}

fn failed() -> WorkerError {
    misuse("this run has failed; an earlier error says why")
}
