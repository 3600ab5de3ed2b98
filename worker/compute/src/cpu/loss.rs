//! Losses over row-major slices: value, and gradient with respect to the model's output.

use crate::cpu::{
    threads::Threads,
    vector::{exp, largest, load, places, store},
};
use fearless_simd::{Simd as Token, dispatch, prelude::*};

/// Rows per partial sum, whatever the number of threads.
const ROWS: usize = 64;

/// Values summed in single precision; partial sums are added in double.
const VALUES: usize = 1 << 14;

/// Softmax and cross-entropy, mean over the batch: `torch.nn.functional.cross_entropy`. The logits become the
/// gradient.
///
/// `logits` is `[n, classes]`, `labels` is `[n]` with values below `classes`. It subtracts each row's largest logit
/// before the exponential, so any finite logits are valid. `room` is a buffer for sums.
pub fn softmax_cross_entropy(
    threads: &Threads,
    logits: &mut [f32],
    labels: &[u32],
    classes: usize,
    room: &mut Vec<f64>,
) -> f32 {
    assert_eq!(logits.len(), labels.len() * classes, "cross entropy: logits");
    let (level, scale) = (threads.cpu().level(), 1.0 / labels.len() as f32);
    room.clear();
    room.resize(labels.len().div_ceil(ROWS), 0.0);
    let blocks = logits.chunks_mut(ROWS * classes).zip(labels.chunks(ROWS)).zip(room.iter_mut());
    threads.each(blocks, |((logits, labels), loss)| {
        dispatch!(level, s => cross_entropy(s, logits, labels, classes, scale, loss));
    });
    (room.iter().sum::<f64>() / labels.len() as f64) as f32
}

#[inline(always)]
fn cross_entropy<S: Token>(
    s: S,
    logits: &mut [f32],
    labels: &[u32],
    classes: usize,
    scale: f32,
    loss: &mut f64,
) {
    for (row, &label) in logits.chunks_exact_mut(classes).zip(labels) {
        let label = label as usize;
        let top = largest(s, row);
        let at_label = row[label] - top;
        let tops = S::f32s::splat(s, top);
        let mut sums = S::f32s::splat(s, 0.0);
        places(
            s,
            classes,
            #[inline(always)]
            |p| {
                let e = exp(s, load(s, row, p, f32::NEG_INFINITY) - tops);
                sums += e;
                store(s, e, row, p);
            },
        );
        let sum = sums.reduce_sum();
        let share = S::f32s::splat(s, scale / sum);
        places(
            s,
            classes,
            #[inline(always)]
            |p| store(s, load(s, row, p, 0.0) * share, row, p),
        );
        row[label] -= scale;
        *loss += f64::from(sum.ln() - at_label);
    }
}

/// Sum of the cross-entropy over the rows, and how many rows have their largest logit at the label.
pub fn cross_entropy_sum(logits: &[f32], labels: &[u32], classes: usize) -> (f64, u64) {
    assert_eq!(logits.len(), labels.len() * classes, "cross entropy: logits");
    let (mut loss, mut correct) = (0.0f64, 0);
    for (row, &label) in logits.chunks_exact(classes).zip(labels) {
        let label = label as usize;
        let mut best = 0;
        for (i, v) in row.iter().enumerate() {
            if *v > row[best] {
                best = i;
            }
        }
        let sum: f64 = row.iter().map(|v| f64::from(v - row[best]).exp()).sum();
        loss += sum.ln() - f64::from(row[label] - row[best]);
        correct += u64::from(best == label);
    }
    (loss, correct)
}

/// Mean of the squared difference over all values: `torch.nn.functional.mse_loss`. `dy` becomes its gradient with
/// respect to `y`; all three have one length. `room` is a buffer for sums.
pub fn mse(threads: &Threads, y: &[f32], target: &[f32], dy: &mut [f32], room: &mut Vec<f64>) -> f32 {
    assert_eq!(y.len(), target.len(), "mse: target");
    assert_eq!(y.len(), dy.len(), "mse: dy");
    let (level, scale) = (threads.cpu().level(), 2.0 / y.len() as f32);
    room.clear();
    room.resize(y.len().div_ceil(VALUES), 0.0);
    let blocks = y.chunks(VALUES).zip(target.chunks(VALUES)).zip(dy.chunks_mut(VALUES)).zip(room.iter_mut());
    threads.each(blocks, |(((y, target), dy), sum)| {
        dispatch!(level, s => *sum = squares(s, y, target, scale, dy));
    });
    (room.iter().sum::<f64>() / y.len() as f64) as f32
}

/// The sum of squared differences, and each difference times `scale` into `dy`.
#[inline(always)]
fn squares<S: Token>(s: S, y: &[f32], target: &[f32], scale: f32, dy: &mut [f32]) -> f64 {
    let scales = S::f32s::splat(s, scale);
    let mut total = 0.0;
    // Parts are short enough for sums in single precision.
    for ((y, target), dy) in y.chunks(1024).zip(target.chunks(1024)).zip(dy.chunks_mut(1024)) {
        let mut sums = S::f32s::splat(s, 0.0);
        places(
            s,
            y.len(),
            #[inline(always)]
            |p| {
                let d = load(s, y, p, 0.0) - load(s, target, p, 0.0);
                sums = d.mul_add(d, sums);
                store(s, d * scales, dy, p);
            },
        );
        total += f64::from(sums.reduce_sum());
    }
    total
}

/// Sum of the squared difference over all values.
pub fn squared_difference(y: &[f32], target: &[f32]) -> f64 {
    assert_eq!(y.len(), target.len(), "squared difference: target");
    let mut total = 0.0f64;
    // Eight running sums let the compiler use vectors; each is short enough for single precision.
    for (a, b) in y.chunks(1024).zip(target.chunks(1024)) {
        let mut sums = [0.0f32; 8];
        let ((a, a_rest), (b, b_rest)) = (a.as_chunks::<8>(), b.as_chunks::<8>());
        for (a, b) in a.iter().zip(b) {
            for i in 0..8 {
                sums[i] += (a[i] - b[i]) * (a[i] - b[i]);
            }
        }
        for (s, (a, b)) in sums.iter_mut().zip(a_rest.iter().zip(b_rest)) {
            *s += (a - b) * (a - b);
        }
        total += f64::from(sums.iter().sum::<f32>());
    }
    total
}
