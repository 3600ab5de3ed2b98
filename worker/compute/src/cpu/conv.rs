//! Convolution in the blocked layout: forward, and the gradient of the input.
//!
//! Both are the same direct convolution; for the gradient the kernel is turned by 180 degrees and its channel axes
//! are swapped. A tile of some output channels and columns stays in registers, while the loop passes all taps of
//! all input channels:
//!
//! | vector registers | tile | per tap |
//! |---|---|---|
//! | 32 (AVX-512, NEON) | 4 channels x 7 columns | 7 loads and 4 broadcasts feed 28 multiply-adds |
//! | 16 (AVX2, SSE2) | 2 x 6 | 6 and 2 feed 12 |
//!
//! A tile's input stays in the first-level cache for the next channels and the next part of the lanes, so both
//! loops are inside the loop over columns.

use crate::cpu::blocked::{Block, Geometry, Planes, live_lanes};
use crate::cpu::simd::{Cpu, Kernel, Lane, Simd};
use crate::shape::ConvShape;

/// Output channels whose weights are adjacent; a tile has as many, or half.
const CHANNEL_TILE: usize = 4;

impl ConvShape {
    /// Shape of the output for an input of this shape, with a border of `pad` zeros.
    pub fn output(&self, input: Geometry, pad: usize) -> Geometry {
        Geometry::new(self.outputs, self.side(input.height), self.side(input.width), pad)
    }
}

/// A convolution's weights in the order in which the kernels read them:
/// `[channel tile][input][row][column][output in tile]`, the last tile filled up with zeros.
#[derive(Clone, Debug)]
pub struct ConvWeights {
    shape: ConvShape,
    packed: Vec<[f32; CHANNEL_TILE]>,
    bias: Vec<f32>,
    /// Offsets of the taps' inputs in a block of this shape, relative to the first tap.
    places: Vec<u32>,
    from: Geometry,
}

impl ConvWeights {
    /// Zero weights of this shape.
    pub fn new(shape: ConvShape) -> Self {
        assert!(shape.pad < shape.kernel, "a convolution's padding must be less than its kernel");
        let tiles = shape.outputs.div_ceil(CHANNEL_TILE);
        let taps = shape.inputs * shape.kernel * shape.kernel;
        Self {
            shape,
            packed: vec![[0.0; CHANNEL_TILE]; tiles * taps],
            bias: vec![0.0; tiles * CHANNEL_TILE],
            places: vec![0; taps],
            from: Geometry::new(0, 0, 0, 0),
        }
    }

    /// The shape.
    pub fn shape(&self) -> ConvShape {
        self.shape
    }

    /// Copies `weight` (`[outputs, inputs, kernel, kernel]`) and `bias` (`[outputs]`).
    pub fn set(&mut self, weight: &[f32], bias: &[f32]) {
        let s = self.shape;
        assert_eq!(weight.len(), s.weight_len(), "ConvWeights::set: weight of {s:?}");
        let taps = s.inputs * s.kernel * s.kernel;
        for o in 0..s.outputs {
            let tile = &mut self.packed[o / CHANNEL_TILE * taps..][..taps];
            for (t, &w) in tile.iter_mut().zip(&weight[o * taps..][..taps]) {
                t[o % CHANNEL_TILE] = w;
            }
        }
        self.bias[..s.outputs].copy_from_slice(bias);
    }

    /// Copies the weight of the convolution whose input gradient this one computes: `self` must have the
    /// [`ConvShape::transposed`] shape of `weight`'s. There is no bias.
    pub fn set_transposed(&mut self, weight: &[f32]) {
        let s = self.shape;
        assert_eq!(weight.len(), s.weight_len(), "ConvWeights::set_transposed: weight of {s:?}");
        let square = s.kernel * s.kernel;
        for o in 0..s.outputs {
            let tile = &mut self.packed[o / CHANNEL_TILE * s.inputs * square..][..s.inputs * square];
            for i in 0..s.inputs {
                let from = &weight[(i * s.outputs + o) * square..][..square];
                for (t, &w) in tile[i * square..][..square].iter_mut().zip(from.iter().rev()) {
                    t[o % CHANNEL_TILE] = w;
                }
            }
        }
    }

