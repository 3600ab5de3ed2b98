//! Linear layers with ReLUs between them and softmax cross-entropy: logistic regression and the multi-layer
//! perceptron.

use crate::batch::{InputSpec, Sample};
use crate::net::{Flat, Layer, Net, NetResult, Pass, Weights};
use crate::slice::{NetSlice, Slice, SliceMember, SliceRanks};
use crate::stack::{Gradient, Stack};
use crate::{Batch, ModelError};
use paraft_common::layout::TensorSpec;
use paraft_compute::{Device, shape::Activation};
use std::sync::Arc;

/// PyTorch's names of a stack's layers.
#[derive(Clone, Copy, Debug)]
enum Names {
    /// A single `nn.Linear`.
    Module,
    /// `nn.Sequential`: the ReLUs take the odd indices.
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
    takes: InputSpec,
    classes: usize,
    names: Names,
    /// Widths of the input, each layer and the output.
    widths: Vec<usize>,
    /// Inputs and labels of each slot.
    loaded: Vec<(D::Values, D::Ids)>,
}

impl<D: Device> Classifier<D> {
    fn new(widths: &[usize], names: Names) -> Result<Self, ModelError> {
        if widths.len() < 2 || widths.contains(&0) {
            return Err(ModelError::new(format!(
                "layer widths {widths:?}: two or more, none of them zero, expected"
            )));
        }
        Self::among(widths, names, None)
    }

    fn among(widths: &[usize], names: Names, among: Option<SliceMember>) -> Result<Self, ModelError> {
        let (inputs, classes) = (widths[0], widths[widths.len() - 1]);
        let stack = Stack::among(widths, Activation::None, among);
        let takes = InputSpec {
            len: stack.len(),
            sample: Sample::Values(inputs),
            classes: Some(classes),
            targets: false,
        };
        Ok(Self { stack, takes, classes, names, widths: widths.to_vec(), loaded: vec![Default::default()] })
    }

    /// Logistic regression: one linear layer from the input to the classes.
    pub fn linear(inputs: usize, classes: usize) -> Result<Self, ModelError> {
        Self::new(&[inputs, classes], Names::Module)
    }

    /// `inputs` values per sample, hidden layers of these widths (possibly none), `classes` outputs.
    pub fn mlp(inputs: usize, hidden: &[usize], classes: usize) -> Result<Self, ModelError> {
        Self::new(&[&[inputs], hidden, &[classes]].concat(), Names::Sequential)
    }
}

impl<D: Device> Net<D> for Classifier<D>
where
    Self: Send + 'static,
{
    fn slice(&self, slice: Slice, ranks: Arc<dyn SliceRanks>) -> Result<NetSlice<D>, ModelError> {
        if let Some(width) = self.widths[1..].iter().find(|w| **w < slice.of) {
            return Err(ModelError::new(format!("{} slices of a layer of width {width}", slice.of)));
        }
        let net = Self::among(&self.widths, self.names, Some(SliceMember { slice, ranks }))?;
        let runs = net.stack.runs(&self.widths, slice);
        Ok((Box::new(net), runs))
    }

    fn tensors(&self) -> Vec<TensorSpec> {
        self.stack.tensors(|i| match self.names {
            Names::Module => String::new(),
            Names::Sequential => format!("{}.", 2 * i),
        })
    }

    fn init(&self, seed: u64, params: &mut [f32]) {
        self.stack.init(seed, params);
    }

    fn takes(&self) -> InputSpec {
        self.takes
    }

    fn layers(&self) -> Vec<Layer> {
        self.stack.layers()
    }

    fn load(&mut self, device: &mut D, slot: usize, batch: &Batch) -> NetResult {
        self.has_slot(slot);
        let (inputs, labels) = &mut self.loaded[slot];
        device.load_values(&batch.inputs, inputs)?;
        device.load_ids(&batch.labels, labels)
    }

    fn step(&mut self, device: &mut D, flat: &mut dyn Flat<D>, n: usize) -> NetResult {
        let all = self.stack.whole(n);
        self.through(device, flat, &all)?;
        self.stack.backward(device, flat, &self.loaded[0].0, &all, (Gradient::InPlace, None))?;
        Ok(())
    }

    fn forward_pass(
        &mut self,
        device: &mut D,
        weights: &mut dyn Weights<D>,
        pass: &Pass,
        input: Option<&[f32]>,
    ) -> NetResult<Option<Vec<f32>>> {
        self.has_slot(pass.slot);
        self.stack.take(device, pass, input)?;
        self.through(device, weights, pass)?;
        self.stack.give(device, pass)
    }

    fn backward_pass(
        &mut self,
        device: &mut D,
        flat: &mut dyn Flat<D>,
        pass: &Pass,
        gradient: Option<&[f32]>,
    ) -> NetResult<Option<Vec<f32>>> {
        let inputs = &self.loaded[pass.slot].0;
        self.stack.backward(device, flat, inputs, pass, (Gradient::InPlace, gradient))
    }
}

impl<D: Device> Classifier<D> {
    fn has_slot(&mut self, slot: usize) {
        let more = (self.loaded.len()..=slot).map(|_| Default::default());
        self.loaded.extend(more);
    }

    /// The forward pass, including the loss if the pass contains the last layer.
    fn through<W: Weights<D> + ?Sized>(&mut self, device: &mut D, weights: &mut W, pass: &Pass) -> NetResult {
        let (inputs, labels) = &self.loaded[pass.slot];
        self.stack.forward(device, weights, inputs, pass)?;
        if pass.layers.end < self.stack.depth() {
            return Ok(());
        }
        let output = self.stack.output(pass.slot);
        match pass.evaluates {
            true => device.cross_entropy_sum(pass.n, self.classes, output, labels),
            false => device.softmax_cross_entropy(pass.n, self.classes, output, labels),
        }
    }
}
