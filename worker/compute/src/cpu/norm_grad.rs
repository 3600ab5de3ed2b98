//! The backward pass of [`crate::cpu::norm`]: the gradients of BatchNorm, ReLU and 2x2 max pooling as one operator.
//!
//! It goes over the batch twice: a norm's gradient depends on two sums over all samples ([`NormSums`], from the
//! pooled planes alone), and only then can [`apply_block`] turn each convolution output into its gradient.

use crate::cpu::blocked::{Geometry, Planes, live_lanes, live_mask};
use crate::cpu::norm::{ChannelNorm, check_pool};
use crate::cpu::simd::{Cpu, Kernel, LANES, Lane, Simd};
use crate::{collective::RankSums, error::Result};

/// Sums that the backward pass needs of the whole batch before it can change any value, for each channel.
#[derive(Clone, Debug)]
pub struct NormSums {
    /// Σ g, the gradient of beta.
    g: Vec<f64>,
    /// Σ g (y - mean).
    gy: Vec<f64>,
    /// Σ dy, the gradient of the convolution's bias before the norm.
    dy: Vec<f64>,
}

impl NormSums {
    /// All zero.
    pub fn new(channels: usize) -> Self {
        Self { g: vec![0.0; channels], gy: vec![0.0; channels], dy: vec![0.0; channels] }
    }

    /// All zero again.
    pub fn clear(&mut self) {
        for v in [&mut self.g, &mut self.gy, &mut self.dy] {
            v.fill(0.0);
        }
    }

    /// Adds block `b` of a batch of `n`: `dp` is the gradient of the pooled result, zero in the dead lanes, without border.
    pub fn add_block(
        &mut self,
        cpu: Cpu,
        norms: &[ChannelNorm],
        pick: &Planes,
        dp: &Planes,
        (b, n): (usize, usize),
    ) {
        assert_eq!(pick.geometry(), dp.geometry(), "norm gradient: shapes");
        assert_eq!(norms.len(), self.g.len(), "norm gradient: channels");
        let g = pick.geometry();
        cpu.run_live(live_lanes(n, b), Reduce { norms, pick: pick.block(b), dp: dp.block(b), g, sums: self });
    }

    /// Makes those that [`apply_block`] needs the sums over all ranks' batches (SyncBatchNorm). What [`Self::write`] writes is the
    /// rank's own, since gradients are averaged over the ranks: call it before.
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

    /// Writes the gradient of the bias of the convolution before the norm; valid after [`apply_block`] on all
    /// blocks. (In exact arithmetic it is zero, since the norm takes the mean away.)
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
    sums: &'a mut NormSums,
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
            sums.g[c] += f64::from(s.sum(sum));
            sums.gy[c] += f64::from(s.sum(sum_y));
        }
    }
}

/// Block `b` of the gradient of `y`, written over `y`. `sums` must hold all blocks; `count` is the number of
/// values a channel ([`count`](crate::cpu::norm::ChannelStats::count)).
pub fn apply_block(
    cpu: Cpu,
    norms: &[ChannelNorm],
    (sums, count): (&mut NormSums, f64),
    (pick, dp): (&Planes, &Planes),
    y: &mut Planes,
    (b, n): (usize, usize),
) {
    let (g, half) = (y.geometry(), pick.geometry());
    check_pool(norms, g, half);
    assert_eq!(half, dp.geometry(), "norm gradient: shapes");
    assert_eq!(half.pad, 0, "norm gradient: the pooled planes have no border");
    let mask = live_mask(live_lanes(n, b));
    let (pick, dp) = (pick.block(b), dp.block(b));
    cpu.run_tiles(LANES, Apply { norms, mask, count, sums, pick, dp, half, y: y.block_mut(b), g });
}

struct Apply<'a> {
    norms: &'a [ChannelNorm],
    mask: Lane,
    count: f64,
    sums: &'a mut NormSums,
    pick: &'a [Lane],
    dp: &'a [Lane],
    half: Geometry,
    y: &'a mut [Lane],
    g: Geometry,
}

impl Kernel for Apply<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Self { norms, mask, count, sums, pick, dp, half, y, g } = self;
        for (c, norm) in norms.iter().enumerate() {
            // dy = scale * (g - Σg/count - (y - mean) * inv_std² * Σg(y - mean)/count)
            let inv = f64::from(norm.inv_std);
            let constant = (-f64::from(norm.scale) * sums.g[c] / count) as f32;
            let slope = (-f64::from(norm.scale) * inv * inv * sums.gy[c] / count) as f32;
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
            sums.dy[c] += total;
        }
    }
}
