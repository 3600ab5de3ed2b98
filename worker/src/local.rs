//! The optimizer on a rank: for jobs whose ranks apply the gradients themselves, all of them the same.

use crate::{Job, worker::WorkerError};
use paraft_common::{
    Encoding, Payload, Step, TensorKind, TensorSpec,
    codec::put_f32_le,
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
    /// Likewise: the mean of the ranks' gradients.
    pub mean: Vec<f32>,
}

impl Local {
    /// Without a state. What is kept on a device takes no memory here.
    pub fn new(job: &Job, tensors: &[TensorSpec], on_device: bool) -> Self {
        let params = tensors.iter().filter(|t| t.kind == TensorKind::Param);
        let params_len = params.map(TensorSpec::len).sum();
        let len = tensors.iter().map(TensorSpec::len).sum();
        Self {
            optimizer: job.optimizer.clone(),
            schedule: job.schedule.clone(),
            clip: job.clip,
            params_len,
            done: None,
            slots: if on_device { Vec::new() } else { job.optimizer.new_slots(params_len) },
            mean: if on_device { Vec::new() } else { vec![0.0; len] },
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

    /// Applies the mean gradient.
    pub fn apply(&mut self, step: Step, weights: &mut [f32]) -> Result<(), WorkerError> {
        let (params, buffers) = self.mean.split_at(self.params_len);
        let payload = |values: &[f32]| {
            let mut le = Vec::new();
            put_f32_le(values, &mut le);
            Payload::from(le)
        };
        let params = payload(params);
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
        apply_buffer(rest, Gradient { payload: &payload(buffers), encoding: Encoding::F32, scale: 1.0 });
        self.done = Some(step);
        Ok(())
    }
}
