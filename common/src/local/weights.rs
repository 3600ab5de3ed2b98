//! The worker's side of local steps.

use super::LocalConfig;
use crate::{
    codec::F32_BYTES,
    optim::{Descent, NotFinite},
};
use bytes::Bytes;
use std::ops::Range;

/// The local weights of a worker, with the state of their optimizer.
///
/// It needs the memory of the model once for the weights, once for the push, once for a gradient, once
/// for each state vector of the optimizer, and once more with several fragments.
#[derive(Debug)]
pub struct LocalWeights {
    descent: Descent,
    /// Number of trained values; running statistics follow them.
    params_len: usize,
    weights: Vec<f32>,
    slots: Vec<Vec<f32>>,
    /// Updates of the local weights since the slots were reset.
    t: u64,
    push: Vec<f32>,
    gradient: Vec<u8>,
    /// With several fragments, the center at each fragment's last pull; otherwise empty, and the center
    /// is the last pull.
    center: Vec<f32>,
}

impl LocalWeights {
    /// For a job with this optimizer, with `params_len` trained values among `len`; `None` if its
    /// workers have no local weights. Call [`Self::begin`] first.
    pub fn new(config: &LocalConfig, job: &Descent, params_len: usize, len: usize) -> Option<Self> {
        config.is_local().then(|| Self {
            slots: job.optimizer.new_slots(params_len),
            descent: job.clone(),
            params_len,
            weights: vec![0.0; len],
            t: 0,
            push: vec![0.0; len],
            gradient: Vec::new(),
            center: if config.fragments().stream() { vec![0.0; len] } else { Vec::new() },
        })
    }

    /// Resets to the center, with fresh state: at the start, and after the worker resumes elsewhere.
    pub fn begin(&mut self, center: &[f32]) {
        self.weights.copy_from_slice(center);
        if !self.center.is_empty() {
            self.center.copy_from_slice(center);
        }
        self.slots = self.descent.optimizer.new_slots(self.params_len);
        self.t = 0;
    }

    /// Handles a pull of the center.
    pub fn pulled(&mut self, center: &[f32]) {
        if self.center.is_empty() {
            self.weights.copy_from_slice(center);
        }
    }

    /// Handles a pull of one fragment, which followed its push.
    pub fn take_over(&mut self, center: &[f32], range: Range<usize>) {
        self.weights[range.clone()].copy_from_slice(&center[range.clone()]);
        self.center[range.clone()].copy_from_slice(&center[range]);
    }

    /// What is pushed of a fragment, as long as its range.
    pub fn push_fragment(&mut self, range: Range<usize>) -> &[f32] {
        let part = &mut self.push[range.clone()];
        difference(&self.center[range.clone()], &self.weights[range], part);
        part
    }

    /// Where the next gradient is computed.
    pub fn weights(&self) -> &[f32] {
        &self.weights
    }

    /// Moves the weights by the gradient of a minibatch; `clock`: how many minibatches of the job the worker had trained
    /// before it, for the schedule.
    ///
    /// # Panics
    /// When the gradient is not as long as the weights.
    pub fn step(&mut self, clock: u64, gradient: &[f32]) -> Result<(), NotFinite> {
        assert_eq!(gradient.len(), self.weights.len(), "a gradient of another model");
        self.gradient.resize(gradient.len() * F32_BYTES, 0); // Allocated at the first step: a loop that changes the weights itself never needs it.
        let bytes = self.gradient.as_chunks_mut::<F32_BYTES>().0;
        bytes.iter_mut().zip(gradient).for_each(|(bytes, v)| *bytes = v.to_le_bytes());
        let bytes = Bytes::from(std::mem::take(&mut self.gradient));
        let hyper = self.descent.hyper(clock, self.t + 1);
        let applied = self.descent.apply(&hyper, self.params_len, &mut self.weights, &mut self.slots, &bytes);
        // No other owner is left, so the memory is reused for the next gradient.
        self.gradient = bytes.into();
        applied?;
        self.t += 1;
        Ok(())
    }

    /// The caller has moved this range of the weights.
    ///
    /// # Panics
    /// When there are not as many.
    pub fn moved(&mut self, range: Range<usize>, weights: &[f32]) {
        self.weights[range].copy_from_slice(weights);
    }

    /// What is pushed for the minibatches since the last push, as long as the weights; `center` is what was pulled last.
    pub fn push(&mut self, center: &[f32]) -> &[f32] {
        difference(center, &self.weights, &mut self.push);
        &self.push
    }
}

/// How far the weights have gone from the center.
fn difference(center: &[f32], weights: &[f32], push: &mut [f32]) {
    for ((d, c), x) in push.iter_mut().zip(center).zip(weights) {
        *d = *c - *x;
    }
}
