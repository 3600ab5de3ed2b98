//! A worker's training loop: does what the [`Trainer`] says, with the model, the data and the servers.

use super::{
    Plan, WorkerError, WorkerOptions, WorkerReport,
    clock::Clock,
    evaluate::{Share, Watch, evaluate},
};
use crate::{
    checkpoints::{self, Checkpoints},
    engine::{Engine, Stepped},
    exchange::PushParts,
    job::Job,
    metrics::Gauges,
    recorder::{Progress, Recorder, wall},
    samples::fill,
    slow::Slow,
};
use paraft_checkpoint::{MODEL_FILE, weights};
use paraft_client::{Client, Counters, Pull, Pulled, Reported};
use paraft_common::{Layout, Step, WorkerId, local::LocalWeights};
use paraft_data::{Dataset, Prefetcher, chunk_of};
use paraft_models::{Batch, Evaluation, ModelError};
use paraft_record::{Event, event};
use paraft_trainer::{Action, Seen, Trainer};
use std::{
    collections::BTreeMap,
    ops::Range,
    sync::{Arc, atomic::Ordering::Relaxed, mpsc},
    thread,
    time::Duration,
};

pub(super) struct Training<'a> {
    pub job: &'a Job,
    pub options: &'a WorkerOptions,
    pub plan: Plan,
    pub train: Arc<Dataset>,
    pub test: Arc<Dataset>,
    pub engine: Engine<'a>,
    /// Where the worker has weights of its own.
    pub local: Option<LocalWeights>,
    pub client: Client,
    pub recorder: Recorder,
    pub checkpoints: Option<Checkpoints>,
    pub gauges: Arc<Gauges>,
    pub worker: WorkerId,
    /// With the model's tensor names.
    pub layout: Layout,
    pub clock: Clock,
    pub samples: u64,
    pub steps: u64,
    pub waited_at_start: Duration,
    /// What was moved and waited for in training: the wait for the others at the end is none of it.
    pub at_end: Counters,
    /// Switches of the mode that it has heard of.
    pub switches: u64,
    pub slow: Slow,
    /// Epochs that were done when the job began.
    pub begun: u64,
    /// Leased sampler: the steps at which epochs were over.
    pub ends: BTreeMap<u64, Step>,
    /// The last epoch whose evaluation is complete.
    pub reported: Option<Reported>,
}

/// Where minibatches come from, filled on a thread of its own.
struct Feed {
    /// The leased sampler: the samples of the next ones. Dropped first: ends a thread that waits for them.
    chunks: Option<mpsc::Sender<Vec<u32>>>,
    batches: Prefetcher<Batch>,
    /// The static sampler: the step that they begin after.
    after: Step,
}

/// A chunk in training: the order of the epoch's samples, and the samples that were trained before.
struct Chunk {
    epoch: u64,
    order: Vec<u32>,
    before: u64,
}

