//! Gradient of a convolution's weight in the blocked layout.
//!
//! `dw[o][i][ky][kx]` is a sum over samples and pixels of `dy[o] * x[i]`, shifted by the tap. Samples are
//! lanes, so each weight has a vector of sixteen partial sums; they are added up at the end of the step. A
//! tile of 4 output channels x up to 5 taps of one kernel row stays in registers while a strip of rows passes.
//! The strip is chosen such that the gradient rows (4 channels) and the input rows (1 channel) stay in the
//! first-level cache for all kernel rows.

use crate::cpu::blocked::{Geometry, Planes, live_lanes};
use crate::cpu::conv::CHANNEL_TILE;
use crate::cpu::simd::{Cpu, Kernel, Lane, Simd};
use crate::shape::ConvShape;

/// Rows of the gradient that are worked on together.
const STRIP: usize = 5;

/// Partial sums of a convolution's weight gradient: `[output][input][row][column]` vectors.
#[derive(Clone, Debug)]
pub struct ConvGradient {
    shape: ConvShape,
    sums: Vec<Lane>,
}

impl ConvGradient {
    /// Zero sums for weights of this shape.
    pub fn new(shape: ConvShape) -> Self {
        let padded = shape.outputs.next_multiple_of(CHANNEL_TILE);
        let len = padded * shape.inputs * shape.kernel * shape.kernel;
        Self { shape, sums: vec![Lane::ZERO; len] }
    }

    /// Forgets all sums.
    pub fn clear(&mut self) {
        self.sums.fill(Lane::ZERO);
    }

    /// Adds block `b` of a batch of `n`. `x` is the convolution's input and `dy` the gradient of its output; where `dy`'s dead
    /// lanes are zero, they add nothing.
    pub fn add_block(&mut self, cpu: Cpu, x: &Planes, dy: &Planes, (b, n): (usize, usize)) {
        let (s, from, to) = (self.shape, x.geometry(), dy.geometry());
        assert_eq!(from.channels, s.inputs, "conv gradient: channels of the input");
        assert!(from.pad >= s.pad, "conv gradient: the input's border is less than the padding");
        assert_eq!(s.output(from, to.pad), to, "conv gradient: shape of the output's gradient");
        cpu.run_tiles(
            live_lanes(n, b),
            WeightGrad { shape: s, sums: &mut self.sums, x: x.block(b), from, dy: dy.block(b), to },
        );
    }

    /// Writes the gradient, `[outputs, inputs, kernel, kernel]`.
    pub fn write(&self, cpu: Cpu, dw: &mut [f32]) {
        assert_eq!(dw.len(), self.shape.weight_len(), "conv gradient: weight of {:?}", self.shape);
        cpu.run(LaneSums { sums: &self.sums[..dw.len()], out: dw });
    }
}

/// Adds up the lanes of each vector.
pub(crate) struct LaneSums<'a> {
    pub(crate) sums: &'a [Lane],
    pub(crate) out: &'a mut [f32],
}

impl Kernel for LaneSums<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for (o, v) in self.out.iter_mut().zip(self.sums) {
            *o = s.sum(s.load(v));
        }
    }
}

struct WeightGrad<'a> {
    shape: ConvShape,
    sums: &'a mut [Lane],
    x: &'a [Lane],
    from: Geometry,
    dy: &'a [Lane],
    to: Geometry,
}

impl Kernel for &mut WeightGrad<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let k = self.shape.kernel;
        let mut top = 0;
        while top < self.to.height {
            let rows = STRIP.min(self.to.height - top);
            let mut o = 0;
            while o < self.shape.outputs {
                let channels = CHANNEL_TILE.min(self.shape.outputs - o);
                for i in 0..self.shape.inputs {
                    for ky in 0..k {
                        let mut kx = 0;
                        while kx < k {
                            let at = Place { o, channels, i, ky, kx, top, rows };
                            kx += match k - kx {
                                5.. => self.tile::<S, 5>(s, at),
                                3.. => self.tile::<S, 3>(s, at),
                                _ => self.tile::<S, 1>(s, at),
                            };
                        }
                    }
                }
                o += CHANNEL_TILE;
            }
            top += rows;
        }
    }
}

/// Which weights a tile sums up, over which rows.
#[derive(Clone, Copy)]
struct Place {
    o: usize,
    channels: usize,
    i: usize,
    ky: usize,
    kx: usize,
    top: usize,
    rows: usize,
}

impl WeightGrad<'_> {
    /// `T` taps from `at.kx` for the channels from `at.o`. Returns `T`.
    #[inline(always)]
    fn tile<S: Simd, const T: usize>(&mut self, s: S, at: Place) -> usize {
        let (shape, from, to) = (self.shape, self.from, self.to);
        let width = to.width;
        let mut acc = [[s.splat(0.0); T]; CHANNEL_TILE];
        for y in at.top..at.top + at.rows {
            // Channels past the last one repeat it; their sums are not kept.
            let dy = |c: usize| &self.dy[to.at(at.o + c.min(at.channels - 1), y)..][..width];
            let dy: [&[Lane]; CHANNEL_TILE] = [dy(0), dy(1), dy(2), dy(3)];
            let first = at.i * from.plane() + (y + at.ky + from.pad - shape.pad) * from.row() + from.pad
                - shape.pad
                + at.kx;
            let row = &self.x[first..][..width + T - 1];
            for x in 0..width {
                let window = &row[x..x + T];
                let mut g = [s.splat(0.0); CHANNEL_TILE];
                for c in 0..CHANNEL_TILE {
                    g[c] = s.load(&dy[c][x]);
                }
                for t in 0..T {
                    let v = s.load(&window[t]);
                    for c in 0..CHANNEL_TILE {
                        acc[c][t] = s.fma(g[c], v, acc[c][t]);
                    }
                }
            }
        }
        for c in 0..at.channels {
            let from = (((at.o + c) * shape.inputs + at.i) * shape.kernel + at.ky) * shape.kernel + at.kx;
            let sums = &mut self.sums[from..from + T];
            for t in 0..T {
                let v = s.add(s.load(&sums[t]), acc[c][t]);
                s.store(&mut sums[t], v);
            }
        }
        T
    }
}
