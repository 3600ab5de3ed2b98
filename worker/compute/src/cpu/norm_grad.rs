//! The backward pass of [`crate::cpu::norm`]: the gradients of BatchNorm, ReLU and 2x2 max pooling as one operator.
//!
//! It makes two passes over the batch, because a norm's gradient depends on two sums over all samples. The first
//! computes these sums ([`NormSums`], from the pooled planes alone); then [`NormSums::apply`] turns each
//! convolution output into its gradient.

use crate::cpu::blocked::{Geometry, Planes, blocks, live_lanes, live_mask};
use crate::cpu::norm::{ChannelNorm, check_pool};
use crate::cpu::simd::{Kernel, LANES, Lane, Simd};
use crate::cpu::threads::Threads;
use crate::{collective::RankSums, error::Result};
use std::ops::Range;

/// Per-channel sums over the whole batch, which precede the gradients.
#[derive(Clone, Debug)]
pub struct NormSums {
    /// Σ g, the gradient of beta.
    g: Vec<f64>,
    /// Σ g (y - mean).
    gy: Vec<f64>,
    /// Σ dy, the gradient of the convolution's bias before the norm.
    dy: Vec<f64>,
    /// Two sums per channel and block, until they are added in block order.
    parts: Vec<[f64; 2]>,
}

/// Memory for the sums of this many blocks.
fn parts(
    of: &mut Vec<[f64; 2]>,
    blocks: usize,
    channels: usize,
) -> impl Iterator<Item = &mut [[f64; 2]]> + Send {
    of.clear();
    of.resize(blocks * channels, [0.0; 2]);
    of.chunks_exact_mut(channels)
}

impl NormSums {
    /// All zero.
    pub fn new(channels: usize) -> Self {
        let zeros = vec![0.0; channels];
        Self { g: zeros.clone(), gy: zeros.clone(), dy: zeros, parts: Vec::new() }
    }

    /// All zero again.
    pub fn clear(&mut self) {
        for v in [&mut self.g, &mut self.gy, &mut self.dy] {
            v.fill(0.0);
        }
    }

    /// Adds a batch of `n`: `dp` is the gradient of the pooled result, zero in the dead lanes, without border.
    pub fn add(
        &mut self,
        threads: &Threads,
        norms: &[ChannelNorm],
        (pick, dp): (&Planes, &Planes),
        n: usize,
    ) {
        assert_eq!(pick.geometry(), dp.geometry(), "norm gradient: shapes");
        assert_eq!(norms.len(), self.g.len(), "norm gradient: channels");
        let g = pick.geometry();
        let parts = parts(&mut self.parts, blocks(n), norms.len());
        threads.each(parts.enumerate(), |(b, sums)| {
            let part = Reduce { norms, pick: pick.block(b), dp: dp.block(b), g, sums };
            threads.cpu().run_live(live_lanes(n, b), part);
        });
        for block in self.parts.chunks_exact(norms.len()) {
            for (c, [g, gy]) in block.iter().enumerate() {
                self.g[c] += g;
                self.gy[c] += gy;
            }
        }
    }

    /// Overwrites some blocks of `y`, of a batch of `n`, by their gradient. All of the batch must have been added
    /// before. `count` is the number of values per channel ([`count`](crate::cpu::norm::ChannelStats::count)).
    pub fn apply(
        &mut self,
        threads: &Threads,
        norms: &[ChannelNorm],
        count: f64,
        (pick, dp): (&Planes, &Planes),
        y: &mut Planes,
        (some, n): (Range<usize>, usize),
    ) {
        let (g, half) = (y.geometry(), pick.geometry());
        check_pool(norms, g, half);
        assert_eq!(half, dp.geometry(), "norm gradient: shapes");
        assert_eq!(half.pad, 0, "norm gradient: the pooled planes have no border");
        let sums = (&self.g[..], &self.gy[..]);
        let parts = parts(&mut self.parts, some.len(), norms.len());
        threads.each(y.blocks_mut(n).skip(some.start).zip(parts), |(y, totals)| {
            let mask = live_mask(live_lanes(n, y.number));
            let (pick, dp) = (pick.block(y.number), dp.block(y.number));
            let part = Apply { norms, mask, count, sums, totals, pick, dp, half, y: y.lanes, g };
            threads.cpu().run_tiles(LANES, part);
        });
        for block in self.parts.chunks_exact(norms.len()) {
            block.iter().zip(&mut self.dy).for_each(|([total, _], dy)| *dy += total);
        }
    }

    /// Sums the values for [`NormSums::apply`] over all ranks' batches (SyncBatchNorm). The values for
    /// [`Self::write`] must stay this rank's own, because gradients are averaged over the ranks: call that before.
    pub fn join(&mut self, ranks: &dyn RankSums) -> Result {
        let mut sums = [self.g.as_slice(), self.gy.as_slice()].concat();
        ranks.sum(&mut sums)?;
        let (g, gy) = sums.split_at(self.g.len());
        self.g.copy_from_slice(g);
        self.gy.copy_from_slice(gy);
        Ok(())
    }

