//! The optimizer on a rank: for jobs whose ranks apply the gradients themselves, all of them the same.

use crate::{Job, worker::WorkerError};
use bytes::Bytes;
use paraft_common::{
    Encoding, Payload, Step, TensorKind, TensorSpec,
    codec::F32_BYTES,
    encoding::sum_of_squares,
    optim::{ClipConfig, Gradient, Hyper, OptimizerConfig, ScheduleConfig, apply_buffer, norm_factor},
};
use paraft_models::ModelError;

/// See the module.
pub(crate) struct Local {
    pub optimizer: OptimizerConfig,
    schedule: ScheduleConfig,
    clip: ClipConfig,
    /// Trained values; what is behind them is not the optimizer's.
    params_len: usize,
    /// The last step that was applied; `None`: it has no state yet.
    pub done: Option<Step>,
    /// In the host's memory: the optimizer's state, each vector as long as the trained part.
    pub slots: Vec<Vec<f32>>,
    /// Likewise: the mean of the ranks' gradients, as the little-endian bytes that the optimizer reads.
    mean: Vec<u8>,
}

impl Local {
    /// Without a state. What is kept on a device takes no memory here.
    pub fn new(job: &Job, tensors: &[TensorSpec], on_device: bool) -> Self {
        let params = tensors.iter().filter(|t| t.kind == TensorKind::Param);
        let params_len = params.map(TensorSpec::len).sum();
        let len: usize = tensors.iter().map(TensorSpec::len).sum();
        Self {
            optimizer: job.optimizer.clone(),
            schedule: job.schedule.clone(),
            clip: job.clip,
            params_len,
            done: None,
            slots: if on_device { Vec::new() } else { job.optimizer.new_slots(params_len) },
            mean: if on_device { Vec::new() } else { vec![0; len * F32_BYTES] },
        }
    }

    /// Rate and number of the update that makes `step`, as the servers would have it.
    pub fn hyper(&self, step: Step) -> Hyper {
        let lr = self.optimizer.lr() * self.schedule.factor(step.0.saturating_sub(1) as f64, 1);
        Hyper { lr: lr as f32, t: step.0, clip_value: self.clip.value }
    }

    /// The bound on the norm of the whole gradient.
    pub fn clip_norm(&self) -> Option<f32> {
        self.clip.norm
    }

    /// The mean gradient of these values, from `start` on.
    pub fn take(&mut self, start: usize, mean: &[f32]) {
        let bytes = self.mean[start * F32_BYTES..].as_chunks_mut::<F32_BYTES>().0;
        bytes.iter_mut().zip(mean).for_each(|(bytes, v)| *bytes = v.to_le_bytes());
    }

    /// Applies the mean gradient.
    pub fn apply(&mut self, step: Step, weights: &mut [f32]) -> Result<(), WorkerError> {
        let mean = Bytes::from(std::mem::take(&mut self.mean));
        let applied = self.apply_mean(step, weights, &mean);
        // Nobody else has them any more: the same memory serves the next step.
        self.mean = mean.into();
        applied
    }

    fn apply_mean(&mut self, step: Step, weights: &mut [f32], mean: &Bytes) -> Result<(), WorkerError> {
        let (params, buffers) =
            (mean.slice(..self.params_len * F32_BYTES), mean.slice(self.params_len * F32_BYTES..));
        let (params, buffers) = (Payload::from(params), Payload::from(buffers));
        let squares = sum_of_squares(&params, Encoding::F32, self.params_len)
            .map_err(|e| ModelError::new(format!("the gradient of {step}: {e}")))?;
        if !squares.is_finite() {
            let why = format!(
                "the gradient of {step} is not finite: training has diverged (lower the rate, or clip)"
            );
            return Err(ModelError::new(why).into());
        }
        let scale = self.clip.norm.map_or(1.0, |max| norm_factor(max, squares));
        let (trained, rest) = weights.split_at_mut(self.params_len);
        let hyper = self.hyper(step);
        let gradient = Gradient { payload: &params, encoding: Encoding::F32, scale };
        self.optimizer.apply(&hyper, trained, &mut self.slots, gradient);
        apply_buffer(rest, Gradient { payload: &buffers, encoding: Encoding::F32, scale: 1.0 });
        self.done = Some(step);
        Ok(())
    }
}
