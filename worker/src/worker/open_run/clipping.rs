//! Steps that the loop clips by the norm of their mean gradient.

use super::{OpenRun, misuse};
use crate::worker::WorkerError;
use paraft_common::Step;

/// A loop's clipping by norm.
#[derive(Default)]
pub(super) struct Clipping {
    /// Whether the loop clips its steps.
    on: bool,
    /// The squared norm of this step, if the loop has asked for it; `Some(None)`: it is unknown.
    norm: Option<Option<f64>>,
    /// The largest norm that this step may have.
    bound: Option<f64>,
    /// The step whose rounds wait for the norm.
    waits: Option<Step>,
    /// Gradients of this step were not finite; the step's wait reports it.
    refused: Option<WorkerError>,
}

impl Clipping {
    /// The step's wait begins. Returns the refusal of its gradients, if there was one.
    pub fn begin(&mut self, step: Step) -> Option<WorkerError> {
        self.waits = self.on.then_some(step);
        self.refused.take()
    }
}

impl OpenRun {
    /// Whether the loop clips the next steps by the norm of their mean gradient ([`Self::norm`]), in modes with rounds. Set
    /// it before a step's first gradient.
    ///
    /// # Errors
    /// A gradient of the step was handed over.
    pub fn clip_steps(&mut self, clips: bool) -> Result<(), WorkerError> {
        if self.pushes.begun() && self.clipping.on != clips {
            return Err(misuse("gradients of this step are on their way: clip from the next step on"));
        }
        self.clipping.on = clips;
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
        if !self.clipping.on {
            return Err(misuse("the loop does not clip its steps: call clip_steps"));
        }
        self.clipping.bound = bound;
        if self.clipping.norm.is_none() {
            self.push_rows(step); // the norm is of all gradients
            match self.driver.client.norm(step).map_err(WorkerError::from) {
                Err(e) if e.is_not_finite() => {
                    self.driver.client.skip(step);
                    self.clipping.refused.get_or_insert(e);
                    return Ok(f64::NAN);
                }
                known => self.clipping.norm = Some(known?),
            }
        }
        Ok(self.clipping.norm.flatten().map_or(f64::NAN, f64::sqrt))
    }

    /// Ends the wait of a clipped step's rounds.
    pub(super) fn clip(&mut self) -> Result<(), WorkerError> {
        let Some(step) = self.clipping.waits else { return Ok(()) };
        let known = match self.clipping.norm.take() {
            Some(known) => known,
            None => self.driver.client.norm(step)?,
        };
        if let Some(sum_of_squares) = known {
            self.driver.client.clip_by_norm(step, sum_of_squares, self.clipping.bound);
        }
        (self.clipping.waits, self.clipping.bound) = (None, None);
        Ok(())
    }
}
