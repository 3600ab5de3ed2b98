//! One stage of the net: convolution, norm, ReLU, pooling, with its workspaces and its place in the flat
//! vector. The order of the calls is the net's.

use super::{KERNEL, PAD};
use crate::init::Init;
use paraft_common::layout::TensorSpec;
use paraft_compute::Cpu;
use paraft_compute::blocked::{Geometry, Planes};
use paraft_compute::conv::{ConvShape, ConvWeights, forward_block};
use paraft_compute::conv_grad::ConvGradient;
use paraft_compute::norm::{ChannelNorm, ChannelStats, MOMENTUM, norm_relu_pool};
use paraft_compute::norm_grad::{NormSums, apply_block};

/// See the module. `(b, n)` is always a block of a batch of `n` samples.
#[derive(Debug)]
pub(super) struct Stage {
    shape: ConvShape,
    /// Of the convolution's weight; its bias, gamma and beta follow.
    offset: usize,
    /// Of the running mean; the running variance follows.
    buffers: usize,
    weights: ConvWeights,
    stats: ChannelStats,
    norms: Vec<ChannelNorm>,
    sums: NormSums,
    dweights: ConvGradient,
    /// The convolution's output; after `differentiate` its gradient.
    pub y: Planes,
    pick: Planes,
    /// The stage's result and its gradient.
    pub pooled: Planes,
    pub dpooled: Planes,
}

impl Stage {
    /// For images of this side; `y_pad` and `pooled_pad` are the borders of the two outputs.
    pub fn new(
        shape: ConvShape,
        side: usize,
        y_pad: usize,
        pooled_pad: usize,
        offset: usize,
        buffers: usize,
    ) -> Self {
        let c = shape.outputs;
        let half = |pad| Planes::new(Geometry::new(c, side / 2, side / 2, pad));
        Self {
            shape,
            offset,
            buffers,
            weights: ConvWeights::new(shape),
            stats: ChannelStats::new(c),
            norms: vec![ChannelNorm::default(); c],
            sums: NormSums::new(c),
            dweights: ConvGradient::new(shape),
            y: Planes::new(Geometry::new(c, side, side, y_pad)),
            pick: half(0),
            pooled: half(pooled_pad),
            dpooled: half(0),
        }
    }

    /// Values of weight, bias, gamma and beta.
    pub fn params_len(shape: ConvShape) -> usize {
        shape.weight_len() + 3 * shape.outputs
    }

    /// The parameters, given the names of the convolution and of the norm.
    pub fn params(&self, conv: &str, norm: &str) -> Vec<TensorSpec> {
        let s = self.shape;
        vec![
            TensorSpec::param(format!("{conv}.weight"), &[s.outputs, s.inputs, KERNEL, KERNEL]),
            TensorSpec::param(format!("{conv}.bias"), &[s.outputs]),
            TensorSpec::param(format!("{norm}.weight"), &[s.outputs]),
            TensorSpec::param(format!("{norm}.bias"), &[s.outputs]),
        ]
    }

    /// Draws the initial weights and sets the statistics to mean 0 and variance 1.
    pub fn init(&self, init: &mut Init, params: &mut [f32]) {
        let (fan_in, c) = (self.shape.inputs * KERNEL * KERNEL, self.shape.outputs);
        let (weight, rest) = params[self.offset..].split_at_mut(self.shape.weight_len());
        init.uniform(fan_in, weight);
        init.uniform(fan_in, &mut rest[..c]);
        rest[c..2 * c].fill(1.0);
        rest[2 * c..3 * c].fill(0.0);
        params[self.buffers..][..c].fill(0.0);
        params[self.buffers + c..][..c].fill(1.0);
    }

    pub fn reserve(&mut self, n: usize) {
        for planes in [&mut self.y, &mut self.pick, &mut self.pooled, &mut self.dpooled] {
            planes.reserve(n);
        }
        debug_assert!(self.shape.pad == PAD);
    }

