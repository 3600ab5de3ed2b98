//! The built-in training loop: it has the model and the data, and performs the [`Driver`]'s actions.

use super::{
    Plan, WorkerError, WorkerOptions, WorkerReport,
    driver::{Driver, DriverAction, End, WeightBuffer},
    evaluate::{Watch, evaluate},
    pushes::misuse,
};
use crate::{
    engine::{Engine, StepLoss},
    job::Job,
    samples::{fill, shape_of},
    slow::Slowdown,
    streamed::StreamError,
};
use paraft_client::{Client, Pull, Pulled};
use paraft_common::{Layout, Share, Step, WorkerId};
use paraft_data::{Dataset, Prefetcher, chunk_of};
use paraft_models::{Batch, Evaluation, ModelError, Sample};
use std::sync::{Arc, mpsc};

pub(super) struct Training<'a> {
    pub job: &'a Job,
    pub options: &'a WorkerOptions,
    pub plan: Plan,
    pub train: Arc<Dataset>,
    pub test: Arc<Dataset>,
    pub engine: Engine<'a>,
    pub driver: Driver,
    pub slow: Slowdown,
}

/// Pulls to the model's own destination.
impl WeightBuffer for Engine<'_> {
    fn weights(&mut self) -> &[f32] {
        Engine::weights(self)
    }

    fn buffer(&mut self) -> Result<&mut [f32], WorkerError> {
        Engine::buffer(self)
    }

    fn landed(&mut self, pulled: &Pulled, layout: &Layout) -> Result<(), WorkerError> {
        Engine::landed(self, pulled, layout)
    }

    fn pull(&mut self, client: &mut Client, pull: &Pull) -> Option<Result<Pulled, WorkerError>> {
        Engine::pull(self, client, pull)
    }
}

/// The result of a minibatch.
enum MinibatchResult {
    /// The sum of the losses, and the number of samples; `None`: no data is left.
    Trained(Option<(f64, u64)>),
    /// This worker was removed meanwhile.
    Rejoined(Pulled),
}

/// The source of minibatches, filled on its own thread.
struct Feed {
    /// The leased sampler: sends the next minibatches' samples. Dropped first, which ends the thread's wait.
    chunks: Option<mpsc::Sender<Vec<u32>>>,
    batches: Prefetcher<Batch>,
    /// The next minibatch, if it overlaps another.
    next: Option<Batch>,
    /// The static sampler: the step before its first minibatch.
    after: Step,
}

