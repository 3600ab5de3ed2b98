//! An autoencoder: linear layers, each followed by a ReLU, including the last, and the mean squared error against
//! the input.

use crate::batch::{EVALUATION_CHUNK, InputSpec, Sample};
use crate::net::{Flat, Layer, Net, NetResult, Pass, Weights, WholeParams};
use crate::stack::{Gradient, Stack};
use crate::{Batch, Evaluation, ModelError};
use paraft_common::layout::TensorSpec;
use paraft_compute::{Device, shape::Activation};

/// An autoencoder with any hidden widths. It ignores labels.
pub struct Autoencoder<D: Device> {
    stack: Stack<D>,
    width: usize,
    /// Inputs of each slot.
    inputs: Vec<D::Values>,
}

impl<D: Device> Autoencoder<D> {
    /// `inputs` values per sample, hidden layers of these widths, and as many outputs as inputs.
    pub fn new(inputs: usize, hidden: &[usize]) -> Result<Self, ModelError> {
        let widths: Vec<usize> = [&[inputs], hidden, &[inputs]].concat();
        if widths.contains(&0) {
            return Err(ModelError::new(format!("layer widths {widths:?}: none of them may be zero")));
        }
        Ok(Self {
            stack: Stack::new(&widths, Activation::Relu),
            width: inputs,
            inputs: vec![Default::default()],
        })
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

    fn takes(&self) -> InputSpec {
        InputSpec { len: self.stack.len(), sample: Sample::Values(self.width), classes: None }
    }

    fn layers(&self) -> Vec<Layer> {
        self.stack.layers()
    }

    fn load(&mut self, device: &mut D, slot: usize, batch: &Batch) -> NetResult {
        self.has_slot(slot);
        device.load_values(&batch.inputs, &mut self.inputs[slot])
    }

    fn step(&mut self, device: &mut D, flat: &mut dyn Flat<D>, n: usize) -> NetResult {
        let all = self.stack.whole(n);
        self.through(device, flat, &all)?;
        self.stack.backward(device, flat, &self.inputs[0], &all, (Gradient::Apart, None))?;
        Ok(())
    }

    fn evaluate(&mut self, device: &mut D, params: &D::Params, batch: &Batch) -> NetResult<Evaluation> {
        for part in batch.parts(EVALUATION_CHUNK) {
            self.load(device, 0, &part)?;
            let pass = Pass { evaluates: true, ..self.stack.whole(part.n) };
            self.through(device, &mut WholeParams(params), &pass)?;
        }
        self.evaluated(device, batch.n)
    }

    /// A sample's loss is its mean squared error; there is no classification.
    fn evaluated(&mut self, device: &mut D, n: usize) -> NetResult<Evaluation> {
        let loss_sum = device.sums()?.loss / self.width as f64;
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
        let inputs = &self.inputs[pass.slot];
        if gradient.is_none() {
            // The forward pass's result may belong to another slot by now.
            let (output, delta) = self.stack.output_and_delta(pass.slot);
            device.mse(output, inputs, delta)?;
        }
        self.stack.backward(device, flat, inputs, pass, (Gradient::Apart, gradient))
    }
}

impl<D: Device> Autoencoder<D> {
    fn has_slot(&mut self, slot: usize) {
        let more = (self.inputs.len()..=slot).map(|_| Default::default());
        self.inputs.extend(more);
    }

    /// The forward pass, including the loss if the pass contains the last layer.
    fn through<W: Weights<D> + ?Sized>(&mut self, device: &mut D, weights: &mut W, pass: &Pass) -> NetResult {
        let inputs = &self.inputs[pass.slot];
        self.stack.forward(device, weights, inputs, pass)?;
        if pass.layers.end < self.stack.depth() {
            return Ok(());
        }
        let (output, delta) = self.stack.output_and_delta(pass.slot);
        match pass.evaluates {
            true => device.squared_difference(output, inputs),
            false => device.mse(output, inputs, delta),
        }
    }
}