    /// Sets the shape of later inputs.
    pub fn lay(&mut self, from: Geometry) {
        if from == self.from {
            return;
        }
        let k = self.shape.kernel;
        for (t, place) in self.places.iter_mut().enumerate() {
            let (c, y, x) = (t / (k * k), t / k % k, t % k);
            *place = (c * from.plane() + y * from.row() + x) as u32;
        }
        self.from = from;
    }
}

/// A block of `y = conv(x) + bias` for a batch of `n`.
///
/// `x` must have the shape that the weights were [laid out](ConvWeights::lay) for, with a border of at least the
/// convolution's padding; `y` may have any border. Dead lanes of `y` are undefined.
pub fn forward_block(cpu: Cpu, weights: &ConvWeights, x: &Planes, y: &mut Block, n: usize) {
    let (s, from, to) = (weights.shape, x.geometry(), y.geometry);
    assert_eq!(from, weights.from, "conv: the shape that the weights are laid out for");
    assert_eq!(from.channels, s.inputs, "conv: channels of the input");
    assert!(from.pad >= s.pad, "conv: the input's border {} is less than the padding {}", from.pad, s.pad);
    assert_eq!(s.output(from, to.pad), to, "conv: shape of the output");
    cpu.run_tiles(live_lanes(n, y.number), Forward { weights, x: x.block(y.number), y: y.lanes, to });
}

struct Forward<'a> {
    weights: &'a ConvWeights,
    x: &'a [Lane],
    y: &'a mut [Lane],
    to: Geometry,
}

impl Kernel for Forward<'_> {
    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        for y in 0..self.to.height {
            let mut x = 0;
            while x < self.to.width {
                x += match (S::REGISTERS, self.to.width - x) {
                    (32.., left) if left.is_multiple_of(7) => self.columns::<S, 4, 7>(s, y, x),
                    (32.., 4..) => self.columns::<S, 4, 4>(s, y, x),
                    (..32, 6..) => self.columns::<S, 2, 6>(s, y, x),
                    (..32, 4..) => self.columns::<S, 2, 4>(s, y, x),
                    (_, 2..) => self.columns::<S, 4, 2>(s, y, x),
                    _ => self.columns::<S, 4, 1>(s, y, x),
                };
            }
        }
    }
}

impl Forward<'_> {
    /// `X` columns from `x` of row `y`, `C` channels at a time. Returns `X`.
    #[inline(always)]
    fn columns<S: Simd, const C: usize, const X: usize>(&mut self, s: S, y: usize, x: usize) -> usize {
        for o in (0..self.weights.shape.outputs).step_by(C) {
            for s in s.parts() {
                self.tile::<S, C, X>(s, o, y, x);
            }
        }
        X
    }

    /// `C` channels from `o`, `X` columns from `x0`, of row `y`.
    #[inline(always)]
    fn tile<S: Simd, const C: usize, const X: usize>(&mut self, s: S, o: usize, y: usize, x0: usize) {
        let (weights, to) = (self.weights, self.to);
        let (shape, from) = (weights.shape, weights.from);
        let mut acc = [[s.splat(0.0); X]; C];
        for i in 0..C {
            acc[i] = [s.splat(weights.bias[o + i]); X];
        }
        let taps = weights.places.len();
        let packed = &weights.packed[o / CHANNEL_TILE * taps..][..taps];
        // Shows the compiler that the indices are in range.
        let first = (o % CHANNEL_TILE) & (CHANNEL_TILE - C);
        let pixels = &self.x[(y + from.pad - shape.pad) * from.row() + from.pad - shape.pad + x0..];
        for (tap, &place) in packed.iter().zip(&weights.places) {
            let (tap, place) = (&tap[first..first + C], place as usize);
            let window = &pixels[place..place + X];
            // The fewer of both stay in registers; the others pass through one register.
            if C < X {
                for x in 0..X {
                    let v = s.load(&window[x]);
                    for i in 0..C {
                        acc[i][x] = s.fma(s.splat(tap[i]), v, acc[i][x]);
                    }
                }
                continue;
            }
            let mut v = [s.splat(0.0); X];
            for x in 0..X {
                v[x] = s.load(&window[x]);
            }
            for i in 0..C {
                let weight = s.splat(tap[i]);
                for x in 0..X {
                    acc[i][x] = s.fma(weight, v[x], acc[i][x]);
                }
            }
        }
        for i in 0..C.min(shape.outputs - o) {
            let row = &mut self.y[to.at(o + i, y) + x0..][..X];
            for x in 0..X {
                s.store(&mut row[x], acc[i][x]);
            }
        }
    }
}
