//! Evaluates a worker's share of the held-out samples, and shows the progress.

use super::WorkerError;
use crate::{
    engine::Engine,
    job::Job,
    recorder::{Recorder, wall},
    samples::fill,
};
use paraft_client::Interrupt;
use paraft_common::{Share, Step, WorkerId};
use paraft_data::Dataset;
use paraft_models::{Batch, Evaluation};
use paraft_record::{Event, event};
use std::time::{Duration, Instant};

/// A worker's share when all of the job's workers take part and no server assigns shares.
pub(super) fn own_share(job: &Job, rank: u32) -> Share {
    Share { place: rank / job.ranks_of_worker(), of: job.train.workers }
}

/// The interval at which an evaluation reports its progress.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(1);
/// The same for a worker's own log.
const LOG_INTERVAL: Duration = Duration::from_secs(10);

/// Observes a worker's evaluation.
pub(super) struct Watch<'a> {
    /// Ends the evaluation once set.
    pub interrupt: &'a dyn Interrupt,
    /// Receives the progress. In a group only the leader reports it.
    pub recorder: Option<&'a mut Recorder>,
    pub worker: WorkerId,
    /// The epochs that are over; and the step, if there are several evaluations in an epoch.
    pub at: (u64, Option<Step>),
}

impl Watch<'_> {
    fn says(&mut self, done: usize, of: usize, logs: bool) -> Result<(), WorkerError> {
        let (epoch, step) = self.at;
        if logs {
            tracing::info!(epoch, step = step.map(|s| s.0), done, of, "evaluating");
        }
        let Some(recorder) = &mut self.recorder else { return Ok(()) };
        let (worker, done, of) = (self.worker, done as u64, of as u64);
        let event = event::Evaluating { wall: wall(), worker, epoch, step, done, of };
        Ok(recorder.write(&Event::Evaluating(event))?)
    }
}

/// Loss and correct predictions over these held-out samples, with the engine's weights.
pub(super) fn evaluate(
    engine: &mut Engine,
    test: &Dataset,
    share: Share,
    watch: &mut Watch<'_>,
) -> Result<Evaluation, WorkerError> {
    const CHUNK: usize = 256;
    let indices: Vec<u32> = share.samples(test.len()).map(|i| i as u32).collect();
    let mut sum = Evaluation::default();
    let mut batch = Batch::default();
    let (mut said, mut logged) = (Instant::now(), Instant::now());
    for (done, chunk) in (0..).step_by(CHUNK).zip(indices.chunks(CHUNK)) {
        if watch.interrupt.is_set() {
            return Err(WorkerError::Interrupted);
        }
        if said.elapsed() >= PROGRESS_INTERVAL {
            let logs = logged.elapsed() >= LOG_INTERVAL;
            watch.says(done, indices.len(), logs)?;
            said = Instant::now();
            if logs {
                logged = said;
            }
        }
        fill(test, chunk, &mut batch)?;
        sum += engine.evaluate(&batch)?;
    }
    Ok(sum)
}
