//! Causal self-attention, one head of one sequence at a time, in blocks of rows. A block's attention weights are a
//! matrix in memory, with the columns up to its last row.

use crate::{
    cpu::{
        matrix::{Matrix, ProductStart, product},
        simd::Cpu,
        threads::Threads,
        vector::{exp, largest, load, places, store},
    },
    shape::AttentionShape,
};
use fearless_simd::{Simd as Token, dispatch, prelude::*};
use std::{cell::RefCell, ops::Range};

/// Rows per block. Larger blocks compute more masked values; smaller ones pack keys and values more often.
const ROWS: usize = 64;

/// This thread's memory for a block's weights and their gradient, `[ROWS, time]` each.
fn with_room<R>(s: AttentionShape, work: impl FnOnce(&mut [f32], &mut [f32]) -> R) -> R {
    thread_local!(static ROOM: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) });
    ROOM.with_borrow_mut(|room| {
        let each = ROWS.min(s.time) * s.time;
        room.resize(2 * each, 0.0);
        let (weights, dweights) = room.split_at_mut(each);
        work(weights, dweights)
    })
}

/// The blocks of a sequence's rows.
fn blocks(time: usize) -> impl DoubleEndedIterator<Item = Range<usize>> {
    (0..time.div_ceil(ROWS)).map(move |i| i * ROWS..time.min((i + 1) * ROWS))
}

/// `softmax(q · kᵀ · scale) · v` over the places up to each one. `lse`, `[batch, heads, time]`, gets the logarithm
/// of the sum of exponentials. See [`crate::device::Attentions::attention`] for the shapes.
pub fn forward(threads: &Threads, s: AttentionShape, qkv: &[f32], out: &mut [f32], lse: &mut [f32]) {
    let (t, w) = (s.time, s.width());
    let sequences =
        qkv.chunks_exact(3 * w * t).zip(out.chunks_exact_mut(w * t)).zip(lse.chunks_exact_mut(s.heads * t));
    threads.each(sequences.take(s.batch), |((qkv, out), lse)| {
        let one = Threads::one(threads.cpu());
        for (h, lse) in lse.chunks_exact_mut(t).enumerate() {
            let head = Head::of(s, &one, qkv, h);
            with_room(s, |weights, _| {
                for rows in blocks(t) {
                    let lse = &mut lse[rows.clone()];
                    head.scores(&rows, weights);
                    softmax(one.cpu(), rows.start, weights, s.scale(), lse);
                    let (p, v) = (Matrix::rows(weights, rows.end), Matrix::rows(head.v, 3 * w));
                    let out = &mut out[rows.start * w + h * s.head..];
                    product(&one, [rows.len(), rows.end, s.head], p, v, (out, w), ProductStart::Zero);
                }
            });
        }
    });
}

/// Overwrites the gradient of `qkv`.
pub fn backward(
    threads: &Threads,
    s: AttentionShape,
    (qkv, out, lse): (&[f32], &[f32], &[f32]),
    dout: &[f32],
    dqkv: &mut [f32],
) {
    let (t, d, w) = (s.time, s.head, s.width());
    let wide = 3 * w;
    let sequences = qkv
        .chunks_exact(wide * t)
        .zip(out.chunks_exact(w * t))
        .zip(dout.chunks_exact(w * t))
        .zip(lse.chunks_exact(s.heads * t))
        .zip(dqkv.chunks_exact_mut(wide * t));
    threads.each(sequences.take(s.batch), |((((qkv, out), dout), lse), dqkv)| {
        let one = Threads::one(threads.cpu());
        for (h, lse) in lse.chunks_exact(t).enumerate() {
            let head = Head::of(s, &one, qkv, h);
            let (out, dout) = (&out[h * d..], &dout[h * d..]);
            with_room(s, |p, dp| {
                // Starts with the last block, because its products cover all keys and values; the other blocks add
                // to them.
                for rows in blocks(t).rev() {
                    let (m, n) = (rows.len(), rows.end);
                    let onto = if n == t { ProductStart::Zero } else { ProductStart::Sum };
                    let dout = &dout[rows.start * w..];
                    head.scores(&rows, p);
                    weights(one.cpu(), rows.start, p, s.scale(), &lse[rows.clone()]);
                    let (pt, right) = (Matrix::columns(p, n), Matrix::rows(dout, w));
                    product(&one, [n, m, d], pt, right, (&mut dqkv[2 * w + h * d..], wide), onto);
                    let (left, v) = (Matrix::rows(dout, w), Matrix::columns(head.v, wide));
                    product(&one, [m, d, n], left, v, (&mut *dp, n), ProductStart::Zero);
                    let outs = (&out[rows.start * w..], dout);
                    dscores(one.cpu(), [m, n, d, w], s.scale(), p, dp, outs);
                    let (left, k) = (Matrix::rows(dp, n), Matrix::rows(head.k, wide));
                    product(
                        &one,
                        [m, n, d],
                        left,
                        k,
                        (&mut dqkv[rows.start * wide + h * d..], wide),
                        ProductStart::Zero,
                    );
                    let (left, q) =
                        (Matrix::columns(dp, n), Matrix::rows(&head.q[rows.start * wide..], wide));
                    product(&one, [n, m, d], left, q, (&mut dqkv[w + h * d..], wide), onto);
                }
            });
        }
    });
}

