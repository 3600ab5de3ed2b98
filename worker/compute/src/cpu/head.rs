//! A linear layer on blocked features: the classifier at the end of a convolutional net.
//!
//! Features are vectors of sixteen samples (`[block][feature]`, a [`Planes`] without border), so the layer
//! needs no change of layout: each weight is broadcast. Feature `f` is PyTorch's `Flatten` order,
//! `(channel * height + row) * width + column`. Outputs and their gradients are `[block][output]` vectors.

use crate::cpu::blocked::{Block, Geometry, Planes, blocks};
use crate::cpu::conv_grad::LaneSums;
use crate::cpu::simd::{Cpu, Kernel, LANES, Lane, Simd};

/// Block `b` of the outputs, `[outputs]` vectors: `weight` is `[outputs, features]`, `bias` is `[outputs]`.
pub fn forward_block(cpu: Cpu, x: &Planes, b: usize, weight: &[f32], bias: &[f32], y: &mut [Lane]) {
    check(x.geometry(), weight, bias.len());
    assert_eq!(y.len(), bias.len(), "head: outputs");
    cpu.run(Forward { x: x.block(b), weight, bias, y });
}

/// A block of the features' gradient from `dy`, `[outputs]` vectors.
pub fn backward_block(cpu: Cpu, dy: &[Lane], weight: &[f32], dx: &mut Block) {
    check(dx.geometry, weight, dy.len());
    cpu.run(Backward { dy, weight, dx: dx.lanes });
}

/// The gradients of weight and bias over a batch of `n`: `dy` is `[blocks(n)][outputs]` with zeros in dead
/// lanes. Both are overwritten.
pub fn backward_weight(cpu: Cpu, n: usize, x: &Planes, dy: &[Lane], dweight: &mut [f32], dbias: &mut [f32]) {
    check(x.geometry(), dweight, dbias.len());
    assert_eq!(dy.len(), blocks(n) * dbias.len(), "head: gradient of the outputs");
    let x = &x.lanes()[..blocks(n) * x.geometry().block()];
    cpu.run(WeightGrad { x, dy, outputs: dbias.len(), dweight });
    dbias.fill(0.0);
    for block in dy.chunks_exact(dbias.len()) {
        for (d, lane) in dbias.iter_mut().zip(block) {
            let mut sum = [0.0];
            cpu.run(LaneSums { sums: std::slice::from_ref(lane), out: &mut sum });
            *d += sum[0];
        }
    }
}

/// Turns `[block][output]` vectors into `[n, outputs]`.
pub fn unpack(y: &[Lane], outputs: usize, out: &mut [f32]) {
    for (i, row) in out.chunks_exact_mut(outputs).enumerate() {
        let block = &y[i / LANES * outputs..][..outputs];
        for (o, lane) in row.iter_mut().zip(block) {
            *o = lane.0[i % LANES];
        }
    }
}

/// Turns `[n, outputs]` into `[block][output]` vectors, with zeros in the dead lanes.
pub fn pack(rows: &[f32], outputs: usize, y: &mut [Lane]) {
    y.fill(Lane::ZERO);
    for (i, row) in rows.chunks_exact(outputs).enumerate() {
        let block = &mut y[i / LANES * outputs..][..outputs];
        for (v, lane) in row.iter().zip(block) {
            lane.0[i % LANES] = *v;
        }
    }
}

fn check(g: Geometry, weight: &[f32], outputs: usize) {
    assert_eq!(g.pad, 0, "head: features have no border");
    assert_eq!(weight.len(), outputs * g.block(), "head: weight");
}

struct Forward<'a> {
    x: &'a [Lane],
    weight: &'a [f32],
    bias: &'a [f32],
    y: &'a mut [Lane],
}

impl Kernel for Forward<'_> {
    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        let mut o = 0;
        while o < self.y.len() {
            o += match self.y.len() - o {
                5.. => self.tile::<S, 5>(s, o),
                3.. => self.tile::<S, 3>(s, o),
                _ => self.tile::<S, 1>(s, o),
            };
        }
    }
}

impl Forward<'_> {
    #[inline(always)]
    fn tile<S: Simd, const O: usize>(&mut self, s: S, o: usize) -> usize {
        let features = self.x.len();
        let mut acc = [s.splat(0.0); O];
        let mut rows = [self.weight; O];
        for i in 0..O {
            rows[i] = &self.weight[(o + i) * features..][..features];
            acc[i] = s.splat(self.bias[o + i]);
        }
        for f in 0..features {
            let v = s.load(&self.x[f]);
            for i in 0..O {
                acc[i] = s.fma(s.splat(rows[i][f]), v, acc[i]);
            }
        }
        for i in 0..O {
            s.store(&mut self.y[o + i], acc[i]);
        }
        O
    }
}

struct Backward<'a> {
    dy: &'a [Lane],
    weight: &'a [f32],
    dx: &'a mut [Lane],
}

impl Kernel for Backward<'_> {
    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        let mut f = 0;
        while f < self.dx.len() {
            f += match self.dx.len() - f {
                8.. => self.tile::<S, 8>(s, f),
                _ => self.tile::<S, 1>(s, f),
            };
        }
    }
}

impl Backward<'_> {
    #[inline(always)]
    fn tile<S: Simd, const F: usize>(&mut self, s: S, f: usize) -> usize {
        let features = self.dx.len();
        let mut acc = [s.splat(0.0); F];
        for (o, lane) in self.dy.iter().enumerate() {
            let g = s.load(lane);
            let row = &self.weight[o * features + f..][..F];
            for i in 0..F {
                acc[i] = s.fma(s.splat(row[i]), g, acc[i]);
            }
        }
        for i in 0..F {
            s.store(&mut self.dx[f + i], acc[i]);
        }
        F
    }
}

struct WeightGrad<'a> {
    x: &'a [Lane],
    dy: &'a [Lane],
    outputs: usize,
    dweight: &'a mut [f32],
}

impl Kernel for WeightGrad<'_> {
    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        let features = self.dweight.len() / self.outputs;
        for f in 0..features {
            let mut o = 0;
            while o < self.outputs {
                o += match self.outputs - o {
                    5.. => self.tile::<S, 5>(s, f, features, o),
                    3.. => self.tile::<S, 3>(s, f, features, o),
                    _ => self.tile::<S, 1>(s, f, features, o),
                };
            }
        }
    }
}

impl WeightGrad<'_> {
    #[inline(always)]
    fn tile<S: Simd, const O: usize>(&mut self, s: S, f: usize, features: usize, o: usize) -> usize {
        let mut acc = [s.splat(0.0); O];
        for (x, dy) in self.x.chunks_exact(features).zip(self.dy.chunks_exact(self.outputs)) {
            let v = s.load(&x[f]);
            let g = &dy[o..o + O];
            for i in 0..O {
                acc[i] = s.fma(s.load(&g[i]), v, acc[i]);
            }
        }
        for i in 0..O {
            self.dweight[(o + i) * features + f] = s.sum(acc[i]);
        }
        O
    }
}
