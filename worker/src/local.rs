//! The optimizer on a rank, for jobs whose ranks all apply the same gradients themselves.

use crate::{Job, worker::WorkerError};
use bytes::Bytes;
use paraft_common::{
    Step, TensorKind, TensorSpec,
    codec::F32_BYTES,
    optim::{Descent, Hyper},
};
use paraft_models::ModelError;

/// See the module.
pub(crate) struct Local {
    pub descent: Descent,
    /// Number of trained values. The optimizer ignores later values.
    params_len: usize,
    /// The last applied step; `None`: there is no state yet.
    pub done: Option<Step>,
    /// The optimizer's state in host memory, each vector as long as the trained part.
    pub slots: Vec<Vec<f32>>,
    /// The mean of the ranks' gradients in host memory, as the little-endian bytes that the optimizer reads.
    mean: Vec<u8>,
}

impl Local {
    /// Without state. State on a device takes no host memory.
    pub fn new(job: &Job, tensors: &[TensorSpec], on_device: bool) -> Self {
        let params = tensors.iter().filter(|t| t.kind == TensorKind::Param);
        let params_len = params.map(TensorSpec::len).sum();
        let len: usize = tensors.iter().map(TensorSpec::len).sum();
        Self {
            descent: job.descent(),
            params_len,
            done: None,
            slots: if on_device { Vec::new() } else { job.optimizer.new_slots(params_len) },
            mean: if on_device { Vec::new() } else { vec![0; len * F32_BYTES] },
        }
    }

    /// Learning rate and number of the update that makes `step`, as the servers would compute them.
    pub fn hyper(&self, step: Step) -> Hyper {
        self.descent.hyper(step.0.saturating_sub(1), step.0)
    }

    /// The norm bound of the whole gradient.
    pub fn clip_norm(&self) -> Option<f32> {
        self.descent.clip.norm
    }

    /// Takes the mean gradient of these values, from `start` on.
    pub fn take(&mut self, start: usize, mean: &[f32]) {
        let bytes = self.mean[start * F32_BYTES..].as_chunks_mut::<F32_BYTES>().0;
        bytes.iter_mut().zip(mean).for_each(|(bytes, v)| *bytes = v.to_le_bytes());
    }

    /// Applies the mean gradient.
    pub fn apply(&mut self, step: Step, weights: &mut [f32]) -> Result<(), WorkerError> {
        let mean = Bytes::from(std::mem::take(&mut self.mean));
        let applied = self.apply_mean(step, weights, &mean);
        // The buffer is unshared now: the same memory serves the next step.
        self.mean = mean.into();
        applied
    }

    fn apply_mean(&mut self, step: Step, weights: &mut [f32], mean: &Bytes) -> Result<(), WorkerError> {
        let hyper = self.hyper(step);
        self.descent
            .apply(&hyper, self.params_len, weights, &mut self.slots, mean)
            .map_err(|e| ModelError::new(format!("{step}: {e}")))?;
        self.done = Some(step);
        Ok(())
    }
}
