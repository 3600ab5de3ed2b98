//! Performs the [`Trainer`]'s actions on the servers, the record and the checkpoints. Actions that need a model or
//! data go to the loop as a [`DriverAction`]. The training loop of [`super::run`] and a user's own ([`crate::Run`])
//! both use it.

mod action;
mod checkpoints;
mod local;
mod mean;
mod pulling;
mod weight_buffer;

pub(crate) use action::{DriverAction, End};
pub use weight_buffer::WeightBuffer;

use super::{Plan, WorkerError, WorkerOptions, clock::Clock};
use crate::{
    checkpoints::{Author, Checkpoints},
    metrics::Gauges,
    recorder::{Recorder, wall},
};
use paraft_client::{Client, ClientError, Counters, Interrupt, Pull, Pulled, Reported};
use paraft_common::{Layout, Share, Step, WorkerId, local::LocalWeights, optim::Descent};
use paraft_models::Evaluation;
use paraft_record::{Event, event};
use paraft_trainer::{Action, EvaluationSteps, Trainer};
use std::{
    collections::BTreeMap,
    path::PathBuf,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

/// How long a worker that ends waits for the shards' confirmation. It is less than the time that launchers give it.
const LEAVE_TIMEOUT: Duration = Duration::from_millis(800);

/// A worker of a job, without its model and data.
pub(crate) struct Driver {
    pub client: Client,
    /// The worker's own weights, with local steps.
    pub local: Option<LocalWeights>,
    /// The user's weights, if the user's loop changes them: `local` copies them before a push, and receives pulled
    /// weights for them.
    pub user_weights: Option<Box<dyn WeightBuffer + Send>>,
    /// An action that the next call repeats: its wait was interrupted, or a push was refused.
    to_repeat: Option<Action>,
    /// The layout, with the model's tensor names.
    pub layout: Layout,
    pub clock: Clock,
    /// Trained samples.
    pub samples: u64,
    pub steps: u64,
    pub(super) trainer: Trainer,
    pub(super) plan: Plan,
    pub(super) recorder: Recorder,
    pub(super) checkpoints: Option<Checkpoints>,
    /// Writes requested checkpoints, into this folder.
    on_demand: (Author, Option<PathBuf>),
    /// The servers request a checkpoint after this step.
    save: bool,
    pub(super) gauges: Arc<Gauges>,
    pub(super) run_dir: Option<PathBuf>,
    /// An additional file for the final weights.
    pub(super) weights: Option<PathBuf>,
    pub(super) interrupt: Arc<dyn Interrupt>,
    /// How to interpret evaluations.
    pub(super) scores: Scores,
    pub(super) waited_at_start: Duration,
    /// Counters at the end of training, without the final wait for the other workers.
    pub(super) at_end: Counters,
    /// Known switches of the mode.
    pub(super) switches: u64,
    /// Epochs that were done at the job's start.
    pub(super) begun: u64,
    /// Leased sampler: the step at which each epoch ended.
    pub(super) ends: BTreeMap<u64, Step>,
    /// Samples trained before the current chunk.
    pub(super) before_chunk: u64,
    /// Everything is trained: an interrupt has no effect any more.
    pub(super) over: bool,
    /// Whether the clock continues after the evaluation.
    trains: bool,
    /// The largest number of samples of an evaluation.
    pub(super) most: u64,
    /// The last complete evaluation.
    pub(super) reported: Option<Reported>,
    /// Metrics of the evaluations that this worker made alone, by their number. Some: it records only those.
    pub(super) measured: Option<BTreeMap<u64, BTreeMap<String, f64>>>,
    /// How the servers apply gradients, if the worker pushes them.
    pub(super) descent: Option<Descent>,
    /// The learning rate that the user's loop has set instead.
    pub(super) rate: Option<f64>,
    /// When the norm of a gradient was measured last, and how long that took.
    pub(super) norm: Option<(Instant, Duration)>,
    /// The step of a worker that runs the optimizer on the mean gradient.
    mean: mean::MeanStep,
}

/// The samples behind an evaluation.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Scores {
    /// Workers of the job.
    pub workers: u64,
    /// Samples of the training data.
    pub samples: u64,
    /// Whether evaluations count correct predictions.
    pub classifies: bool,
    /// The evaluations besides the final one.
    pub at: EvaluationSteps,
}

