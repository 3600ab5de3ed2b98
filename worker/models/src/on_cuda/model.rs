//! A net on a GPU as an ordinary [`Model`].

use super::OnCuda;
use crate::{Batch, Evaluation, Model, ModelError, Resident, replay::Cuts};
use paraft_common::layout::TensorSpec;
use paraft_compute::{cuda::Precision, device::Losses};

/// With parameters and gradients in host memory: each is copied in one piece. In a group each rank uses its given
/// parameters, and receives the mean of the gradients.
impl Model for OnCuda {
    fn tensors(&self) -> Vec<TensorSpec> {
        self.net.tensors()
    }

    fn init(&self, seed: u64, params: &mut [f32]) {
        self.net.init(seed, params);
    }

    fn step(
        &mut self,
        params: &[f32],
        grads: &mut [f32],
        batch: &Batch,
        ready: &mut dyn FnMut(usize, &[f32]),
    ) -> Result<f32, ModelError> {
        self.net.takes().check_step(params, grads, batch)?;
        self.pending = None;
        self.take(params)?;
        if self.device.precision() == Precision::F16 {
            self.scaled_step(batch)?;
        } else {
            self.begin(batch, &Cuts::default(), &mut |_, _, _| Ok(()))?;
        }
        let loss = self.device.loss()?;
        if let Some(group) = self.device.group() {
            let stream = self.device.stream().clone();
            self.outbox.mark(&stream)?;
            self.outbox.reduce(&self.gradient, 0..grads.len(), group)?;
            self.outbox.begin(&stream)?;
        }
        let mean = self.device.read_gradient(&self.gradient)?;
        self.device.check_group()?;
        grads.copy_from_slice(&mean);
        ready(0, grads);
        Ok(loss)
    }

    fn evaluate(&mut self, params: &[f32], batch: &Batch) -> Result<Evaluation, ModelError> {
        self.net.takes().check(params, batch)?;
        self.take(params)?;
        self.evaluate_resident(batch)
    }

    fn resident(&mut self) -> Option<&mut dyn Resident> {
        Some(self)
    }
}