    /// Writes the gradients of gamma and beta.
    pub fn write(&self, norms: &[ChannelNorm], dgamma: &mut [f32], dbeta: &mut [f32]) {
        for (c, norm) in norms.iter().enumerate() {
            dgamma[c] = (self.gy[c] * f64::from(norm.inv_std)) as f32;
            dbeta[c] = self.g[c] as f32;
        }
    }

    /// Writes the gradient of the bias of the convolution before the norm; valid after [`NormSums::apply`] on all
    /// blocks. (In exact arithmetic it is zero, because the norm subtracts the mean.)
    pub fn write_bias(&self, dbias: &mut [f32]) {
        for (d, v) in dbias.iter_mut().zip(&self.dy) {
            *d = *v as f32;
        }
    }
}

struct Reduce<'a> {
    norms: &'a [ChannelNorm],
    pick: &'a [Lane],
    dp: &'a [Lane],
    g: Geometry,
    /// Σ g and Σ g (y - mean) of each channel.
    sums: &'a mut [[f64; 2]],
}

impl Kernel for Reduce<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Self { norms, pick, dp, g, sums } = self;
        let zero = s.splat(0.0);
        for (c, norm) in norms.iter().enumerate() {
            let (scale, shift, mean) = (s.splat(norm.scale), s.splat(norm.shift), s.splat(norm.mean));
            let (mut sum, mut sum_y) = (zero, zero);
            let place = g.at(c, 0)..g.at(c, 0) + g.height * g.width;
            for (y, d) in pick[place.clone()].iter().zip(&dp[place]) {
                let y = s.load(y);
                let grad = s.select(s.gt(s.fma(scale, y, shift), zero), s.load(d), zero);
                sum = s.add(sum, grad);
                sum_y = s.fma(grad, s.sub(y, mean), sum_y);
            }
            sums[c] = [f64::from(s.sum(sum)), f64::from(s.sum(sum_y))];
        }
    }
}

struct Apply<'a> {
    norms: &'a [ChannelNorm],
    mask: Lane,
    count: f64,
    /// Σ g and Σ g (y - mean).
    sums: (&'a [f64], &'a [f64]),
    /// For this block, with Σ dy first.
    totals: &'a mut [[f64; 2]],
    pick: &'a [Lane],
    dp: &'a [Lane],
    half: Geometry,
    y: &'a mut [Lane],
    g: Geometry,
}

impl Kernel for Apply<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Self { norms, mask, count, sums: (sum_g, sum_gy), totals, pick, dp, half, y, g } = self;
        for (c, norm) in norms.iter().enumerate() {
            // dy = scale * (g - Σg/count - (y - mean) * inv_std² * Σg(y - mean)/count)
            let inv = f64::from(norm.inv_std);
            let constant = (-f64::from(norm.scale) * sum_g[c] / count) as f32;
            let slope = (-f64::from(norm.scale) * inv * inv * sum_gy[c] / count) as f32;
            let mut total = 0.0;
            for r in 0..half.height {
                let pick = &pick[half.at(c, r)..][..half.width];
                let dp = &dp[half.at(c, r)..][..half.width];
                let (above, below) = y[g.at(c, 2 * r)..][..g.row() + g.width].split_at_mut(g.row());
                for s in s.parts() {
                    let zero = s.splat(0.0);
                    let live = s.gt(s.load(&mask), zero);
                    let (scale, shift, mean) = (s.splat(norm.scale), s.splat(norm.shift), s.splat(norm.mean));
                    let (constant, slope) = (s.splat(constant), s.splat(slope));
                    let mut sum = zero;
                    for x in 0..half.width {
                        let best = s.load(&pick[x]);
                        let passes = s.gt(s.fma(scale, best, shift), zero);
                        let mut rest = s.select(passes, s.load(&dp[x]), zero);
                        let (a, b) = (&mut above[2 * x..2 * x + 2], &mut below[2 * x..2 * x + 2]);
                        let [a0, a1] = a else { return };
                        let [b0, b1] = b else { return };
                        for lane in [a0, a1, b0, b1] {
                            let v = s.load(lane);
                            let here = s.eq(v, best);
                            let grad = s.select(here, rest, zero);
                            rest = s.select(here, zero, rest);
                            let d = s.fma(scale, grad, s.fma(slope, s.sub(v, mean), constant));
                            let d = s.select(live, d, zero);
                            sum = s.add(sum, d);
                            s.store(lane, d);
                        }
                    }
                    total += f64::from(s.sum(sum));
                }
            }
            totals[c][0] = total;
        }
    }
}