impl Driver {
    pub(super) fn new(
        options: &WorkerOptions,
        (client, trainer): (Client, Trainer),
        plan: Plan,
        (recorder, gauges, begun): (Recorder, Arc<Gauges>, u64),
        (checkpoints, on_demand): (Option<Checkpoints>, (Author, Option<PathBuf>)),
        (layout, local): (Layout, Option<LocalWeights>),
        scores: Scores,
    ) -> Self {
        Self {
            client,
            local,
            user_weights: None,
            to_repeat: None,
            layout,
            clock: Clock::default(),
            samples: 0,
            steps: 0,
            trainer,
            plan,
            recorder,
            checkpoints,
            on_demand,
            save: false,
            gauges,
            run_dir: options.run_dir.clone(),
            weights: options.weights.clone(),
            interrupt: options.interrupt.clone(),
            scores,
            waited_at_start: Duration::ZERO,
            at_end: Counters::default(),
            switches: 0,
            begun,
            ends: BTreeMap::new(),
            before_chunk: 0,
            over: false,
            trains: false,
            most: 0,
            reported: None,
            measured: None,
            descent: None,
            rate: None,
            norm: None,
            mean: mean::MeanStep::default(),
        }
    }

    /// This worker's rank.
    pub fn worker(&self) -> WorkerId {
        self.client.worker()
    }

    /// The sample order of an epoch, counted from 0.
    pub(super) fn order(&self, epoch: u64) -> Vec<u32> {
        self.plan.sampler.order(epoch)
    }

    /// The last finished step.
    pub fn done(&self) -> Step {
        self.trainer.done()
    }

    /// Ends this worker's session if the servers have already finished the job's steps.
    pub(super) fn has_steps(&mut self, start: Step) -> Result<(), WorkerError> {
        if self.plan.leased.is_some() || start.0 < self.plan.total {
            return Ok(());
        }
        // This member has joined, so the job finishes only after it has.
        self.client.finish();
        if let Err(e) = self.client.pull_to(Pull { last: true, ..Pull::of(start) }, &mut ()) {
            tracing::warn!(error = %e, "this worker's session could not be ended in order");
        }
        Err(WorkerError::Job(format!(
            "these servers have done this job's {} steps already; to train it again, or for longer, use other servers, or \
             start these with other data folders (with --resume it continues from a checkpoint)",
            self.plan.total
        )))
    }

    /// Ends this worker's session early, so that no other worker waits for its lease to expire.
    pub(super) fn leave(&mut self) {
        if !self.client.leave(LEAVE_TIMEOUT) {
            tracing::warn!(
                "not every shard has confirmed that this worker leaves; there its lease must expire"
            );
        }
    }

