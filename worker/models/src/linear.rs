//! Logistic regression: one linear layer and softmax cross-entropy.

use crate::mlp::Classifier;
use crate::{Batch, Evaluation, Model, ModelError};
use paraft_common::layout::TensorSpec;

/// One linear layer from the input to the classes.
#[derive(Debug)]
pub struct Linear(Classifier);

impl Linear {
    /// `inputs` values a sample, `classes` outputs.
    pub fn new(inputs: usize, classes: usize) -> Result<Self, ModelError> {
        Classifier::new(&[inputs, classes]).map(Self)
    }
}

impl Model for Linear {
    fn tensors(&self) -> Vec<TensorSpec> {
        self.0.stack.tensors(|_| String::new())
    }

    fn init(&self, seed: u64, params: &mut [f32]) {
        self.0.stack.init(seed, params);
    }

    fn step(
        &mut self,
        params: &[f32],
        grads: &mut [f32],
        batch: &Batch,
        ready: &mut dyn FnMut(usize, &[f32]),
    ) -> Result<f32, ModelError> {
        self.0.step(params, grads, batch, ready)
    }

    fn evaluate(&mut self, params: &[f32], batch: &Batch) -> Result<Evaluation, ModelError> {
        self.0.evaluate(params, batch)
    }
}
