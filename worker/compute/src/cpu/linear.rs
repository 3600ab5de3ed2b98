//! Linear layers over row-major slices.
//!
//! Shapes follow PyTorch: `x` is `[n, inputs]`, `weight` is `[outputs, inputs]`, `bias` is `[outputs]`, `y` is
//! `[n, outputs]`. Every matrix is handed to the product as it lies in memory, with strides; nothing is
//! transposed by copying.

use crate::{
    cpu::matrix::product,
    shape::{Activation, LinearShape},
};

/// `y = x · weightᵀ + bias`, with a ReLU in the same pass as the bias; `bias` may be empty. (A GELU needs its argument kept: see
/// [`gelu`](crate::cpu::activation::gelu).)
pub fn forward(
    shape: LinearShape,
    x: &[f32],
    weight: &[f32],
    bias: &[f32],
    activation: Activation,
    y: &mut [f32],
) {
    let LinearShape { n, inputs, outputs } = shape;
    assert!(bias.is_empty() || bias.len() == outputs, "linear: bias");
    product([n, inputs, outputs], (x, [inputs, 1]), (weight, [1, inputs]), (y, [outputs, 1]), 0.0);
    // Not `max`: a NaN must stay one, or a diverged run would look healthy.
    let relu = |z: f32| if z < 0.0 { 0.0 } else { z };
    let rectified = activation == Activation::Relu;
    if bias.is_empty() {
        if rectified {
            y.iter_mut().for_each(|v| *v = relu(*v));
        }
        return;
    }
    for row in y.chunks_exact_mut(outputs) {
        let both = row.iter_mut().zip(bias);
        if rectified {
            both.for_each(|(v, b)| *v = relu(*v + b));
        } else {
            both.for_each(|(v, b)| *v += b);
        }
    }
}

/// `dweight = dyᵀ · x` and `dbias = Σ dy` over the samples. Both are overwritten; without a bias, `dbias` is empty.
pub fn backward_weight(shape: LinearShape, x: &[f32], dy: &[f32], dweight: &mut [f32], dbias: &mut [f32]) {
    let LinearShape { n, inputs, outputs } = shape;
    assert!(dbias.is_empty() || dbias.len() == outputs, "linear: dbias");
    product([outputs, n, inputs], (dy, [1, outputs]), (x, [inputs, 1]), (dweight, [inputs, 1]), 0.0);
    if dbias.is_empty() {
        return;
    }
    dbias.fill(0.0);
    for row in dy.chunks_exact(outputs) {
        for (d, v) in dbias.iter_mut().zip(row) {
            *d += v;
        }
    }
}

/// `dx = dy · weight`. Overwrites `dx`, `[n, inputs]`.
pub fn backward_input(shape: LinearShape, weight: &[f32], dy: &[f32], dx: &mut [f32]) {
    let LinearShape { n, inputs, outputs } = shape;
    product([n, outputs, inputs], (dy, [outputs, 1]), (weight, [inputs, 1]), (dx, [inputs, 1]), 0.0);
}
