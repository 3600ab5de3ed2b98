//! A multi-layer perceptron: linear layers with ReLUs between them, softmax cross-entropy.

use crate::batch::{EVALUATION_CHUNK, Takes};
use crate::stack::Stack;
use crate::{Batch, Evaluation, Model, ModelError};
use paraft_common::layout::TensorSpec;
use paraft_compute::linear::Activation;
use paraft_compute::loss;

/// The classifier's part that [`Mlp`] and [`crate::Linear`] share.
#[derive(Debug)]
pub(crate) struct Classifier {
    pub stack: Stack,
    takes: Takes,
    classes: usize,
}

impl Classifier {
    /// `widths`: input, hidden layers, classes. None may be zero.
    pub fn new(widths: &[usize]) -> Result<Self, ModelError> {
        let (Some(&inputs), Some(&classes)) = (widths.first(), widths.last()) else {
            return Err(ModelError::new("a classifier needs the width of its input and its classes"));
        };
        if widths.len() < 2 || widths.contains(&0) {
            return Err(ModelError(format!(
                "layer widths {widths:?}: two or more, none of them zero, expected"
            )));
        }
        let stack = Stack::new(widths, Activation::None);
        let takes = Takes { len: stack.len(), inputs, classes: Some(classes) };
        Ok(Self { stack, takes, classes })
    }

    pub fn step(
        &mut self,
        params: &[f32],
        grads: &mut [f32],
        batch: &Batch,
        ready: &mut dyn FnMut(usize, &[f32]),
    ) -> Result<f32, ModelError> {
        self.takes.check_step(params, grads, batch)?;
        self.stack.forward(params, &batch.inputs, batch.n);
        let (logits, dlogits) = self.stack.output_and_delta();
        let loss = loss::softmax_cross_entropy(logits, &batch.labels, self.classes, dlogits);
        self.stack.backward(params, grads, &batch.inputs, batch.n, ready);
        Ok(loss)
    }

    pub fn evaluate(&mut self, params: &[f32], batch: &Batch) -> Result<Evaluation, ModelError> {
        self.takes.check(params, batch)?;
        let mut total = Evaluation { count: batch.n as u64, ..Evaluation::default() };
        let parts = batch.inputs.chunks(EVALUATION_CHUNK * self.takes.inputs);
        for (inputs, labels) in parts.zip(batch.labels.chunks(EVALUATION_CHUNK)) {
            let logits = self.stack.forward(params, inputs, labels.len());
            let (loss, correct) = loss::cross_entropy_sum(logits, labels, self.classes);
            total.loss_sum += loss;
            total.correct += correct;
        }
        Ok(total)
    }
}

/// A multi-layer perceptron with any widths.
///
/// ```
/// use paraft_models::{Mlp, Model};
/// let mlp = Mlp::new(784, &[256, 128], 10).unwrap();
/// assert_eq!(mlp.tensors()[2].name, "2.weight");
/// ```
#[derive(Debug)]
pub struct Mlp(Classifier);

impl Mlp {
    /// `inputs` values a sample, hidden layers of these widths (none is fine), `classes` outputs.
    pub fn new(inputs: usize, hidden: &[usize], classes: usize) -> Result<Self, ModelError> {
        let widths: Vec<usize> = [&[inputs], hidden, &[classes]].concat();
        Classifier::new(&widths).map(Self)
    }
}

impl Model for Mlp {
    fn tensors(&self) -> Vec<TensorSpec> {
        // The ReLUs between take the odd numbers of PyTorch's `nn.Sequential`.
        self.0.stack.tensors(|i| format!("{}.", 2 * i))
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
