//! The encoding `powersgd`: matrices as products of two narrow ones.
//!
//! A bucket is a sequence of *stretches*. A stretch is a matrix (rows of a tensor that lie whole in the
//! bucket) or plain values: vectors, rows cut by the bucket's edge, and matrices that two factors would
//! not shorten.
//!
//! ```text
//!  a matrix M of m rows and n columns | m, u32 | n, u32 | P: R columns of m values | Q: R columns of n values |
//!  n values                           | 0, u32 | n, u32 | the values |
//! ```
//!
//! M is decoded as P Qᵀ. The servers receive each worker's factors and add the products. (Ranks with an
//! all-reduce would sum P first and compute Q of the sum: Vogels et al., 2019, algorithm 1.)
//!
//! A payload that passes [`check`] holds the expected number of values, and decoding needs no more
//! memory than the payload.

use super::Rank;
use crate::{
    codec::{F32_BYTES, Word, put_f32_le},
    layout::{BucketSpec, Layout},
    payload::{Payload, Reader, Short},
    simd::wide,
};

/// The two lengths before each stretch.
const HEAD_BYTES: usize = 8;

/// A part of a bucket, for [`super::Encoding::PowerSgd`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stretch {
    /// This many plain values.
    Plain(usize),
    /// A matrix, row by row.
    Matrix {
        /// Its rows, from 1.
        rows: usize,
        /// Its columns, from 1.
        columns: usize,
    },
}

impl Stretch {
    /// The number of its values.
    pub fn values(self) -> usize {
        match self {
            Stretch::Plain(values) => values,
            Stretch::Matrix { rows, columns } => rows * columns,
        }
    }

    /// Its length in bytes, with factors of this rank.
    pub fn bytes(self, rank: Rank) -> usize {
        HEAD_BYTES
            + F32_BYTES
                * match self {
                    Stretch::Plain(values) => values,
                    Stretch::Matrix { rows, columns } => rank.columns() * (rows + columns),
                }
    }
}

/// The largest length in bytes of `values` values: those of one plain stretch.
pub(super) fn most_bytes(values: usize) -> usize {
    if values == 0 { 0 } else { HEAD_BYTES + values * F32_BYTES }
}

/// The stretches of a bucket. Whole rows of tensors with at least two dimensions form matrices if that
/// saves bytes. As in the paper, the first dimension gives the rows and all others together the
/// columns.
pub fn stretches(layout: &Layout, bucket: BucketSpec, rank: Rank) -> Vec<Stretch> {
    let mut all = Vec::new();
    let mut plain = 0;
    for (i, tensor) in layout.tensors().iter().enumerate() {
        let of = layout.tensor_range(i);
        let (from, to) = (of.start.max(bucket.range().start), of.end.min(bucket.range().end));
        if from >= to {
            continue;
        }
        let columns: usize = tensor.shape.iter().skip(1).product();
        let (first, last) = ((from - of.start).div_ceil(columns), (to - of.start) / columns);
        let matrix = Stretch::Matrix { rows: last.saturating_sub(first), columns };
        // After a matrix, the next stretch needs another head.
        if tensor.shape.len() < 2 || matrix.bytes(rank) + HEAD_BYTES > matrix.values() * F32_BYTES {
            plain += to - from;
            continue;
        }
        plain += of.start + first * columns - from;
        if plain > 0 {
            all.push(Stretch::Plain(plain));
        }
        all.push(matrix);
        plain = to - (of.start + last * columns);
    }
    if plain > 0 {
        all.push(Stretch::Plain(plain));
    }
    all
}

/// Writes the head of a stretch.
pub(super) fn put_head(stretch: Stretch, out: &mut Vec<u8>) {
    let (rows, columns) = match stretch {
        Stretch::Plain(values) => (0, values),
        Stretch::Matrix { rows, columns } => (rows, columns),
    };
    // A bucket has at most 2^18 values.
    [rows, columns].iter().for_each(|n| out.extend_from_slice(&(*n as u32).to_le_bytes()));
}

