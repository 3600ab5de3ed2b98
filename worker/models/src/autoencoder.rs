//! An autoencoder: linear layers, a ReLU after every one of them, the last included, and the mean squared
//! error against the input.

use crate::batch::{EVALUATION_CHUNK, Takes};
use crate::stack::Stack;
use crate::{Batch, Evaluation, Model, ModelError};
use paraft_common::layout::TensorSpec;
use paraft_compute::linear::Activation;
use paraft_compute::loss;

/// An autoencoder with any hidden widths. It ignores labels.
#[derive(Debug)]
pub struct Autoencoder {
    stack: Stack,
    takes: Takes,
}

impl Autoencoder {
    /// `inputs` values a sample, hidden layers of these widths, and as many outputs as inputs.
    pub fn new(inputs: usize, hidden: &[usize]) -> Result<Self, ModelError> {
        let widths: Vec<usize> = [&[inputs], hidden, &[inputs]].concat();
        if widths.contains(&0) {
            return Err(ModelError(format!("layer widths {widths:?}: none of them may be zero")));
        }
        let stack = Stack::new(&widths, Activation::Relu);
        let takes = Takes { len: stack.len(), inputs, classes: None };
        Ok(Self { stack, takes })
    }
}

impl Model for Autoencoder {
    fn tensors(&self) -> Vec<TensorSpec> {
        self.stack.tensors(|i| format!("{}.", 2 * i))
    }

    fn init(&self, seed: u64, params: &mut [f32]) {
        self.stack.init(seed, params);
    }

    fn step(
        &mut self,
        params: &[f32],
        grads: &mut [f32],
        batch: &Batch,
        ready: &mut dyn FnMut(usize, &[f32]),
    ) -> Result<f32, ModelError> {
        self.takes.check_step(params, grads, batch)?;
        self.stack.forward(params, &batch.inputs, batch.n);
        let (output, delta) = self.stack.output_and_delta();
        let loss = loss::mse(output, &batch.inputs, delta);
        self.stack.backward(params, grads, &batch.inputs, batch.n, ready);
        Ok(loss)
    }

    /// The loss of a sample is its mean squared error; nothing is classified.
    fn evaluate(&mut self, params: &[f32], batch: &Batch) -> Result<Evaluation, ModelError> {
        self.takes.check(params, batch)?;
        let mut total = Evaluation { count: batch.n as u64, ..Evaluation::default() };
        for inputs in batch.inputs.chunks(EVALUATION_CHUNK * self.takes.inputs) {
            let output = self.stack.forward(params, inputs, inputs.len() / self.takes.inputs);
            total.loss_sum += loss::squared_difference(output, inputs) / self.takes.inputs as f64;
        }
        Ok(total)
    }
}
