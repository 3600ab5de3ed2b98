//! The training loop of the leased sampler.
//!
//! ```text
//!   join ─▶ pull ─▶ ┌─ take a chunk ─▶ its minibatches: step, push, pull ─▶ all acknowledged: done ─┐
//!                   │      │ none left: rest until there is one                                      │
//!                   └──────┴─[epoch over: pull, checkpoint, evaluate a share, report]◀──────────────┘
//!   finish ─▶ final pull ─▶ lowest finisher evaluates everything
//! ```
//!
//! A chunk counts as done when its last push is acknowledged by every shard. A worker that dies before, or that loses its
//! session, leaves the whole chunk to another.

use super::{Training, WorkerError};
use crate::{recorder::wall, samples::fill};
use paraft_client::{Client, Next, Pulled};
use paraft_common::{Step, config::ChunkPlan};
use paraft_data::{Prefetcher, chunk_of};
use paraft_models::{Batch, Evaluation};
use paraft_record::{Event, event};
use std::{
    sync::{atomic::Ordering::Relaxed, mpsc},
    thread,
    time::Duration,
};

/// The last checkpoint waits so often for what is in its way on a server: an image that is being fetched, say.
const LAST_TRIES: u32 = 100;
const TRY_AGAIN: Duration = Duration::from_millis(50);

/// Minibatches by their indices, filled on a thread of their own.
struct Feed {
    // Dropped first: ends a thread that waits for indices.
    indices: mpsc::Sender<Vec<u32>>,
    batches: Prefetcher<Batch>,
}

/// Where the worker stands.
struct At {
    done: Step,
    /// Epochs that are over, as far as it knows.
    epochs: u64,
    /// The chunk that it has trained and not yet given account of.
    trained: Option<u64>,
    stop: bool,
}

impl At {
    /// Takes in where a pull says that the worker is; false where it has lost its session, and its chunk.
    fn pulled(&mut self, pulled: &Pulled) -> bool {
        self.done = pulled.done;
        self.stop |= pulled.stop;
        if pulled.rejoined {
            self.trained = None;
            tracing::warn!(done = %self.done, "this worker had been taken out; others train its chunk");
        }
        !pulled.rejoined
    }
}

