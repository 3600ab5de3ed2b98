//! Convolution in the blocked layout: forward, and the gradient of the input.
//!
//! Both are the same direct convolution; for the gradient the kernel is turned by 180 degrees and its channel
//! axes are swapped. A tile of up to 4 output channels x 7 columns stays in registers while all taps of all
//! input channels pass: per tap 7 loads and 4 broadcasts feed 28 multiply-adds.

use crate::cpu::blocked::{Geometry, Planes, live_lanes};
use crate::cpu::simd::{Cpu, Kernel, Lane, Simd};
use crate::shape::ConvShape;

/// Output channels that share a register tile.
pub(crate) const CHANNEL_TILE: usize = 4;

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
}

impl ConvWeights {
    /// Room for weights of this shape, all zero.
    pub fn new(shape: ConvShape) -> Self {
        assert!(shape.pad < shape.kernel, "a convolution's padding must be less than its kernel");
        let tiles = shape.outputs.div_ceil(CHANNEL_TILE);
        let taps = shape.inputs * shape.kernel * shape.kernel;
        Self { shape, packed: vec![[0.0; CHANNEL_TILE]; tiles * taps], bias: vec![0.0; tiles * CHANNEL_TILE] }
    }

    /// The shape.
    pub fn shape(&self) -> ConvShape {
        self.shape
    }

    /// Takes over `weight` (`[outputs, inputs, kernel, kernel]`) and `bias` (`[outputs]`).
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

    /// Takes over the weight of the convolution whose input gradient this one computes: `self` must have the
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
}

/// Block `b` of `y = conv(x) + bias` for a batch of `n`.
///
/// `x` must have a border of at least the convolution's padding; `y` any border. Dead lanes of `y` hold
/// no meaning.
pub fn forward_block(cpu: Cpu, weights: &ConvWeights, x: &Planes, y: &mut Planes, (b, n): (usize, usize)) {
    let (s, from, to) = (weights.shape, x.geometry(), y.geometry());
    assert_eq!(from.channels, s.inputs, "conv: channels of the input");
    assert!(from.pad >= s.pad, "conv: the input's border {} is less than the padding {}", from.pad, s.pad);
    assert_eq!(s.output(from, to.pad), to, "conv: shape of the output");
    cpu.run_tiles(live_lanes(n, b), Forward { weights, x: x.block(b), from, y: y.block_mut(b), to });
}

struct Forward<'a> {
    weights: &'a ConvWeights,
    x: &'a [Lane],
    from: Geometry,
    y: &'a mut [Lane],
    to: Geometry,
}

impl Kernel for &mut Forward<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let mut o = 0;
        while o < self.weights.shape.outputs {
            for y in 0..self.to.height {
                let mut x = 0;
                while x < self.to.width {
                    let left = self.to.width - x;
                    x += match left {
                        _ if left.is_multiple_of(7) => self.tile::<S, 7>(s, o, y, x),
                        4.. => self.tile::<S, 4>(s, o, y, x),
                        2.. => self.tile::<S, 2>(s, o, y, x),
                        _ => self.tile::<S, 1>(s, o, y, x),
                    };
                }
            }
            o += CHANNEL_TILE;
        }
    }
}

impl Forward<'_> {
    /// `CHANNEL_TILE` channels from `o`, `X` columns from `x0`, of row `y`. Returns `X`.
    #[inline(always)]
    fn tile<S: Simd, const X: usize>(&mut self, s: S, o: usize, y: usize, x0: usize) -> usize {
        let shape = self.weights.shape;
        let (k, from, to) = (shape.kernel, self.from, self.to);
        let mut acc = [[s.splat(0.0); X]; CHANNEL_TILE];
        for i in 0..CHANNEL_TILE {
            acc[i] = [s.splat(self.weights.bias[o + i]); X];
        }
        let taps = shape.inputs * k * k;
        let mut w = &self.weights.packed[o / CHANNEL_TILE * taps..][..taps];
        let corner = (y + from.pad - shape.pad) * from.row() + from.pad - shape.pad + x0;
        for c in 0..shape.inputs {
            for ky in 0..k {
                let row = &self.x[corner + c * from.plane() + ky * from.row()..][..X + k - 1];
                let (now, later) = w.split_at(k);
                w = later;
                for kx in 0..k {
                    let (window, tap) = (&row[kx..kx + X], &now[kx]);
                    for x in 0..X {
                        let v = s.load(&window[x]);
                        for i in 0..CHANNEL_TILE {
                            acc[i][x] = s.fma(s.splat(tap[i]), v, acc[i][x]);
                        }
                    }
                }
            }
        }
        for i in 0..CHANNEL_TILE.min(shape.outputs - o) {
            let row = &mut self.y[to.at(o + i, y) + x0..][..X];
            for x in 0..X {
                s.store(&mut row[x], acc[i][x]);
            }
        }
        X
    }
}
