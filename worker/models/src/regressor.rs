//! Linear layers with ReLUs between them and the mean squared error: against a number (the multi-layer perceptron as
//! a regression), or against the input (the autoencoder, with a ReLU also after the last layer).

use crate::batch::{InputSpec, Sample};
use crate::net::{Flat, Layer, Net, NetResult, Pass, Weights};
use crate::stack::{Gradient, Stack};
use crate::{Batch, Evaluation, ModelError};
use paraft_common::layout::TensorSpec;
use paraft_compute::{Device, shape::Activation};

/// Linear layers that predict numbers. The loss is that of `torch.nn.MSELoss`.
///
/// ```
/// use paraft_models::{Model, OnCpu, Regressor};
/// let linear = OnCpu::new(Regressor::mlp(13, &[]).unwrap());
/// assert_eq!(linear.tensors()[0].shape, [1, 13]);
/// ```
pub struct Regressor<D: Device> {
    stack: Stack<D>,
    takes: InputSpec,
    outputs: usize,
    /// Inputs of each slot, and the numbers to predict, unless those are the inputs.
    loaded: Vec<(D::Values, D::Values)>,
}

impl<D: Device> Regressor<D> {
    /// `inputs` values per sample, hidden layers of these widths (possibly none), and one output.
    pub fn mlp(inputs: usize, hidden: &[usize]) -> Result<Self, ModelError> {
        Self::new(&[&[inputs], hidden, &[1]].concat(), Activation::None, true)
    }

    /// `inputs` values per sample, hidden layers of these widths, and as many outputs as inputs. It ignores labels.
    pub fn autoencoder(inputs: usize, hidden: &[usize]) -> Result<Self, ModelError> {
        Self::new(&[&[inputs], hidden, &[inputs]].concat(), Activation::Relu, false)
    }

    fn new(widths: &[usize], last: Activation, targets: bool) -> Result<Self, ModelError> {
        if widths.contains(&0) {
            return Err(ModelError::new(format!("layer widths {widths:?}: none of them may be zero")));
        }
        let stack = Stack::new(widths, last);
        let takes = InputSpec { len: stack.len(), sample: Sample::Values(widths[0]), classes: None, targets };
        Ok(Self { stack, takes, outputs: widths[widths.len() - 1], loaded: vec![Default::default()] })
    }
}

impl<D: Device> Net<D> for Regressor<D>
where
    Self: Send,
{
    fn tensors(&self) -> Vec<TensorSpec> {
        self.stack.tensors(|i| format!("{}.", 2 * i))
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
        let (inputs, targets) = &mut self.loaded[slot];
        device.load_values(&batch.inputs, inputs)?;
        if self.takes.targets { device.load_values(&batch.targets, targets) } else { Ok(()) }
    }

    fn step(&mut self, device: &mut D, flat: &mut dyn Flat<D>, n: usize) -> NetResult {
        let all = self.stack.whole(n);
        self.through(device, flat, &all)?;
        self.stack.backward(device, flat, &self.loaded[0].0, &all, (Gradient::Apart, None))?;
        Ok(())
    }

    /// A sample's loss is its mean squared error over the outputs; there is no classification.
    fn evaluated(&mut self, device: &mut D, n: usize) -> NetResult<Evaluation> {
        let loss_sum = device.sums()?.loss / self.outputs as f64;
        Ok(Evaluation { loss_sum, correct: 0, count: n as u64 })
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
        let (inputs, targets) = &self.loaded[pass.slot];
        if gradient.is_none() {
            // The forward pass's result may belong to another slot by now.
            let (output, delta) = self.stack.output_and_delta(pass.slot);
            device.mse(output, if self.takes.targets { targets } else { inputs }, delta)?;
        }
        self.stack.backward(device, flat, inputs, pass, (Gradient::Apart, gradient))
    }
}

impl<D: Device> Regressor<D> {
    fn has_slot(&mut self, slot: usize) {
        let more = (self.loaded.len()..=slot).map(|_| Default::default());
        self.loaded.extend(more);
    }

    /// The forward pass, including the loss if the pass contains the last layer.
    fn through<W: Weights<D> + ?Sized>(&mut self, device: &mut D, weights: &mut W, pass: &Pass) -> NetResult {
        let (inputs, targets) = &self.loaded[pass.slot];
        self.stack.forward(device, weights, inputs, pass)?;
        if pass.layers.end < self.stack.depth() {
            return Ok(());
        }
        let (output, delta) = self.stack.output_and_delta(pass.slot);
        let target = if self.takes.targets { targets } else { inputs };
        match pass.evaluates {
            true => device.squared_difference(output, target),
            false => device.mse(output, target, delta),
        }
    }
}
