//! A worker with a user's own training loop, model and data.

use super::{
    LoopAction, Minibatch, Minibatches, Plan, Setup, WorkerError, WorkerOptions, WorkerReport,
    driver::{self, Driver, End},
    join::{Flush, JoinedWorker, join},
    pushes::{Pushes, misuse},
    training::finite,
};
use crate::{engine::StepLoss, job::Job, metrics::Gauges};
use paraft_common::{Step, TensorSpec};
use paraft_data::chunk_of;
use paraft_models::{Evaluation, ModelError};
use std::{
    collections::{BTreeMap, VecDeque},
    ops::Range,
    sync::Arc,
};

/// The loop's last action.
enum LastAction {
    Nothing,
    Gradient { step: Step, samples: u64 },
    Local { step: Step, clock: u64, samples: u64 },
    Evaluate(u64),
    Final(End),
    Over,
}

/// A worker of a job, for a user's own training loop.
///
/// ```no_run
/// use paraft_worker::{Evaluation, Job, Run, Setup, TensorSpec, LoopAction, WorkerError, WorkerOptions};
/// # fn gradient(_: &[f32], _: &[u32]) -> (f32, Vec<f32>) { (0.0, vec![0.0; 4]) }
///
/// # fn main() -> Result<(), WorkerError> {
/// let job = Job::load("job.toml".as_ref(), &[])?;
/// let options = WorkerOptions::new(0, vec!["10.0.0.1:7070".into()]);
/// let setup = Setup::new(vec![TensorSpec::param("w", &[4])], 60_000, |seed, weights| weights.fill(0.1));
///
/// let mut run = Run::join(&job, &options, setup)?;
/// loop {
///     match run.next()? {
///         LoopAction::Train(minibatch) => {
///             let (loss, w) = gradient(run.tensor("w").expect("its name"), &minibatch.samples);
///             run.ready(0, &w)?; // pushed while the next tensor's gradient is computed
///             run.trained(loss)?;
///         }
///         LoopAction::Evaluate { samples } => {
///             run.evaluated(Evaluation { loss_sum: 0.0, correct: 0, count: samples.len() as u64 })?;
///         }
///         LoopAction::Over => break,
///     }
/// }
/// let weights = run.finish()?.weights; // the job's final ones
/// # Ok(()) }
/// ```
///
/// Mode, sampler, local steps, checkpoints, resume and the record come from the job, as for the built-in workers.
/// One process is one worker: only the built-in loop supports groups of ranks.
pub struct Run {
    driver: Driver,
    weights: Vec<f32>,
    /// Tensor indices by name.
    names: BTreeMap<String, usize>,
    pushes: Pushes,
    minibatches: Minibatches,
    /// The step before the static sampler's minibatches.
    after: Step,
    /// Leased sampler: the epoch's sample order, and the chunk's minibatches.
    order: (u64, Vec<u32>),
    chunk: Option<VecDeque<Vec<u32>>>,
    job: Job,
    rank: u32,
    asked: LastAction,
    evaluation: Option<Evaluation>,
    held_out: usize,
    _flush: Option<Flush>,
}

impl Run {
    /// Joins the job on its servers; waits for them up to `cluster.timeout_ms`.
    ///
    /// # Errors
    /// The job does not fit the setup or the fleet, a checkpoint is unusable, or the servers are not
    /// reached or refuse. [`WorkerError::kind`] says what can be done about it.
    pub fn join(job: &Job, options: &WorkerOptions, setup: Setup) -> Result<Self, WorkerError> {
        let (held_out, tensors) = (setup.held_out, &setup.tensors);
        setup.check(job, options)?;
        let names: BTreeMap<_, _> = tensors.iter().enumerate().map(|(i, t)| (t.name.clone(), i)).collect();
        let plan = Plan::of(job, setup.samples)?.resuming_from(job, options.resume.as_deref())?;
        let JoinedWorker { mut driver, start, flush, .. } =
            join(job, options, setup, &plan, Arc::new(Gauges::default()), false, None)?;
        driver.has_steps(start)?;
        let (len, pushes) = (driver.layout.len(), Pushes::new(&driver.layout));
        let done = driver.done();
        Ok(Self {
            minibatches: plan.minibatches(job, options.rank, done),
            after: done,
            order: (u64::MAX, Vec::new()),
            chunk: plan.leased.map(|_| VecDeque::new()),
            driver,
            weights: vec![0.0; len],
            names,
            pushes,
            job: job.clone(),
            rank: options.rank,
            asked: LastAction::Nothing,
            evaluation: None,
            held_out,
            _flush: flush,
        })
    }

