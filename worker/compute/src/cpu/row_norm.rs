//! LayerNorm and RMSNorm over rows.

use crate::shape::{NORM_EPSILON, NormShape};

/// Of each row: what was subtracted and what it was multiplied by. Of an RMSNorm the mean is not used.
pub const STATS: usize = 2;

/// `y = (x - mean) · inverse · gamma + beta` for each row, and `(mean, inverse)` into `stats`, `[rows, 2]`. Without `beta`
/// (empty) it is an RMSNorm: the mean is 0 and the inverse that of the root of the mean square.
pub fn forward(shape: NormShape, x: &[f32], gamma: &[f32], beta: &[f32], y: &mut [f32], stats: &mut [f32]) {
    let n = shape.cols as f64;
    let rows =
        x.chunks_exact(shape.cols).zip(y.chunks_exact_mut(shape.cols)).zip(stats.as_chunks_mut::<STATS>().0);
    for ((x, y), stats) in rows {
        let sum = |f: &dyn Fn(f64) -> f64| x.iter().map(|v| f(f64::from(*v))).sum::<f64>() / n;
        let mean = if beta.is_empty() { 0.0 } else { sum(&|v| v) };
        let spread = sum(&|v| (v - mean) * (v - mean));
        let inverse = (1.0 / (spread + f64::from(NORM_EPSILON)).sqrt()) as f32;
        let mean = mean as f32;
        *stats = [mean, inverse];
        for (i, (y, x)) in y.iter_mut().zip(x).enumerate() {
            *y = (x - mean) * inverse * gamma[i] + beta.get(i).unwrap_or(&0.0);
        }
    }
}

/// The gradient of `x` into `dx`, over what is there; those of gamma and beta are added to what is there. `dbeta` is empty
/// for an RMSNorm.
#[expect(clippy::too_many_arguments, reason = "the operands of the operator")]
pub fn backward(
    shape: NormShape,
    dy: &[f32],
    x: &[f32],
    stats: &[f32],
    gamma: &[f32],
    dx: &mut [f32],
    dgamma: &mut [f32],
    dbeta: &mut [f32],
) {
    let (cols, n) = (shape.cols, shape.cols as f64);
    let rows = dy.chunks_exact(cols).zip(x.chunks_exact(cols)).zip(dx.chunks_exact_mut(cols));
    for (((dy, x), dx), &[mean, inverse]) in rows.zip(stats.as_chunks::<STATS>().0) {
        let (mut of_dy, mut of_both) = (0.0f64, 0.0f64);
        for i in 0..cols {
            let hat = (x[i] - mean) * inverse;
            of_dy += f64::from(dy[i] * gamma[i]);
            of_both += f64::from(dy[i] * gamma[i] * hat);
            dgamma[i] += dy[i] * hat;
        }
        for (d, v) in dbeta.iter_mut().zip(dy) {
            *d += v;
        }
        // Without a mean there is nothing that the mean of the gradient would be taken from.
        let of_dy = if dbeta.is_empty() { 0.0 } else { (of_dy / n) as f32 };
        let of_both = (of_both / n) as f32;
        for i in 0..cols {
            let hat = (x[i] - mean) * inverse;
            dx[i] = inverse * (dy[i] * gamma[i] - of_dy - hat * of_both);
        }
    }
}
