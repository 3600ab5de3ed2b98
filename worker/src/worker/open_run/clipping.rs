//! Steps that the loop clips by the norm of their mean gradient.

use super::{OpenRun, misuse};
use crate::worker::WorkerError;

impl OpenRun {
    /// Whether the loop clips the next steps by the norm of their mean gradient ([`Self::norm`]), in modes with rounds. Set
    /// it before a step's first gradient.
    ///
    /// # Errors
    /// A gradient of the step was handed over.
    pub fn clip_steps(&mut self, clips: bool) -> Result<(), WorkerError> {
        if self.pushes.begun() && self.clips != clips {
            return Err(misuse("gradients of this step are on their way: clip from the next step on"));
        }
        self.clips = clips;
        self.driver.client.clip_steps(clips);
        Ok(())
    }

    /// The norm of the step's mean gradient, over all workers; all its gradients are handed over. NaN: it is unknown, because
    /// a gradient is not finite, or this worker was taken out. [`Self::step`] clips it to `bound`; `None`: it does not.
    ///
    /// # Errors
    /// A gradient is missing, the loop does not clip, or the servers cannot be reached.
    pub fn norm(&mut self, bound: Option<f64>) -> Result<f64, WorkerError> {
        let step = self.pushing()?;
        self.pushes.are_complete(&self.driver.layout)?;
        if !self.clips {
            return Err(misuse("the loop does not clip its steps: call clip_steps"));
        }
        self.bound = bound;
        if self.norm.is_none() {
            match self.driver.client.norm(step).map_err(WorkerError::from) {
                Err(e) if e.is_not_finite() => {
                    self.driver.client.skip(step);
                    self.refused = self.refused.take().or(Some(e));
                    return Ok(f64::NAN);
                }
                known => self.norm = Some(known?),
            }
        }
        Ok(self.norm.flatten().map_or(f64::NAN, f64::sqrt))
    }

    /// Ends the wait of a clipped step's rounds.
    pub(super) fn clip(&mut self) -> Result<(), WorkerError> {
        let Some(step) = self.to_clip else { return Ok(()) };
        let known = match self.norm.take() {
            Some(known) => known,
            None => self.driver.client.norm(step)?,
        };
        if let Some(sum_of_squares) = known {
            self.driver.client.clip_by_norm(step, sum_of_squares, self.bound);
        }
        (self.to_clip, self.bound) = (None, None);
        Ok(())
    }
}