    /// The model's tensors, with each one's place in [`Self::weights`].
    pub fn tensors(&self) -> impl Iterator<Item = (&TensorSpec, Range<usize>)> {
        let layout = &self.driver.layout;
        layout.tensors().iter().enumerate().map(|(i, t)| (t, layout.tensor_range(i)))
    }

    /// All weights, flat, for the next gradient or evaluation. With local steps they are the worker's own while it
    /// trains.
    pub fn weights(&self) -> &[f32] {
        match (&self.asked, &self.driver.local) {
            (LastAction::Local { .. }, Some(local)) => local.weights(),
            _ => &self.weights,
        }
    }

    /// The weights of one tensor, row-major; `None`: no tensor has this name.
    pub fn tensor(&self, name: &str) -> Option<&[f32]> {
        let i = *self.names.get(name)?;
        self.weights().get(self.driver.layout.tensor_range(i))
    }

    /// The loop's next action. Waits as the job's mode requires, pulls weights, writes checkpoints and the record.
    ///
    /// # Errors
    /// The servers cannot be reached or refuse, files cannot be written, a signal came, or the last action
    /// is unfinished.
    #[allow(clippy::should_implement_trait)] // fallible, and it borrows from self
    pub fn next(&mut self) -> Result<LoopAction, WorkerError> {
        match std::mem::replace(&mut self.asked, LastAction::Nothing) {
            LastAction::Nothing => {}
            LastAction::Over => {
                self.asked = LastAction::Over;
                return Ok(LoopAction::Over);
            }
            waits @ (LastAction::Gradient { .. } | LastAction::Local { .. }) => {
                self.asked = waits;
                return Err(misuse("a minibatch is in training: call trained"));
            }
            waits @ (LastAction::Evaluate(_) | LastAction::Final(_)) => {
                self.asked = waits;
                return Err(misuse("an evaluation is asked for: call evaluated"));
            }
        }
        loop {
            match self.driver.next(&mut self.weights)? {
                driver::DriverAction::Begin(done) => {
                    if self.after != done {
                        self.minibatches = self.driver.plan.minibatches(&self.job, self.rank, done);
                        self.after = done;
                    }
                }
                driver::DriverAction::Gradient { step, ask_ahead, .. } => {
                    let Some(samples) = self.minibatch() else { continue };
                    let n = samples.len();
                    self.pushes.expect(&self.driver.layout);
                    self.driver.client.weigh(n);
                    if ask_ahead {
                        self.driver.client.ask_ahead(step);
                    }
                    self.asked = LastAction::Gradient { step, samples: n as u64 };
                    return Ok(LoopAction::Train(Minibatch { step, samples }));
                }
                driver::DriverAction::Local { step, clock } => {
                    let Some(samples) = self.minibatch() else { continue };
                    self.pushes.expect(&self.driver.layout);
                    self.asked = LastAction::Local { step, clock, samples: samples.len() as u64 };
                    return Ok(LoopAction::Train(Minibatch { step, samples }));
                }
                driver::DriverAction::Apply { .. } => {
                    return Err(misuse("results of an own optimizer need an OpenRun"));
                }
                driver::DriverAction::Evaluate { .. } if self.held_out == 0 => self.driver.not_evaluated(),
                driver::DriverAction::Evaluate { number, share } => {
                    let samples: Vec<_> = share.samples(self.held_out).collect();
                    if samples.is_empty() {
                        self.driver.evaluated(number, &Evaluation::default())?;
                        continue;
                    }
                    self.asked = LastAction::Evaluate(number);
                    return Ok(LoopAction::Evaluate { samples });
                }
                driver::DriverAction::Chunk { epoch, chunk } => {
                    if self.order.0 != epoch {
                        self.order = (epoch, self.driver.plan.sampler.order(epoch));
                    }
                    let t = &self.job.train;
                    let all: VecDeque<_> = chunk_of(&self.order.1, chunk, t.chunk(), t.batch).collect();
                    self.driver.prepared(all.len() as u64);
                    self.chunk = Some(all);
                }
                driver::DriverAction::DropChunk => self.chunk = Some(VecDeque::new()),
                driver::DriverAction::End(end) => {
                    self.driver.save(end, &mut self.weights)?;
                    if end.first && self.held_out > 0 {
                        self.evaluation = self.driver.shared(end, self.held_out as u64);
                        if self.evaluation.is_none() {
                            self.asked = LastAction::Final(end);
                            return Ok(LoopAction::Evaluate { samples: (0..self.held_out).collect() });
                        }
                    }
                    return self.over(end);
                }
            }
        }
    }

