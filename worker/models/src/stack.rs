//! A stack of linear layers with ReLUs: what [`crate::Linear`], [`crate::Mlp`] and [`crate::Autoencoder`]
//! share. The loss is theirs.

use crate::init::Init;
use paraft_common::layout::TensorSpec;
use paraft_compute::linear::{self, Activation, LinearShape};

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

    /// Weight and bias.
    fn of<'a>(&self, params: &'a [f32]) -> (&'a [f32], &'a [f32]) {
        params[self.offset..self.offset + self.len()].split_at(self.weight_len())
    }
}

/// Layers and their workspaces.
#[derive(Debug)]
pub(crate) struct Stack {
    layers: Vec<Layer>,
    /// Outputs of each layer, after its activation, `[n, outputs]`.
    outputs: Vec<Vec<f32>>,
    /// Gradient of the current layer's output and of its input. Public part: see `output_and_delta`.
    delta: Vec<f32>,
    next_delta: Vec<f32>,
}

impl Stack {
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
        let outputs = vec![Vec::new(); layers.len()];
        Self { layers, outputs, delta: Vec::new(), next_delta: Vec::new() }
    }

    /// Values of the flat vector.
    pub fn len(&self) -> usize {
        self.layers.iter().map(Layer::len).sum()
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

    /// The output for `n` samples, `[n, outputs]`.
    pub fn forward(&mut self, params: &[f32], inputs: &[f32], n: usize) -> &[f32] {
        let mut done: &[f32] = inputs;
        for (l, out) in self.layers.iter().zip(&mut self.outputs) {
            out.resize(n * l.outputs, 0.0);
            let (weight, bias) = l.of(params);
            linear::forward(l.shape(n), done, weight, bias, l.activation, out);
            done = out;
        }
        self.output()
    }

    fn output(&self) -> &[f32] {
        self.outputs.last().map_or(&[], Vec::as_slice)
    }

    /// The output of the last forward pass, and room for its gradient, to be filled before `backward`.
    pub fn output_and_delta(&mut self) -> (&[f32], &mut [f32]) {
        let len = self.output().len();
        self.delta.resize(len, 0.0);
        (self.outputs.last().map_or(&[], Vec::as_slice), &mut self.delta)
    }

    /// Turns the output's gradient into that of all weights, last layer first.
    pub fn backward(
        &mut self,
        params: &[f32],
        grads: &mut [f32],
        inputs: &[f32],
        n: usize,
        ready: &mut dyn FnMut(usize, &[f32]),
    ) {
        for (i, l) in self.layers.iter().enumerate().rev() {
            if l.activation == Activation::Relu {
                linear::relu_backward(&self.outputs[i], &mut self.delta);
            }
            let x = if i == 0 { inputs } else { &self.outputs[i - 1] };
            let part = &mut grads[l.offset..l.offset + l.len()];
            let (dweight, dbias) = part.split_at_mut(l.weight_len());
            linear::backward_weight(l.shape(n), x, &self.delta, dweight, dbias);
            ready(l.offset, grads);
            // Nobody asks for the gradient of the data.
            if i > 0 {
                self.next_delta.resize(n * l.inputs, 0.0);
                linear::backward_input(l.shape(n), l.of(params).0, &self.delta, &mut self.next_delta);
                std::mem::swap(&mut self.delta, &mut self.next_delta);
            }
        }
    }
}
