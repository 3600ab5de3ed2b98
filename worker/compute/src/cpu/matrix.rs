//! Matrix products for the shapes of training: tens to hundreds of rows, any width.
//!
//! ```text
//!  c[m, n] = a[m, k] · b[k, n]      for KC rows of b, some rows of a, a panel of two vectors of columns:
//!      b: the panel's columns, packed [k][columns], or where they lie
//!      a: read where it lies, a value at a time, R rows by the panel: R x 2 accumulators in registers (tile.rs)
//! ```
//!
//! It never copies `a`, and copies a panel of `b` once, while it is in the cache: with 64 rows, copying both
//! matrices, as for large products, costs more than it saves. A sum starts from a bias, or from `c`, and a ReLU is
//! applied before the store, so no further pass over `c` is needed.
//!
//! A value of `c` is one chain of (fused) multiplications and additions over `k` for each KC, whatever the tile:
//! neither the number of threads nor neighbouring rows change its bits.

mod operands;
mod pack;
mod tile;

pub(crate) use operands::{Matrix, ProductStart};

use crate::cpu::{simd::Cpu, threads::Threads};
use fearless_simd::{Simd as Token, dispatch, prelude::*};
use pack::{KC, Room, pack, with_room};
use tile::{Panel, Tile};

/// As [`KC`], for contiguous columns of `a`: a tile reads a part of a cache line of each, and the next tile reads the
/// rest while the line is still in the first-level cache.
const KC_COLUMNS: usize = 256;
/// Values of `a` per panel: half of a second-level cache of 1 MiB.
const BLOCK: usize = 1 << 17;
/// Minimum multiplications of a parallel product: about 20 us on one thread.
const PARALLEL: usize = 1 << 20;

/// `c = a · b`, starting from `onto`. `c` is `[m, n]`, with rows at a distance of `stride`.
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
                // With few rows a copy of the panel does not pay.
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
