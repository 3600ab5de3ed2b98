//! How the values of a gradient are written for the way from a worker to the weights.
//!
//! | encoding | bytes for `n` values | a value |
//! |---|---|---|
//! | f32 | 4n | as it is |
//! | bf16 | 2n | rounded to 8 bits of significand, the range of an f32 |
//! | f16 | 2n | rounded to 11 bits of significand, at most 65504 in size |
//! | int8 | n + 4 for each 1024 values begun | a whole number from -127 to 127 times the block's scale |
//! | sign | a bit, and 4 for each 1024 values begun | the block's mean magnitude, with the value's sign |
//! | top-k:F | 8k, with k = F n | the k largest as they are, the others 0 |
//! | powersgd:R | 4 R (rows + columns) for a matrix, and 8 for each stretch; at most 4n + 8 | of a matrix of rank R; what is no matrix as it is |
//!
//! Everything is little-endian. An int8 block is its scale (an f32: the largest magnitude of the block over 127) and
//! then a signed byte for each value; a sign block is its scale and then the signs, eight in a byte from the lowest bit
//! on, set where a value is below zero. top-k is the places of its values, rising, and then the values (`sparse`);
//! powersgd a list of stretches (`low_rank`).
//!
//! The first four round each value by itself, to nearest, ties to even. A finite value stays finite: what is beyond the
//! largest finite number of the encoding becomes that number, with its sign. The others leave most of a gradient out;
//! a worker keeps what they left out for its next push: error feedback, by an [`Encoder`]. What is not finite stays so
//! (in int8 and sign the whole block becomes NaN), so that the receiver can refuse it. Decoding uses operations that
//! IEEE 754 defines exactly, so it gives the same bits on every host.
//!
//! Sources: sign, Karimireddy, Rebjock, Stich, Jaggi, "Error Feedback Fixes SignSGD and other Gradient Compression
//! Schemes", ICML 2019; top-k, Stich, Cordonnier, Jaggi, "Sparsified SGD with Memory", NeurIPS 2018, and
//! Aji, Heafield, "Sparse Communication for Distributed Gradient Descent", EMNLP 2017; powersgd, Vogels, Karimireddy,
//! Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization", NeurIPS 2019.

mod draws;
mod encoder;
mod low_rank;
mod narrow;
mod options;
mod scan;
mod sign;
mod sparse;
mod values;

pub use encoder::Encoder;
pub use low_rank::{Stretch, stretches};
pub use options::{Fraction, ParseEncodingError, Rank};
pub use scan::{all_finite, sum_of_squares};
pub use values::Values;
pub(crate) use values::Word;

use crate::{
    codec::{F32_BYTES, put_f32_le},
    payload::Payload,
    simd::wide,
};

/// Values that share a scale in int8 and in sign. The scale costs 4 bytes in 1028, 0.4 %; a block decoded takes 4 KiB, an
/// eighth of the smallest first-level cache; and one large value costs the precision of no more than its 1023 neighbours.
pub const INT8_BLOCK: usize = 1024;

/// How a gradient's values are written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Encoding {
    /// IEEE 754 binary32: nothing is lost.
    #[default]
    F32,
    /// The upper half of an f32.
    Bf16,
    /// IEEE 754 binary16.
    F16,
    /// Bytes with a scale for each block of [`INT8_BLOCK`] values.
    Int8,
    /// Signs with a scale for each block of [`INT8_BLOCK`] values: their mean magnitude.
    Sign,
    /// The largest values of a bucket, so many of them, and where they are.
    TopK(Fraction),
    /// The matrices of a bucket as products of two narrow ones.
    PowerSgd(Rank),
}

/// A payload has another length than its values need.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{got} bytes are not {values} values in {encoding}, which are {expected} bytes")]
pub struct WrongLength {
    /// How the values are written.
    pub encoding: Encoding,
    /// Values that there should be.
    pub values: usize,
    /// Bytes that they need, at most where it depends on the values' matrices.
    pub expected: usize,
    /// Bytes that there are.
    pub got: usize,
}

/// A payload does not hold the values that it should.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadPayload {
    /// It is too long or too short.
    #[error(transparent)]
    Length(#[from] WrongLength),
    /// It has a length that could be right, and says something that cannot be.
    #[error("a payload is not {values} values in {encoding}: {why}")]
    Form {
        /// How the values are written.
        encoding: Encoding,
        /// Values that there should be.
        values: usize,
        /// What is wrong with it.
        why: &'static str,
    },
}

impl Encoding {
    /// One of every kind; a fraction and a rank that are small.
    pub const ALL: [Encoding; 7] = [
        Encoding::F32,
        Encoding::Bf16,
        Encoding::F16,
        Encoding::Int8,
        Encoding::Sign,
        Encoding::TopK(Fraction::TENTH),
        Encoding::PowerSgd(Rank::TWO),
    ];

