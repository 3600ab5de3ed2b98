//! Does what the [`Trainer`] says with the servers, the record and the checkpoints; what needs a model or data it hands to
//! its loop as a [`DriverAction`]. The training loop of [`super::run`] and a user's own ([`crate::Run`]) are both on top of it.

use super::{Plan, WorkerError, WorkerOptions, clock::Clock};
use crate::{
    checkpoints::{Author, Checkpoints},
    exchange::PushParts,
    metrics::Gauges,
    recorder::{Recorder, wall},
};
use paraft_checkpoint::{MODEL_FILE, weights};
use paraft_client::{Client, ClientError, Counters, Interrupt, Pull, Pulled, Reported};
use paraft_common::{Layout, Share, Step, WorkerId, local::LocalWeights};
use paraft_models::Evaluation;
use paraft_record::{Event, event};
use paraft_trainer::{Action, Trainer};
use std::{
    collections::BTreeMap,
    ops::Range,
    path::{Path, PathBuf},
    sync::{Arc, mpsc},
    thread,
    time::Duration,
};

/// A worker that is told to end waits so long for the shards' word that they know. Less than signals wait for the worker.
const LEAVE_TIMEOUT: Duration = Duration::from_millis(800);

/// A worker that has waited for the first weights for so long says that it does.
const WAIT_WARNING_DELAY: Duration = Duration::from_secs(5);

/// Where weights are pulled to, or, with local steps of your own, where yours are.
pub trait Landing {
    /// As they are.
    fn weights(&mut self) -> &[f32];
    /// For the next pull to write; then [`Self::landed`].
    ///
    /// # Errors
    /// There is no such memory.
    fn landing(&mut self) -> Result<&mut [f32], WorkerError>;
    /// A pull of everything has written them.
    ///
    /// # Errors
    /// They can't be brought to where they are used.
    fn landed(&mut self, pulled: &Pulled, layout: &Layout) -> Result<(), WorkerError>;
    /// A pull, where weights are pulled in another way than all at once. `None`: this one isn't, and goes to [`Self::landing`].
    ///
    /// # Errors
    /// Those of a pull.
    fn pull(&mut self, _client: &mut Client, _pull: &Pull) -> Option<Result<Pulled, WorkerError>> {
        None
    }
}

/// In the memory of this process alone.
impl Landing for Vec<f32> {
    fn weights(&mut self) -> &[f32] {
        self
    }

    fn landing(&mut self) -> Result<&mut [f32], WorkerError> {
        Ok(self)
    }

    fn landed(&mut self, _: &Pulled, _: &Layout) -> Result<(), WorkerError> {
        Ok(())
    }
}

/// What a loop does before it asks for the next.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum DriverAction {
    /// Minibatches come after this step.
    Begin(Step),
    /// One minibatch at the pulled weights; its gradient is pushed. Answer: [`Driver::trained`].
    Gradient {
        /// Of this step.
        step: Step,
        /// Call [`Client::ask_ahead`] before the first push.
        ask_ahead: bool,
        /// The next step's comes behind it.
        goes_on: bool,
    },
    /// One minibatch at the worker's own weights ([`Driver::local`]), which move. Answer: [`Driver::trained`].
    Local {
        /// Of this step.
        step: Step,
        /// Minibatches before it.
        clock: u64,
    },
    /// Evaluate this share of the held-out data. Answer: [`Driver::evaluated`].
    Evaluate {
        /// From 1.
        epoch: u64,
        share: Share,
    },
    /// Get the minibatches of this chunk ready. Answer: [`Driver::prepared`].
    Chunk {
        /// From 0.
        epoch: u64,
        /// From 0.
        chunk: u64,
    },
    /// The rest of the chunk is another worker's.
    DropChunk,
    /// The weights are the final ones: [`Driver::save`] them, then [`Driver::end`].
    End(End),
}

/// The end of a job.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct End {
    /// The last step.
    pub done: Step,
    /// This worker writes the model, and the evaluation of the final weights.
    pub first: bool,
    /// All workers have evaluated their shares of this epoch at the final weights.
    pub evaluated: Option<u64>,
}

