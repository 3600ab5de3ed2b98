//! The encoding `powersgd`: matrices as products of two narrow ones.
//!
//! A bucket is a row of *stretches*. One is a matrix (rows of a tensor that lie whole in the bucket), or values that are
//! written as they are: vectors, rows that are cut by the bucket's edge, and matrices for which two factors would be no
//! fewer bytes.
//!
//! ```text
//!  a matrix M of m rows and n columns | m, u32 | n, u32 | P: R columns of m values | Q: R columns of n values |
//!  n values                           | 0, u32 | n, u32 | the values |
//! ```
//!
//! M is decoded as P Qᵀ. Each worker's factors travel by themselves: the servers add up products, where ranks that reduce
//! among themselves would have to add up P first and compute Q of the sum (Vogels et al., 2019, algorithm 1).
//!
//! What it promises: a payload that [`check`] lets through holds as many values as asked for; what decoding takes in memory
//! is no more than the payload.

use super::{Rank, Word};
use crate::{
    codec::{F32_BYTES, put_f32_le},
    layout::{BucketSpec, Layout},
    payload::{Payload, Reader, Short},
    simd::wide,
};

/// The two lengths before each stretch.
const HEAD_BYTES: usize = 8;

/// What a part of a bucket is, for [`super::Encoding::PowerSgd`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stretch {
    /// So many values that are written as they are.
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
    /// Its values.
    pub fn values(self) -> usize {
        match self {
            Stretch::Plain(values) => values,
            Stretch::Matrix { rows, columns } => rows * columns,
        }
    }

    /// Its bytes where matrices have factors of this rank.
    pub fn bytes(self, rank: Rank) -> usize {
        HEAD_BYTES
            + F32_BYTES
                * match self {
                    Stretch::Plain(values) => values,
                    Stretch::Matrix { rows, columns } => rank.columns() * (rows + columns),
                }
    }
}

/// The most bytes of so many values: those of one stretch that is no matrix.
pub(super) fn most_bytes(values: usize) -> usize {
    if values == 0 { 0 } else { HEAD_BYTES + values * F32_BYTES }
}

/// The stretches of a bucket: rows of tensors of two dimensions and more that lie whole in it are matrices, where that saves
/// bytes. As in the paper a tensor's first dimension are the rows, and all others together the columns.
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
        // Behind a matrix another head is needed, for what follows it.
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

/// Writes values of which nothing is known.
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

/// Whether a payload's stretches are `values` values, to the last byte.
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

/// The stretch that is being decoded.
#[derive(Clone, Debug)]
pub(super) struct Matrices {
    rank: usize,
    /// The factors, column by column; of a stretch that is no matrix there are none.
    p: Vec<f32>,
    q: Vec<f32>,
    rows: usize,
    columns: usize,
    /// Values of it that are decoded, and that are not.
    at: usize,
    left: usize,
}

impl Matrices {
    /// Before the first one.
    pub fn new(rank: Rank) -> Self {
        Self { rank: rank.columns(), p: Vec::new(), q: Vec::new(), rows: 0, columns: 0, at: 0, left: 0 }
    }

    /// Fills `out` with the next values of a payload that was checked.
    pub fn decode(&mut self, reader: &mut Reader<'_>, mut out: &mut [Word]) -> Result<(), Short> {
        while !out.is_empty() {
            if self.left == 0 {
                self.begin(reader)?;
            }
            // Of a matrix a part of one row.
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
        // Of a checked payload no stretch is empty.
        if self.left == 0 { Err(Short { wanted: F32_BYTES, left: 0 }) } else { Ok(()) }
    }

    /// A part of a row: the products of the row's values in P with the columns of Q, added in rising order.
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
