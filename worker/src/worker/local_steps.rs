//! A step of a worker with weights of its own ([`paraft_common::local`]): some minibatches, then one push.
//!
//! ```text
//!   ┌─ minibatch ─▶ gradient at its weights ─▶ they move ─┐ ─▶ [pull] ─▶ push ─▶ pull, or wait for the acks
//!   └───────────────────── of a step ◀────────────────────┘
//! ```
//!
//! What was pulled stays in the engine, as for any worker; evaluations and checkpoints are of that. What its own weights hold
//! and no push was made of is lost with the worker: at most one step.

use super::{Training, WorkerError, finite};
use crate::{engine::Stepped, exchange::PushParts};
use paraft_client::{Client, Pulled};
use paraft_common::{Mode, Step, WorkerId, local::Fragments};
use paraft_data::Prefetcher;
use paraft_models::{Batch, ModelError};
use std::{
    sync::atomic::Ordering::Relaxed,
    thread,
    time::{Duration, Instant},
};

/// A worker that has to wait for the warm start looks so often whether it is over.
const LOOK: Duration = Duration::from_millis(20);

/// What became of a step.
pub(super) enum Made {
    /// It was pushed.
    Pushed(Stepped),
    /// It was given up: a pull says that the worker is to end, or goes on from elsewhere.
    Elsewhere(Pulled),
}

impl Training<'_> {
    /// The minibatches of `step`, and its push. `due`: a checkpoint is cut behind it. `None`: no data is left.
    pub(super) fn local_step(
        &mut self,
        step: Step,
        batches: &mut Prefetcher<Batch>,
        due: bool,
    ) -> Result<Option<Made>, WorkerError> {
        let fragments = self.local.as_ref().map(|l| l.rule().fragments()).filter(Fragments::stream);
        if let Some(fragments) = fragments {
            return self.streamed_step(step, fragments, batches, due);
        }
        let (mut loss_sum, mut samples) = (0.0, 0);
        let before = self.plan.minibatches_before(step);
        for i in 0..self.plan.minibatches_of(step) {
            let Some((sum, n)) = self.local_minibatch(step, before + i, batches)? else { return Ok(None) };
            loss_sum += sum;
            samples += n;
        }
        if self.local.as_ref().is_some_and(|r| r.rule().pulls_first()) {
            let done = Step(step.0 - 1);
            let pulled = self.pull(done, Client::pull)?;
            if pulled.done != done || pulled.stop {
                return Ok(Some(Made::Elsewhere(pulled)));
            }
        }
        if !due {
            self.client.ask_ahead(step);
        }
        let Some(local) = &mut self.local else { return Ok(None) };
        let values = local.push(self.engine.weights());
        let mut push = PushParts::new(&mut self.client, step, samples);
        for (i, bucket) in self.layout.buckets().iter().enumerate().rev() {
            push.values(i, &values[bucket.range()]);
        }
        let loss = (loss_sum / samples.max(1) as f64) as f32;
        Ok(Some(Made::Pushed(Stepped { loss, samples: samples as u64 })))
    }

    /// One minibatch at the worker's own weights, which move; `clock`: how many it had trained before. Gives the loss times the
    /// samples, and the samples; `None`: no data is left.
    pub(super) fn local_minibatch(
        &mut self,
        step: Step,
        clock: u64,
        batches: &mut Prefetcher<Batch>,
    ) -> Result<Option<(f64, usize)>, WorkerError> {
        if self.options.interrupt.load(Relaxed) {
            return Err(WorkerError::Interrupted);
        }
        let (Some(batch), Some(local)) = (batches.next(), &mut self.local) else { return Ok(None) };
        let batch = batch?;
        let (loss, gradient) = self.slow.step(|| self.engine.gradient_at(local.weights(), &batch))?;
        finite(Stepped { loss, samples: 0 }, step, self.worker)?;
        local
            .step(clock, gradient)
            .map_err(|e| ModelError::new(format!("{step} of {}: {e}", self.worker)))?;
        let made = (f64::from(loss) * batch.n as f64, batch.n);
        batches.recycle(batch);
        Ok(Some(made))
    }

    /// Whether everything is pulled behind `step`: it is an epoch's last, or the job's.
    pub(super) fn ends_epoch(&self, step: Step) -> bool {
        step.0.is_multiple_of(self.plan.per_epoch) || step.0 >= self.plan.total
    }

    /// Behind the push of `step`, where no checkpoint is cut: pulls if it is time, or sees that the next push may go.
    pub(super) fn pull_behind(&mut self, step: Step) -> Result<Pulled, WorkerError> {
        let Some(rule) = self.local.as_ref().map(|r| r.rule()) else {
            return self.pull(step, Client::pull);
        };
        let within = (step.0 - 1) % self.plan.per_epoch + 1;
        let ends = self.ends_epoch(step);
        if !ends && (rule.pulls_first() || rule.fragments().stream()) {
            // The next pull is of this step too, and waits for its push; or the last fragment's is under way, or over.
            return Ok(Pulled { done: step, ..Pulled::default() });
        }
        // In the other modes pulls are what workers wait for.
        let free = self.client.mode().1 == Mode::Asp;
        if ends || !free || within.is_multiple_of(rule.steps_a_pull()) {
            return self.pull(step, Client::pull);
        }
        match self.client.settle()? {
            None => Ok(Pulled { done: step, ..Pulled::default() }),
            Some(done) => Ok(Pulled { rejoined: true, ..self.pull(done, Client::pull)? }),
        }
    }

    /// Waits for the warm start of the lowest worker; `pulled` is the first pull. Where nothing comes for as long as the
    /// patience is, this worker begins all the same: the one that warms up may be gone.
    pub(super) fn warm_start(&mut self, mut pulled: Pulled) -> Result<Pulled, WorkerError> {
        let rule = self.local.as_ref().map(|r| (r.rule().warm_start(), r.rule().minibatches()));
        let Some((minibatches, a_push)) = rule.filter(|_| self.worker != WorkerId(0)) else {
            return Ok(pulled);
        };
        let updates = minibatches.div_ceil(a_push).min(self.plan.total);
        let patience = Duration::from_millis(self.job.cluster.patience_ms);
        let (mut seen, mut since) = (self.client.version(), Instant::now());
        while self.client.version().0 < updates && !pulled.stop && self.client.mode().1 == Mode::Asp {
            if self.options.interrupt.load(Relaxed) {
                return Err(WorkerError::Interrupted);
            }
            if self.client.version() != seen {
                (seen, since) = (self.client.version(), Instant::now());
            } else if since.elapsed() > patience {
                tracing::warn!(
                    updates = seen.0,
                    of = updates,
                    "the warm start has come to a halt; going on without it"
                );
                break;
            }
            thread::sleep(LOOK);
            let rejoined = pulled.rejoined;
            pulled = self.pull(pulled.done, Client::pull)?;
            pulled.rejoined |= rejoined;
        }
        Ok(pulled)
    }
}