impl Training<'_> {
    pub(super) fn run_leased(
        &mut self,
        start: Step,
        chunks: ChunkPlan,
    ) -> Result<Option<Evaluation>, WorkerError> {
        let mut at = At { done: start, epochs: self.begun, trained: None, stop: false };
        let pulled = self.pull(start, Client::pull)?;
        at.pulled(&pulled);
        self.waited_at_start = self.client.counters().waited;
        self.clock.start();
        let mut order = (u64::MAX, Vec::new());
        let mut feed = self.feed()?;
        while !at.stop {
            if self.options.interrupt.load(Relaxed) {
                return Err(WorkerError::Interrupted);
            }
            match self.client.take_chunk(at.epochs, at.trained.take())? {
                Next::Train { epoch, chunk, resumed } => {
                    at.epochs = epoch;
                    if let Some(step) = resumed {
                        let pulled = self.pull(step, Client::pull)?;
                        if !at.pulled(&pulled) || at.stop {
                            continue;
                        }
                    }
                    if order.0 != epoch {
                        order = (epoch, self.plan.sampler.order(epoch));
                    }
                    if !self.train_chunk(&mut at, &mut feed, &order.1, chunk)? {
                        feed = self.feed()?; // what is left in it is another's now
                    }
                }
                Next::Over { epochs, write, step } => {
                    self.between_epochs(&mut at, chunks, epochs, write, step)?;
                }
                Next::Rejoined(step) => {
                    let pulled = self.pull(step, Client::pull)?;
                    at.pulled(&Pulled { rejoined: true, ..pulled });
                }
                Next::Ended => break,
            }
        }
        if self.steps == 0 && !at.stop {
            tracing::warn!("nothing was left to train; to train the job again, use fresh servers");
        }
        drop(feed);
        self.end(at.done)
    }

    fn feed(&self) -> Result<Feed, WorkerError> {
        let (indices, next) = mpsc::channel::<Vec<u32>>();
        let data = self.train.clone();
        let batches = Prefetcher::spawn(move |b: &mut Batch| {
            let Ok(indices) = next.recv() else { return Ok(false) };
            fill(&data, &indices, b);
            Ok(true)
        })?;
        Ok(Feed { indices, batches })
    }

    /// Trains a chunk; false where the rest of it is not for this worker any more.
    fn train_chunk(
        &mut self,
        at: &mut At,
        feed: &mut Feed,
        order: &[u32],
        chunk: u64,
    ) -> Result<bool, WorkerError> {
        let batches: Vec<_> = chunk_of(order, chunk, self.job.train.chunk(), self.job.train.batch).collect();
        let (count, before) = (batches.len(), self.samples);
        for indices in batches {
            let _ = feed.indices.send(indices); // a thread that has ended says why in what it gives
        }
        for _ in 0..count {
            if self.options.interrupt.load(Relaxed) {
                return Err(WorkerError::Interrupted);
            }
            let Some(batch) = feed.batches.next() else { return Ok(false) };
            let batch = batch?;
            let step = at.done.next();
            self.client.ask_ahead(step);
            let stepped = self.step(step, &batch)?;
            self.samples += stepped.samples;
            self.steps += 1;
            self.client.note_loss(stepped.loss);
            feed.batches.recycle(batch);
            let pulled = self.pull(step, Client::pull)?;
            let goes_on = at.pulled(&pulled);
            self.note_step(at.done, at.epochs + 1, stepped.loss, false)?;
            self.note_evaluations()?;
            self.note_checkpoints(false)?;
            if !goes_on || at.stop {
                return Ok(false);
            }
        }
        at.trained = Some(chunk);
        let (epoch, samples) = (at.epochs + 1, self.samples - before);
        let done = event::Chunk { wall: wall(), worker: self.worker, epoch, chunk, samples };
        self.recorder.write(&Event::Chunk(done))?;
        Ok(true)
    }

    /// An epoch is over and nobody trains: what is evaluated, and what goes into a checkpoint, is the same for all.
    fn between_epochs(
        &mut self,
        at: &mut At,
        chunks: ChunkPlan,
        epochs: u64,
        write: bool,
        step: Step,
    ) -> Result<(), WorkerError> {
        // A job that goes on from a checkpoint comes by here first, and has the checkpoint already.
        let due =
            write && epochs > self.begun && self.checkpoints.as_ref().is_some_and(|c| c.due_after(epochs));
        let pulled = if due {
            self.pull_for_checkpoint(step, epochs, epochs == chunks.epochs)?
        } else {
            self.pull(step, Client::pull)?
        };
        if !at.pulled(&pulled) {
            return Ok(()); // it asks again, and comes by here again
        }
        at.epochs = epochs;
        self.ends.insert(epochs, at.done);
        if self.job.eval.every_epoch {
            self.evaluate_share(epochs)?;
        }
        if let Some(c) = self.checkpoints.as_mut().filter(|_| due) {
            c.pulled(at.done, &pulled);
        }
        self.note_evaluations()?;
        self.note_checkpoints(false)
    }

    fn pull_for_checkpoint(&mut self, step: Step, epochs: u64, last: bool) -> Result<Pulled, WorkerError> {
        if let Some(c) = &self.checkpoints {
            if last {
                c.wait(); // the last is always made: nothing of this worker's own may be in its way
            }
            c.epochs(step, epochs);
        }
        let mut tries = if last { LAST_TRIES } else { 1 };
        loop {
            let pulled = self.pull(step, Client::pull_for_checkpoint)?;
            tries -= 1;
            if pulled.section || pulled.rejoined || tries == 0 {
                return Ok(pulled);
            }
            thread::sleep(TRY_AGAIN);
        }
    }
}
