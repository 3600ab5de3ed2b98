//! Linear layers over row-major slices.
//!
//! Shapes follow PyTorch: `x` is `[n, inputs]`, `weight` is `[outputs, inputs]`, `bias` is `[outputs]`, `y` is `[n,
//! outputs]`. The product reads every matrix in place, by strides; nothing is transposed by copying.

use crate::{
    cpu::{
        matrix::{Matrix, ProductStart, product},
        threads::Threads,
        vector::{load, places, store},
    },
    shape::{Activation, LinearShape},
};
use fearless_simd::{Simd as Token, dispatch, prelude::*};

/// `y = x · weightᵀ + bias`, followed by an optional ReLU; `bias` may be empty. (A GELU needs its argument kept:
/// see [`gelu`](crate::cpu::activation::gelu).)
pub fn forward(
    threads: &Threads,
    shape: LinearShape,
    x: &[f32],
    weight: &[f32],
    bias: &[f32],
    activation: Activation,
    y: &mut [f32],
) {
    let LinearShape { n, inputs, outputs } = shape;
    assert!(bias.is_empty() || bias.len() == outputs, "linear: bias");
    let relu = activation == Activation::Relu;
    let onto = match bias.is_empty() {
        true => ProductStart::Zero,
        false if relu => ProductStart::BiasRelu(bias),
        false => ProductStart::Bias(bias),
    };
    let (x, weight) = (Matrix::rows(x, inputs), Matrix::columns(weight, inputs));
    product(threads, [n, inputs, outputs], x, weight, (y, outputs), onto);
    if relu && bias.is_empty() {
        y.iter_mut().for_each(|v| *v = if *v < 0.0 { 0.0 } else { *v });
    }
}

/// `dweight = dyᵀ · x` and `dbias = Σ dy` over the samples. Both are overwritten; without a bias, `dbias` is empty.
pub fn backward_weight(
    threads: &Threads,
    shape: LinearShape,
    x: &[f32],
    dy: &[f32],
    dweight: &mut [f32],
    dbias: &mut [f32],
) {
    let LinearShape { n, inputs, outputs } = shape;
    assert!(dbias.is_empty() || dbias.len() == outputs, "linear: dbias");
    let (left, right) = (Matrix::columns(dy, outputs), Matrix::rows(x, inputs));
    product(threads, [outputs, n, inputs], left, right, (dweight, inputs), ProductStart::Zero);
    if dbias.is_empty() {
        return;
    }
    dispatch!(threads.cpu().level(), s => sums(s, dy, outputs, dbias));
}

/// The sum of each column, in row order.
#[inline(always)]
fn sums<S: Token>(s: S, dy: &[f32], outputs: usize, to: &mut [f32]) {
    places(
        s,
        outputs,
        #[inline(always)]
        |p| {
            let mut sum = S::f32s::splat(s, 0.0);
            for row in dy.chunks_exact(outputs) {
                sum += load(s, row, p, 0.0);
            }
            store(s, sum, to, p);
        },
    );
}

/// `dx = dy · weight`. Overwrites `dx`, `[n, inputs]`.
pub fn backward_input(threads: &Threads, shape: LinearShape, weight: &[f32], dy: &[f32], dx: &mut [f32]) {
    let LinearShape { n, inputs, outputs } = shape;
    let (dy, weight) = (Matrix::rows(dy, outputs), Matrix::rows(weight, inputs));
    product(threads, [n, outputs, inputs], dy, weight, (dx, inputs), ProductStart::Zero);
}
