//! Linear layers with ReLUs between them and softmax cross-entropy: logistic regression and the multi-layer perceptron.

use crate::batch::{EVALUATION_CHUNK, Sample, Takes};
use crate::net::{Flat, Layer, Net, NetResult, There};
use crate::stack::{Gradient, Stack};
use crate::{Batch, Evaluation, ModelError};
use paraft_common::layout::TensorSpec;
use paraft_compute::{Device, shape::Activation};

/// How PyTorch names a stack's layers.
#[derive(Clone, Copy, Debug)]
enum Names {
    /// A single `nn.Linear`.
    Module,
    /// `nn.Sequential`: the ReLUs between take the odd numbers.
    Sequential,
}

/// Linear layers that classify.
///
/// ```
/// use paraft_models::{Classifier, Model, OnCpu};
/// let mlp = OnCpu::new(Classifier::mlp(784, &[256, 128], 10).unwrap());
/// assert_eq!(mlp.tensors()[2].name, "2.weight");
/// ```
pub struct Classifier<D: Device> {
    stack: Stack<D>,
    takes: Takes,
    classes: usize,
    names: Names,
    inputs: D::Values,
    labels: D::Ids,
}

impl<D: Device> Classifier<D> {
    fn new(widths: &[usize], names: Names) -> Result<Self, ModelError> {
        let (Some(&inputs), Some(&classes)) = (widths.first(), widths.last()) else {
            return Err(ModelError::new("a classifier needs the width of its input and its classes"));
        };
        if widths.len() < 2 || widths.contains(&0) {
            return Err(ModelError::new(format!(
                "layer widths {widths:?}: two or more, none of them zero, expected"
            )));
        }
        let stack = Stack::new(widths, Activation::None);
        let takes = Takes { len: stack.len(), sample: Sample::Values(inputs), classes: Some(classes) };
        Ok(Self { stack, takes, classes, names, inputs: Default::default(), labels: Default::default() })
    }

    /// Logistic regression: one linear layer from the input to the classes.
    pub fn linear(inputs: usize, classes: usize) -> Result<Self, ModelError> {
        Self::new(&[inputs, classes], Names::Module)
    }

    /// `inputs` values a sample, hidden layers of these widths (none is fine), `classes` outputs.
    pub fn mlp(inputs: usize, hidden: &[usize], classes: usize) -> Result<Self, ModelError> {
        Self::new(&[&[inputs], hidden, &[classes]].concat(), Names::Sequential)
    }
}

impl<D: Device> Net<D> for Classifier<D>
where
    Self: Send,
{
    fn tensors(&self) -> Vec<TensorSpec> {
        self.stack.tensors(|i| match self.names {
            Names::Module => String::new(),
            Names::Sequential => format!("{}.", 2 * i),
        })
    }

    fn init(&self, seed: u64, params: &mut [f32]) {
        self.stack.init(seed, params);
    }

    fn takes(&self) -> Takes {
        self.takes
    }

    fn layers(&self) -> Vec<Layer> {
        self.stack.layers()
    }

    fn load(&mut self, device: &mut D, batch: &Batch) -> NetResult {
        device.load_values(&batch.inputs, &mut self.inputs)?;
        device.load_ids(&batch.labels, &mut self.labels)
    }

    fn step(&mut self, device: &mut D, flat: &mut dyn Flat<D>, n: usize) -> NetResult {
        self.stack.forward(device, flat, &self.inputs, n)?;
        device.softmax_cross_entropy(n, self.classes, self.stack.output(), &self.labels)?;
        self.stack.backward(device, flat, (&self.inputs, n), Gradient::InPlace)
    }

    fn evaluate(&mut self, device: &mut D, params: &D::Params, batch: &Batch) -> NetResult<Evaluation> {
        for part in batch.parts(EVALUATION_CHUNK) {
            self.load(device, &part)?;
            self.stack.forward(device, &mut There(params), &self.inputs, part.n)?;
            device.cross_entropy_sum(part.n, self.classes, self.stack.output(), &self.labels)?;
        }
        let sums = device.sums()?;
        Ok(Evaluation { loss_sum: sums.loss, correct: sums.correct, count: batch.n as u64 })
    }
}
