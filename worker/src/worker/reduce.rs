//! The training loop of an all-reduce job: every rank applies the mean gradient to its own weights and optimizer
//! state, which are equal on all ranks. No server takes part in a step.
//!
//! ```text
//!   join ─▶ state (seed, file, checkpoint) to all ranks ─▶ ┌─ minibatch ─▶ gradients, summed over the ranks ─▶ optimizer ─┐
//!                                                          └── [epoch's end: evaluate together] [due: checkpoint] ◀───────┘
//! ```
//!
//! The servers keep the membership: the leader's session keeps the job alive, and the control group keeps the
//! group's members and its checkpoints. When a rank is lost, the others continue from the leader's step. When all
//! are lost, the job continues from the latest checkpoint.

use super::{
    WorkerError, WorkerOptions, WorkerReport,
    clock::Clock,
    evaluate::{Watch, evaluate, own_share},
    follower::Follower,
    join::client_options,
    shared::Shared,
    training::finite,
};
use crate::{
    Job,
    checkpoints::{self, Author, Checkpoints},
    engine::{Engine, StepLoss},
    group::Ranks,
    local::Local,
    recorder::{self, Progress, Recorder, wall},
    start,
};
use paraft_checkpoint::{Checkpoint, Folder, MODEL_FILE, State, weights};
use paraft_client::Client;
use paraft_common::{BucketSpec, Layout, Step, TensorSpec, optim::Descent};
use paraft_models::{Evaluation, Model, Part};
use paraft_record::{Event, event};

/// Trains as a rank of the job's group, whether or not it leads.
pub(super) fn run(
    job: &Job,
    options: &WorkerOptions,
    model: &mut dyn Model,
    data: &Shared,
    ranks: &mut Ranks,
) -> Result<WorkerReport, WorkerError> {
    let tensors = model.tensors();
    let layout = job.layout(tensors.clone()).map_err(|e| WorkerError::Job(e.to_string()))?;
    let part = |b: &BucketSpec| Part { range: b.range(), encoding: job.train.encoding };
    let parts = layout.buckets().iter().map(part).collect();
    let on_device = model.resident().is_some();
    let mut engine = Engine::with(Local::new(job, &tensors, on_device), model, parts, ranks);
    let mut following = Follower::new(job, options, data);
    loop {
        if engine.leads() {
            let lead = LeaderState::join(job, options, data, &tensors, &layout, engine.model());
            match lead.and_then(|(mut lead, beginning)| lead.train(&mut engine, beginning)) {
                Err(WorkerError::Deposed) => tracing::warn!("another rank leads this group now"),
                // Another group took over this worker while this process was stopped.
                Err(WorkerError::Client(e)) if e.is_displaced() => {
                    tracing::warn!(error = %e, "this rank has lost its group");
                    if !engine.form()? {
                        return Ok(following.report(engine.into_weights()));
                    }
                    continue;
                }
                ended => return ended,
            }
        }
        if engine.follow(&mut following)? {
            return Ok(following.report(engine.into_weights()));
        }
    }
}

/// The leader's additional state.
struct LeaderState<'a> {
    job: &'a Job,
    options: &'a WorkerOptions,
    data: &'a Shared,
    layout: &'a Layout,
    client: Client,
    recorder: Recorder,
    checkpoints: Option<Checkpoints>,
    clock: Clock,
    samples: u64,
    steps: u64,
    /// The step at the job's start.
    begun: Step,
    descent: Descent,
}