/// A worker of a job, without its model and its data.
pub(crate) struct Driver {
    pub client: Client,
    /// Where the worker has weights of its own.
    pub local: Option<LocalWeights>,
    /// The same, where a loop of the user's moves them: `local` follows before what leaves it, and they follow it after what comes.
    pub theirs: Option<Box<dyn Landing + Send>>,
    /// A wait that was interrupted, and goes on with the next call.
    again: Option<Action>,
    /// With the model's tensor names.
    pub layout: Layout,
    pub clock: Clock,
    /// Trained on.
    pub samples: u64,
    pub steps: u64,
    pub(super) trainer: Trainer,
    pub(super) plan: Plan,
    pub(super) recorder: Recorder,
    pub(super) checkpoints: Option<Checkpoints>,
    /// Who writes those that are asked for, and where.
    on_demand: (Author, Option<PathBuf>),
    /// One is asked for behind this step, by somebody else.
    save: bool,
    pub(super) gauges: Arc<Gauges>,
    pub(super) run_dir: Option<PathBuf>,
    /// The final weights go here too.
    pub(super) weights: Option<PathBuf>,
    pub(super) interrupt: Arc<dyn Interrupt>,
    /// What evaluations mean.
    pub(super) scores: Scores,
    pub(super) waited_at_start: Duration,
    /// What was moved and waited for in training: the wait for the others at the end is none of it.
    pub(super) at_end: Counters,
    /// Switches of the mode that it has heard of.
    pub(super) switches: u64,
    /// Epochs that were done when the job began.
    pub(super) begun: u64,
    /// Leased sampler: the steps at which epochs were over.
    pub(super) ends: BTreeMap<u64, Step>,
    /// Samples that were trained before the chunk in training.
    pub(super) before_chunk: u64,
    /// Everything is trained: an interrupt comes too late.
    pub(super) over: bool,
    /// The clock goes on when the evaluation is done.
    trains: bool,
    /// Of how many samples an evaluation was, at most.
    pub(super) most: u64,
    /// The last epoch whose evaluation is complete.
    pub(super) reported: Option<Reported>,
}

