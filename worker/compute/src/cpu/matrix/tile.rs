//! The inner part of a product: some rows by one or two vectors of columns, in registers.
//!
//! All functions here are inlined into one function per level and number of rows. No accumulator may have its
//! address taken (by a slice or a closure), or the compiler keeps them all in memory.

use super::operands::{Matrix, ProductStart};
use crate::cpu::simd::LANES;
use fearless_simd::{Simd as Token, prelude::*};

/// A tile's columns of `b`, with a row for each term.
#[derive(Clone, Copy)]
pub(super) enum Panel<'a> {
    /// Contiguous rows.
    Packed(&'a [f32]),
    /// Rows at this distance.
    Apart(&'a [f32], usize),
}

/// A panel's part of a product.
#[derive(Clone, Copy)]
pub(super) struct Tile<'a> {
    /// Number of terms.
    pub(super) kc: usize,
    /// Columns of `c`: fewer than the panel's at the right edge.
    pub(super) cols: usize,
    /// Distance between rows of `c`.
    pub(super) stride: usize,
    pub(super) start: ProductStart<'a>,
    pub(super) relu: bool,
}

impl Tile<'_> {
    /// All rows of `a` by the panel.
    #[inline(always)]
    pub(super) fn rows<S: Token>(self, s: S, m: usize, a: Matrix, panel: Panel, c: &mut [f32]) {
        match self.cols > S::f32s::LEN {
            true => self.rows_of::<S, 2>(s, m, a, panel, c),
            false => self.rows_of::<S, 1>(s, m, a, panel, c),
        }
    }

    #[inline(always)]
    fn rows_of<S: Token, const V: usize>(self, s: S, m: usize, a: Matrix, panel: Panel, c: &mut [f32]) {
        // 32 registers hold 8 x 2 accumulators, 16 hold 6 x 2, in addition to the panel's two and a value of `a`.
        let many = S::f32s::LEN == LANES || cfg!(target_arch = "aarch64");
        let mut i = 0;
        while i < m {
            let (a, c) = (a.from(i, 0), &mut c[i * self.stride..]);
            i += match m - i {
                8.. if many => self.tile::<S, 8, V>(s, a, panel, c),
                // Four and four: two rows alone would wait for each other.
                6 | 7 | 9.. if !many => self.tile::<S, 6, V>(s, a, panel, c),
                4.. => self.tile::<S, 4, V>(s, a, panel, c),
                2.. => self.tile::<S, 2, V>(s, a, panel, c),
                _ => self.tile::<S, 1, V>(s, a, panel, c),
            };
        }
    }

    /// `R` rows; returns their number. A separate function, so that surrounding variables take no registers from
    /// the sums.
    #[inline(never)]
    fn tile<S: Token, const R: usize, const V: usize>(
        self,
        s: S,
        a: Matrix,
        panel: Panel,
        c: &mut [f32],
    ) -> usize {
        s.vectorize(
            #[inline(always)]
            || self.sums::<S, R, V>(s, a, panel, c),
        );
        R
    }

    #[inline(always)]
    fn sums<S: Token, const R: usize, const V: usize>(self, s: S, a: Matrix, panel: Panel, c: &mut [f32]) {
        let len = S::f32s::LEN;
        let width = V * len;
        let mut acc = [[S::f32s::splat(s, 0.0); V]; R];
        if let ProductStart::Bias(bias) = self.start {
            let mut padded = [0.0; 2 * LANES];
            padded[..self.cols].copy_from_slice(&bias[..self.cols]);
            for v in 0..V {
                let start = S::f32s::from_slice(s, &padded[v * len..][..len]);
                for r in 0..R {
                    acc[r][v] = start;
                }
            }
        }
        let onto = matches!(self.start, ProductStart::Sum);
        if a.col == 1 {
            let rows: [&[f32]; R] = std::array::from_fn(|r| &a.values[r * a.row..][..self.kc]);
            match panel {
                Panel::Packed(b) => {
                    let b = &b[..self.kc * width];
                    for p in 0..self.kc {
                        acc = add::<S, R, V>(s, |r| rows[r][p], &b[p * width..][..width], acc);
                    }
                }
                Panel::Apart(b, stride) => {
                    for p in 0..self.kc {
                        acc = add::<S, R, V>(s, |r| rows[r][p], &b[p * stride..][..width], acc);
                    }
                }
            }
        } else {
            match panel {
                Panel::Packed(b) => {
                    for (p, b) in b[..self.kc * width].chunks_exact(width).enumerate() {
                        let column = &a.values[p * a.col..][..R];
                        acc = add::<S, R, V>(s, |r| column[r], b, acc);
                    }
                }
                Panel::Apart(b, stride) => {
                    for p in 0..self.kc {
                        let column = &a.values[p * a.col..][..R];
                        acc = add::<S, R, V>(s, |r| column[r], &b[p * stride..][..width], acc);
                    }
                }
            }
        }
        if self.relu && !onto {
            let zero = S::f32s::splat(s, 0.0);
            for r in 0..R {
                for v in 0..V {
                    // Not `max`: a NaN must stay, or a diverged run would look healthy.
                    acc[r][v] = acc[r][v].simd_lt(zero).select(zero, acc[r][v]);
                }
            }
        }
        // Only store the accumulators, in loops that the compiler unrolls: an index that it cannot resolve would
        // keep them in memory.
        if self.cols == width && !onto {
            for r in 0..R {
                let row = &mut c[r * self.stride..][..width];
                for v in 0..V {
                    acc[r][v].store_slice(&mut row[v * len..][..len]);
                }
            }
        } else {
            let mut sums = [[0.0; 2 * LANES]; R];
            for r in 0..R {
                for v in 0..V {
                    acc[r][v].store_slice(&mut sums[r][v * len..][..len]);
                }
            }
            for (r, sums) in sums.iter().enumerate() {
                for (to, sum) in c[r * self.stride..][..self.cols].iter_mut().zip(sums) {
                    let y = if onto { *to + sum } else { *sum };
                    *to = if self.relu && y < 0.0 { 0.0 } else { y };
                }
            }
        }
    }
}

/// One term of all sums.
#[inline(always)]
fn add<S: Token, const R: usize, const V: usize>(
    s: S,
    a: impl Fn(usize) -> f32,
    b: &[f32],
    mut acc: [[S::f32s; V]; R],
) -> [[S::f32s; V]; R] {
    let len = S::f32s::LEN;
    let mut columns = [S::f32s::splat(s, 0.0); V];
    for v in 0..V {
        columns[v] = S::f32s::from_slice(s, &b[v * len..][..len]);
    }
    for r in 0..R {
        let a = S::f32s::splat(s, a(r));
        for v in 0..V {
            acc[r][v] = a.mul_add(columns[v], acc[r][v]);
        }
    }
    acc
}