impl<'a> LeaderState<'a> {
    /// Opens the leader's session; returns it with the job's initial state.
    fn join(
        job: &'a Job,
        options: &'a WorkerOptions,
        data: &'a Shared,
        tensors: &[TensorSpec],
        layout: &'a Layout,
        model: &dyn Model,
    ) -> Result<(Self, (State, Step)), WorkerError> {
        let begin = start::begin(
            job,
            options.resume.as_deref(),
            Some(&mut |seed, w| model.init(seed, w)),
            (layout, &[], &[]),
            &data.plan,
            &std::env::temp_dir(),
        )?;
        let state = State {
            weights: begin.initial.weights.to_vec(),
            slots: begin.initial.slots.iter().map(|s| s.to_vec()).collect(),
        };
        let begun = Step(begin.step());
        let mut server_job = job.server_job_on(tensors, &data.digest);
        let budget = data.plan.budget(job, begin.start.as_ref());
        server_job.start = begin.start;
        let client = client_options(job, options, server_job, true);
        recorder::try_out(options.run_dir.as_deref())?;
        let checkpoints = Checkpoints::start(
            job,
            options.run_dir.as_deref(),
            &data.plan,
            Author::new(job, &data.plan, layout.tensors(), &client, String::new()),
            begun,
        )?;
        let (client, _) = Client::join_from(client, begin.initial)?;
        let resumed = options.resume.as_ref().map(|_| (begun, data.plan.left_out));
        let run = recorder::described(job, layout.params_len() as u64, budget, resumed);
        let (worker, founding) = (client.worker(), client.founding());
        let recorder = Recorder::new(worker, options.run_dir.as_deref(), data.gauges.clone(), run, founding)?;
        data.gauges.stages(client.stages().clone());
        let lead = Self {
            job,
            options,
            data,
            layout,
            client,
            recorder,
            checkpoints,
            clock: Clock::default(),
            samples: 0,
            steps: 0,
            begun,
            descent: job.descent(),
        };
        Ok((lead, (state, begun)))
    }

    /// The state for a rank without one: the job's initial state or, if an earlier group of this run lost all its
    /// ranks, the latest checkpoint.
    fn state(&self, beginning: (State, Step), generation: u64) -> Result<(State, Step), WorkerError> {
        if generation > 1 && self.job.checkpoints().is_none() {
            tracing::warn!(
                step = beginning.1.0,
                "all ranks were lost, and the job makes no checkpoints: it restarts (set checkpoint.every_epochs, say)"
            );
        }
        let folder = checkpoints::folder(self.job, self.options.run_dir.as_deref());
        let Some(folder) = folder.filter(|_| generation > 1 && self.job.checkpoints().is_some()) else {
            return Ok(beginning);
        };
        let Some(path) = Folder::new(folder).newest_whole(None) else { return Ok(beginning) };
        let checkpoint = Checkpoint::open(&path)?;
        if checkpoint.manifest().name != self.job.name || checkpoint.manifest().resume_step <= beginning.1.0 {
            return Ok(beginning);
        }
        checkpoint.verify()?;
        checkpoint.fits(self.layout.tensors(), &self.job.optimizer, &[], &[])?;
        let done = Step(checkpoint.manifest().resume_step);
        tracing::warn!(step = done.0, path = %path.display(), "all ranks were lost; continuing from the latest checkpoint");
        Ok((checkpoint.load()?, done))
    }

    fn train(&mut self, engine: &mut Engine, beginning: (State, Step)) -> Result<WorkerReport, WorkerError> {
        let plan = &self.data.plan;
        let mut done = match engine.done() {
            Some(done) => {
                drop(beginning);
                done
            }
            None => {
                let (state, done) = self.state(beginning, engine.generation())?;
                engine.set_state(state, done)?;
                done
            }
        };
        engine.share_state()?;
        let mut batches = plan.prefetch(self.job, &self.data.train, self.options.rank, done)?;
        self.clock.start();
        if let Some(c) = &mut self.checkpoints {
            c.rests(None); // from here on the time counts
        }
        while done.0 < plan.total {
            if self.options.interrupt.is_set() {
                return Err(WorkerError::Interrupted);
            }
            let Some(batch) = batches.next() else { break };
            let batch = batch?;
            let step = done.next();
            let stepped = engine.step_alone(step, &batch)?;
            finite(stepped, step, self.client.worker())?;
            batches.recycle(batch);
            done = step;
            self.samples += stepped.samples;
            self.steps += 1;
            let evaluates = plan.evaluations(self.job).at(done, plan);
            self.note_step(done, plan.epoch_of(done), stepped, plan.ends_epoch(done) || evaluates)?;
            if let Some(c) = self.checkpoints.as_mut().filter(|c| c.due(step)) {
                c.own(step, self.client.founding(), || engine.state())?;
            }
            // The final weights are evaluated at the end.
            if evaluates && done.0 < plan.total {
                self.evaluate(engine, done, false)?;
            }
            self.note_checkpoints(false)?;
        }
        drop(batches);
        self.end(engine, done)
    }

