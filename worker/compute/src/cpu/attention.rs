//! Causal self-attention, one head of one sequence at a time, with its whole matrix of weights in memory.

use crate::{
    cpu::{
        matrix::{Matrix, Onto, product},
        threads::Threads,
    },
    shape::AttentionShape,
};

/// Room for the matrices of one head.
#[derive(Clone, Debug, Default)]
pub struct AttentionRoom {
    /// `[time, time]`: weights, and their gradient.
    weights: Vec<f32>,
    dweights: Vec<f32>,
}

impl AttentionRoom {
    fn reserve(&mut self, s: AttentionShape) {
        self.weights.resize(s.time * s.time, 0.0);
        self.dweights.resize(s.time * s.time, 0.0);
    }

    /// `q · kᵀ` for a head, the part that is later than the place left as it is.
    fn scores(&mut self, threads: &Threads, s: AttentionShape, qkv: &[f32]) {
        let row = 3 * s.width();
        let (q, k) = (qkv, &qkv[s.width()..]);
        let (t, d) = (s.time, s.head);
        let (q, k) = (Matrix::rows(q, row), Matrix::columns(k, row));
        product(threads, [t, d, t], q, k, (&mut self.weights, t), Onto::Zero);
    }
}

/// The heads: offset of their queries in `qkv`, of their result in `out`, and of their rows in the statistics.
fn heads(s: AttentionShape) -> impl Iterator<Item = (usize, usize, usize)> {
    (0..s.batch).flat_map(move |b| {
        (0..s.heads).map(move |h| {
            let place = b * s.time;
            (place * 3 * s.width() + h * s.head, place * s.width() + h * s.head, (b * s.heads + h) * s.time)
        })
    })
}

/// `softmax(q · kᵀ · scale) · v` over the places up to each one. `lse`, `[batch, heads, time]`, gets the logarithm of the sum
/// of exponentials. See [`crate::device::Attentions::attention`] for the shapes.
pub fn forward(
    threads: &Threads,
    s: AttentionShape,
    room: &mut AttentionRoom,
    qkv: &[f32],
    out: &mut [f32],
    lse: &mut [f32],
) {
    room.reserve(s);
    let (t, d, w) = (s.time, s.head, s.width());
    for (at, to, stat) in heads(s) {
        let qkv = &qkv[at..];
        room.scores(threads, s, qkv);
        for (i, row) in room.weights.chunks_exact_mut(t).enumerate() {
            let (past, future) = row.split_at_mut(i + 1);
            future.fill(0.0);
            let largest = past.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let mut sum = 0.0;
            for p in past.iter_mut() {
                *p = ((*p - largest) * s.scale()).exp();
                sum += *p;
            }
            past.iter_mut().for_each(|p| *p /= sum);
            lse[stat + i] = sum.ln() + largest * s.scale();
        }
        let (weights, v) = (Matrix::rows(&room.weights, t), Matrix::rows(&qkv[2 * w..], 3 * w));
        product(threads, [t, t, d], weights, v, (&mut out[to..], w), Onto::Zero);
    }
}

/// The gradient of `qkv`, over what is there.
pub fn backward(
    threads: &Threads,
    s: AttentionShape,
    room: &mut AttentionRoom,
    (qkv, out, lse): (&[f32], &[f32], &[f32]),
    dout: &[f32],
    dqkv: &mut [f32],
) {
    room.reserve(s);
    let (t, d, w) = (s.time, s.head, s.width());
    let wide = 3 * w;
    for (at, to, stat) in heads(s) {
        let (q, k, v) = (&qkv[at..], &qkv[at + w..], &qkv[at + 2 * w..]);
        let (out, dout) = (&out[to..], &dout[to..]);
        room.scores(threads, s, q);
        for (i, row) in room.weights.chunks_exact_mut(t).enumerate() {
            let (past, future) = row.split_at_mut(i + 1);
            future.fill(0.0);
            past.iter_mut().for_each(|p| *p = (*p * s.scale() - lse[stat + i]).exp());
        }
        let (p, dp) = (&room.weights, &mut room.dweights);
        product(
            threads,
            [t, t, d],
            Matrix::columns(p, t),
            Matrix::rows(dout, w),
            (&mut dqkv[at + 2 * w..], wide),
            Onto::Zero,
        );
        product(threads, [t, d, t], Matrix::rows(dout, w), Matrix::columns(v, wide), (dp, t), Onto::Zero);
        for (i, (dp, p)) in dp.chunks_exact_mut(t).zip(p.chunks_exact(t)).enumerate() {
            let row = |x: &[f32]| -> f32 { (0..d).map(|c| x[i * w + c] * dout[i * w + c]).sum() };
            let delta = row(out);
            for (dp, p) in dp.iter_mut().zip(p) {
                // Zero where the place is later, since `p` is.
                *dp = p * (*dp - delta) * s.scale();
            }
        }
        product(
            threads,
            [t, t, d],
            Matrix::rows(dp, t),
            Matrix::rows(k, wide),
            (&mut dqkv[at..], wide),
            Onto::Zero,
        );
        product(
            threads,
            [t, t, d],
            Matrix::columns(dp, t),
            Matrix::rows(q, wide),
            (&mut dqkv[at + w..], wide),
            Onto::Zero,
        );
    }
}
