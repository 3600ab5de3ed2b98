//! A worker's training loop, as `paraft_worker` has it, in simulated time.
//!
//! ```text
//!   join ─▶ pull ─▶ ┌─ forward ─▶ backward ──buckets ready──▶ push ─┐
//!                   └── [epoch's end: evaluate] ◀── pull ◀──────────┘
//!   finish ─▶ final pull ─▶ lowest finisher evaluates everything
//! ```
//!
//! The gradient is the real one, of the real weights and samples. Only the time that it takes is drawn: a third of it is the
//! forward pass, and in the rest buckets become ready one after the other, the last one first. Evaluation takes no
//! simulated time; a worker's training clock stands still for it anyway.

use crate::{
    SimError,
    chance::{Chance, Draws},
    client::Client,
    clock::{Moment, nanos, seconds},
    learner::Gradient,
    local_steps::Made,
    recording::{Evaluated, Progress, Stand},
    stream::Process,
    streaming::Under,
    world::World,
};
use paraft_common::{BucketId, Step, WorkerId, local::LocalWeights};
use paraft_record::{Event, event};
use paraft_server::shard::command::EvalSums;
use paraft_worker::worker::Minibatches;
use std::sync::{Arc, atomic::Ordering::Relaxed};

/// Of a step's time.
const FORWARD: f64 = 1.0 / 3.0;
/// The backward pass makes buckets ready in so many turns at most: each is an event of every worker's every step.
const TURNS: usize = 8;
/// A worker that has to wait for the warm start looks so often whether it is over, in nanoseconds.
pub(crate) const WARM_LOOK: u64 = 20_000_000;

/// What is left of a worker that came to the end.
pub(crate) struct Finished {
    pub steps: u64,
    pub weights: Vec<f32>,
    /// Of the final weights, if it was this worker's to make.
    pub evaluation: Option<paraft_models::Evaluation>,
}

/// How long a worker computes.
pub(crate) struct Speed {
    /// Seconds, on average.
    mean: f64,
    chance: Chance,
}

impl Speed {
    /// Of a worker in one of its lives: all have the same speed, and each draws on.
    pub fn new(world: &World, worker: WorkerId) -> Self {
        let setup = &world.setup;
        let own = Chance::new(world.seed, Draws::Worker(worker.0)).log_normal(1.0, setup.worker_spread);
        let slow = setup.slow.get(&worker.0).copied().unwrap_or(1.0);
        let chance = Chance::new(world.seed, Draws::Compute(worker.0));
        Self { mean: setup.compute_ms / 1e3 * own * slow, chance }
    }

    /// Seconds of a step.
    pub(crate) fn step(&mut self, world: &World) -> f64 {
        let drawn = self.chance.log_normal(self.mean, world.setup.compute_spread);
        match world.setup.straggle {
            Some(s) if self.chance.uniform() < s.probability => drawn * s.factor,
            _ => drawn,
        }
    }
}

pub(crate) struct Training<'a> {
    pub(crate) world: &'a Arc<World>,
    process: &'a Arc<Process>,
    pub(crate) worker: WorkerId,
    pub(crate) speed: &'a mut Speed,
    pub(crate) client: Client,
    pub(crate) weights: Vec<f32>,
    /// Where the worker has weights of its own.
    pub(crate) local: Option<LocalWeights>,
    /// Where its weights stream: the fragment that is under way.
    pub(crate) under: Option<Under>,
    progress: Progress,
    /// When its training clock began.
    began: Moment,
    /// Nanoseconds in pulls since then.
    pub(crate) waited: u64,
    /// Seconds of its processor.
    pub(crate) worked: f64,
    samples: u64,
    steps: u64,
    /// The last switch of the mode that it has heard of.
    switches: u64,
}

/// One life of a worker, up to the end of the job.
pub(crate) async fn train(
    world: &Arc<World>,
    process: &Arc<Process>,
    speed: &mut Speed,
) -> Result<Finished, SimError> {
    let (client, start) = Client::join(world, process).await?;
    let training = Training {
        world,
        process,
        worker: process.worker,
        speed,
        client,
        weights: vec![0.0; world.layout.len()],
        local: LocalWeights::new(
            &world.file.local,
            &world.file.descent(),
            world.layout.params_len(),
            world.layout.len(),
        ),
        under: None,
        progress: Progress::default(),
        began: 0,
        waited: 0,
        worked: 0.0,
        samples: 0,
        steps: 0,
        switches: 0,
    };
    training.run(start).await
}

