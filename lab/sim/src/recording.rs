//! The record of a simulated run: the lines of `metrics.jsonl`, with simulated time in every time
//! field.

use crate::{clock::Clock, error::SimError};
use paraft_common::{Step, WorkerId};
use paraft_record::{Event, RecordError, event};
use parking_lot::Mutex;
use std::collections::{BTreeMap, BTreeSet};

/// Receives the lines in the order of simulated time.
pub type Sink = Box<dyn FnMut(&Event) -> Result<(), RecordError> + Send>;

/// Training lines of all workers together, per simulated second (besides those at an epoch's end).
const LINES_PER_SECOND: f64 = 20.0;

/// The recorder.
pub(crate) struct Recording {
    clock: Clock,
    /// The interval of a worker's training lines.
    interval: f64,
    inner: Mutex<Inner>,
}

struct Inner {
    sink: Sink,
    /// Evaluations that are written: every worker receives each.
    evaluated: BTreeSet<u64>,
    /// Samples trained by all workers.
    samples: u64,
}

/// The state of a worker's lines.
#[derive(Debug, Default)]
pub(crate) struct Progress {
    losses: (f64, u64),
    last: (f64, u64),
    written: f64,
}

/// A worker's position after a step.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Stand {
    pub worker: WorkerId,
    pub step: Step,
    pub epoch: u64,
    pub samples: u64,
    pub seconds: f64,
    pub wait_seconds: f64,
}

impl Recording {
    pub fn new(clock: Clock, workers: u32, sink: Sink) -> Self {
        let inner = Inner { sink, evaluated: BTreeSet::new(), samples: 0 };
        Self { clock, interval: f64::from(workers) / LINES_PER_SECOND, inner: Mutex::new(inner) }
    }

    /// Writes a line.
    pub fn write(&self, event: &Event) -> Result<(), SimError> {
        Ok((self.inner.lock().sink)(event)?)
    }

    /// Counts a step; writes a line at the interval, and always if `now`.
    pub fn step(
        &self,
        progress: &mut Progress,
        s: Stand,
        trained: u64,
        loss: f32,
        now: bool,
    ) -> Result<(), SimError> {
        self.inner.lock().samples += trained;
        progress.losses.0 += f64::from(loss);
        progress.losses.1 += 1;
        if !now && s.seconds < progress.written + self.interval {
            return Ok(());
        }
        progress.written = s.seconds;
        let loss = progress.losses.0 / progress.losses.1.max(1) as f64;
        progress.losses = (0.0, 0);
        let elapsed = s.seconds - progress.last.0;
        let rate = if elapsed > 0.0 { (s.samples - progress.last.1) as f64 / elapsed } else { 0.0 };
        progress.last = (s.seconds, s.samples);
        self.write(&Event::Train(event::Train {
            wall: self.clock.seconds(),
            worker: s.worker,
            step: s.step,
            epoch: s.epoch,
            samples: s.samples,
            seconds: s.seconds,
            loss,
            samples_per_s: rate,
            wait_seconds: s.wait_seconds,
            delay_mean: None,
            values: BTreeMap::new(),
        }))
    }

    /// Writes a complete evaluation, at the first worker that receives it. `seconds` is that worker's
    /// training clock.
    pub fn evaluation(&self, e: Evaluated, seconds: f64, is_final: bool) -> Result<(), SimError> {
        let samples = {
            let mut inner = self.inner.lock();
            if !is_final && !inner.evaluated.insert(e.number) {
                return Ok(());
            }
            inner.samples
        };
        let n = e.count.max(1) as f64;
        self.write(&Event::Eval(event::Eval {
            wall: self.clock.seconds(),
            epoch: e.epoch,
            step: e.step,
            samples,
            seconds,
            loss: e.loss_sum / n,
            accuracy: e.classifies.then_some(e.correct as f64 / n),
            count: e.count,
            metrics: Default::default(),
            is_final,
        }))
    }
}

/// Sums over held-out samples.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Evaluated {
    /// Of the evaluation.
    pub number: u64,
    pub epoch: u64,
    pub step: Option<Step>,
    pub loss_sum: f64,
    pub correct: u64,
    pub count: u64,
    pub classifies: bool,
}