impl Training<'_> {
    /// Trains until the job is done; gives the evaluation of the final weights, if it was this worker's to make.
    pub fn run(&mut self, mut trainer: Trainer) -> Result<Option<Evaluation>, WorkerError> {
        let mut feed = self.feed(trainer.done())?; // fills while the first weights come
        let mut chunk = Chunk { epoch: u64::MAX, order: Vec::new(), before: 0 };
        let mut over = false;
        loop {
            if self.options.interrupt.load(Relaxed) && !over {
                return Err(WorkerError::Interrupted);
            }
            let (mode, version) = (self.client.mode().1, self.client.version());
            match trainer.next(&Seen { version, mode, now: super::clock::now() }) {
                Action::Pull(pull) => {
                    let pulled = self.pull(pull)?;
                    trainer.pulled(pulled);
                }
                Action::Settle => trainer.settled(self.client.settle()?),
                Action::TakeChunk { epoch, done } => trainer.chunk(self.client.take_chunk(epoch, done)?),
                Action::Begin(done) => {
                    if let Some(local) = &mut self.local {
                        local.begin(self.engine.weights());
                    }
                    if self.steps == 0 {
                        self.waited_at_start = self.client.counters().waited;
                    }
                    if feed.after != done {
                        feed = self.feed(done)?;
                    }
                    self.clock.start();
                }
                Action::Gradient { step, ask_ahead } => {
                    let trained = self.gradient(step, ask_ahead, &mut feed)?;
                    trainer.trained(trained);
                }
                Action::Local { step, clock } => {
                    let trained = self.local_minibatch(step, clock, &mut feed)?;
                    trainer.trained(trained);
                }
                Action::Push { step, samples, ask_ahead } => self.push(step, samples, ask_ahead),
                Action::PushFragment { step, buckets, samples } => self.push_fragment(step, buckets, samples),
                Action::Ask(pull) => self.client.ask(pull),
                Action::TakeOver(buckets) => self.take_over(buckets),
                Action::Pushed { loss, samples, .. } => {
                    self.steps += 1;
                    self.samples += samples;
                    self.client.note_loss(loss);
                }
                Action::Stepped(s) => {
                    self.note_step(s)?;
                    self.note_evaluations()?;
                    self.note_checkpoints(false)?;
                }
                Action::Evaluate(epoch) => {
                    self.evaluate_share(epoch)?;
                    self.note_evaluations()?;
                }
                Action::Checkpoint(pulled) => {
                    if let Some(c) = &mut self.checkpoints {
                        c.pulled(pulled.done, &pulled);
                    }
                    self.note_checkpoints(false)?;
                }
                Action::Chunk { epoch, chunk: n } => {
                    if chunk.epoch != epoch {
                        (chunk.epoch, chunk.order) = (epoch, self.plan.sampler.order(epoch));
                    }
                    chunk.before = self.samples;
                    trainer.prepared(self.prepare(&chunk.order, n, &feed));
                }
                Action::DropChunk => feed = self.feed(trainer.done())?, // what is left in it is another's now
                Action::ChunkDone { epoch, chunk: n } => {
                    let (epoch, samples) = (epoch + 1, self.samples - chunk.before);
                    let done = event::Chunk { wall: wall(), worker: self.worker, epoch, chunk: n, samples };
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
                Action::ColdStart { updates, of } => {
                    tracing::warn!(updates, of, "the warm start has come to a halt; going on without it");
                }
                Action::Trained => {
                    self.clock.stop();
                    self.at_end = self.client.counters();
                }
                Action::Finish(_) => {
                    if self.steps == 0 && self.plan.leased.is_some() {
                        tracing::warn!(
                            "nothing was left to train; to train the job again, use fresh servers"
                        );
                    }
                    over = true;
                    self.client.finish();
                }
                Action::End { done, first, evaluated } => return self.end(done, first, evaluated),
            }
        }
    }

    /// The minibatches after step `done`; those of chunks as they are given out.
    fn feed(&self, done: Step) -> Result<Feed, WorkerError> {
        if self.plan.leased.is_none() {
            let batches = self.plan.prefetch(self.job, &self.train, self.options.rank, done)?;
            return Ok(Feed { chunks: None, batches, after: done });
        }
        let (chunks, next) = mpsc::channel::<Vec<u32>>();
        let data = self.train.clone();
        let batches = Prefetcher::spawn(move |b: &mut Batch| {
            let Ok(indices) = next.recv() else { return Ok(false) };
            fill(&data, &indices, b)?;
            Ok(true)
        })?;
        Ok(Feed { chunks: Some(chunks), batches, after: done })
    }

    /// Has a chunk's minibatches filled; says how many they are.
    fn prepare(&self, order: &[u32], chunk: u64, feed: &Feed) -> u64 {
        let mut minibatches = 0;
        for indices in chunk_of(order, chunk, self.job.train.chunk(), self.job.train.batch) {
            minibatches += 1;
            if let Some(chunks) = &feed.chunks {
                let _ = chunks.send(indices); // a thread that has ended says why in what it gives
            }
        }
        minibatches
    }

    /// One minibatch at the pulled weights; each bucket of its gradient is pushed as soon as it is there.
    fn gradient(
        &mut self,
        step: Step,
        ask_ahead: bool,
        feed: &mut Feed,
    ) -> Result<Option<(f64, u64)>, WorkerError> {
        self.clear_the_way(step);
        let Some(batch) = feed.batches.next() else { return Ok(None) };
        let batch = batch?;
        if ask_ahead {
            self.client.ask_ahead(step);
        }
        let stepped = self.slow.step(|| self.engine.step(&mut self.client, step, &batch))?;
        let Stepped { loss, samples } = finite(stepped, step, self.worker)?;
        feed.batches.recycle(batch);
        Ok(Some((f64::from(loss) * samples as f64, samples)))
    }

    /// One minibatch at the worker's own weights, which move; `clock`: how many it had trained before.
    fn local_minibatch(
        &mut self,
        step: Step,
        clock: u64,
        feed: &mut Feed,
    ) -> Result<Option<(f64, u64)>, WorkerError> {
        self.clear_the_way(step);
        let (Some(batch), Some(local)) = (feed.batches.next(), &mut self.local) else { return Ok(None) };
        let batch = batch?;
        let (loss, gradient) = self.slow.step(|| self.engine.gradient_at(local.weights(), &batch))?;
        finite(Stepped { loss, samples: 0 }, step, self.worker)?;
        local
            .step(clock, gradient)
            .map_err(|e| ModelError::new(format!("{step} of {}: {e}", self.worker)))?;
        let trained = (f64::from(loss) * batch.n as f64, batch.n as u64);
        feed.batches.recycle(batch);
        Ok(Some(trained))
    }

    fn clear_the_way(&self, step: Step) {
        if let Some(c) = &self.checkpoints {
            c.clear_the_way(step);
        }
    }

    fn push(&mut self, step: Step, samples: usize, ask_ahead: bool) {
        if ask_ahead {
            self.client.ask_ahead(step);
        }
        let Some(local) = &mut self.local else { return };
        let values = local.push(self.engine.weights());
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

    fn take_over(&mut self, buckets: Range<usize>) {
        let Some(local) = &mut self.local else { return };
        for bucket in &self.layout.buckets()[buckets] {
            local.take_over(self.engine.weights(), bucket.range());
        }
    }

    /// Pulls, to where the model wants its weights.
    fn pull(&mut self, pull: Pull) -> Result<Pulled, WorkerError> {
        let whole = pull.only.is_empty();
        let pulled = self.client.pull_by(pull, self.engine.landing()?)?;
        self.engine.landed(&pulled, &self.layout)?;
        if let Some(local) = self.local.as_mut().filter(|_| whole) {
            local.pulled(self.engine.weights());
        }
        self.note_mode(pulled.done)?;
        Ok(pulled)
    }

    /// Writes down where the worker stands after a step: now and then, and always where something ends with it.
    fn note_step(&mut self, s: paraft_trainer::Stepped) -> Result<(), WorkerError> {
        let counters = self.client.counters();
        let progress = Progress {
            step: s.done,
            epoch: s.epoch,
            samples: self.samples,
            seconds: self.clock.seconds(),
            wait_seconds: (counters.waited - self.waited_at_start).as_secs_f64(),
        };
        self.gauges.bytes_pushed.store(counters.bytes_pushed, Relaxed);
        self.gauges.bytes_pulled.store(counters.bytes_pulled, Relaxed);
        Ok(self.recorder.step(progress, s.loss, s.ends)?)
    }

    /// The weights are the final ones.
    fn end(
        &mut self,
        done: Step,
        first: bool,
        evaluated: Option<u64>,
    ) -> Result<Option<Evaluation>, WorkerError> {
        let counters = self.at_end;
        self.engine.over();
        self.note_evaluations()?;
        let own = self.options.weights.clone();
        let run = self.options.run_dir.as_ref().filter(|_| first).map(|d| d.join(MODEL_FILE));
        for path in own.into_iter().chain(run) {
            weights::save(&path, &self.layout, self.engine.weights(), done.0)?;
        }
        self.note_checkpoints(true)?;
        let evaluation = first.then(|| self.evaluate_final(done, evaluated)).transpose()?;
        let usage = paraft_host::usage();
        self.recorder.write(&Event::Worker(event::Worker {
            wall: wall(),
            worker: self.worker,
            steps: self.steps,
            samples: self.samples,
            seconds: self.clock.seconds(),
            wait_seconds: (counters.waited - self.waited_at_start).as_secs_f64(),
            bytes_pushed: counters.bytes_pushed,
            bytes_pulled: counters.bytes_pulled,
            cpu_seconds: self.clock.cpu_seconds(),
            peak_rss_bytes: usage.peak_rss_bytes,
        }))?;
        Ok(evaluation)
    }

    pub fn report(self, evaluation: Option<Evaluation>) -> WorkerReport {
        WorkerReport {
            steps: self.steps,
            samples: self.samples,
            seconds: self.clock.seconds(),
            weights: self.engine.into_weights(),
            evaluation,
        }
    }

    /// Writes down a switch of the mode.
    fn note_mode(&mut self, step: Step) -> Result<(), WorkerError> {
        let (number, mode) = self.client.mode();
        if number == self.switches {
            return Ok(());
        }
        self.switches = number;
        tracing::info!(%mode, number, %step, "the mode was switched");
        Ok(self.recorder.write(&Event::Mode(event::ModeSwitch {
            wall: wall(),
            worker: self.worker,
            step,
            samples: self.samples,
            seconds: self.clock.seconds(),
            number,
            mode: mode.to_string(),
        }))?)
    }

    /// Every worker evaluates a share of the held-out part at the same time, so none waits for another; shard
    /// 0 adds the shares up.
    fn evaluate_share(&mut self, epoch: u64) -> Result<(), WorkerError> {
        let trains = self.clock.stop();
        let share = Share::of(self.job, self.options);
        let Self { engine, test, recorder, options, worker, .. } = self;
        let mut watch =
            Watch { interrupt: &options.interrupt, recorder: Some(recorder), worker: *worker, epoch };
        let e = engine.evaluate_share(epoch, |engine, place| {
            evaluate(engine, test, share.part(place, test.len()), &mut watch)
        })?;
        self.client.report(epoch, e.loss_sum, e.correct, e.count);
        if trains {
            self.clock.start();
        }
        Ok(())
    }

    /// The evaluation of the final weights: what the workers' shares came to, where all were evaluated at these weights; else
    /// this worker makes it.
    fn evaluate_final(&mut self, done: Step, evaluated: Option<u64>) -> Result<Evaluation, WorkerError> {
        let whole = |r: &Reported| Some(r.epoch) == evaluated && r.count == self.test.len() as u64;
        let shared = self.reported.take().filter(whole);
        let epoch = match self.plan.leased {
            Some(_) => self.ends.keys().next_back().copied().unwrap_or(self.begun),
            None => done.0.div_ceil(self.plan.per_epoch),
        };
        let all = match shared {
            Some(all) => all,
            None => {
                let (interrupt, recorder) = (&self.options.interrupt, Some(&mut self.recorder));
                let mut watch = Watch { interrupt, recorder, worker: self.worker, epoch };
                let e = evaluate(&mut self.engine, &self.test, 0..self.test.len(), &mut watch)?;
                Reported { epoch, loss_sum: e.loss_sum, correct: e.correct, count: e.count, stop: false }
            }
        };
        self.write_evaluation(&all, true)?;
        Ok(Evaluation { loss_sum: all.loss_sum, correct: all.correct, count: all.count })
    }

    fn note_evaluations(&mut self) -> Result<(), WorkerError> {
        for e in self.client.evaluations() {
            if let Some(c) = &self.checkpoints {
                let step = match self.plan.leased {
                    Some(_) => self.ends.get(&e.epoch).copied(),
                    None => Some(Step(e.epoch.saturating_mul(self.plan.per_epoch).min(self.plan.total))),
                };
                if let Some(step) = step {
                    c.loss(step, e.loss_sum / e.count.max(1) as f64);
                }
            }
            if self.job.eval.every_epoch {
                self.write_evaluation(&e, false)?;
            }
            self.reported = Some(e);
        }
        Ok(())
    }

    /// Writes what the checkpoints' thread has done; `wait`s for it at the end.
    fn note_checkpoints(&mut self, wait: bool) -> Result<(), WorkerError> {
        checkpoints::note(&mut self.checkpoints, &mut self.recorder, wait)
    }

    fn write_evaluation(&mut self, e: &Reported, is_final: bool) -> Result<(), WorkerError> {
        let n = e.count.max(1) as f64;
        let accuracy = self.test.classes().filter(|_| self.job.classifies()).map(|_| e.correct as f64 / n);
        let event = event::Eval {
            wall: wall(),
            epoch: e.epoch,
            samples: match self.plan.leased {
                Some(_) => e.epoch.saturating_sub(self.begun) * self.train.len() as u64,
                None => self.samples * u64::from(self.job.train.workers),
            },
            seconds: self.clock.seconds(),
            loss: e.loss_sum / n,
            accuracy,
            count: e.count,
            is_final,
        };
        Ok(self.recorder.write(&Event::Eval(event))?)
    }
}

/// A loss that is no number ends the training, on every rank.
pub(super) fn finite(stepped: Stepped, step: Step, worker: WorkerId) -> Result<Stepped, WorkerError> {
    match stepped.loss.is_finite() {
        true => Ok(stepped),
        false => Err(WorkerError::NotFinite { loss: stepped.loss, step, worker }),
    }
}
