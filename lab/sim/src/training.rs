//! A worker's training loop in simulated time; it carries out the actions of the real workers' trainer.
//!
//! The gradient is the real one, of real weights and samples. Only its time is drawn: a third is the
//! forward pass, and in the rest buckets become ready one by one, the last one first. Evaluation takes
//! no simulated time, since the training clock pauses for it anyway.

use crate::{
    client::Client,
    clock::{Moment, nanos, seconds},
    error::SimError,
    learner::Gradient,
    recording::{Progress, Stand},
    speed::{FORWARD, Speed, TURNS},
    stages::{Leader, OfRank, Rank, Shared},
    stream::Process,
    world::World,
};
use paraft_common::{BucketId, Share, Step, WorkerId, local::LocalWeights};
use paraft_record::{Event, event};
use paraft_session::{Pull, Pulled};
use paraft_trainer::{Action, Options, Trainer};
use paraft_worker::worker::Minibatches;
use std::sync::{Arc, atomic::Ordering::Relaxed};
use tokio::task::JoinSet;

mod evaluation;
mod local_steps;

/// The result of a worker that finished.
pub(crate) struct Finished {
    pub steps: u64,
    pub weights: Vec<f32>,
    /// The evaluation of the final weights, if it was this worker's task.
    pub evaluation: Option<paraft_models::Evaluation>,
    /// The results of its ranks, with pipeline stages.
    pub ranks: Vec<OfRank>,
}

struct Training<'a> {
    world: &'a Arc<World>,
    process: &'a Arc<Process>,
    worker: WorkerId,
    speed: &'a Speed,
    client: Client,
    weights: Vec<f32>,
    /// Set with pipeline stages.
    stages: Option<Leader>,
    /// Set with local steps.
    local: Option<LocalWeights>,
    progress: Progress,
    /// When its training clock started.
    began: Option<Moment>,
    /// Where the training clock stopped, after the last step.
    trained_for: Option<f64>,
    /// Nanoseconds in pulls since the start of the clock.
    waited: u64,
    /// CPU seconds.
    worked: f64,
    samples: u64,
    steps: u64,
    /// The number of the last switch of the mode that it received.
    switches: u64,
    /// The last complete evaluation: its number, and the sums of loss, correct predictions and samples.
    reported: Option<(u64, f64, u64, u64)>,
}

/// One run of a worker (its process or its ranks), up to the end of the job.
pub(crate) async fn train(
    world: &Arc<World>,
    processes: &[Arc<Process>],
    speeds: &[Arc<Speed>],
) -> Result<Finished, SimError> {
    let (process, speed) = (&processes[0], &speeds[0]);
    let Some(cut) = world.cut.clone() else { return lead(world, process, speed, None).await };
    let shared = Shared::new(world, process.worker, cut.ranks());
    let rank = |at: usize| Rank::new(world, &cut, &shared, at, speeds[at].clone());
    let mut others = JoinSet::new();
    for (at, process) in processes.iter().enumerate().skip(1) {
        others.spawn(rank(at).follow(process.clone()));
    }
    let leader = Leader::new(&shared, rank(0));
    let failed = async {
        loop {
            match others.join_next().await {
                Some(Ok(Ok(()))) => {}
                Some(Ok(Err(e))) => return e,
                Some(Err(e)) => return SimError::Runtime(format!("a simulated rank panicked: {e}")),
                None => std::future::pending().await,
            }
        }
    };
    tokio::select! {
        biased;
        finished = lead(world, process, speed, Some(leader)) => finished,
        e = failed => Err(e),
    }
}

