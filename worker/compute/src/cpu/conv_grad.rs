//! Gradient of a convolution's weight in the blocked layout.
//!
//! `dw[o][i][ky][kx]` is a sum over samples and pixels of `dy[o] * x[i]`, shifted by the tap. Samples are lanes, so
//! each weight has a vector of sixteen partial sums, which are summed at the end of the step. A tile of output
//! channels x taps of one kernel row stays in registers, while the loop passes a strip of rows: 4 x 5 with 32
//! vector registers, otherwise 2 x 5 or, for small kernels, 4 x 3. The strip is small enough that the gradient rows
//! (4 channels) and the input rows (1 channel) stay in the first-level cache for all kernel rows and all parts of
//! the lanes.

use crate::cpu::blocked::{Geometry, Planes, live_lanes};
use crate::cpu::simd::{Cpu, Kernel, Lane, Simd};
use crate::cpu::threads::Threads;
use crate::shape::ConvShape;
use std::ops::Range;

/// Channels of the largest tile.
const CHANNELS: usize = 4;
/// Rows of the gradient per strip.
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
        Self { shape, sums: vec![Lane::ZERO; shape.weight_len()] }
    }

    /// Resets all sums.
    pub fn clear(&mut self) {
        self.sums.fill(Lane::ZERO);
    }

    /// Adds some blocks of a batch of `n`; each thread computes some output channels. `x` is the convolution's
    /// input and `dy` its output's gradient, which must be zero in dead lanes to add nothing there.
    pub fn add(&mut self, threads: &Threads, x: &Planes, dy: &Planes, some: Range<usize>, n: usize) {
        let (s, from, to) = (self.shape, x.geometry(), dy.geometry());
        assert_eq!(from.channels, s.inputs, "conv gradient: channels of the input");
        assert!(from.pad >= s.pad, "conv gradient: the input's border is less than the padding");
        assert_eq!(s.output(from, to.pad), to, "conv gradient: shape of the output's gradient");
        let channels = s.outputs.div_ceil(CHANNELS).div_ceil(threads.count()) * CHANNELS;
        let parts = self.sums.chunks_mut(channels * s.inputs * s.kernel * s.kernel).enumerate();
        threads.each(parts, |(i, sums)| {
            for b in some.clone() {
                let first = i * channels;
                let part = WeightGrad { shape: s, first, sums, x: x.block(b), from, dy: dy.block(b), to };
                threads.cpu().run_tiles(live_lanes(n, b), part);
            }
        });
    }

    /// Writes the gradient, `[outputs, inputs, kernel, kernel]`.
    pub fn write(&self, cpu: Cpu, dw: &mut [f32]) {
        assert_eq!(dw.len(), self.shape.weight_len(), "conv gradient: weight of {:?}", self.shape);
        cpu.run(LaneSums { sums: &self.sums, out: dw });
    }
}

/// Sums the lanes of each vector.
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
    /// The first output channel of `sums`.
    first: usize,
    sums: &'a mut [Lane],
    x: &'a [Lane],
    from: Geometry,
    dy: &'a [Lane],
    to: Geometry,
}

impl Kernel for WeightGrad<'_> {
    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        match self.shape.kernel {
            _ if S::REGISTERS >= 32 => self.strips::<S, 4>(s),
            ..=3 => self.strips::<S, 4>(s),
            _ => self.strips::<S, 2>(s),
        }
    }
}

/// A tile's weights, and its rows.
#[derive(Clone, Copy)]
struct Place {
    o: usize,
    i: usize,
    ky: usize,
    kx: usize,
    top: usize,
    rows: usize,
}

impl WeightGrad<'_> {
    /// One past the last channel.
    fn end(&self) -> usize {
        self.first + self.sums.len() / (self.shape.inputs * self.shape.kernel * self.shape.kernel)
    }

    /// All channels, `C` at a time.
    #[inline(always)]
    fn strips<S: Simd, const C: usize>(&mut self, s: S) {
        let k = self.shape.kernel;
        for top in (0..self.to.height).step_by(STRIP) {
            let rows = STRIP.min(self.to.height - top);
            for o in (self.first..self.end()).step_by(C) {
                for i in 0..self.shape.inputs {
                    for ky in 0..k {
                        let mut kx = 0;
                        while kx < k {
                            let at = Place { o, i, ky, kx, top, rows };
                            kx += match k - kx {
                                5.. if C == 2 || S::REGISTERS >= 32 => self.taps::<S, C, 5>(s, at),
                                3.. => self.taps::<S, C, 3>(s, at),
                                2 => self.taps::<S, C, 2>(s, at),
                                _ => self.taps::<S, C, 1>(s, at),
                            };
                        }
                    }
                }
            }
        }
    }

    /// `T` taps from `at.kx` for the `C` channels from `at.o`. Returns `T`.
    #[inline(always)]
    fn taps<S: Simd, const C: usize, const T: usize>(&mut self, s: S, at: Place) -> usize {
        for s in s.parts() {
            self.tile::<S, C, T>(s, at);
        }
        T
    }

    #[inline(always)]
    fn tile<S: Simd, const C: usize, const T: usize>(&mut self, s: S, at: Place) {
        let (shape, from, to) = (self.shape, self.from, self.to);
        let width = to.width;
        let channels = C.min(self.end() - at.o);
        let mut acc = [[s.splat(0.0); T]; C];
        for y in at.top..at.top + at.rows {
            // Channels past the last one repeat it; their sums are dropped.
            let dy: [&[Lane]; C] =
                std::array::from_fn(|c| &self.dy[to.at(at.o + c.min(channels - 1), y)..][..width]);
            let first = at.i * from.plane() + (y + at.ky + from.pad - shape.pad) * from.row() + from.pad
                - shape.pad
                + at.kx;
            let row = &self.x[first..][..width + T - 1];
            for (x, window) in row.windows(T).enumerate().take(width) {
                // The fewer of both stay in registers; the others pass through one register.
                if C < T {
                    let mut g = [s.splat(0.0); C];
                    for c in 0..C {
                        g[c] = s.load(&dy[c][x]);
                    }
                    for t in 0..T {
                        let v = s.load(&window[t]);
                        for c in 0..C {
                            acc[c][t] = s.fma(g[c], v, acc[c][t]);
                        }
                    }
                    continue;
                }
                let mut v = [s.splat(0.0); T];
                for t in 0..T {
                    v[t] = s.load(&window[t]);
                }
                for c in 0..C {
                    let g = s.load(&dy[c][x]);
                    for t in 0..T {
                        acc[c][t] = s.fma(g, v[t], acc[c][t]);
                    }
                }
            }
        }
        for c in 0..channels {
            let from = (((at.o - self.first + c) * shape.inputs + at.i) * shape.kernel + at.ky)
                * shape.kernel
                + at.kx;
            let sums = &mut self.sums[from..from + T];
            for t in 0..T {
                let v = s.add(s.load(&sums[t]), acc[c][t]);
                s.store(&mut sums[t], v);
            }
        }
    }
}
