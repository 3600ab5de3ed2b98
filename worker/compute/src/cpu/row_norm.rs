//! LayerNorm over rows.

use crate::{
    cpu::{
        threads::Threads,
        vector::{load, places, store},
    },
    shape::{NORM_EPSILON, NormShape},
};
use fearless_simd::{Simd as Token, dispatch, prelude::*};

/// Per row: the subtracted mean and the factor.
pub const STATS: usize = 2;

/// Rows per partial sum of gamma's and beta's gradients, whatever the number of threads.
const ROWS: usize = 128;

/// `y = (x - mean) · inverse · gamma + beta` for each row, and `(mean, inverse)` into `stats`, `[rows, 2]`.
pub fn forward(
    threads: &Threads,
    shape: NormShape,
    x: &[f32],
    gamma: &[f32],
    beta: &[f32],
    y: &mut [f32],
    stats: &mut [f32],
) {
    let level = threads.cpu().level();
    let values = ROWS * shape.cols;
    let blocks = x.chunks(values).zip(y.chunks_mut(values)).zip(stats.chunks_mut(ROWS * STATS));
    threads.each(blocks, |((x, y), stats)| {
        dispatch!(level, s => forward_in(s, shape.cols, x, gamma, beta, y, stats));
    });
}

#[inline(always)]
fn forward_in<S: Token>(
    s: S,
    cols: usize,
    x: &[f32],
    gamma: &[f32],
    beta: &[f32],
    y: &mut [f32],
    stats: &mut [f32],
) {
    let n = cols as f32;
    let zero = S::f32s::splat(s, 0.0);
    let rows = x.chunks_exact(cols).zip(y.chunks_exact_mut(cols)).zip(stats.as_chunks_mut::<STATS>().0);
    for ((x, y), stats) in rows {
        let mut sums = zero;
        places(
            s,
            cols,
            #[inline(always)]
            |p| sums += load(s, x, p, 0.0),
        );
        let mean = sums.reduce_sum() / n;
        let means = S::f32s::splat(s, mean);
        let mut squares = zero;
        places(
            s,
            cols,
            #[inline(always)]
            |p| {
                let d = load(s, x, p, mean) - means;
                squares = d.mul_add(d, squares);
            },
        );
        let inverse = 1.0 / (squares.reduce_sum() / n + NORM_EPSILON).sqrt();
        *stats = [mean, inverse];
        let inverses = S::f32s::splat(s, inverse);
        places(
            s,
            cols,
            #[inline(always)]
            |p| {
                let hat = (load(s, x, p, 0.0) - means) * inverses;
                store(s, hat.mul_add(load(s, gamma, p, 0.0), load(s, beta, p, 0.0)), y, p);
            },
        );
    }
}

/// Overwrites `dx` by the gradient of `x`, plus `add` unless it is empty, and the gradients of gamma and beta.
/// `room` is a buffer for sums.
#[expect(clippy::too_many_arguments, reason = "the operands of the operator")]
pub fn backward(
    threads: &Threads,
    shape: NormShape,
    dy: &[f32],
    x: &[f32],
    stats: &[f32],
    gamma: &[f32],
    add: &[f32],
    dx: &mut [f32],
    dgamma: &mut [f32],
    dbeta: &mut [f32],
    room: &mut Vec<f32>,
) {
    let (level, cols) = (threads.cpu().level(), shape.cols);
    let values = ROWS * cols;
    room.clear();
    room.resize(shape.rows.div_ceil(ROWS) * 2 * cols, 0.0);
    let blocks = dx.chunks_mut(values).zip(room.chunks_exact_mut(2 * cols)).enumerate();
    threads.each(blocks, |(i, (dx, sums))| {
        let at = i * values..i * values + dx.len();
        let add = if add.is_empty() { add } else { &add[at.clone()] };
        let of = Rows { dy: &dy[at.clone()], x: &x[at], stats: &stats[i * ROWS * STATS..], gamma, add };
        dispatch!(level, s => of.backward(s, dx, sums));
    });
    dgamma.fill(0.0);
    dbeta.fill(0.0);
    for sums in room.chunks_exact(2 * cols) {
        let (gamma, beta) = sums.split_at(cols);
        dgamma.iter_mut().zip(gamma).for_each(|(d, v)| *d += v);
        dbeta.iter_mut().zip(beta).for_each(|(d, v)| *d += v);
    }
}

/// The inputs of the gradient of some rows.
struct Rows<'a> {
    dy: &'a [f32],
    x: &'a [f32],
    stats: &'a [f32],
    gamma: &'a [f32],
    add: &'a [f32],
}

impl Rows<'_> {
    #[inline(always)]
    fn backward<S: Token>(&self, s: S, dx: &mut [f32], sums: &mut [f32]) {
        let cols = self.gamma.len();
        let (dgamma, dbeta) = sums.split_at_mut(cols);
        let zero = S::f32s::splat(s, 0.0);
        let rows = self.dy.chunks_exact(cols).zip(self.x.chunks_exact(cols)).zip(dx.chunks_exact_mut(cols));
        let rows = rows.zip(self.stats.as_chunks::<STATS>().0);
        for (i, (((dy, x), dx), &[mean, inverse])) in rows.enumerate() {
            let (means, inverses) = (S::f32s::splat(s, mean), S::f32s::splat(s, inverse));
            let (mut of_dy, mut of_both) = (zero, zero);
            places(
                s,
                cols,
                #[inline(always)]
                |p| {
                    let (dy, hat) = (load(s, dy, p, 0.0), (load(s, x, p, 0.0) - means) * inverses);
                    let scaled = dy * load(s, self.gamma, p, 0.0);
                    of_dy += scaled;
                    of_both = scaled.mul_add(hat, of_both);
                    store(s, dy.mul_add(hat, load(s, dgamma, p, 0.0)), dgamma, p);
                    store(s, dy + load(s, dbeta, p, 0.0), dbeta, p);
                },
            );
            let of_dy = S::f32s::splat(s, of_dy.reduce_sum() / cols as f32);
            let of_both = S::f32s::splat(s, of_both.reduce_sum() / cols as f32);
            places(
                s,
                cols,
                #[inline(always)]
                |p| {
                    let hat = (load(s, x, p, 0.0) - means) * inverses;
                    let scaled = load(s, dy, p, 0.0) * load(s, self.gamma, p, 0.0);
                    let mut d = inverses * (scaled - of_dy - hat * of_both);
                    if !self.add.is_empty() {
                        d += load(s, &self.add[i * cols..][..cols], p, 0.0);
                    }
                    store(s, d, dx, p);
                },
            );
        }
    }
}