impl Training<'_> {
    /// Trains until the job is done. Returns the evaluation of the final weights, if this worker made it.
    pub fn run(&mut self) -> Result<Option<Evaluation>, WorkerError> {
        let mut feed = self.feed(self.driver.done())?; // fills while the first weights arrive
        let (mut epoch_of_order, mut order) = (u64::MAX, Vec::new());
        loop {
            match self.driver.next(&mut self.engine)? {
                DriverAction::Begin(done) => {
                    if feed.after != done {
                        feed = self.feed(done)?;
                    }
                }
                DriverAction::Gradient { step, ask_ahead, continues } => {
                    match self.gradient(step, (ask_ahead, continues), &mut feed)? {
                        MinibatchResult::Trained(trained) => self.driver.trained(trained),
                        MinibatchResult::Rejoined(pulled) => self.driver.rejoined(pulled),
                    }
                }
                DriverAction::Local { step, clock } => {
                    let trained = self.local_minibatch(step, clock, &mut feed)?;
                    self.driver.trained(trained);
                }
                DriverAction::Apply { .. } => {
                    return Err(misuse("this model has no optimizer of its own"));
                }
                DriverAction::Evaluate { number, share } => {
                    let share = match self.engine.streams() {
                        Some(streamed) => {
                            let share = streamed.fetch_whole(&mut self.driver.client)?.unwrap_or(share);
                            self.driver.assigned(share);
                            share
                        }
                        None => share,
                    };
                    let Self { engine, test, driver, options, .. } = self;
                    let (worker, at) = (driver.worker(), driver.place_of(number));
                    let recorder = Some(&mut driver.recorder);
                    let mut watch = Watch { interrupt: &*options.interrupt, recorder, worker, at };
                    let e = engine.evaluate_share(number, share, |engine, part| {
                        evaluate(engine, test, part, &mut watch)
                    })?;
                    self.driver.evaluated(number, &e)?;
                }
                DriverAction::Chunk { epoch, chunk } => {
                    if epoch_of_order != epoch {
                        (epoch_of_order, order) = (epoch, self.plan.sampler.order(epoch));
                    }
                    let minibatches = self.prepare(&order, chunk, &feed);
                    self.driver.prepared(minibatches);
                }
                DriverAction::DropChunk => feed = self.feed(self.driver.done())?, // the rest is another worker's
                DriverAction::End(end) => {
                    if end.first || self.options.weights.is_some() {
                        self.engine.gather()?;
                    }
                    self.engine.over();
                    self.driver.save(end, &mut self.engine)?;
                    let evaluation = end.first.then(|| self.evaluate_final(end)).transpose()?;
                    self.driver.end(end, evaluation.as_ref())?;
                    return Ok(evaluation);
                }
            }
        }
    }

    /// The sum of all workers' shares, if all used the final weights; otherwise this worker evaluates.
    fn evaluate_final(&mut self, end: End) -> Result<Evaluation, WorkerError> {
        let of_sample = match shape_of(&self.test).sample {
            Sample::Tokens { time, .. } => time,
            Sample::Values(_) => 1,
        };
        if let Some(shared) = self.driver.shared(end, (self.test.len() * of_sample) as u64) {
            return Ok(shared);
        }
        let (worker, at) = (self.driver.worker(), self.driver.place_of(self.driver.number_at(end.done)));
        let recorder = Some(&mut self.driver.recorder);
        let mut watch = Watch { interrupt: &*self.options.interrupt, recorder, worker, at };
        evaluate(&mut self.engine, &self.test, Share::ALL, &mut watch)
    }

    /// The minibatches after step `done`; with the leased sampler, those of chunks as they are assigned.
    fn feed(&self, done: Step) -> Result<Feed, WorkerError> {
        if self.plan.leased.is_none() {
            let batches = {
                // The leader is in the first mesh of a split model.
                let share = self.job.share_of(self.options.rank, 0);
                self.plan.prefetch(self.job, &self.train, share, done)?
            };
            return Ok(Feed { chunks: None, batches, next: None, after: done });
        }
        let (chunks, next) = mpsc::channel::<Vec<u32>>();
        let data = self.train.clone();
        let batches = Prefetcher::spawn(move |b: &mut Batch| {
            let Ok(indices) = next.recv() else { return Ok(false) };
            fill(&data, &indices, b)?;
            Ok(true)
        })?;
        Ok(Feed { chunks: Some(chunks), batches, next: None, after: done })
    }

    /// Queues a chunk's minibatches; returns their number.
    fn prepare(&self, order: &[u32], chunk: u64, feed: &Feed) -> u64 {
        let mut minibatches = 0;
        for indices in chunk_of(order, chunk, self.job.train.chunk(), self.job.train.batch) {
            minibatches += 1;
            if let Some(chunks) = &feed.chunks {
                let _ = chunks.send(indices); // a thread that has ended reports its error with the next minibatch
            }
        }
        minibatches
    }

    /// Trains one minibatch at the pulled weights; pushes each bucket of its gradient as soon as it is complete.
    fn gradient(
        &mut self,
        step: Step,
        (ask_ahead, continues): (bool, bool),
        feed: &mut Feed,
    ) -> Result<MinibatchResult, WorkerError> {
        let Some(batch) = feed.next.take().map(Ok).or_else(|| feed.batches.next()) else {
            return Ok(MinibatchResult::Trained(None));
        };
        let batch = batch?;
        if continues && self.engine.overlaps_minibatches() {
            feed.next = feed.batches.next().transpose()?;
        }
        let client = &mut self.driver.client;
        let stepped = if self.engine.streams().is_some() {
            match self.slow.step(|| self.engine.step_streamed(client, step, &batch)) {
                Ok(stepped) => stepped,
                Err(StreamError::Rejoined(pulled)) => return Ok(MinibatchResult::Rejoined(pulled)),
                Err(StreamError::Failed(e)) => return Err(e),
            }
        } else {
            if ask_ahead {
                client.ask_ahead(step);
            }
            self.slow.step(|| self.engine.step(client, step, (&batch, feed.next.as_ref())))?
        };
        let StepLoss { loss, samples } = finite(stepped, step, self.driver.worker())?;
        feed.batches.recycle(batch);
        Ok(MinibatchResult::Trained(Some((f64::from(loss) * samples as f64, samples))))
    }

    /// Trains one minibatch at the worker's own weights, which change. `clock`: minibatches before it.
    fn local_minibatch(
        &mut self,
        step: Step,
        clock: u64,
        feed: &mut Feed,
    ) -> Result<Option<(f64, u64)>, WorkerError> {
        let worker = self.driver.worker();
        let (Some(batch), Some(local)) = (feed.batches.next(), &mut self.driver.local) else {
            return Ok(None);
        };
        let batch = batch?;
        let (loss, gradient) = self.slow.step(|| self.engine.gradient_at(local.weights(), &batch))?;
        finite(StepLoss { loss, samples: 0 }, step, worker)?;
        local.step(clock, gradient).map_err(|e| ModelError::new(format!("{step} of {worker}: {e}")))?;
        let trained = (f64::from(loss) * batch.n as f64, batch.n as u64);
        feed.batches.recycle(batch);
        Ok(Some(trained))
    }

    pub fn report(self, evaluation: Option<Evaluation>) -> WorkerReport {
        WorkerReport {
            steps: self.driver.steps,
            samples: self.driver.samples,
            seconds: self.driver.clock.seconds(),
            weights: self.engine.into_weights(),
            evaluation,
        }
    }
}

/// A loss that is not finite ends the training, on every rank.
pub(super) fn finite(stepped: StepLoss, step: Step, worker: WorkerId) -> Result<StepLoss, WorkerError> {
    match stepped.loss.is_finite() {
        true => Ok(stepped),
        false => Err(WorkerError::NotFinite { loss: stepped.loss, step, worker }),
    }
}
