//! The training loop of models with sparse tables: it pulls the rows that a minibatch names, and pushes their gradients
//! with those of the tensors, as one step.

mod evaluation;
mod lookups;

use super::{
    Minibatches, Plan, Setup, WorkerError, WorkerOptions, WorkerReport,
    driver::{Driver, DriverAction, End},
    join::{JoinedWorker, join},
    pushes::misuse,
    rows,
    training::finite,
};
use crate::{
    cli,
    engine::StepLoss,
    exchange::PushParts,
    job::Job,
    metrics::{self, Gauges},
    slow::Slowdown,
};
use evaluation::{Measured, Progress};
use lookups::Batch;
use paraft_client::{ClientError, Pulled};
use paraft_common::{Step, TableSpec, TensorKind};
use paraft_data::{SparseDataset, SparseSplit, chunk_of};
use paraft_models::{Evaluation, SparseModel, SparseTable};
use std::{collections::VecDeque, ops::Range, sync::Arc, time::Instant};

/// Trains the job's built-in model of tables until the job is done. Blocks; the calling thread computes.
///
/// # Errors
/// The model, the data or the fleet do not fit the job, files cannot be read or written, the servers are not reached or
/// refuse, or a signal came.
pub fn run_sparse(job: &Job, options: &WorkerOptions) -> Result<WorkerReport, WorkerError> {
    let (model, data) = cli::sparse_built_in(job)?;
    let digest = data.digest();
    let SparseSplit { train, test, hashing, .. } = data;
    let plan = Plan::of(job, train.len())?.resuming_from(job, options.resume.as_deref())?;
    let gauges = Arc::new(Gauges::default());
    metrics::serve_at(options.metrics, &gauges, &job.name)?;
    let tables = job.tables_of_model();
    let setup = Setup {
        data: digest.to_string(),
        classifies: job.classifies(),
        held_out: test.len(),
        tables: tables.clone(),
        ..Setup::new(model.tensors(), train.len(), |seed, weights| model.init(seed, weights))
    };
    setup.check(job, options)?;
    let JoinedWorker { mut driver, start, flush: _flush, .. } =
        join(job, options, setup, &plan, gauges, false, None)?;
    driver.has_steps(start)?;
    driver.measured = Some(Default::default());
    let values = driver.layout.len();
    let of_tensors = driver.layout.buckets().iter().filter(|b| b.kind != TensorKind::Rows);
    let buckets = of_tensors.map(|b| b.range()).collect();
    let takes = job.model.as_ref().map_or(&[][..], |m| m.tables());
    let mut training = Training {
        job,
        options,
        train,
        test,
        batch: Batch::new(takes, hashing),
        model,
        takes,
        rows: vec![Vec::new(); tables.len()],
        row_grads: vec![Vec::new(); tables.len()],
        tables,
        weights: vec![0.0; values],
        grads: vec![0.0; values],
        buckets,
        minibatches: plan.minibatches(job, options.rank, driver.done()),
        after: driver.done(),
        chunk: plan.leased.map(|_| VecDeque::new()),
        slow: Slowdown::new(options.slow, job.seed, options.rank),
        driver,
    };
    match training.run() {
        Err(WorkerError::Interrupted | WorkerError::Client(ClientError::Interrupted)) => {
            training.driver.leave();
            Err(WorkerError::Interrupted)
        }
        ended => Ok(training.report(ended?)),
    }
}

struct Training<'a> {
    job: &'a Job,
    options: &'a WorkerOptions,
    train: SparseDataset,
    test: SparseDataset,
    batch: Batch,
    model: Box<dyn SparseModel>,
    /// The model's tables, and the job's in the same order.
    takes: &'static [SparseTable],
    tables: Vec<TableSpec>,
    /// For each table the minibatch's rows, `[ids, dim]`, and their gradients.
    rows: Vec<Vec<f32>>,
    row_grads: Vec<Vec<f32>>,
    /// The tensors of the last pull, and their gradient.
    weights: Vec<f32>,
    grads: Vec<f32>,
    /// The buckets of the tensors; those of the tables follow them.
    buckets: Vec<Range<usize>>,
    /// The static sampler, and the step before its next minibatch.
    minibatches: Minibatches,
    after: Step,
    /// The leased sampler: what is left of the chunk.
    chunk: Option<VecDeque<Vec<u32>>>,
    slow: Slowdown,
    driver: Driver,
}

