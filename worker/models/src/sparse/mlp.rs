//! Linear layers with ReLUs, over the operators of [`paraft_compute::CpuDevice`].

use crate::{ModelError, init::Init};
use paraft_common::TensorSpec;
use paraft_compute::{
    CpuDevice,
    device::Linears,
    shape::{Activation, LinearAt, LinearShape},
};

/// Layers and their workspaces.
pub struct Mlp {
    /// Input, each layer's output.
    widths: Vec<usize>,
    /// Whether the last layer has a ReLU.
    relu_last: bool,
    /// Where the layers lie in the flat vector.
    offset: usize,
    prefix: &'static str,
    /// The input, then each layer's output, `[n, width]`.
    values: Vec<Vec<f32>>,
    /// The gradient of a layer's output, and that of its input.
    deltas: [Vec<f32>; 2],
}

impl Mlp {
    pub fn new(prefix: &'static str, widths: Vec<usize>, relu_last: bool, offset: usize) -> Self {
        let values = vec![Vec::new(); widths.len()];
        Self { widths, relu_last, offset, prefix, values, deltas: Default::default() }
    }

    /// Where its values end in the flat vector.
    pub fn end(&self) -> usize {
        self.offset + self.widths.windows(2).map(|w| (w[0] + 1) * w[1]).sum::<usize>()
    }

    /// As PyTorch names those of an `nn.Sequential` with a ReLU behind each layer.
    pub fn tensors(&self) -> Vec<TensorSpec> {
        let of = |(i, w): (usize, &[usize])| {
            let name = format!("{}.{}", self.prefix, 2 * i);
            [
                TensorSpec::param(format!("{name}.weight"), &[w[1], w[0]]),
                TensorSpec::param(format!("{name}.bias"), &[w[1]]),
            ]
        };
        self.widths.windows(2).enumerate().flat_map(of).collect()
    }

    pub fn init(&self, init: &mut Init, params: &mut [f32]) {
        let mut at = self.offset;
        for w in self.widths.windows(2) {
            let (weight, bias) = (w[0] * w[1], w[1]);
            init.uniform(w[0], &mut params[at..at + weight]);
            init.uniform(w[0], &mut params[at + weight..at + weight + bias]);
            at += weight + bias;
        }
    }

    /// The input of the next pass, `[n, inputs]`.
    pub fn input(&mut self) -> &mut Vec<f32> {
        &mut self.values[0]
    }

    /// Each layer's shape, place and activation.
    fn layers(&self, n: usize) -> Vec<(LinearShape, LinearAt, Activation)> {
        let mut at = self.offset;
        let depth = self.widths.len() - 1;
        let layer = |(i, w): (usize, &[usize])| {
            let shape = LinearShape { n, inputs: w[0], outputs: w[1] };
            let bias = at + shape.weight_len();
            let place = LinearAt { weight: at, bias: Some(bias) };
            at = bias + w[1];
            let relu = i + 1 < depth || self.relu_last;
            (shape, place, if relu { Activation::Relu } else { Activation::None })
        };
        self.widths.windows(2).enumerate().map(layer).collect()
    }

    /// The output `[n, outputs]` of the input of `n` samples.
    pub fn forward(
        &mut self,
        device: &mut CpuDevice,
        params: &[f32],
        n: usize,
    ) -> Result<&[f32], ModelError> {
        for (i, (shape, at, activation)) in self.layers(n).into_iter().enumerate() {
            let (before, after) = self.values.split_at_mut(i + 1);
            device.linear(shape, &before[i], params, at, activation, &mut after[0], None)?;
        }
        Ok(self.values.last().map_or(&[], |v| v))
    }

    /// Writes the gradient of the layers, and returns that of the input, from that of the output.
    pub fn backward(
        &mut self,
        device: &mut CpuDevice,
        params: &[f32],
        (n, slopes): (usize, &[f32]),
        grads: &mut [f32],
    ) -> Result<&[f32], ModelError> {
        self.deltas[0].clear();
        self.deltas[0].extend_from_slice(slopes);
        for (i, (shape, at, activation)) in self.layers(n).into_iter().enumerate().rev() {
            let [dy, dx] = &mut self.deltas;
            if activation != Activation::None {
                device.activation_backward(activation, &self.values[i + 1], dy)?;
            }
            device.linear_backward_weight(shape, &self.values[i], dy, at, grads)?;
            device.linear_backward_input(shape, dy, params, at, dx)?;
            self.deltas.swap(0, 1);
        }
        Ok(&self.deltas[0])
    }
}

/// For each sample and field the sum of its rows: `[n, fields, dim]`, each sample behind `before` further values.
pub fn bags(
    rows: &[f32],
    dim: usize,
    input: &super::SparseInput,
    (width, before): (usize, usize),
    out: &mut [f32],
) {
    for (f, field) in input.fields.iter().enumerate() {
        for i in 0..input.len() {
            let bag = &mut out[i * width + before + f * dim..][..dim];
            bag.fill(0.0);
            for (place, x) in field.of(i) {
                for (sum, v) in bag.iter_mut().zip(&rows[place * dim..]) {
                    *sum += x * v;
                }
            }
        }
    }
}

/// The gradients of the rows from those of [`bags`], added.
pub fn bags_backward(
    slopes: &[f32],
    dim: usize,
    input: &super::SparseInput,
    (width, before): (usize, usize),
    row_grads: &mut [f32],
) {
    for (f, field) in input.fields.iter().enumerate() {
        for i in 0..input.len() {
            let bag = &slopes[i * width + before + f * dim..][..dim];
            for (place, x) in field.of(i) {
                for (g, s) in row_grads[place * dim..].iter_mut().zip(bag) {
                    *g += x * s;
                }
            }
        }
    }
}
