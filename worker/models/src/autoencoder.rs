//! An autoencoder: linear layers, a ReLU after every one of them, the last included, and the mean squared
//! error against the input.

use crate::batch::{EVALUATION_CHUNK, Sample, Takes};
use crate::net::{Flat, Layer, Net, NetResult, There};
use crate::stack::{Gradient, Stack};
use crate::{Batch, Evaluation, ModelError};
use paraft_common::layout::TensorSpec;
use paraft_compute::{Device, shape::Activation};

/// An autoencoder with any hidden widths. It ignores labels.
pub struct Autoencoder<D: Device> {
    stack: Stack<D>,
    width: usize,
    inputs: D::Values,
}

impl<D: Device> Autoencoder<D> {
    /// `inputs` values a sample, hidden layers of these widths, and as many outputs as inputs.
    pub fn new(inputs: usize, hidden: &[usize]) -> Result<Self, ModelError> {
        let widths: Vec<usize> = [&[inputs], hidden, &[inputs]].concat();
        if widths.contains(&0) {
            return Err(ModelError::new(format!("layer widths {widths:?}: none of them may be zero")));
        }
        Ok(Self { stack: Stack::new(&widths, Activation::Relu), width: inputs, inputs: Default::default() })
    }
}

impl<D: Device> Net<D> for Autoencoder<D>
where
    Self: Send,
{
    fn tensors(&self) -> Vec<TensorSpec> {
        self.stack.tensors(|i| format!("{}.", 2 * i))
    }

    fn init(&self, seed: u64, params: &mut [f32]) {
        self.stack.init(seed, params);
    }

    fn takes(&self) -> Takes {
        Takes { len: self.stack.len(), sample: Sample::Values(self.width), classes: None }
    }

    fn layers(&self) -> Vec<Layer> {
        self.stack.layers()
    }

    fn load(&mut self, device: &mut D, batch: &Batch) -> NetResult {
        device.load_values(&batch.inputs, &mut self.inputs)
    }

    fn step(&mut self, device: &mut D, flat: &mut dyn Flat<D>, n: usize) -> NetResult {
        self.stack.forward(device, flat, &self.inputs, n)?;
        let (output, delta) = self.stack.output_and_delta();
        device.mse(output, &self.inputs, delta)?;
        self.stack.backward(device, flat, (&self.inputs, n), Gradient::Apart)
    }

    /// The loss of a sample is its mean squared error; nothing is classified.
    fn evaluate(&mut self, device: &mut D, params: &D::Params, batch: &Batch) -> NetResult<Evaluation> {
        for part in batch.parts(EVALUATION_CHUNK) {
            self.load(device, &part)?;
            self.stack.forward(device, &mut There(params), &self.inputs, part.n)?;
            device.squared_difference(self.stack.output(), &self.inputs)?;
        }
        let loss_sum = device.sums()?.loss / self.width as f64;
        Ok(Evaluation { loss_sum, correct: 0, count: batch.n as u64 })
    }
}
