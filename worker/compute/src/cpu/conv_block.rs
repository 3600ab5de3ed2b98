//! Convolution, BatchNorm, ReLU and 2x2 max pooling with their workspaces, one block of samples after another.

use crate::{
    collective::RankSums,
    cpu::{
        blocked::{Geometry, Planes, blocks},
        conv::{ConvWeights, forward_block},
        conv_grad::ConvGradient,
        norm::{BlockStats, ChannelNorm, ChannelStats, MOMENTUM, block_stats, norm_relu_pool},
        norm_grad::NormSums,
        threads::Threads,
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
    /// Computes the input's gradient from the output's.
    back: Option<ConvWeights>,
    stats: ChannelStats,
    of_blocks: Vec<BlockStats>,
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
        // If the input's gradient is needed, the output's gradient is convolved, which requires a border.
        let back = shape.input_gradient.then(|| ConvWeights::new(conv.transposed()));
        let border = back.as_ref().map_or(0, |b| b.shape().pad);
        Self {
            shape,
            at,
            weights: ConvWeights::new(conv),
            back,
            stats: ChannelStats::new(c),
            of_blocks: Vec::new(),
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

    /// In training it uses the batch statistics of all `ranks`, if any.
    pub(super) fn forward(
        &mut self,
        threads: &Threads,
        x: &Planes,
        n: usize,
        params: &[f32],
        (train, ranks): (bool, Option<&dyn RankSums>),
    ) -> Result {
        for planes in [&mut self.y, &mut self.pick, &mut self.pooled, &mut self.dpooled] {
            planes.reserve(n);
        }
        self.weights.set(&params[self.weight()], &params[self.channel_tensor(0)]);
        self.weights.lay(x.geometry());
        self.stats.clear();
        let (cpu, weights, channels) = (threads.cpu(), &self.weights, self.norms.len());
        self.of_blocks.resize(blocks(n) * channels, BlockStats::default());
        let of_blocks = self.of_blocks.chunks_exact_mut(channels);
        threads.each(self.y.blocks_mut(n).zip(of_blocks), |(mut y, stats)| {
            forward_block(cpu, weights, x, &mut y, n);
            if train {
                block_stats(cpu, &y, n, stats);
            }
        });
        if train {
            self.of_blocks.chunks_exact(channels).for_each(|stats| self.stats.add(stats));
        }
        if let Some(ranks) = ranks.filter(|_| train) {
            self.stats.join(ranks)?;
        }
        self.set_norms(params, train);
        let (norms, y) = (&self.norms, &self.y);
        threads.each(self.pooled.blocks_mut(n).zip(self.pick.blocks_mut(n)), |(mut p, mut pick)| {
            norm_relu_pool(cpu, norms, y, (&mut p, &mut pick), n);
        });
        Ok(())
    }

    /// Normalises by this batch's statistics, or by the running ones.
    fn set_norms(&mut self, params: &[f32], train: bool) {
        let (gamma, beta) = (&params[self.channel_tensor(1)], &params[self.channel_tensor(2)]);
        let (mean, var) = params[self.at.buffers..].split_at(self.shape.conv.outputs);
        for (c, norm) in self.norms.iter_mut().enumerate() {
            let (mean, var) =
                if train { (self.stats.mean(c), self.stats.variance(c)) } else { (mean[c], var[c]) };
            *norm = ChannelNorm::new(mean, var, gamma[c], beta[c]);
        }
    }

    /// Writes the amount to subtract from the running statistics.
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
        threads: &Threads,
        n: usize,
        grads: &mut [f32],
        ranks: Option<&dyn RankSums>,
    ) -> Result {
        self.sums.clear();
        self.sums.add(threads, &self.norms, (&self.pick, &self.dpooled), n);
        let (gamma, beta) = (self.channel_tensor(1), self.channel_tensor(2));
        let (dgamma, dbeta) = grads[gamma.start..beta.end].split_at_mut(gamma.len());
        self.sums.write(&self.norms, dgamma, dbeta);
        ranks.map_or(Ok(()), |ranks| self.sums.join(ranks))
    }

    pub(super) fn backward_weight(&mut self, threads: &Threads, x: &Planes, n: usize, grads: &mut [f32]) {
        self.dweights.clear();
        let (all, count) = (blocks(n), self.stats.count());
        // On one thread, block by block: written values are still in the caches.
        let together = if threads.count() == 1 { 1 } else { all };
        for from in (0..all).step_by(together.max(1)) {
            let some = from..(from + together).min(all);
            let picked = (&self.pick, &self.dpooled);
            self.sums.apply(threads, &self.norms, count, picked, &mut self.y, (some.clone(), n));
            self.dweights.add(threads, x, &self.y, some, n);
        }
        self.dweights.write(threads.cpu(), &mut grads[self.weight()]);
        self.sums.write_bias(&mut grads[self.channel_tensor(0)]);
    }

    pub(super) fn backward_input(&mut self, threads: &Threads, n: usize, params: &[f32], dx: &mut Planes) {
        let weight = self.weight();
        let Some(back) = &mut self.back else {
            panic!("a convolution block without input_gradient was asked for one");
        };
        back.set_transposed(&params[weight]);
        back.lay(self.y.geometry());
        let (back, dy) = (&*back, &self.y);
        threads.each(dx.blocks_mut(n), |mut dx| forward_block(threads.cpu(), back, dy, &mut dx, n));
    }
}