/// A worker, or the first rank of one, from its session to its end.
async fn lead(
    world: &Arc<World>,
    process: &Arc<Process>,
    speed: &Speed,
    stages: Option<Leader>,
) -> Result<Finished, SimError> {
    let (client, start) = Client::join(world, process).await?;
    let (worker, plan, file) = (process.worker, &world.plan, &world.file);
    let trainer = Trainer::new(
        Options {
            batch: file.train.batch,
            evaluates: plan.evaluations(file),
            share: Share { place: worker.0, of: world.workers },
            ..Options::new(worker, plan.steps, file.local.clone(), world.layout.clone())
        },
        start,
    );
    let (params, len) = (world.layout.params_len(), world.layout.len());
    let training = Training {
        world,
        process,
        worker,
        speed,
        client,
        weights: vec![0.0; if stages.is_some() { 0 } else { len }],
        stages,
        local: LocalWeights::new(&file.local, &file.descent(), params, len),
        progress: Progress::default(),
        began: None,
        trained_for: None,
        waited: 0,
        worked: 0.0,
        samples: 0,
        steps: 0,
        switches: 0,
        reported: None,
    };
    training.run(trainer).await
}

impl Training<'_> {
    async fn run(mut self, mut trainer: Trainer) -> Result<Finished, SimError> {
        let mut minibatches = self.minibatches(trainer.done());
        let mut trained = 0;
        loop {
            match trainer.next_action() {
                Action::Pull(pull) => {
                    let pulled = self.pull(pull).await?;
                    trainer.pulled(pulled);
                }
                Action::Begin(done) => {
                    if let Some(local) = &mut self.local {
                        local.begin(&self.weights);
                    }
                    minibatches = self.minibatches(done);
                    if let Some(leader) = &mut self.stages {
                        leader.begins();
                    }
                    self.trained_for = None;
                    if self.began.is_none() {
                        (self.began, self.waited) = (Some(self.world.clock.now()), 0);
                        self.process.begins();
                    }
                }
                Action::Gradient { step, ask_ahead, continues } => {
                    if ask_ahead {
                        self.client.ask_ahead(step);
                    }
                    self.note_lead(step);
                    let (loss, samples) = match &mut self.stages {
                        Some(leader) => {
                            leader.step(&mut self.client, (step, continues), &mut minibatches).await?
                        }
                        None => {
                            let samples = minibatches.next();
                            (self.step(step, &samples).await?, samples.len())
                        }
                    };
                    trainer.trained(Some((f64::from(loss) * samples as f64, samples as u64)));
                }
                Action::Local { step, clock } => {
                    let samples = minibatches.next();
                    let loss_sum = self.local_minibatch(step, clock, &samples).await?;
                    trainer.trained(Some((loss_sum, samples.len() as u64)));
                }
                Action::Push { step, samples, ask_ahead } => {
                    self.note_lead(step);
                    if ask_ahead {
                        self.client.ask_ahead(step);
                    }
                    self.push(step, samples);
                }
                Action::PushFragment { step, buckets, samples } => {
                    if buckets.end == self.world.layout.buckets().len() {
                        self.note_lead(step);
                    }
                    self.push_fragment(step, buckets, samples);
                }
                Action::TakeOver(buckets) => self.take_over(buckets),
                Action::Pushed { step, loss, samples } => {
                    self.world.step_lead.lock().pushed(self.worker, step);
                    self.samples += samples;
                    self.steps += 1;
                    self.client.note_loss(loss);
                    trained = samples;
                }
                Action::Stepped(s) => {
                    self.note_step(s, trained)?;
                    self.note_evaluations()?;
                }
                Action::Evaluate { number, share } => {
                    self.evaluate_share(number, share)?;
                    self.note_evaluations()?;
                }
                Action::Wait(time) => self.world.clock.sleep(time.as_nanos() as u64).await,
                // The training clock stops here.
                Action::Trained => self.trained_for = Some(self.seconds()),
                Action::Finish(_) => {
                    self.process.finishes();
                    self.world.step_lead.lock().left(self.worker);
                    self.client.finish();
                }
                Action::End { done, first, evaluated } => return self.end(done, first, evaluated),
                Action::Moved { .. } => {}
                // The simulator refuses jobs with checkpoints or the leased sampler.
                Action::Apply(_) => trainer.applied(),
                Action::TakeChunk { .. }
                | Action::Chunk { .. }
                | Action::DropChunk
                | Action::ChunkDone { .. }
                | Action::WriteAfter { .. }
                | Action::EpochOver { .. }
                | Action::WriteResults { .. }
                | Action::Checkpoint(_) => {}
            }
        }
    }

    fn minibatches(&self, done: Step) -> Minibatches {
        self.world.step_lead.lock().pushed(self.worker, done);
        let file = &self.world.file;
        self.world.plan.minibatches(file, self.worker.0, done)
    }

    /// Its part of `step` is computed: the next push belongs to a step that other workers may wait for.
    fn note_lead(&self, step: Step) {
        self.world.step_lead.lock().note_step(Step(step.0 - 1));
    }

    /// Computes a gradient and pushes it; returns the loss.
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

    async fn pull(&mut self, pull: Pull) -> Result<Pulled, SimError> {
        let asked = self.world.clock.now();
        let whole = pull.only.is_empty();
        let trains = !pull.last && !pull.barrier;
        let pulled = match &mut self.stages {
            None => self.client.pull(pull, &mut self.weights).await?,
            Some(leader) => leader.pull(&mut self.client, pull).await?,
        };
        if let Some(local) = self.local.as_mut().filter(|_| whole) {
            local.pulled(&self.weights);
        }
        // The first pull and the last are not part of training.
        let work = self.world.setup.exchange_ms / 1e3;
        if whole && trains && self.began.is_some() {
            self.worked += work;
            if work > 0.0 {
                self.world.cores.work(nanos(work)).await;
            }
        }
        if trains {
            self.waited += self.world.clock.now() - asked;
        }
        self.note_mode(pulled.done)?;
        Ok(pulled)
    }

    /// Records a switch of the mode.
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
        let now = self.world.clock.now();
        self.trained_for.unwrap_or_else(|| seconds(now - self.began.unwrap_or(now)))
    }

    fn note_step(&mut self, s: paraft_trainer::Stepped, trained: u64) -> Result<(), SimError> {
        let (step, epoch) = (s.done, s.epoch);
        let stand = Stand {
            worker: self.worker,
            step,
            epoch,
            samples: self.samples,
            seconds: self.seconds(),
            wait_seconds: seconds(self.waited),
        };
        self.world.recording.step(&mut self.progress, stand, trained, s.loss, s.ends)
    }

    fn end(mut self, done: Step, first: bool, evaluated: Option<u64>) -> Result<Finished, SimError> {
        self.world.over.store(true, Relaxed);
        self.note_evaluations()?;
        let evaluation = if first { Some(self.final_evaluation(done, evaluated)?) } else { None };
        let ranks = self.stages.as_mut().map(Leader::over).unwrap_or_default();
        let (mut bytes_pushed, mut bytes_pulled) = (self.client.bytes_pushed, self.client.bytes_pulled);
        // `ranks` includes the first rank.
        if !ranks.is_empty() {
            bytes_pushed = ranks.iter().map(|r| r.bytes_pushed).sum();
            bytes_pulled = ranks.iter().map(|r| r.bytes_pulled).sum();
            self.worked += ranks.iter().map(|r| seconds(r.worked)).sum::<f64>();
        }
        self.world.recording.write(&Event::Worker(event::Worker {
            wall: self.world.clock.seconds(),
            worker: self.worker,
            steps: self.steps,
            samples: self.samples,
            seconds: self.seconds(),
            wait_seconds: seconds(self.waited),
            bytes_pushed,
            bytes_pulled,
            cpu_seconds: self.worked,
            peak_rss_bytes: 0,
        }))?;
        self.client.leave();
        let weights = match self.stages {
            Some(leader) => leader.whole(),
            None => self.weights,
        };
        Ok(Finished { steps: done.0, weights, evaluation, ranks })
    }
}
