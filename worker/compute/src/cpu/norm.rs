//! BatchNorm, ReLU and 2x2 max pooling as one operator in the blocked layout.
//!
//! ```text
//!  forward    y --block_stats--> mean, var    (of each block, right after the convolution wrote it)
//!             y --norm_relu_pool--> p = pool(relu(a*y + b)), pick = the y that each maximum came from
//!  backward   dp, pick --reduce--> Σg, Σg(pick - mean)   = gradients of beta and gamma
//!             dp, pick, y --apply--> dy, over y's memory
//! ```
//!
//! Of these only `y` and the pooled result are stored: the normalised and the rectified planes are four times as
//! large as the pooled one, and would cost more memory traffic than their arithmetic. With `pick` the backward pass
//! finds the maximum by equality; the first of equal values wins, as in PyTorch. The backward pass is in
//! [`crate::cpu::norm_grad`]. Dead lanes add nothing to the statistics, and their `p` and `dy` are zero.

use crate::cpu::blocked::{Block, Geometry, Planes, live_lanes, live_mask};
use crate::cpu::simd::{Cpu, Kernel, Lane, Simd};
use crate::{collective::RankSums, error::Result};

/// Added to the variance before the square root, as in PyTorch.
pub const EPSILON: f32 = 1e-5;
/// Weight of a batch's statistic in the running one, as in PyTorch.
pub const MOMENTUM: f32 = 0.1;

/// Mean and variance of each channel, collected block by block.
#[derive(Clone, Debug)]
pub struct ChannelStats {
    mean: Vec<f64>,
    /// Sum of squared distances from the mean.
    spread: Vec<f64>,
    count: f64,
}

impl ChannelStats {
    /// Empty statistics.
    pub fn new(channels: usize) -> Self {
        Self { mean: vec![0.0; channels], spread: vec![0.0; channels], count: 0.0 }
    }

    /// Resets the statistics.
    pub fn clear(&mut self) {
        self.mean.fill(0.0);
        self.spread.fill(0.0);
        self.count = 0.0;
    }

    /// Adds the statistics of blocks ([`block_stats`]) in their order (Chan et al.).
    pub fn add(&mut self, of: &[BlockStats]) {
        assert_eq!(of.len(), self.mean.len(), "statistics: channels");
        let Some(count) = of.first().map(|s| s.count) else { return };
        let (before, all) = (self.count, self.count + count);
        for (c, s) in of.iter().enumerate() {
            let apart = s.mean - self.mean[c];
            self.spread[c] += s.spread + apart * apart * before * count / all;
            self.mean[c] += apart * count / all;
        }
        self.count = all;
    }

    /// Combines them with those of all ranks' batches (SyncBatchNorm).
    pub fn join(&mut self, ranks: &dyn RankSums) -> Result {
        // In two rounds, mean first, for precision, as in `block_stats`.
        let mut sums: Vec<f64> = self.mean.iter().map(|m| m * self.count).collect();
        sums.push(self.count);
        ranks.sum(&mut sums)?;
        let count = sums.pop().unwrap_or(self.count);
        let mut spread = Vec::with_capacity(sums.len());
        for ((sum, own), apart) in sums.iter_mut().zip(&self.mean).zip(&self.spread) {
            *sum /= count.max(1.0);
            spread.push(apart + self.count * (own - *sum) * (own - *sum));
        }
        ranks.sum(&mut spread)?;
        (self.mean, self.spread, self.count) = (sums, spread, count);
        Ok(())
    }

    /// Mean of channel `c`.
    pub fn mean(&self, c: usize) -> f32 {
        self.mean[c] as f32
    }

    /// Biased variance of channel `c`, used to normalise the batch.
    pub fn variance(&self, c: usize) -> f32 {
        (self.spread[c] / self.count.max(1.0)) as f32
    }

    /// Unbiased variance of channel `c`, for the running variance.
    pub fn unbiased_variance(&self, c: usize) -> f32 {
        (self.spread[c] / (self.count - 1.0).max(1.0)) as f32
    }

    /// Values per channel.
    pub fn count(&self) -> f64 {
        self.count
    }
}

/// Statistics of one channel of one block.
#[derive(Clone, Copy, Debug, Default)]
pub struct BlockStats {
    mean: f64,
    /// Sum of squared distances from the mean.
    spread: f64,
    /// Values.
    count: f64,
}

/// The statistics of each channel in a block of a batch of `n`.
///
/// It uses two passes, mean first: a plain sum of squares loses the variance of a channel with a large mean.
pub fn block_stats(cpu: Cpu, y: &Block, n: usize, stats: &mut [BlockStats]) {
    let (g, live) = (y.geometry, live_lanes(n, y.number));
    assert_eq!(g.channels, stats.len(), "statistics: channels");
    let count = (live * g.height * g.width) as f64;
    cpu.run_live(live, Stats { y: &*y.lanes, g, mask: live_mask(live), count, stats });
}