    /// Those that write each value by itself, or beside its neighbours: a device can do that.
    pub const DENSE: [Encoding; 4] = [Encoding::F32, Encoding::Bf16, Encoding::F16, Encoding::Int8];

    /// Whether it leaves most of a gradient out, so that a worker has to send that later if it is not to be lost: error
    /// feedback. What the others round away is small, and of no side.
    pub fn feeds_back(self) -> bool {
        !Self::DENSE.contains(&self)
    }

    /// Bytes of so many values. [`Encoding::PowerSgd`]: the most; less where there are matrices.
    pub fn encoded_len(self, values: usize) -> usize {
        match self {
            Encoding::F32 => values * F32_BYTES,
            Encoding::Bf16 | Encoding::F16 => values * 2,
            Encoding::Int8 => values + values.div_ceil(INT8_BLOCK) * F32_BYTES,
            Encoding::Sign => sign::encoded_len(values),
            Encoding::TopK(kept) => kept.of(values) * sparse::LISTED_BYTES,
            Encoding::PowerSgd(_) => low_rank::most_bytes(values),
        }
    }

    /// Whether `payload` is `values` values: after this it can be decoded. Whether they are finite is another question
    /// ([`all_finite`]).
    pub fn check(self, payload: &Payload, values: usize) -> Result<(), BadPayload> {
        let (got, expected) = (payload.len(), self.encoded_len(values));
        let fits = match self {
            Encoding::PowerSgd(_) => got <= expected,
            _ => got == expected,
        };
        if !fits {
            return Err(WrongLength { encoding: self, values, expected, got }.into());
        }
        let formed = match self {
            Encoding::TopK(kept) => sparse::check(payload, kept.of(values), values),
            Encoding::PowerSgd(rank) => low_rank::check(payload, rank, values),
            _ => Ok(()),
        };
        formed.map_err(|why| BadPayload::Form { encoding: self, values, why })
    }

    /// Appends `values` to `out`: [`Self::encoded_len`] bytes. Knows no more than the values: powersgd finds no matrix
    /// and writes them as they are. A worker's [`Encoder`] knows more.
    pub fn encode(self, values: &[f32], out: &mut Vec<u8>) {
        match self {
            Encoding::F32 => put_f32_le(values, out),
            Encoding::Bf16 => put_halves(values, out, narrow::to_bf16),
            Encoding::F16 => put_halves(values, out, narrow::to_f16),
            Encoding::Int8 => values.chunks(INT8_BLOCK).for_each(|block| put_int8(block, out)),
            Encoding::Sign => values.chunks(INT8_BLOCK).for_each(|block| sign::put(block, out)),
            Encoding::TopK(kept) => sparse::put_largest(values, kept.of(values.len()), &mut Vec::new(), out),
            Encoding::PowerSgd(_) => low_rank::put_plain(values, out),
        }
    }
}

fn put_halves(values: &[f32], out: &mut Vec<u8>, half: impl Fn(f32) -> u16) {
    let from = out.len();
    out.resize(from + values.len() * 2, 0);
    let out = out[from..].as_chunks_mut::<2>().0.iter_mut().zip(values);
    wide(
        #[inline(always)]
        || out.for_each(|(bytes, v)| *bytes = half(*v).to_le_bytes()),
    );
}

fn put_int8(block: &[f32], out: &mut Vec<u8>) {
    let scale = int8_scale(block);
    out.extend_from_slice(&scale.to_le_bytes());
    let from = out.len();
    out.resize(from + block.len(), 0);
    if scale > 0.0 {
        let out = out[from..].iter_mut().zip(block);
        wide(
            #[inline(always)]
            || out.for_each(|(byte, v)| *byte = narrow::to_int8(*v, scale) as u8),
        );
    }
}

/// NaN where a value is not finite. 0 where every value is so small that its scale would lose precision itself: 127 times
/// the smallest normal number or less, which changes no weight that is not as small.
fn int8_scale(block: &[f32]) -> f32 {
    // The order of the bits is that of the magnitudes, and what is not finite is above all others.
    let largest = wide(
        #[inline(always)]
        || block.iter().fold(0, |m, v| std::cmp::max(m, v.to_bits() & 0x7fff_ffff)),
    );
    let largest = f32::from_bits(largest);
    if !largest.is_finite() {
        return f32::NAN;
    }
    let mut scale = largest / 127.0;
    if scale < f32::MIN_POSITIVE {
        return 0.0;
    }
    while (scale * 127.0).is_infinite() {
        scale = scale.next_down();
    }
    scale
}

#[cfg(test)]
mod compressed_tests;
#[cfg(test)]
mod tests;
