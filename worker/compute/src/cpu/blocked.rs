//! The blocked layout: images with the batch innermost, sixteen samples to a vector.
//!
//! ```text
//!  [block][channel][pad + height + pad][pad + width + pad][16 samples]
//! ```
//!
//! Neighbouring samples need the same arithmetic with the same weights, so a convolution in this layout is only
//! broadcast-multiply-add on whole vectors: no im2col, no shuffles, no special case at the edge of a row. A border
//! of zeros around each plane replaces tests for the image's edge. Operators write only the inside, so the border
//! is zeroed once, at allocation.
//!
//! A batch that is not a multiple of sixteen leaves dead lanes in the last block. Their inputs and pooled values
//! are zero, as are the gradients that contribute to a weight's. Elsewhere they may hold values of another batch,
//! which no operator uses. If eight or more lanes are dead, the costly operators skip that half.

use crate::cpu::{
    simd::{LANES, Lane},
    threads::Threads,
};

/// Shape of one block of planes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// Number of channels.
    pub channels: usize,
    /// Rows of the inside.
    pub height: usize,
    /// Columns of the inside.
    pub width: usize,
    /// Rows and columns of zeros on each side.
    pub pad: usize,
}

impl Geometry {
    /// `channels` planes of `height` x `width` with a border of `pad` zeros.
    pub fn new(channels: usize, height: usize, width: usize, pad: usize) -> Self {
        Self { channels, height, width, pad }
    }

    /// Lanes from one row to the next.
    #[inline(always)]
    pub fn row(&self) -> usize {
        self.width + 2 * self.pad
    }

    /// Lanes of one channel.
    #[inline(always)]
    pub fn plane(&self) -> usize {
        (self.height + 2 * self.pad) * self.row()
    }

    /// Lanes of one block.
    #[inline(always)]
    pub fn block(&self) -> usize {
        self.channels * self.plane()
    }

    /// Place of the first inner lane of row `y` of channel `c` in a block.
    #[inline(always)]
    pub fn at(&self, c: usize, y: usize) -> usize {
        c * self.plane() + (y + self.pad) * self.row() + self.pad
    }

    /// Values of one sample, without borders.
    pub fn sample_len(&self) -> usize {
        self.channels * self.height * self.width
    }
}

/// Blocks needed for `n` samples.
pub fn blocks(n: usize) -> usize {
    n.div_ceil(LANES)
}

/// Samples in block `b` of a batch of `n`.
pub fn live_lanes(n: usize, b: usize) -> usize {
    n.saturating_sub(b * LANES).min(LANES)
}

/// A lane vector that is one where a sample is and zero in the dead lanes.
pub(crate) fn live_mask(live: usize) -> Lane {
    let mut m = Lane::ZERO;
    m.0[..live].fill(1.0);
    m
}

/// A mutable block of planes. The border must stay zero.
#[derive(Debug)]
pub struct Block<'a> {
    /// Its index.
    pub number: usize,
    /// Its shape.
    pub geometry: Geometry,
    /// `[channel][row][column]`, with borders.
    pub lanes: &'a mut [Lane],
}

impl Block<'_> {
    fn pack(&mut self, inputs: &[f32], n: usize) {
        let (g, live) = (self.geometry, live_lanes(n, self.number));
        let len = g.sample_len();
        let inputs = &inputs[self.number * LANES * len..][..live * len];
        for c in 0..g.channels {
            for y in 0..g.height {
                let row = &mut self.lanes[g.at(c, y)..][..g.width];
                let from = (c * g.height + y) * g.width;
                for (x, lane) in row.iter_mut().enumerate() {
                    let mut v = [0.0; LANES];
                    for s in 0..live {
                        v[s] = inputs[s * len + from + x];
                    }
                    lane.0 = v;
                }
            }
        }
    }
}

/// A batch of images in the blocked layout.
#[derive(Clone, Debug)]
pub struct Planes {
    geometry: Geometry,
    data: Vec<Lane>,
}

impl Planes {
    /// No samples yet; [`Planes::reserve`] allocates.
    pub fn new(geometry: Geometry) -> Self {
        Self { geometry, data: Vec::new() }
    }

    /// Allocates space for `n` samples and keeps the present ones. New lanes are zero.
    pub fn reserve(&mut self, n: usize) {
        let len = blocks(n) * self.geometry.block();
        if len > self.data.len() {
            self.data.resize(len, Lane::ZERO);
        }
    }

    /// Shape of a block.
    pub fn geometry(&self) -> Geometry {
        self.geometry
    }

    /// Block `b`: `[channel][row][column]` with borders. Panics if it is not reserved.
    pub fn block(&self, b: usize) -> &[Lane] {
        let len = self.geometry.block();
        &self.data[b * len..(b + 1) * len]
    }

    /// The mutable blocks of a batch of `n`. Panics if they are not reserved.
    pub fn blocks_mut(&mut self, n: usize) -> impl Iterator<Item = Block<'_>> {
        let (geometry, len) = (self.geometry, self.geometry.block());
        let all = self.data[..blocks(n) * len].chunks_exact_mut(len).enumerate();
        all.map(move |(number, lanes)| Block { number, geometry, lanes })
    }

    /// All reserved blocks, concatenated.
    pub fn lanes(&self) -> &[Lane] {
        &self.data
    }

    /// Copies all samples of `inputs` (`[n, channels, height, width]`), and allocates if needed; dead lanes become
    /// zero.
    pub fn pack(&mut self, threads: &Threads, inputs: &[f32], n: usize) {
        let len = self.geometry.sample_len();
        assert_eq!(inputs.len(), n * len, "pack: inputs must be [n, {len}]");
        self.reserve(n);
        threads.each(self.blocks_mut(n), |mut block| block.pack(inputs, n));
    }

    /// The first `n` samples, as `[n, channels, height, width]`. It allocates, for tests.
    pub fn unpack(&self, n: usize) -> Vec<f32> {
        let g = self.geometry;
        let mut out = Vec::with_capacity(n * g.sample_len());
        for s in 0..n {
            let block = self.block(s / LANES);
            for c in 0..g.channels {
                for y in 0..g.height {
                    out.extend(block[g.at(c, y)..][..g.width].iter().map(|lane| lane.0[s % LANES]));
                }
            }
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::simd::Cpu;

    #[test]
    fn packing_round_trips_and_keeps_zero_border() {
        let g = Geometry::new(2, 3, 4, 1);
        for n in [1, 15, 16, 17, 40] {
            let inputs: Vec<f32> = (0..n * g.sample_len()).map(|i| i as f32 + 1.0).collect();
            let mut p = Planes::new(g);
            p.pack(&Threads::one(Cpu::detect()), &inputs, n);
            assert_eq!(p.unpack(n), inputs);
            let total: f64 = p.lanes().iter().flat_map(|l| l.0).map(f64::from).sum();
            assert_eq!(total, inputs.iter().copied().map(f64::from).sum::<f64>(), "stray values at n={n}");
        }
    }
}
