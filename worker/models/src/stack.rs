//! A stack of linear layers with ReLUs: what [`crate::Linear`], [`crate::Mlp`] and [`crate::Autoencoder`]
//! share. The loss is theirs.

use crate::init::Init;
use crate::net::{Flat, Layer as Piece, NetResult, Weights};
use paraft_common::layout::TensorSpec;
use paraft_compute::{
    Device,
    shape::{Activation, LinearAt, LinearShape},
};

/// One layer's place in the flat vector.
#[derive(Clone, Copy, Debug)]
struct Layer {
    inputs: usize,
    outputs: usize,
    /// Of the weight; the bias follows it.
    offset: usize,
    activation: Activation,
}

impl Layer {
    fn weight_len(&self) -> usize {
        self.inputs * self.outputs
    }

    fn len(&self) -> usize {
        self.weight_len() + self.outputs
    }

    fn shape(&self, n: usize) -> LinearShape {
        LinearShape { n, inputs: self.inputs, outputs: self.outputs }
    }

    fn at(&self) -> LinearAt {
        LinearAt { weight: self.offset, bias: Some(self.offset + self.weight_len()) }
    }
}

/// Where the gradient of the output is when the backward pass begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Gradient {
    /// In the output's place; the last layer has no activation then.
    InPlace,
    /// In [`Stack::output_and_delta`]'s second.
    Apart,
}

/// Layers and their workspaces.
pub(crate) struct Stack<D: Device> {
    layers: Vec<Layer>,
    /// Outputs of each layer, after its activation, `[n, outputs]`.
    outputs: Vec<D::Values>,
    /// Gradients of a layer's output and of its input, in turn.
    deltas: [D::Values; 2],
}

impl<D: Device> Stack<D> {
    /// `widths` are the values of the input, of each hidden layer and of the output: at least two numbers.
    pub fn new(widths: &[usize], last: Activation) -> Self {
        let mut offset = 0;
        let mut layers = Vec::with_capacity(widths.len());
        for (i, pair) in widths.windows(2).enumerate() {
            let activation = if i + 2 == widths.len() { last } else { Activation::Relu };
            let layer = Layer { inputs: pair[0], outputs: pair[1], offset, activation };
            offset += layer.len();
            layers.push(layer);
        }
        let outputs = layers.iter().map(|_| D::Values::default()).collect();
        Self { layers, outputs, deltas: Default::default() }
    }

    /// Values of the flat vector.
    pub fn len(&self) -> usize {
        self.layers.iter().map(Layer::len).sum()
    }

    /// One a layer.
    pub fn layers(&self) -> Vec<Piece> {
        self.layers.iter().map(|l| Piece::of(l.offset..l.offset + l.len())).collect()
    }

    /// The tensors; `prefix` names a layer's module, given its index.
    pub fn tensors(&self, prefix: impl Fn(usize) -> String) -> Vec<TensorSpec> {
        let both = |(i, l): (usize, &Layer)| {
            let p = prefix(i);
            [
                TensorSpec::param(format!("{p}weight"), &[l.outputs, l.inputs]),
                TensorSpec::param(format!("{p}bias"), &[l.outputs]),
            ]
        };
        self.layers.iter().enumerate().flat_map(both).collect()
    }

    /// Draws the initial weights.
    pub fn init(&self, seed: u64, params: &mut [f32]) {
        let mut init = Init::new(seed);
        for l in &self.layers {
            let (weight, bias) = params[l.offset..l.offset + l.len()].split_at_mut(l.weight_len());
            init.uniform(l.inputs, weight);
            init.uniform(l.inputs, bias);
        }
    }

    /// Computes the output for `n` samples.
    pub fn forward<W: Weights<D> + ?Sized>(
        &mut self,
        device: &mut D,
        weights: &mut W,
        inputs: &D::Values,
        n: usize,
    ) -> NetResult {
        for (i, l) in self.layers.iter().enumerate() {
            let (done, rest) = self.outputs.split_at_mut(i);
            let x = done.last().unwrap_or(inputs);
            device.linear(l.shape(n), x, weights.params(i)?, l.at(), l.activation, &mut rest[0], None)?;
        }
        Ok(())
    }

    /// The output of the last forward pass, `[n, outputs]`.
    pub fn output(&mut self) -> &mut D::Values {
        self.output_and_delta().0
    }

    /// The same, and room for its gradient.
    pub fn output_and_delta(&mut self) -> (&mut D::Values, &mut D::Values) {
        let last = self.outputs.len() - 1;
        (&mut self.outputs[last], &mut self.deltas[0])
    }

    /// Turns the gradient of the output into that of all weights, last layer first. `inputs` are those of the forward pass,
    /// and their number.
    pub fn backward(
        &mut self,
        device: &mut D,
        flat: &mut dyn Flat<D>,
        (inputs, n): (&D::Values, usize),
        gradient: Gradient,
    ) -> NetResult {
        let last = self.layers.len() - 1;
        for (i, l) in self.layers.iter().enumerate().rev() {
            let (done, rest) = self.outputs.split_at_mut(i);
            let x = done.last().unwrap_or(inputs);
            let [delta, next] = &mut self.deltas;
            let delta = if i == last && gradient == Gradient::InPlace {
                &mut rest[0]
            } else {
                device.activation_backward(l.activation, &rest[0], delta)?;
                delta
            };
            device.linear_backward_weight(l.shape(n), x, delta, l.at(), flat.layer(i)?.1)?;
            flat.ready(l.offset)?;
            // Nobody asks for the gradient of the data.
            if i > 0 {
                device.linear_backward_input(l.shape(n), delta, flat.params(i)?, l.at(), next)?;
                self.deltas.swap(0, 1);
            }
        }
        Ok(())
    }
}
