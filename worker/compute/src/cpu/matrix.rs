//! Matrix products for the shapes of training: tens to hundreds of rows, any width.
//!
//! ```text
//!  c[m, n] = a[m, k] · b[k, n]      for KC rows of b, some rows of a, a panel of two vectors of columns:
//!      b: the panel's columns, packed [k][columns], or where they lie
//!      a: read where it lies, a value at a time, R rows by the panel: R x 2 accumulators in registers (tile.rs)
//! ```
//!
//! Nothing of `a` is ever copied, and a panel of `b` once, while it is in the cache: with 64 rows copies of both matrices, as
//! products of large ones are blocked, cost more than they save. A bias, or what is in `c`, is where a sum starts, and a ReLU is
//! applied before it is stored, so that no pass over `c` follows.
//!
//! A value of `c` is one chain of (fused) multiplications and additions over `k` for each KC, whatever the tile: neither the
//! number of threads nor the rows beside it change its bits.

mod pack;
mod tile;

use crate::cpu::{simd::Cpu, threads::Threads};
use fearless_simd::{Simd as Token, dispatch, prelude::*};
use pack::{Room, pack, with_room};
use tile::{Panel, Tile};

/// Rows of `b` that a panel has at most: with two vectors of AVX-512 it has 128 KiB then, and with what it is multiplied by it
/// stays in the second cache.
const KC: usize = 1024;
/// Likewise where the columns of `a` are contiguous: a tile takes a part of a line of each, and the next tile the rest of it, which is
/// in the first cache still.
const KC_COLUMNS: usize = 256;
/// Values of `a` that a panel is used for before the next is packed: half of a second cache of 1 MiB.
const BLOCK: usize = 1 << 17;
/// Multiplications from which on a product is worth waking other threads for: some 20 us of one.
const PARALLEL: usize = 1 << 20;

/// A matrix that is read: the strides of its rows and columns, one of which is 1.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Matrix<'a> {
    values: &'a [f32],
    row: usize,
    col: usize,
}

impl<'a> Matrix<'a> {
    /// Rows one after another, at this distance.
    pub(crate) fn rows(values: &'a [f32], stride: usize) -> Self {
        Self { values, row: stride, col: 1 }
    }

    /// Columns likewise: the transpose of [`Self::rows`].
    pub(crate) fn columns(values: &'a [f32], stride: usize) -> Self {
        Self { values, row: 1, col: stride }
    }

    /// What lies behind a row and a column.
    #[inline(always)]
    fn from(self, row: usize, col: usize) -> Self {
        Self { values: &self.values[row * self.row + col * self.col..], ..self }
    }

    fn holds(self, rows: usize, cols: usize) -> bool {
        rows == 0 || cols == 0 || (rows - 1) * self.row + (cols - 1) * self.col < self.values.len()
    }
}

/// What a product starts from, and what is done with it.
#[derive(Clone, Copy, Debug)]
pub(crate) enum ProductStart<'a> {
    /// Nothing: `c` is not read.
    Zero,
    /// What is in `c`.
    Sum,
    /// A bias, a value for each column.
    Bias(&'a [f32]),
    /// The same, and negative results become zero.
    BiasRelu(&'a [f32]),
}

impl<'a> ProductStart<'a> {
    fn columns(self, from: usize) -> Self {
        match self {
            Self::Bias(b) => Self::Bias(&b[from..]),
            Self::BiasRelu(b) => Self::BiasRelu(&b[from..]),
            other => other,
        }
    }

    /// For a part of the sum.
    fn part(self, first: bool, last: bool) -> (Self, bool) {
        let relu = last && matches!(self, Self::BiasRelu(_));
        let start = match self {
            _ if !first => Self::Sum,
            Self::BiasRelu(b) => Self::Bias(b),
            other => other,
        };
        (start, relu)
    }
}

/// `c = a · b`, onto something. `c` is `[m, n]`, its rows at a distance of `stride`.
pub(crate) fn product(
    threads: &Threads,
    [m, k, n]: [usize; 3],
    a: Matrix,
    b: Matrix,
    (c, stride): (&mut [f32], usize),
    onto: ProductStart,
) {
    if m == 0 || n == 0 {
        return;
    }
    assert!(k > 0, "matrix product: no terms");
    assert!(a.holds(m, k), "matrix product: left");
    assert!(b.holds(k, n), "matrix product: right");
    assert!(n <= stride && (m - 1) * stride + n <= c.len(), "matrix product: result");
    let cpu = threads.cpu();
    let parts = if m * k * n < PARALLEL { 1 } else { threads.count().min(m.div_ceil(8)) };
    if parts == 1 {
        return with_room(|room| rows(cpu, [m, k, n], a, b, (c, stride), onto, room));
    }
    let each = m.div_ceil(parts).next_multiple_of(4);
    let chunks = c.chunks_mut(each * stride).enumerate().take(m.div_ceil(each));
    threads.each(chunks, |(i, c)| {
        let m = each.min(m - i * each);
        with_room(|room| rows(cpu, [m, k, n], a.from(i * each, 0), b, (c, stride), onto, room));
    });
}

fn rows(
    cpu: Cpu,
    dims: [usize; 3],
    a: Matrix,
    b: Matrix,
    c: (&mut [f32], usize),
    onto: ProductStart,
    room: &mut Room,
) {
    dispatch!(cpu.level(), s => blocks(s, dims, a, b, c, onto, room));
}

#[inline(always)]
fn blocks<S: Token>(
    s: S,
    [m, k, n]: [usize; 3],
    a: Matrix,
    b: Matrix,
    (c, stride): (&mut [f32], usize),
    onto: ProductStart,
    room: &mut Room,
) {
    let len = S::f32s::LEN;
    let most = if a.col == 1 { KC } else { KC_COLUMNS };
    for k0 in (0..k).step_by(most) {
        let kc = most.min(k - k0);
        let (start, relu) = onto.part(k0 == 0, k0 + kc == k);
        let rows = BLOCK / kc;
        for i0 in (0..m).step_by(rows) {
            let mc = rows.min(m - i0);
            for j0 in (0..n).step_by(2 * len) {
                let cols = (2 * len).min(n - j0);
                let width = cols.next_multiple_of(len);
                let b = b.from(k0, j0);
                // A copy of the panel does not pay for few rows.
                let panel = if b.col == 1 && cols == width && mc <= 4 * len {
                    Panel::Apart(b.values, b.row)
                } else {
                    Panel::Packed(pack(s, b, [kc, cols], width, room))
                };
                let tile = Tile { kc, cols, stride, start: start.columns(j0), relu };
                tile.rows(s, mc, a.from(i0, k0), panel, &mut c[i0 * stride + j0..]);
            }
        }
    }
}