/// How many samples an evaluation is about.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Scores {
    /// Workers of the job.
    pub workers: u64,
    /// Samples of the training data.
    pub samples: u64,
    /// Correct predictions are counted.
    pub classifies: bool,
    /// Those of every epoch are written down, not of the final weights alone.
    pub every_epoch: bool,
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
            theirs: None,
            again: None,
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
        }
    }

    /// Who it is.
    pub fn worker(&self) -> WorkerId {
        self.client.worker()
    }

    /// The order of the samples in an epoch, from 0.
    pub(super) fn order(&self, epoch: u64) -> Vec<u32> {
        self.plan.sampler.order(epoch)
    }

    /// The last step that is done.
    pub fn done(&self) -> Step {
        self.trainer.done()
    }

    /// Whether the servers have done the job's steps already; ends this worker's session then.
    pub(super) fn has_steps(&mut self, start: Step) -> Result<(), WorkerError> {
        if self.plan.leased.is_some() || start.0 < self.plan.total {
            return Ok(());
        }
        // It has joined: the job has finished only once this member has too.
        self.client.finish();
        if let Err(e) = self.client.pull_to(Pull { last: true, ..Pull::of(start) }, &mut ()) {
            tracing::warn!(error = %e, "this worker's session could not be ended in order");
        }
        Err(WorkerError::Job(format!(
            "these servers have done this job's {} steps already; to train it again, or for longer, use other servers, or \
             start these with other data folders (with --resume it goes on from a checkpoint)",
            self.plan.total
        )))
    }

    /// Ends this worker's session before its time: nobody has to wait for its lease to end.
    pub(super) fn leave(&mut self) {
        if !self.client.leave(LEAVE_TIMEOUT) {
            tracing::warn!(
                "not every shard has answered that this worker leaves; there its lease has to end"
            );
        }
    }

    /// Goes on until the loop has something to do.
    pub fn next(&mut self, into: &mut dyn Landing) -> Result<DriverAction, WorkerError> {
        loop {
            if self.interrupt.is_set() && !self.over {
                return Err(WorkerError::Interrupted);
            }
            let next = self.again.take();
            match next.unwrap_or_else(|| self.trainer.next_action()) {
                Action::Pull(pull) => {
                    let pulled =
                        self.pull(pull.clone(), into).inspect_err(|e| self.goes_on(Action::Pull(pull), e))?;
                    self.trainer.pulled(pulled);
                }
                Action::TakeChunk { epoch, done } => self.trainer.chunk(self.client.take_chunk(epoch, done)?),
                Action::Begin(done) => {
                    if let Some(local) = &mut self.local {
                        local.begin(into.weights());
                    }
                    self.they_follow(0..self.layout.len())?;
                    if self.steps == 0 {
                        self.waited_at_start = self.client.counters().waited;
                    }
                    self.clock.start();
                    return Ok(DriverAction::Begin(done));
                }
                Action::Gradient { step, ask_ahead, goes_on } => {
                    self.save_as_asked();
                    self.clear_the_way(step);
                    return Ok(DriverAction::Gradient { step, ask_ahead, goes_on });
                }
                Action::Local { step, clock } => {
                    self.save_as_asked();
                    self.clear_the_way(step);
                    return Ok(DriverAction::Local { step, clock });
                }
                Action::Push { step, samples, ask_ahead } => {
                    self.follow_them(0..self.layout.len());
                    self.push(into.weights(), step, samples, ask_ahead)
                }
                Action::PushFragment { step, buckets, samples } => {
                    self.follow_them(self.values(&buckets));
                    self.push_fragment(step, buckets, samples);
                }
                Action::TakeOver(buckets) => {
                    self.follow_them(self.values(&buckets));
                    self.take_over(into.weights(), buckets.clone());
                    self.they_follow(self.values(&buckets))?;
                }
                Action::Pushed { loss, samples, .. } => {
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
                }
                Action::Evaluate { epoch, share } => {
                    self.trains = self.clock.stop();
                    return Ok(DriverAction::Evaluate { epoch, share });
                }
                Action::Checkpoint(pulled) => {
                    if let Some(c) = &mut self.checkpoints {
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
                    tracing::warn!(%step, %done, "this worker had been taken out; it goes on with the others");
                }
                Action::Moved { step, done, rejoined: false } => {
                    tracing::info!(%step, %done, "rounds were closed without this worker; it goes on with the others");
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

    /// A minibatch is trained: the sum of its samples' losses, and how many they are. `None`: there was none, the data has come
    /// to an end.
    pub fn trained(&mut self, trained: Option<(f64, u64)>) {
        self.trainer.trained(trained);
    }

    /// Instead: this worker had been taken out while it computed, and goes on from there.
    pub fn rejoined(&mut self, pulled: Pulled) {
        self.trainer.rejoined(pulled);
    }

    /// A chunk has so many minibatches.
    pub fn prepared(&mut self, minibatches: u64) {
        self.trainer.prepared(minibatches);
    }

    /// This worker's share of an evaluation: shard 0 adds the shares up.
    pub fn evaluated(&mut self, epoch: u64, e: &Evaluation) -> Result<(), WorkerError> {
        self.client.report(epoch, e.loss_sum, e.correct, e.count);
        self.not_evaluated();
        self.note_evaluations()
    }

    /// There is nothing to evaluate: training goes on.
    pub fn not_evaluated(&mut self) {
        if self.trains {
            self.clock.start();
        }
    }

    /// What was interrupted is waited for again by the next call, and so is what comes behind a push that was refused and is skipped
    /// then.
    fn goes_on(&mut self, action: Action, e: &WorkerError) {
        if matches!(e, WorkerError::Client(ClientError::Interrupted)) || e.is_not_finite() {
            self.again = Some(action);
        }
    }

    /// The values of these buckets.
    fn values(&self, buckets: &Range<usize>) -> Range<usize> {
        let of = &self.layout.buckets()[buckets.clone()];
        of.first().map_or(0, |b| b.offset)..of.last().map_or(0, |b| b.range().end)
    }

    /// Their weights, to the worker's.
    fn follow_them(&mut self, range: Range<usize>) {
        if let (Some(theirs), Some(local)) = (&mut self.theirs, &mut self.local) {
            local.moved(range.clone(), &theirs.weights()[range]);
        }
    }

    /// The worker's own weights, to theirs.
    fn they_follow(&mut self, range: Range<usize>) -> Result<(), WorkerError> {
        if let (Some(theirs), Some(local)) = (&mut self.theirs, &self.local) {
            theirs.landing()?[range.clone()].copy_from_slice(&local.weights()[range]);
        }
        Ok(())
    }

    fn clear_the_way(&self, step: Step) {
        if let Some(c) = &self.checkpoints {
            c.clear_the_way(step);
        }
    }

    fn push(&mut self, center: &[f32], step: Step, samples: usize, ask_ahead: bool) {
        if ask_ahead {
            self.client.ask_ahead(step);
        }
        let Some(local) = &mut self.local else { return };
        let values = local.push(center);
        let mut push = PushParts::new(&mut self.client, step, samples);
        for (i, bucket) in self.layout.buckets().iter().enumerate().rev() {
            push.values(i, &values[bucket.range()]);
        }
    }

    fn push_fragment(&mut self, step: Step, buckets: Range<usize>, samples: usize) {
        let Some(local) = &mut self.local else { return };
        let mut push = PushParts::new(&mut self.client, step, samples);
        for i in buckets.rev() {
            push.values(i, local.push_fragment(self.layout.buckets()[i].range()));
        }
    }

    fn take_over(&mut self, center: &[f32], buckets: Range<usize>) {
        let Some(local) = &mut self.local else { return };
        for bucket in &self.layout.buckets()[buckets] {
            local.take_over(center, bucket.range());
        }
    }

    /// Pulls, to where the model wants its weights.
    fn pull(&mut self, pull: Pull, into: &mut dyn Landing) -> Result<Pulled, WorkerError> {
        let whole = pull.only.is_empty();
        let waits = (self.steps == 0).then(|| warn_waiting(self.scores.workers));
        let pulled = match into.pull(&mut self.client, &pull) {
            Some(pulled) => pulled?,
            None => {
                let pulled = self.client.pull_by(pull, into.landing()?)?;
                into.landed(&pulled, &self.layout)?;
                pulled
            }
        };
        drop(waits);
        if let Some(local) = self.local.as_mut().filter(|_| whole) {
            local.pulled(into.weights());
            self.they_follow(0..self.layout.len())?;
        }
        self.note_mode(pulled.done)?;
        self.save |= pulled.save;
        Ok(pulled)
    }

    /// Writes a checkpoint of the last step, as the servers have it now, and waits until it is on the disk; gives its folder. `folder`:
    /// into this one; else where the job's go. `rates`: at which its gradients went, where a loop says so itself.
    pub fn save_now(&mut self, folder: Option<&Path>, rates: &[f64]) -> Result<PathBuf, WorkerError> {
        let step = self.done();
        let checkpoints = match &mut self.checkpoints {
            Some(checkpoints) => checkpoints,
            none => {
                let (author, place) = self.on_demand.clone();
                none.insert(Checkpoints::on_demand(&self.plan, place, author)?)
            }
        };
        let saved = checkpoints.save(step, folder, rates, &*self.interrupt);
        self.note_checkpoints(false)?;
        saved
    }

    /// Does so where somebody has asked for one: no reason to end the training where it can't be written.
    fn save_as_asked(&mut self) {
        if !std::mem::take(&mut self.save) {
            return;
        }
        let rates = self.checkpoints.as_ref().map(|c| c.rates.clone()).unwrap_or_default();
        match self.save_now(None, &rates) {
            Ok(path) => tracing::info!(path = %path.display(), "a checkpoint was asked for, and is written"),
            Err(e) => tracing::warn!(error = %e, "a checkpoint was asked for, and can't be written"),
        }
    }

    /// Writes the final weights to where they go, and what is left of the checkpoints.
    pub fn save(&mut self, end: End, into: &mut dyn Landing) -> Result<(), WorkerError> {
        self.note_evaluations()?;
        let own = self.weights.clone();
        let run = self.run_dir.as_ref().filter(|_| end.first).map(|d| d.join(MODEL_FILE));
        for path in own.into_iter().chain(run) {
            weights::save(&path, &self.layout, into.weights(), end.done.0)?;
        }
        self.note_checkpoints(true)
    }
}

/// Until this is dropped, a worker waits for the first weights: it says so, once.
fn warn_waiting(workers: u64) -> mpsc::Sender<()> {
    let (waits, over) = mpsc::channel::<()>();
    thread::spawn(move || {
        if over.recv_timeout(WAIT_WARNING_DELAY) == Err(mpsc::RecvTimeoutError::Timeout) {
            tracing::warn!(
                "no first weights yet: training begins once all {workers} workers of the job have joined"
            );
        }
    });
    waits
}