impl Training<'_> {
    async fn run(mut self, start: Step) -> Result<Finished, SimError> {
        let plan = &self.world.plan;
        let every_epoch = self.world.file.eval.every_epoch;
        let pulled = self.client.pull(start, false, &mut self.weights).await?;
        let mut pulled = self.warm_start(pulled).await?;
        self.begin_local();
        let mut done = pulled.done;
        let mut minibatches = self.minibatches(done);
        self.began = self.world.clock.now();
        self.process.begins();
        while done.0 < plan.total && !pulled.stop {
            let step = done.next();
            let made = match &self.local {
                None => self.one_minibatch(step, &minibatches.next()).await?,
                Some(_) => self.local_step(step, &mut minibatches).await?,
            };
            let pushed = match made {
                Made::Elsewhere(elsewhere) => {
                    pulled = elsewhere;
                    None
                }
                Made::Pushed(samples, loss) => {
                    self.world.gap.lock().pushed(self.worker, step);
                    self.samples += samples;
                    self.client.note_loss(loss);
                    pulled = self.pull_behind(step).await?;
                    self.steps += 1;
                    Some((samples, loss))
                }
            };
            let rejoined = pulled.done != step;
            done = pulled.done;
            let epoch = done.0.div_ceil(plan.per_epoch);
            let last = done.0 >= plan.total || pulled.stop;
            let epoch_ends = done.0.is_multiple_of(plan.per_epoch) || last;
            if let Some((samples, loss)) = pushed {
                self.note_step(done, epoch, samples, loss, epoch_ends)?;
            }
            if epoch_ends && every_epoch {
                self.evaluate_share(epoch)?;
            }
            self.note_evaluations()?;
            if rejoined {
                self.world.gap.lock().pushed(self.worker, done);
                self.begin_local();
                minibatches = self.minibatches(done);
            }
        }
        self.end(done).await
    }

    fn minibatches(&self, done: Step) -> Minibatches {
        self.world.gap.lock().pushed(self.worker, done);
        self.world.plan.minibatches(&self.world.file, self.worker.0, done)
    }

    /// The worker's own weights, if it has any, are what was pulled.
    fn begin_local(&mut self) {
        if let Some(local) = &mut self.local {
            local.begin(&self.weights);
        }
        self.under = None;
    }

    /// A step of one minibatch at the pulled weights.
    async fn one_minibatch(&mut self, step: Step, samples: &[u32]) -> Result<Made, SimError> {
        self.client.ask_ahead(step);
        self.world.gap.lock().goes_on(Step(step.0 - 1));
        let loss = self.step(step, samples).await?;
        Ok(Made::Pushed(samples.len() as u64, loss))
    }

    /// Computes a gradient and pushes it; gives the loss.
    async fn step(&mut self, step: Step, samples: &[u32]) -> Result<f32, SimError> {
        let Gradient { loss, buckets } = self.world.learner.lock().step(
            (self.worker, step),
            &self.weights,
            samples,
            |bucket, values| self.client.encode(bucket, step, values),
        )?;
        self.client.weigh(samples.len());
        let time = self.speed.step(self.world);
        self.worked += time;
        self.world.cores.work(nanos(time * FORWARD)).await;
        let turns: Vec<&[bytes::Bytes]> = buckets.rchunks(buckets.len().div_ceil(TURNS)).collect();
        let backward = nanos(time * (1.0 - FORWARD) / turns.len() as f64);
        let mut next = buckets.len();
        for turn in turns {
            self.world.cores.work(backward).await;
            for payload in turn.iter().rev() {
                next -= 1;
                self.client.push(BucketId(next as u32), step, payload.clone());
            }
        }
        Ok(loss)
    }

    pub(crate) async fn pull(&mut self, step: Step) -> Result<paraft_session::Pulled, SimError> {
        let asked = self.world.clock.now();
        let pulled = self.client.pull(step, false, &mut self.weights).await?;
        if let Some(local) = &mut self.local {
            local.pulled(&self.weights);
        }
        self.takes_over_rest();
        let work = self.world.setup.exchange_ms / 1e3;
        self.worked += work;
        if work > 0.0 {
            self.world.cores.work(nanos(work)).await;
        }
        self.waited += self.world.clock.now() - asked;
        self.note_mode(pulled.done)?;
        Ok(pulled)
    }

    /// Writes down a switch of the mode.
    pub(crate) fn note_mode(&mut self, step: Step) -> Result<(), SimError> {
        let (number, mode) = self.client.mode();
        if number == self.switches {
            return Ok(());
        }
        self.switches = number;
        self.world.recording.write(&Event::Mode(event::ModeSwitch {
            wall: self.world.clock.seconds(),
            worker: self.worker,
            step,
            samples: self.samples,
            seconds: self.seconds(),
            number,
            mode: mode.to_string(),
        }))
    }

    fn seconds(&self) -> f64 {
        seconds(self.world.clock.now() - self.began)
    }

    fn note_step(
        &mut self,
        step: Step,
        epoch: u64,
        trained: u64,
        loss: f32,
        now: bool,
    ) -> Result<(), SimError> {
        let stand = Stand {
            worker: self.worker,
            step,
            epoch,
            samples: self.samples,
            seconds: self.seconds(),
            wait_seconds: seconds(self.waited),
        };
        self.world.recording.step(&mut self.progress, stand, trained, loss, now)
    }

    /// Every worker evaluates a share; shard 0 adds the shares up.
    fn evaluate_share(&mut self, epoch: u64) -> Result<(), SimError> {
        let mut learner = self.world.learner.lock();
        let (first, workers) = (self.worker.0 as usize, self.world.workers as usize);
        let share = (first..learner.held_out()).step_by(workers);
        let e = learner.evaluate(&self.weights, share)?;
        drop(learner);
        let sums = EvalSums { loss_sum: e.loss_sum, correct: e.correct, count: e.count };
        self.client.report(epoch, sums);
        Ok(())
    }

    fn note_evaluations(&mut self) -> Result<(), SimError> {
        for e in self.client.evaluations() {
            self.write_evaluation((e.epoch, e.loss_sum, e.correct, e.count), false)?;
        }
        Ok(())
    }

    fn write_evaluation(
        &self,
        (epoch, loss_sum, correct, count): (u64, f64, u64, u64),
        is_final: bool,
    ) -> Result<(), SimError> {
        let classifies = self.world.learner.lock().classes() && self.world.file.classifies();
        let evaluated = Evaluated { epoch, loss_sum, correct, count, classifies };
        self.world.recording.evaluation(evaluated, self.seconds(), is_final)
    }

    async fn end(mut self, done: Step) -> Result<Finished, SimError> {
        let seconds_trained = self.seconds();
        self.process.finishes();
        self.world.gap.lock().left(self.worker);
        self.client.finish();
        let last = self.client.pull(done, true, &mut self.weights).await?;
        self.world.over.store(true, Relaxed);
        // From here on its training clock stands still.
        self.began = self.world.clock.now() - nanos(seconds_trained);
        self.note_evaluations()?;
        let mut evaluation = None;
        if last.finishers.first() == Some(&self.worker) {
            let e = {
                let mut learner = self.world.learner.lock();
                let all = 0..learner.held_out();
                learner.evaluate(&self.weights, all)?
            };
            let epoch = done.0.div_ceil(self.world.plan.per_epoch);
            self.write_evaluation((epoch, e.loss_sum, e.correct, e.count), true)?;
            evaluation = Some(e);
        }
        self.world.recording.write(&Event::Worker(event::Worker {
            wall: self.world.clock.seconds(),
            worker: self.worker,
            steps: self.steps,
            samples: self.samples,
            seconds: seconds_trained,
            wait_seconds: seconds(self.waited),
            bytes_pushed: self.client.bytes_pushed,
            bytes_pulled: self.client.bytes_pulled,
            cpu_seconds: self.worked,
            peak_rss_bytes: 0,
        }))?;
        self.client.leave();
        Ok(Finished { steps: done.0, weights: self.weights, evaluation })
    }
}