impl Training<'_> {
    fn run(&mut self) -> Result<Option<Evaluation>, WorkerError> {
        let (mut epoch_of_order, mut order) = (u64::MAX, Vec::new());
        loop {
            match self.driver.next(&mut self.weights)? {
                DriverAction::Begin(done) => {
                    if self.after != done {
                        self.minibatches = self.driver.plan.minibatches(self.job, self.options.rank, done);
                        self.after = done;
                    }
                }
                DriverAction::Gradient { step, ask_ahead, .. } => self.minibatch(step, ask_ahead)?,
                DriverAction::Local { .. } | DriverAction::Apply { .. } => {
                    return Err(misuse("a model of tables has no weights or optimizer of its own"));
                }
                DriverAction::Evaluate { number, share } => {
                    // One worker evaluates all samples: servers add losses up, but an AUC is no sum.
                    let e = match share.place {
                        0 => self.evaluate(number)?,
                        _ => Evaluation::default(),
                    };
                    self.driver.evaluated(number, &e)?;
                }
                DriverAction::Chunk { epoch, chunk } => {
                    if epoch_of_order != epoch {
                        (epoch_of_order, order) = (epoch, self.driver.order(epoch));
                    }
                    let t = &self.job.train;
                    let all: VecDeque<_> = chunk_of(&order, chunk, t.chunk(), t.batch).collect();
                    self.driver.prepared(all.len() as u64);
                    self.chunk = Some(all);
                }
                DriverAction::DropChunk => self.chunk = Some(VecDeque::new()),
                DriverAction::End(end) => {
                    self.driver.save(end, &mut self.weights)?;
                    let evaluation = end.first.then(|| self.evaluate_final(end)).transpose()?;
                    self.driver.end(end, evaluation.as_ref())?;
                    return Ok(evaluation);
                }
            }
        }
    }

    /// Trains one minibatch at the pulled weights and rows.
    fn minibatch(&mut self, step: Step, ask_ahead: bool) -> Result<(), WorkerError> {
        let indices = match &mut self.chunk {
            None => Some(self.minibatches.next()),
            Some(chunk) => chunk.pop_front(),
        };
        let Some(indices) = indices else {
            self.driver.trained(None);
            return Ok(());
        };
        self.slow.hold(|| self.options.interrupt.is_set());
        self.batch.fill(&self.train, &indices);
        for (takes, spec) in self.takes.iter().zip(&self.tables) {
            rows::check(spec, self.batch.ids(takes))?;
        }
        if let Some(pulled) = self.pull_rows()? {
            // Taken out meanwhile: it continues from another step, whose minibatch is another.
            self.driver.rejoined(pulled);
            self.after = Step(u64::MAX);
            return Ok(());
        }
        let began = Instant::now();
        for (grads, rows) in self.row_grads.iter_mut().zip(&self.rows) {
            grads.clear();
            grads.resize(rows.len(), 0.0);
        }
        let (input, n) = (&self.batch.input, indices.len());
        let loss = self.model.step(&self.weights, &self.rows, input, &mut self.grads, &mut self.row_grads)?;
        let stepped = StepLoss { loss, samples: n as u64 };
        let StepLoss { loss, samples } = finite(stepped, step, self.driver.worker())?;
        self.slow.took(began.elapsed());
        if ask_ahead {
            self.driver.client.ask_ahead(step);
        }
        let mut push = PushParts::new(&mut self.driver.client, step, n);
        for (i, range) in self.buckets.iter().enumerate().rev() {
            push.values(i, &self.grads[range.clone()]);
        }
        for (t, (takes, spec)) in self.takes.iter().zip(&self.tables).enumerate() {
            let gradients = (self.batch.ids(takes), &self.row_grads[t][..]);
            rows::push(&mut self.driver, (t, spec), step, gradients);
        }
        self.driver.trained(Some((f64::from(loss) * samples as f64, samples)));
        Ok(())
    }

    /// Pulls the rows that the batch names. Some: this worker had been taken out.
    fn pull_rows(&mut self) -> Result<Option<Pulled>, WorkerError> {
        for (t, (takes, spec)) in self.takes.iter().zip(&self.tables).enumerate() {
            let (ids, values) = (self.batch.ids(takes), &mut self.rows[t]);
            values.resize(ids.len() * spec.dim, 0.0);
            let all = (0..ids.len() as u32).collect();
            let pulled = rows::pull(&mut self.driver, (t, spec), (ids, all), values, &mut self.weights);
            if let Some(pulled) = pulled.map_err(|(why, _)| why)? {
                return Ok(Some(pulled));
            }
        }
        Ok(None)
    }

    /// Evaluates all held-out samples.
    fn evaluate(&mut self, number: u64) -> Result<Evaluation, WorkerError> {
        /// Samples at once.
        const CHUNK: usize = 1024;
        let mut measured = Measured::new(self.model.predicts());
        let mut progress = Progress::new(self.test.len(), self.driver.place_of(number));
        let (mut scores, all) = (Vec::new(), (0..self.test.len() as u32).collect::<Vec<_>>());
        for chunk in all.chunks(CHUNK) {
            if self.options.interrupt.is_set() && !self.driver.over {
                return Err(WorkerError::Interrupted);
            }
            self.batch.fill(&self.test, chunk);
            // After a pull that joined again the rows of the present step follow.
            while self.pull_rows()?.is_some() {}
            let input = &self.batch.input;
            self.model.scores(&self.weights, &self.rows, input, &mut scores)?;
            measured.add(&scores, &input.labels);
            progress.says(chunk.len(), &mut self.driver)?;
        }
        let (evaluation, metrics) = measured.result();
        if let Some(of) = &mut self.driver.measured {
            of.insert(number, metrics);
        }
        Ok(evaluation)
    }

    /// The evaluation of the final weights: this worker's last one, if it was of them.
    fn evaluate_final(&mut self, end: End) -> Result<Evaluation, WorkerError> {
        let number = self.driver.number_at(end.done);
        let known = self.driver.measured.as_ref().is_some_and(|m| m.contains_key(&number));
        match self.driver.shared(end, self.test.len() as u64).filter(|_| known) {
            Some(shared) => Ok(shared),
            None => self.evaluate(number),
        }
    }

    fn report(self, evaluation: Option<Evaluation>) -> WorkerReport {
        WorkerReport {
            steps: self.driver.steps,
            samples: self.driver.samples,
            seconds: self.driver.clock.seconds(),
            weights: self.weights,
            evaluation,
        }
    }
}
