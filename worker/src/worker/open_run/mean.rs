//! The step of a loop that runs the optimizer itself, on the mean gradient.

use super::{OpenRun, StepOutcome, misuse, next_action::NextAction};
use crate::worker::WorkerError;

impl OpenRun {
    /// If the tensors have results ([`TensorSpec::result`](paraft_common::TensorSpec::result)), [`Self::step`] returns when the
    /// mean gradient is pulled, in the place of the gradients. `Some(true)`: run the optimizer on it. `Some(false)`: the step
    /// is skipped by all workers. Then call [`Self::applied`]. `None`: there is nothing to apply, because this worker was
    /// taken out and continues with other weights.
    pub fn applies(&self) -> Option<bool> {
        match self.asked {
            NextAction::Apply { whole } => Some(whole),
            _ => None,
        }
    }

    /// Ends a step whose mean gradient is applied: the results are in the weights' memory. Writes this worker's share
    /// of them, and waits until the servers have all.
    ///
    /// # Errors
    /// See [`Self::step`]. There is no mean to apply. A result with a NaN or an infinity ends the run.
    pub fn applied(&mut self) -> Result<StepOutcome, WorkerError> {
        if self.applies().is_none() {
            return Err(misuse("there is no mean gradient to apply: call step"));
        }
        self.driver.applied();
        self.waits = true;
        self.continue_wait()
    }
}