    /// Continues until the loop has an action.
    pub fn next(&mut self, into: &mut dyn WeightBuffer) -> Result<DriverAction, WorkerError> {
        loop {
            if self.interrupt.is_set() && !self.over {
                return Err(WorkerError::Interrupted);
            }
            let next = self.to_repeat.take();
            match next.unwrap_or_else(|| self.trainer.next_action()) {
                Action::Pull(pull) => {
                    let pulled = self
                        .pull(pull.clone(), into)
                        .inspect_err(|e| self.repeat_later(Action::Pull(pull), e))?;
                    self.trainer.pulled(pulled);
                }
                Action::TakeChunk { epoch, done } => self.trainer.chunk(self.client.take_chunk(epoch, done)?),
                Action::Begin(done) => {
                    if let Some(local) = &mut self.local {
                        local.begin(into.weights());
                    }
                    self.copy_to_user(0..self.layout.len())?;
                    if self.steps == 0 {
                        self.waited_at_start = self.client.counters().waited;
                    }
                    self.clock.start();
                    self.space_checkpoints();
                    return Ok(DriverAction::Begin(done));
                }
                Action::Gradient { step, ask_ahead, continues } => {
                    self.save_as_asked();
                    self.clear_the_way(step);
                    self.begin_norm();
                    self.begin_mean();
                    return Ok(DriverAction::Gradient { step, ask_ahead, continues });
                }
                Action::Local { step, clock } => {
                    self.save_as_asked();
                    self.clear_the_way(step);
                    return Ok(DriverAction::Local { step, clock });
                }
                Action::Apply(_) => return Ok(DriverAction::Apply { whole: self.end_mean() }),
                Action::WriteResults { step, share } => self.write_results(into.weights(), step, share),
                Action::Push { step, samples, ask_ahead } => {
                    self.copy_from_user(0..self.layout.len());
                    self.push(into.weights(), step, samples, ask_ahead)
                }
                Action::PushFragment { step, buckets, samples } => {
                    self.copy_from_user(self.values(&buckets));
                    self.push_fragment(step, buckets, samples);
                }
                Action::TakeOver(buckets) => {
                    self.copy_from_user(self.values(&buckets));
                    self.take_over(into.weights(), buckets.clone());
                    self.copy_to_user(self.values(&buckets))?;
                }
                Action::Pushed { loss, samples, .. } => {
                    self.end_norm();
                    self.steps += 1;
                    self.samples += samples;
                    if loss.is_finite() {
                        self.client.note_loss(loss);
                    }
                }
                Action::Stepped(s) => {
                    self.note_step(s)?;
                    self.note_evaluations()?;
                    self.note_checkpoints(false)?;
                    self.space_checkpoints();
                }
                Action::Evaluate { number, share } => {
                    self.trains = self.clock.stop();
                    return Ok(DriverAction::Evaluate { number, share });
                }
                Action::Checkpoint(pulled) => {
                    if let Some(c) = &mut self.checkpoints {
                        c.in_force.mode = self.client.mode().1;
                        c.pulled(pulled.done, &pulled);
                    }
                    self.note_checkpoints(false)?;
                }
                Action::Chunk { epoch, chunk } => {
                    self.before_chunk = self.samples;
                    return Ok(DriverAction::Chunk { epoch, chunk });
                }
                Action::DropChunk => return Ok(DriverAction::DropChunk),
                Action::ChunkDone { epoch, chunk } => {
                    let (epoch, samples) = (epoch + 1, self.samples - self.before_chunk);
                    let done = event::Chunk { wall: wall(), worker: self.worker(), epoch, chunk, samples };
                    self.recorder.write(&Event::Chunk(done))?;
                }
                Action::WriteAfter { step, epochs, last } => {
                    if let Some(c) = &self.checkpoints {
                        if last {
                            c.wait();
                        }
                        c.epochs(step, epochs);
                    }
                }
                Action::EpochOver { epochs, done } => _ = self.ends.insert(epochs, done),
                Action::Moved { step, done, rejoined: true } => {
                    tracing::warn!(%step, %done, "this worker had been taken out; it continues with the others");
                }
                Action::Moved { step, done, rejoined: false } => {
                    tracing::info!(%step, %done, "rounds were closed without this worker; it continues with the others");
                }
                Action::Wait(time) => thread::sleep(time),
                Action::Trained => {
                    self.clock.stop();
                    self.recorder.rest()?;
                    self.at_end = self.client.counters();
                }
                Action::Finish(_) => {
                    if self.steps == 0 && self.plan.leased.is_some() {
                        tracing::warn!(
                            "nothing was left to train; to train the job again, use fresh servers"
                        );
                    }
                    self.over = true;
                    self.client.finish();
                }
                Action::End { done, first, evaluated } => {
                    return Ok(DriverAction::End(End { done, first, evaluated }));
                }
            }
        }
    }

    /// Reports a trained minibatch: the sum of its samples' losses, and their number. `None`: no data was left.
    pub fn trained(&mut self, trained: Option<(f64, u64)>) {
        self.trainer.trained(trained);
    }

    /// In place of [`Self::trained`]: this worker was removed while it computed, and continues from this pull.
    pub fn rejoined(&mut self, pulled: Pulled) {
        self.trainer.rejoined(pulled);
    }

    /// Reports that the optimizer has made its step on the mean gradient.
    pub fn applied(&mut self) {
        self.trainer.applied();
    }

    /// Reports a chunk's number of minibatches.
    pub fn prepared(&mut self, minibatches: u64) {
        self.trainer.prepared(minibatches);
    }

    /// Reports this worker's share of an evaluation; shard 0 adds the shares.
    pub fn evaluated(&mut self, number: u64, e: &Evaluation) -> Result<(), WorkerError> {
        self.client.report(number, e.loss_sum, e.correct, e.count);
        self.not_evaluated();
        self.note_evaluations()
    }

    /// A pull for an evaluation has brought this share of it.
    pub fn assigned(&mut self, share: Share) {
        self.trainer.take_share(share);
    }

    /// Continues without an evaluation.
    pub fn not_evaluated(&mut self) {
        if self.trains {
            self.clock.start();
        }
    }

    /// Keeps an interrupted action for the next call, and an action after a refused push, whose step is then
    /// skipped.
    fn repeat_later(&mut self, action: Action, e: &WorkerError) {
        if matches!(e, WorkerError::Client(ClientError::Interrupted)) || e.is_not_finite() {
            self.to_repeat = Some(action);
        }
    }
}
