//! ReLU's gradient, and GELU, over slices.

use std::f32::consts::FRAC_2_SQRT_PI;

/// Zeroes the gradient where the ReLU's output is zero. `y` and `dy` have one length.
pub fn relu_backward(y: &[f32], dy: &mut [f32]) {
    assert_eq!(y.len(), dy.len(), "relu: lengths");
    for (d, &v) in dy.iter_mut().zip(y) {
        *d = if v > 0.0 { *d } else { 0.0 };
    }
}

/// `√(2/π)`.
const ROOT: f32 = FRAC_2_SQRT_PI * std::f32::consts::FRAC_1_SQRT_2;
const CUBE: f32 = 0.044_715;

/// GELU by the tanh approximation ([`Gelu`](crate::shape::Activation::Gelu)) of each value, into `y`.
pub fn gelu(x: &[f32], y: &mut [f32]) {
    assert_eq!(x.len(), y.len(), "gelu: lengths");
    for (y, &x) in y.iter_mut().zip(x) {
        *y = 0.5 * x * (1.0 + (ROOT * (x + CUBE * x * x * x)).tanh());
    }
}

/// Multiplies each `dy` by GELU's derivative at `x`.
pub fn gelu_backward(x: &[f32], dy: &mut [f32]) {
    assert_eq!(x.len(), dy.len(), "gelu: lengths");
    for (d, &x) in dy.iter_mut().zip(x) {
        let t = (ROOT * (x + CUBE * x * x * x)).tanh();
        let inner = ROOT * (1.0 + 3.0 * CUBE * x * x);
        *d *= 0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * inner;
    }
}
