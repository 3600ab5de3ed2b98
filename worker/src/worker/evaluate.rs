//! Who evaluates which of the held-out samples.

use super::{WorkerError, WorkerOptions};
use crate::{engine::Engine, job::Job, samples::fill};
use paraft_common::WorkerId;
use paraft_data::Dataset;
use paraft_models::{Batch, Evaluation};

/// A worker's share of the held-out samples: every so many.
#[derive(Clone, Copy)]
pub(super) struct Share {
    worker: usize,
    workers: usize,
}

impl Share {
    pub fn of(job: &Job, options: &WorkerOptions) -> Self {
        let worker = options.rank / job.train.group_size;
        Self { worker: worker as usize, workers: job.train.workers as usize }
    }

    /// Whose it is.
    pub fn worker(self) -> WorkerId {
        WorkerId(self.worker as u32)
    }

    /// The part of one of a group's ranks, of those who are there.
    pub fn part(self, (place, size): (usize, usize), len: usize) -> impl Iterator<Item = usize> {
        (self.worker + place * self.workers..len).step_by(self.workers * size)
    }
}

/// Loss and correct predictions over these held-out samples, with the weights that the engine has.
pub(super) fn evaluate(
    engine: &mut Engine,
    test: &Dataset,
    samples: impl Iterator<Item = usize>,
) -> Result<Evaluation, WorkerError> {
    const CHUNK: usize = 256;
    let indices: Vec<u32> = samples.map(|i| i as u32).collect();
    let mut sum = Evaluation::default();
    let mut batch = Batch::default();
    for chunk in indices.chunks(CHUNK) {
        fill(test, chunk, &mut batch)?;
        let e = engine.evaluate(&batch)?;
        sum.loss_sum += e.loss_sum;
        sum.correct += e.correct;
        sum.count += e.count;
    }
    Ok(sum)
}
