//! Linear layers and ReLU over row-major slices.
//!
//! Shapes follow PyTorch: `x` is `[n, inputs]`, `weight` is `[outputs, inputs]`, `bias` is `[outputs]`, `y` is
//! `[n, outputs]`. Every matrix is handed to the product as it lies in memory, with strides; nothing is
//! transposed by copying.

/// A linear layer's shape and batch size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinearShape {
    /// Samples.
    pub n: usize,
    /// Values of one input.
    pub inputs: usize,
    /// Values of one output.
    pub outputs: usize,
}

/// What follows the linear map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// Nothing.
    None,
    /// `max(0, y)`.
    Relu,
}

/// `y = x · weightᵀ + bias`, with the activation in the same pass as the bias.
pub fn forward(
    shape: LinearShape,
    x: &[f32],
    weight: &[f32],
    bias: &[f32],
    activation: Activation,
    y: &mut [f32],
) {
    let LinearShape { n, inputs, outputs } = shape;
    assert_eq!(bias.len(), outputs, "linear: bias");
    product([n, inputs, outputs], (x, [inputs, 1]), (weight, [1, inputs]), (y, [outputs, 1]));
    for row in y.chunks_exact_mut(outputs) {
        match activation {
            Activation::None => {
                for (v, b) in row.iter_mut().zip(bias) {
                    *v += b;
                }
            }
            Activation::Relu => {
                for (v, b) in row.iter_mut().zip(bias) {
                    let z = *v + b;
                    // Not `max`: a NaN must stay one, or a diverged run would look healthy.
                    *v = if z < 0.0 { 0.0 } else { z };
                }
            }
        }
    }
}

/// `dweight = dyᵀ · x` and `dbias = Σ dy` over the samples. Both are overwritten.
pub fn backward_weight(shape: LinearShape, x: &[f32], dy: &[f32], dweight: &mut [f32], dbias: &mut [f32]) {
    let LinearShape { n, inputs, outputs } = shape;
    assert_eq!(dbias.len(), outputs, "linear: dbias");
    product([outputs, n, inputs], (dy, [1, outputs]), (x, [inputs, 1]), (dweight, [inputs, 1]));
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
    product([n, outputs, inputs], (dy, [outputs, 1]), (weight, [inputs, 1]), (dx, [inputs, 1]));
}

/// Zeroes the gradient where the ReLU's output is zero. `y` and `dy` have one length.
pub fn relu_backward(y: &[f32], dy: &mut [f32]) {
    assert_eq!(y.len(), dy.len(), "relu: lengths");
    for (d, &v) in dy.iter_mut().zip(y) {
        *d = if v > 0.0 { *d } else { 0.0 };
    }
}

/// `c = a · b` for `a` of `[m, k]` and `b` of `[k, n]`, each with its row and column stride.
fn product(
    [m, k, n]: [usize; 3],
    (a, [ra, ca]): (&[f32], [usize; 2]),
    (b, [rb, cb]): (&[f32], [usize; 2]),
    (c, [rc, cc]): (&mut [f32], [usize; 2]),
) {
    assert_eq!(a.len(), m * k, "matrix product: left");
    assert_eq!(b.len(), k * n, "matrix product: right");
    assert_eq!(c.len(), m * n, "matrix product: result");
    // Each matrix is dense, row by row or column by column.
    let dense = |rows: usize, cols: usize, r: usize, s: usize| (r, s) == (cols, 1) || (r, s) == (1, rows);
    assert!(dense(m, k, ra, ca) && dense(k, n, rb, cb) && dense(m, n, rc, cc), "matrix product: strides");
    let stride = |s: usize| s as isize;
    // SAFETY: the lengths and strides were just checked, so every index i*r + j*s lies inside its slice, and
    // distinct (i, j) are distinct places in `c`, which no other slice overlaps.
    unsafe {
        matrixmultiply::sgemm(
            m,
            k,
            n,
            1.0,
            a.as_ptr(),
            stride(ra),
            stride(ca),
            b.as_ptr(),
            stride(rb),
            stride(cb),
            0.0,
            c.as_mut_ptr(),
            stride(rc),
            stride(cc),
        );
    }
}
