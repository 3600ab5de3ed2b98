//! What a user's loop does next.

use super::OpenRun;
use crate::worker::{ErrorKind, WorkerError, driver::DriverAction};
use paraft_common::Step;
use paraft_data::chunk_of;
use std::time::Instant;

/// The loop's next action.
pub(super) enum NextAction {
    /// Compute a gradient at the pulled weights; `ask_ahead`: the following weights may be asked for.
    Gradient { step: Step, ask_ahead: bool },
    /// Run the optimizer on the pulled mean gradient, if it is `whole`.
    Apply { whole: bool },
    /// Train a minibatch at the worker's own weights.
    Local,
    /// Prepare the minibatches of a chunk.
    Chunk,
    /// Nothing: the job is over for this worker, or a wait was interrupted.
    Over,
    /// Nothing: the run has failed.
    Failed,
}

impl OpenRun {
    /// Determines the loop's next action.
    pub(super) fn next(&mut self) -> Result<(), WorkerError> {
        self.try_next().inspect_err(|e| {
            if e.kind() != ErrorKind::Interrupted && !e.is_not_finite() {
                self.asked = NextAction::Failed;
            }
        })
    }

    fn try_next(&mut self) -> Result<(), WorkerError> {
        let before = self.driver.done();
        let mut begun = false;
        loop {
            match self.driver.next(&mut *self.into)? {
                DriverAction::Begin(done) => {
                    self.moved |= begun || before != Step(0) && done != before;
                    begun = true;
                }
                DriverAction::Gradient { step, ask_ahead, .. } => {
                    self.pushes.expect(&self.driver.layout);
                    self.asked = NextAction::Gradient { step, ask_ahead };
                    self.hold();
                    return Ok(());
                }
                DriverAction::Local { .. } => {
                    self.asked = NextAction::Local;
                    self.hold();
                    return Ok(());
                }
                DriverAction::Apply { whole } => {
                    self.asked = NextAction::Apply { whole };
                    return Ok(());
                }
                DriverAction::Evaluate { .. } => self.driver.not_evaluated(),
                DriverAction::Chunk { epoch, chunk } => {
                    if self.order.0 != epoch {
                        self.order = (epoch, self.driver.order(epoch));
                    }
                    let t = &self.job.train;
                    self.chunk = chunk_of(&self.order.1, chunk, t.chunk(), t.batch).flatten().collect();
                    self.asked = NextAction::Chunk;
                    return Ok(());
                }
                DriverAction::DropChunk => {
                    self.chunk.clear();
                    self.moved = true;
                }
                DriverAction::End(end) => {
                    self.chunk.clear();
                    self.driver.save(end, &mut *self.into)?;
                    self.driver.end(end, None)?;
                    self.saved = Some(end);
                    self.asked = NextAction::Over;
                    return Ok(());
                }
            }
        }
    }

    /// The loop computes next: at once, or after a pause if this worker is slowed. An interrupt ends the pause; the
    /// next step reports it.
    fn hold(&mut self) {
        let interrupt = &self.driver.interrupt;
        self.slow.hold(|| interrupt.is_set());
        self.computes = Some(Instant::now());
    }
}