    /// The convolution's weight.
    pub fn weight<'a>(&self, params: &'a [f32]) -> &'a [f32] {
        &params[self.offset..][..self.shape.weight_len()]
    }

    /// The `i`-th of bias, gamma and beta.
    fn channel_tensor(&self, i: usize) -> std::ops::Range<usize> {
        let start = self.offset + self.shape.weight_len() + i * self.shape.outputs;
        start..start + self.shape.outputs
    }

    /// Takes over the weights and forgets the last batch.
    pub fn load(&mut self, params: &[f32]) {
        let bias = &params[self.channel_tensor(0)];
        self.weights.set(&params[self.offset..][..self.shape.weight_len()], bias);
        self.stats.clear();
        self.sums.clear();
        self.dweights.clear();
    }

    /// Fills `y`; with `train`, adds it to the statistics.
    pub fn convolve(&mut self, cpu: Cpu, x: &Planes, (b, n): (usize, usize), train: bool) {
        forward_block(cpu, &self.weights, x, &mut self.y, (b, n));
        if train {
            self.stats.add_block(cpu, &self.y, b, n);
        }
    }

    /// Chooses how `pool` normalises: by this batch's statistics, or by the running ones.
    pub fn set_norms(&mut self, params: &[f32], train: bool) {
        let (gamma, beta) = (&params[self.channel_tensor(1)], &params[self.channel_tensor(2)]);
        let (mean, var) = params[self.buffers..].split_at(self.shape.outputs);
        for (c, norm) in self.norms.iter_mut().enumerate() {
            let (mean, var) =
                if train { (self.stats.mean(c), self.stats.variance(c)) } else { (mean[c], var[c]) };
            *norm = ChannelNorm::new(mean, var, gamma[c], beta[c]);
        }
    }

    /// Fills `pooled`.
    pub fn pool(&mut self, cpu: Cpu, place: (usize, usize)) {
        norm_relu_pool(cpu, &self.norms, &self.y, &mut self.pooled, &mut self.pick, place);
    }

    /// Writes what is to be subtracted from the running statistics.
    pub fn write_buffers(&self, params: &[f32], grads: &mut [f32]) {
        let c = self.shape.outputs;
        for i in 0..c {
            let (mean, var) = (self.buffers + i, self.buffers + c + i);
            grads[mean] = MOMENTUM * (params[mean] - self.stats.mean(i));
            grads[var] = MOMENTUM * (params[var] - self.stats.unbiased_variance(i));
        }
    }

    /// Adds `dpooled` to the sums that the norm's gradient needs.
    pub fn reduce(&mut self, cpu: Cpu, place: (usize, usize)) {
        self.sums.add_block(cpu, &self.norms, &self.pick, &self.dpooled, place);
    }

    /// Writes the gradients of gamma and beta, after `reduce` on all blocks. Returns where they start.
    pub fn write_norm(&self, grads: &mut [f32]) -> usize {
        let (gamma, beta) = (self.channel_tensor(1), self.channel_tensor(2));
        let (dgamma, dbeta) = grads[gamma.start..beta.end].split_at_mut(gamma.len());
        self.sums.write(&self.norms, dgamma, dbeta);
        gamma.start
    }

    /// Turns `y` into its gradient and adds it to the weight's. `x` is the convolution's input.
    pub fn differentiate(&mut self, cpu: Cpu, x: &Planes, place: (usize, usize)) {
        let sums = (&mut self.sums, self.stats.count());
        apply_block(cpu, &self.norms, sums, (&self.pick, &self.dpooled), &mut self.y, place);
        self.dweights.add_block(cpu, x, &self.y, place);
    }

    /// Writes the gradients of weight and bias, after `differentiate` on all blocks. Returns where they start.
    pub fn write_conv(&self, cpu: Cpu, grads: &mut [f32]) -> usize {
        self.dweights.write(cpu, &mut grads[self.offset..][..self.shape.weight_len()]);
        self.sums.write_bias(&mut grads[self.channel_tensor(0)]);
        self.offset
    }
}