/// Writes plain values.
pub(super) fn put_plain(values: &[f32], out: &mut Vec<u8>) {
    if !values.is_empty() {
        put_head(Stretch::Plain(values.len()), out);
        put_f32_le(values, out);
    }
}

fn head(reader: &mut Reader<'_>) -> Result<(usize, usize), Short> {
    let mut word = [0; 4];
    reader.bytes(&mut word)?;
    let rows = u32::from_le_bytes(word) as usize;
    reader.bytes(&mut word)?;
    Ok((rows, u32::from_le_bytes(word) as usize))
}

/// Checks that a payload's stretches hold exactly `values` values, to the last byte.
pub(super) fn check(payload: &Payload, rank: Rank, values: usize) -> Result<(), &'static str> {
    const SHORT: &str = "it ends within a stretch";
    let mut reader = payload.reader();
    let mut left = values;
    while reader.left() > 0 {
        let (rows, columns) = head(&mut reader).map_err(|_| SHORT)?;
        let stretch = if rows == 0 { Stretch::Plain(columns) } else { Stretch::Matrix { rows, columns } };
        let fits = columns > 0 && rows.max(1).checked_mul(columns).is_some_and(|n| n <= left);
        if !fits {
            return Err("a stretch of it is empty or goes beyond the bucket's end");
        }
        left -= stretch.values();
        reader.skip(stretch.bytes(rank) - HEAD_BYTES).map_err(|_| SHORT)?;
    }
    if left > 0 { Err("its stretches are not the whole bucket") } else { Ok(()) }
}

/// A decoder, with its current stretch.
#[derive(Clone, Debug)]
pub(super) struct Matrices {
    rank: usize,
    /// The factors, column by column; empty for plain values.
    p: Vec<f32>,
    q: Vec<f32>,
    rows: usize,
    columns: usize,
    /// The number of decoded values of the stretch, and of the remaining ones.
    at: usize,
    left: usize,
}

impl Matrices {
    /// A decoder at the start of a payload.
    pub fn new(rank: Rank) -> Self {
        Self { rank: rank.columns(), p: Vec::new(), q: Vec::new(), rows: 0, columns: 0, at: 0, left: 0 }
    }

    /// Fills `out` with the next values of a checked payload.
    pub fn decode(&mut self, reader: &mut Reader<'_>, mut out: &mut [Word]) -> Result<(), Short> {
        while !out.is_empty() {
            if self.left == 0 {
                self.begin(reader)?;
            }
            // For a matrix, at most the rest of one row.
            let most = if self.rows == 0 { self.left } else { self.columns - self.at % self.columns };
            let count = most.min(out.len());
            let (now, later) = out.split_at_mut(count);
            if self.rows == 0 {
                reader.bytes(now.as_flattened_mut())?;
            } else {
                self.product(now);
            }
            self.at += count;
            self.left -= count;
            out = later;
        }
        Ok(())
    }

    fn begin(&mut self, reader: &mut Reader<'_>) -> Result<(), Short> {
        (self.rows, self.columns) = head(reader)?;
        (self.at, self.left) = (0, self.rows.max(1) * self.columns);
        if self.rows > 0 {
            self.p.resize(self.rank * self.rows, 0.0);
            self.q.resize(self.rank * self.columns, 0.0);
            reader.values(&mut self.p)?;
            reader.values(&mut self.q)?;
        }
        // In a checked payload no stretch is empty.
        if self.left == 0 { Err(Short { wanted: F32_BYTES, left: 0 }) } else { Ok(()) }
    }

    /// Computes part of a row: the products of the row of P with the columns of Q, summed in ascending
    /// order.
    fn product(&self, out: &mut [Word]) {
        let (row, column) = (self.at / self.columns, self.at % self.columns);
        for r in 0..self.rank {
            let p = self.p[r * self.rows + row];
            let q = &self.q[r * self.columns + column..];
            wide(
                #[inline(always)]
                || {
                    for (o, q) in out.iter_mut().zip(q) {
                        let before = if r == 0 { 0.0 } else { f32::from_le_bytes(*o) };
                        *o = (before + p * q).to_le_bytes();
                    }
                },
            );
        }
    }
}