    fn over(&mut self, end: End) -> Result<LoopAction, WorkerError> {
        self.driver.end(end, self.evaluation.as_ref())?;
        self.asked = LastAction::Over;
        Ok(LoopAction::Over)
    }

    /// Hands over the gradient of a tensor, row-major, as the mean over the minibatch; for a buffer, the value that
    /// the servers subtract from it. The order is free; with the last layer first, pushes go out while the first
    /// layer is computed.
    ///
    /// # Errors
    /// No minibatch is in training, there is no such tensor, or its gradient was handed over before or has
    /// another length.
    pub fn ready(&mut self, tensor: usize, gradient: &[f32]) -> Result<(), WorkerError> {
        if !matches!(self.asked, LastAction::Gradient { .. } | LastAction::Local { .. }) {
            return Err(misuse(format!(
                "the gradient of tensor {tensor}, and no minibatch is in training: call next"
            )));
        }
        let step = match self.asked {
            LastAction::Gradient { step, .. } => Some(step),
            _ => None,
        };
        self.pushes.take(&mut self.driver, step, tensor, gradient)
    }

    /// Ends a minibatch; `loss`: the mean over its samples.
    ///
    /// # Errors
    /// No minibatch is in training, a tensor's gradient is missing, or the loss is not finite.
    pub fn trained(&mut self, loss: f32) -> Result<(), WorkerError> {
        let (step, samples) = match self.asked {
            LastAction::Gradient { step, samples } | LastAction::Local { step, samples, .. } => {
                (step, samples)
            }
            _ => return Err(misuse("no minibatch is in training: call next")),
        };
        self.pushes.are_complete(&self.driver.layout)?;
        let worker = self.driver.worker();
        finite(StepLoss { loss, samples }, step, worker)?;
        if let (LastAction::Local { clock, .. }, Some(local)) = (&self.asked, &mut self.driver.local) {
            let moved = local.step(*clock, self.pushes.gradient());
            moved.map_err(|e| ModelError::new(format!("{step} of {worker}: {e}")))?;
        }
        self.asked = LastAction::Nothing;
        self.driver.trained(Some((f64::from(loss) * samples as f64, samples)));
        Ok(())
    }

    /// Reports the requested evaluation: the sum of its losses, correct predictions, and the number of samples.
    ///
    /// # Errors
    /// No evaluation was requested.
    pub fn evaluated(&mut self, evaluation: Evaluation) -> Result<(), WorkerError> {
        match self.asked {
            LastAction::Evaluate(number) => {
                self.asked = LastAction::Nothing;
                self.driver.evaluated(number, &evaluation)
            }
            LastAction::Final(end) => {
                self.evaluation = Some(evaluation);
                self.over(end).map(drop)
            }
            _ => Err(misuse("no evaluation is asked for: call next")),
        }
    }

    /// Ends a job after [`LoopAction::Over`]; returns this worker's report with the final weights.
    ///
    /// # Errors
    /// The job is not over.
    pub fn finish(self) -> Result<WorkerReport, WorkerError> {
        match self.asked {
            LastAction::Over => Ok(WorkerReport {
                steps: self.driver.steps,
                samples: self.driver.samples,
                seconds: self.driver.clock.seconds(),
                weights: self.weights,
                evaluation: self.evaluation,
            }),
            _ => Err(misuse("the job is not over: call next until it says so, or leave")),
        }
    }

    /// Ends this worker early. The other workers continue at once, instead of after its lease.
    pub fn leave(mut self) {
        self.driver.leave();
    }

    /// The samples of the next minibatch. `None`: the chunk has no more, and the trainer was notified.
    fn minibatch(&mut self) -> Option<Vec<u32>> {
        match &mut self.chunk {
            None => Some(self.minibatches.next()),
            Some(chunk) => {
                let next = chunk.pop_front();
                if next.is_none() {
                    self.driver.trained(None);
                }
                next
            }
        }
    }
}
