//! Devices whose parameters and gradients the cases set and read.

use crate::{
    cpu::CpuDevice,
    cuda::{CudaDevice, Gradient, Inbox},
    device::Device,
    error::Result,
};

/// A device whose parameters and gradients can be set and read.
pub trait Bench: Device {
    /// Parameters on the device.
    type Held;
    /// A gradient there.
    type Gradient;
    /// Copies parameters to the device.
    fn hold(&mut self, params: &[f32]) -> Result<Self::Held>;
    /// The held parameters.
    fn params(held: &Self::Held) -> &Self::Params;
    /// A gradient of NaN.
    fn poisoned(&mut self, len: usize) -> Result<Self::Gradient>;
    /// The gradient, for operators.
    fn grads(gradient: &mut Self::Gradient) -> &mut Self::Grads;
    /// Its values.
    fn read_grads(&mut self, gradient: &Self::Gradient) -> Result<Vec<f32>>;
}

impl Bench for CpuDevice {
    type Held = Vec<f32>;
    type Gradient = Vec<f32>;

    fn hold(&mut self, params: &[f32]) -> Result<Vec<f32>> {
        Ok(params.to_vec())
    }

    fn params(held: &Vec<f32>) -> &[f32] {
        held
    }

    fn poisoned(&mut self, len: usize) -> Result<Vec<f32>> {
        Ok(vec![f32::NAN; len])
    }

    fn grads(gradient: &mut Vec<f32>) -> &mut [f32] {
        gradient
    }

    fn read_grads(&mut self, gradient: &Vec<f32>) -> Result<Vec<f32>> {
        Ok(gradient.clone())
    }
}

impl Bench for CudaDevice {
    type Held = Inbox;
    type Gradient = Gradient;

    fn hold(&mut self, params: &[f32]) -> Result<Inbox> {
        CudaDevice::hold(self, params)
    }

    fn params(held: &Inbox) -> &Self::Params {
        held.params()
    }

    fn poisoned(&mut self, len: usize) -> Result<Gradient> {
        let gradient = Gradient::new(self, len)?;
        self.fill(&gradient, f32::NAN)?;
        Ok(gradient)
    }

    fn grads(gradient: &mut Gradient) -> &mut Gradient {
        gradient
    }

    fn read_grads(&mut self, gradient: &Gradient) -> Result<Vec<f32>> {
        self.read_gradient(gradient)
    }
}