    fn note_step(&mut self, done: Step, epoch: u64, stepped: StepLoss, now: bool) -> Result<(), WorkerError> {
        let progress = Progress {
            step: done,
            epoch,
            samples: self.samples,
            seconds: self.clock.seconds(),
            wait_seconds: 0.0,
        };
        let rate = self.descent.hyper(done.0.saturating_sub(1), done.0).lr;
        self.recorder.value(event::LEARNING_RATE, rate.into());
        Ok(self.recorder.step(progress, stepped.loss, now)?)
    }

    /// Evaluates the whole held-out part, a share on each rank.
    fn evaluate(
        &mut self,
        engine: &mut Engine,
        done: Step,
        is_final: bool,
    ) -> Result<Evaluation, WorkerError> {
        self.clock.stop();
        let (plan, evaluations) = (&self.data.plan, self.data.plan.evaluations(self.job));
        let number = evaluations.number(done, plan);
        let (epoch, step) = evaluations.place_of(number, plan);
        let (share, test) = (own_share(self.job, self.options.rank), &self.data.test);
        let (worker, recorder) = (self.client.worker(), Some(&mut self.recorder));
        let at = (epoch, step);
        let mut watch = Watch { interrupt: &*self.options.interrupt, recorder, worker, at };
        let e =
            engine.evaluate_share(number, share, |engine, part| evaluate(engine, test, part, &mut watch))?;
        let n = e.count.max(1) as f64;
        let event = event::Eval {
            wall: wall(),
            epoch,
            step,
            samples: self.samples,
            seconds: self.clock.seconds(),
            loss: e.loss_sum / n,
            accuracy: test.classes().filter(|_| self.job.classifies()).map(|_| e.correct as f64 / n),
            count: e.count,
            metrics: Default::default(),
            is_final,
        };
        if let Some(c) = &self.checkpoints {
            c.loss(done, event.loss);
        }
        self.recorder.write(&Event::Eval(event))?;
        if !is_final {
            self.clock.start();
        }
        Ok(e)
    }

    fn note_checkpoints(&mut self, wait: bool) -> Result<(), WorkerError> {
        checkpoints::note(&mut self.checkpoints, &mut self.recorder, wait)
    }

    fn end(&mut self, engine: &mut Engine, done: Step) -> Result<WorkerReport, WorkerError> {
        self.clock.stop();
        let evaluation = self.evaluate(engine, done, true)?;
        let state = engine.state()?;
        engine.over();
        let own = self.options.weights.clone();
        let run = self.options.run_dir.as_ref().map(|d| d.join(MODEL_FILE));
        for path in own.into_iter().chain(run) {
            weights::save(&path, self.layout, &state.weights, done.0)?;
        }
        self.note_checkpoints(true)?;
        let usage = paraft_host::usage();
        self.recorder.write(&Event::Worker(event::Worker {
            wall: wall(),
            worker: self.client.worker(),
            steps: self.steps,
            samples: self.samples,
            seconds: self.clock.seconds(),
            wait_seconds: 0.0,
            bytes_pushed: 0,
            bytes_pulled: 0,
            cpu_seconds: self.clock.cpu_seconds(),
            peak_rss_bytes: usage.peak_rss_bytes,
        }))?;
        // The job is finished once its member reports so.
        self.client.finish();
        if let Err(e) = self.client.pull_final(self.begun, &mut vec![0.0; self.layout.len()]) {
            tracing::warn!(error = %e, "this worker's session could not be ended in order");
        }
        Ok(WorkerReport {
            steps: self.steps,
            samples: self.samples,
            seconds: self.clock.seconds(),
            weights: state.weights,
            evaluation: Some(evaluation),
        })
    }
}
