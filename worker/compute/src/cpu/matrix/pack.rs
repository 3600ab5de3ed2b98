//! A panel of a product's right matrix, copied so that its rows are contiguous.

use super::operands::Matrix;
use crate::cpu::simd::LANES;
use fearless_simd::{Simd as Token, f32x4, prelude::*};
use std::cell::RefCell;

/// Memory for a panel.
pub(super) type Room = Vec<f32>;

/// Maximum rows of a panel of `b`. With two AVX-512 vectors it then has 128 KiB, and fits into the second-level
/// cache together with the other operand.
pub(super) const KC: usize = 1024;

/// Alignment of a panel in bytes. Otherwise every other load would cross a cache line.
const LINE: usize = 64;

/// Calls `work` with this thread's buffer.
pub(super) fn with_room<R>(work: impl FnOnce(&mut Room) -> R) -> R {
    thread_local!(static ROOM: RefCell<Room> = const { RefCell::new(Vec::new()) });
    ROOM.with_borrow_mut(work)
}

/// The first `kc` rows and `cols` columns of `b` as `[kc, width]`, padded with zero columns.
#[inline(always)]
pub(super) fn pack<'a, S: Token>(
    s: S,
    b: Matrix,
    [kc, cols]: [usize; 2],
    width: usize,
    room: &'a mut Room,
) -> &'a [f32] {
    room.resize(KC * 2 * LANES + LINE, 0.0);
    let skip = room.as_ptr().align_offset(LINE).min(LINE);
    let to = &mut room[skip..][..kc * width];
    if cols < width {
        to.fill(0.0);
    }
    if b.col == 1 && cols == width {
        for (p, to) in to.chunks_exact_mut(width).enumerate() {
            let from = b.values[p * b.row..][..width].chunks_exact(S::f32s::LEN);
            for (from, to) in from.zip(to.chunks_exact_mut(S::f32s::LEN)) {
                S::f32s::from_slice(s, from).store_slice(to);
            }
        }
    } else if b.col == 1 {
        for (p, to) in to.chunks_exact_mut(width).enumerate() {
            to[..cols].copy_from_slice(&b.values[p * b.row..][..cols]);
        }
    } else {
        transpose(s, b.values, b.col, [cols, kc], to, width);
    }
    to
}

/// `to[q, p] = from[p, q]` for `from` of `[rows, cols]`, whose rows are `stride` apart; those of `to` are `into` apart.
#[inline(always)]
fn transpose<S: Token>(
    s: S,
    from: &[f32],
    stride: usize,
    [rows, cols]: [usize; 2],
    to: &mut [f32],
    into: usize,
) {
    /// Columns per pass: the output stays in the first-level cache until all rows are done.
    const COLS: usize = 32;
    let fours = rows / 4 * 4;
    for q0 in (0..cols).step_by(COLS) {
        let cols = COLS.min(cols - q0);
        let (from, to) = (&from[q0..], &mut to[q0 * into..]);
        for p in (0..fours).step_by(4) {
            let (a, b) = (&from[p * stride..][..cols], &from[(p + 1) * stride..][..cols]);
            let (c, d) = (&from[(p + 2) * stride..][..cols], &from[(p + 3) * stride..][..cols]);
            let to = &mut to[p..];
            let mut q = 0;
            while q + 4 <= cols {
                let (a, b) = (f32x4::from_slice(s, &a[q..q + 4]), f32x4::from_slice(s, &b[q..q + 4]));
                let (c, d) = (f32x4::from_slice(s, &c[q..q + 4]), f32x4::from_slice(s, &d[q..q + 4]));
                let (ac, bd) = (a.zip_low(c), b.zip_low(d));
                ac.zip_low(bd).store_slice(&mut to[q * into..][..4]);
                ac.zip_high(bd).store_slice(&mut to[(q + 1) * into..][..4]);
                let (ac, bd) = (a.zip_high(c), b.zip_high(d));
                ac.zip_low(bd).store_slice(&mut to[(q + 2) * into..][..4]);
                ac.zip_high(bd).store_slice(&mut to[(q + 3) * into..][..4]);
                q += 4;
            }
            for q in q..cols {
                to[q * into..][..4].copy_from_slice(&[a[q], b[q], c[q], d[q]]);
            }
        }
        for p in fours..rows {
            for (q, v) in from[p * stride..][..cols].iter().enumerate() {
                to[q * into + p] = *v;
            }
        }
    }
}