struct Stats<'a> {
    y: &'a [Lane],
    g: Geometry,
    mask: Lane,
    count: f64,
    stats: &'a mut [BlockStats],
}

impl Kernel for Stats<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Self { y, g, mask, count, stats } = self;
        let mask = s.load(&mask);
        for c in 0..g.channels {
            let mut total = 0.0;
            for r in 0..g.height {
                // One vector of sums per row: short sums keep their precision.
                let mut sum = s.splat(0.0);
                for lane in &y[g.at(c, r)..][..g.width] {
                    sum = s.fma(s.load(lane), mask, sum);
                }
                total += f64::from(s.sum(sum));
            }
            let mean = total / count;
            let centre = s.splat(mean as f32);
            let mut spread = 0.0;
            for r in 0..g.height {
                let mut sum = s.splat(0.0);
                for lane in &y[g.at(c, r)..][..g.width] {
                    let d = s.mul(s.sub(s.load(lane), centre), mask);
                    sum = s.fma(d, d, sum);
                }
                spread += f64::from(s.sum(sum));
            }
            stats[c] = BlockStats { mean, spread, count };
        }
    }
}

/// A channel's normalisation, `z = scale * y + shift`, and the numbers for its gradients.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ChannelNorm {
    pub(crate) mean: f32,
    pub(crate) inv_std: f32,
    pub(crate) scale: f32,
    pub(crate) shift: f32,
}

impl ChannelNorm {
    /// For a channel with this mean and (biased) variance.
    pub fn new(mean: f32, variance: f32, gamma: f32, beta: f32) -> Self {
        let inv_std = 1.0 / (variance + EPSILON).sqrt();
        let scale = gamma * inv_std;
        Self { mean, inv_std, scale, shift: beta - mean * scale }
    }
}

/// A block of `p = max_pool2x2(relu(norm(y)))`, and `pick`, the values of `y` at the maxima.
///
/// `y`'s sides must be even; `p` and `pick` have half of them. `p` may have a border, `pick` has none.
pub fn norm_relu_pool(
    cpu: Cpu,
    norms: &[ChannelNorm],
    y: &Planes,
    (p, pick): (&mut Block, &mut Block),
    n: usize,
) {
    let (b, from, to, to_pick) = (p.number, y.geometry(), p.geometry, pick.geometry);
    assert_eq!(b, pick.number, "pooling: one block");
    check_pool(norms, from, to);
    check_pool(norms, from, to_pick);
    let mask = live_mask(live_lanes(n, b));
    let (p, pick) = (&mut *p.lanes, &mut *pick.lanes);
    cpu.run(Pool { norms, mask, y: y.block(b), from, p, to, pick, to_pick });
}

pub(crate) fn check_pool(norms: &[ChannelNorm], from: Geometry, to: Geometry) {
    assert!(from.height.is_multiple_of(2) && from.width.is_multiple_of(2), "pooling: odd side in {from:?}");
    let want = Geometry::new(norms.len(), from.height / 2, from.width / 2, to.pad);
    assert!(from.channels == norms.len() && to == want, "pooling: {from:?} to {to:?}");
}

struct Pool<'a> {
    norms: &'a [ChannelNorm],
    mask: Lane,
    y: &'a [Lane],
    from: Geometry,
    p: &'a mut [Lane],
    to: Geometry,
    pick: &'a mut [Lane],
    to_pick: Geometry,
}

impl Kernel for Pool<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Self { norms, mask, y, from, p, to, pick, to_pick } = self;
        let zero = s.splat(0.0);
        let live = s.gt(s.load(&mask), zero);
        for (c, norm) in norms.iter().enumerate() {
            let (scale, shift) = (s.splat(norm.scale), s.splat(norm.shift));
            for r in 0..to.height {
                let above = &y[from.at(c, 2 * r)..][..from.width];
                let below = &y[from.at(c, 2 * r + 1)..][..from.width];
                let p = &mut p[to.at(c, r)..][..to.width];
                let pick = &mut pick[to_pick.at(c, r)..][..to.width];
                for x in 0..to.width {
                    let mut best = s.load(&above[2 * x]);
                    let mut z = s.fma(scale, best, shift);
                    for other in [&above[2 * x + 1], &below[2 * x], &below[2 * x + 1]] {
                        let v = s.load(other);
                        let zv = s.fma(scale, v, shift);
                        let more = s.gt(zv, z);
                        z = s.select(more, zv, z);
                        best = s.select(more, v, best);
                    }
                    // `0 > z`, not `z > 0`: a NaN passes through.
                    let z = s.select(s.gt(zero, z), zero, z);
                    s.store(&mut p[x], s.select(live, z, zero));
                    s.store(&mut pick[x], best);
                }
            }
        }
    }
}
