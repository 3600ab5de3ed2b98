//! Convolution, BatchNorm, ReLU and 2x2 max pooling with their workspaces, block of samples by block.

use crate::{
    collective::RankSums,
    cpu::{
        blocked::{Geometry, Planes, blocks},
        conv::{ConvWeights, forward_block},
        conv_grad::ConvGradient,
        norm::{ChannelNorm, ChannelStats, MOMENTUM, norm_relu_pool},
        norm_grad::{NormSums, apply_block},
        simd::Cpu,
    },
    error::Result,
    shape::{ConvBlockAt, ConvBlockShape},
};
use std::ops::Range;

/// See the module.
#[derive(Debug)]
pub struct ConvBlock {
    shape: ConvBlockShape,
    at: ConvBlockAt,
    weights: ConvWeights,
    /// From the output's gradient to the input's.
    back: Option<ConvWeights>,
    stats: ChannelStats,
    norms: Vec<ChannelNorm>,
    sums: NormSums,
    dweights: ConvGradient,
    /// The convolution's output; after `backward_weight` its gradient.
    y: Planes,
    pick: Planes,
    /// The result and its gradient.
    pub(super) pooled: Planes,
    pub(super) dpooled: Planes,
}

impl ConvBlock {
    pub(super) fn new(shape: ConvBlockShape, at: ConvBlockAt) -> Self {
        let conv = shape.conv;
        let c = conv.outputs;
        let (height, width) = (conv.side(shape.height), conv.side(shape.width));
        let half = |pad| Planes::new(Geometry::new(c, height / 2, width / 2, pad));
        // The gradient of the output is convolved where that of the input is asked for, and wants a border then.
        let back = shape.input_gradient.then(|| ConvWeights::new(conv.transposed()));
        let border = back.as_ref().map_or(0, |b| b.shape().pad);
        Self {
            shape,
            at,
            weights: ConvWeights::new(conv),
            back,
            stats: ChannelStats::new(c),
            norms: vec![ChannelNorm::default(); c],
            sums: NormSums::new(c),
            dweights: ConvGradient::new(conv),
            y: Planes::new(Geometry::new(c, height, width, border)),
            pick: half(0),
            pooled: half(shape.border),
            dpooled: half(0),
        }
    }

    fn weight(&self) -> Range<usize> {
        self.at.params..self.at.params + self.shape.conv.weight_len()
    }

    /// The `i`-th of bias, gamma and beta.
    fn channel_tensor(&self, i: usize) -> Range<usize> {
        let c = self.shape.conv.outputs;
        let start = self.weight().end + i * c;
        start..start + c
    }

    /// In training, with the statistics of the batches of all `ranks`, where there are any.
    pub(super) fn forward(
        &mut self,
        cpu: Cpu,
        x: &Planes,
        n: usize,
        params: &[f32],
        (train, ranks): (bool, Option<&dyn RankSums>),
    ) -> Result {
        for planes in [&mut self.y, &mut self.pick, &mut self.pooled, &mut self.dpooled] {
            planes.reserve(n);
        }
        self.weights.set(&params[self.weight()], &params[self.channel_tensor(0)]);
        self.stats.clear();
        for b in 0..blocks(n) {
            forward_block(cpu, &mut self.weights, x, &mut self.y, (b, n));
            if train {
                self.stats.add_block(cpu, &self.y, b, n);
            }
        }
        if let Some(ranks) = ranks.filter(|_| train) {
            self.stats.join(ranks)?;
        }
        self.set_norms(params, train);
        for b in 0..blocks(n) {
            norm_relu_pool(cpu, &self.norms, &self.y, &mut self.pooled, &mut self.pick, (b, n));
        }
        Ok(())
    }

    /// Normalise by this batch's statistics, or by the running ones.
    fn set_norms(&mut self, params: &[f32], train: bool) {
        let (gamma, beta) = (&params[self.channel_tensor(1)], &params[self.channel_tensor(2)]);
        let (mean, var) = params[self.at.buffers..].split_at(self.shape.conv.outputs);
        for (c, norm) in self.norms.iter_mut().enumerate() {
            let (mean, var) =
                if train { (self.stats.mean(c), self.stats.variance(c)) } else { (mean[c], var[c]) };
            *norm = ChannelNorm::new(mean, var, gamma[c], beta[c]);
        }
    }

    /// What is to be subtracted from the running statistics.
    pub(super) fn write_buffers(&self, params: &[f32], grads: &mut [f32]) {
        let c = self.shape.conv.outputs;
        for i in 0..c {
            let (mean, var) = (self.at.buffers + i, self.at.buffers + c + i);
            grads[mean] = MOMENTUM * (params[mean] - self.stats.mean(i));
            grads[var] = MOMENTUM * (params[var] - self.stats.unbiased_variance(i));
        }
    }

    pub(super) fn backward_norm(
        &mut self,
        cpu: Cpu,
        n: usize,
        grads: &mut [f32],
        ranks: Option<&dyn RankSums>,
    ) -> Result {
        self.sums.clear();
        for b in 0..blocks(n) {
            self.sums.add_block(cpu, &self.norms, &self.pick, &self.dpooled, (b, n));
        }
        let (gamma, beta) = (self.channel_tensor(1), self.channel_tensor(2));
        let (dgamma, dbeta) = grads[gamma.start..beta.end].split_at_mut(gamma.len());
        self.sums.write(&self.norms, dgamma, dbeta);
        ranks.map_or(Ok(()), |ranks| self.sums.join(ranks))
    }

    pub(super) fn backward_weight(&mut self, cpu: Cpu, x: &Planes, n: usize, grads: &mut [f32]) {
        self.dweights.clear();
        for b in 0..blocks(n) {
            let sums = (&mut self.sums, self.stats.count());
            apply_block(cpu, &self.norms, sums, (&self.pick, &self.dpooled), &mut self.y, (b, n));
            self.dweights.add_block(cpu, x, &self.y, (b, n));
        }
        self.dweights.write(cpu, &mut grads[self.weight()]);
        self.sums.write_bias(&mut grads[self.channel_tensor(0)]);
    }

    pub(super) fn backward_input(&mut self, cpu: Cpu, n: usize, params: &[f32], dx: &mut Planes) {
        let weight = self.weight();
        let Some(back) = &mut self.back else {
            panic!("a convolution block without input_gradient was asked for one");
        };
        back.set_transposed(&params[weight]);
        for b in 0..blocks(n) {
            forward_block(cpu, back, &self.y, dx, (b, n));
        }
    }
}