/// A head's queries, keys and values, with rows three widths apart.
struct Head<'a> {
    shape: AttentionShape,
    threads: &'a Threads,
    q: &'a [f32],
    k: &'a [f32],
    v: &'a [f32],
}

impl<'a> Head<'a> {
    fn of(shape: AttentionShape, threads: &'a Threads, qkv: &'a [f32], head: usize) -> Self {
        let (w, at) = (shape.width(), head * shape.head);
        Self { shape, threads, q: &qkv[at..], k: &qkv[w + at..], v: &qkv[2 * w + at..] }
    }

    /// `q · kᵀ` for some rows and the places up to the last of them.
    fn scores(&self, rows: &Range<usize>, scores: &mut [f32]) {
        let wide = 3 * self.shape.width();
        let (q, k) = (Matrix::rows(&self.q[rows.start * wide..], wide), Matrix::columns(self.k, wide));
        product(
            self.threads,
            [rows.len(), self.shape.head, rows.end],
            q,
            k,
            (scores, rows.end),
            ProductStart::Zero,
        );
    }
}

/// Turns each row's scores into weights; later places become 0. Row `i` is place `first + i`.
fn softmax(cpu: Cpu, first: usize, scores: &mut [f32], scale: f32, lse: &mut [f32]) {
    dispatch!(cpu.level(), s => softmax_in(s, first, scores, scale, lse));
}

#[inline(always)]
fn softmax_in<S: Token>(s: S, first: usize, scores: &mut [f32], scale: f32, lse: &mut [f32]) {
    let n = first + lse.len();
    for (i, (row, lse)) in scores.chunks_exact_mut(n).zip(lse).enumerate() {
        let (past, later) = row.split_at_mut(first + i + 1);
        later.fill(0.0);
        let top = largest(s, past);
        let (scales, shift) = (S::f32s::splat(s, scale), S::f32s::splat(s, -top * scale));
        let mut sums = S::f32s::splat(s, 0.0);
        places(
            s,
            past.len(),
            #[inline(always)]
            |p| {
                let e = exp(s, load(s, past, p, f32::NEG_INFINITY).mul_add(scales, shift));
                sums += e;
                store(s, e, past, p);
            },
        );
        let sum = sums.reduce_sum();
        let inverse = S::f32s::splat(s, 1.0 / sum);
        places(
            s,
            past.len(),
            #[inline(always)]
            |p| store(s, load(s, past, p, 0.0) * inverse, past, p),
        );
        *lse = sum.ln() + top * scale;
    }
}

/// Recomputes the weights from the logarithms of the sums.
fn weights(cpu: Cpu, first: usize, scores: &mut [f32], scale: f32, lse: &[f32]) {
    dispatch!(cpu.level(), s => weights_in(s, first, scores, scale, lse));
}

#[inline(always)]
fn weights_in<S: Token>(s: S, first: usize, scores: &mut [f32], scale: f32, lse: &[f32]) {
    let n = first + lse.len();
    for (i, (row, lse)) in scores.chunks_exact_mut(n).zip(lse).enumerate() {
        let (past, later) = row.split_at_mut(first + i + 1);
        later.fill(0.0);
        let (scales, shift) = (S::f32s::splat(s, scale), S::f32s::splat(s, -lse));
        places(
            s,
            past.len(),
            #[inline(always)]
            |p| store(s, exp(s, load(s, past, p, 0.0).mul_add(scales, shift)), past, p),
        );
    }
}

/// Turns the gradient of the weights `p` into that of the scores. `outs` are the rows' outputs and their gradients,
/// `w` apart.
fn dscores(cpu: Cpu, dims: [usize; 4], scale: f32, p: &[f32], dp: &mut [f32], outs: (&[f32], &[f32])) {
    dispatch!(cpu.level(), s => dscores_in(s, dims, scale, p, dp, outs));
}

#[inline(always)]
fn dscores_in<S: Token>(
    s: S,
    [m, n, d, w]: [usize; 4],
    scale: f32,
    p: &[f32],
    dp: &mut [f32],
    (out, dout): (&[f32], &[f32]),
) {
    for (i, (dp, p)) in dp.chunks_exact_mut(n).zip(p.chunks_exact(n)).enumerate().take(m) {
        let (out, dout) = (&out[i * w..][..d], &dout[i * w..][..d]);
        let mut delta = S::f32s::splat(s, 0.0);
        places(
            s,
            d,
            #[inline(always)]
            |p| delta = load(s, out, p, 0.0).mul_add(load(s, dout, p, 0.0), delta),
        );
        let (delta, scales) = (S::f32s::splat(s, delta.reduce_sum()), S::f32s::splat(s, scale));
        places(
            s,
            n,
            #[inline(always)]
            |at| {
                // Zero at later places, because `p` is.
                let d = load(s, p, at, 0.0) * (load(s, dp, at, 0.0) - delta) * scales;
                store(s, d, dp, at);
            },
        );
    }
}
