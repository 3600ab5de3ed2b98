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

mod encoder;
mod low_rank;
pub(crate) mod narrow;
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

use crate::{
    codec::{F32_BYTES, put_f32_le},
    payload::Payload,
    simd::wide,
};

/// Values that share a scale in int8 and in sign. The scale costs 4 bytes in 1028, 0.4 %; a block decoded takes 4 KiB, an
/// eighth of the smallest first-level cache; and one large value costs the precision of no more than its 1023 neighbours.
pub const INT8_BLOCK: usize = 1024;

/// The encoding of a gradient's values.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Encoding {
    /// IEEE 754 binary32: lossless.
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
    /// The values of a bucket with the largest magnitudes, and their positions.
    TopK(Fraction),
    /// The matrices of a bucket as products of two narrow ones.
    PowerSgd(Rank),
}

/// The payload's length does not match its number of values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{got} bytes are not {values} values in {encoding}, which are {expected} bytes")]
pub struct WrongLength {
    /// The encoding.
    pub encoding: Encoding,
    /// The expected number of values.
    pub values: usize,
    /// The expected length in bytes; the maximum if it depends on the shapes of the matrices.
    pub expected: usize,
    /// The actual length in bytes.
    pub got: usize,
}

/// A payload is invalid.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadPayload {
    /// Its length is wrong.
    #[error(transparent)]
    Length(#[from] WrongLength),
    /// Its length is possible, but its content is not.
    #[error("a payload is not {values} values in {encoding}: {why}")]
    Form {
        /// The encoding.
        encoding: Encoding,
        /// The expected number of values.
        values: usize,
        /// The reason.
        why: &'static str,
    },
}

impl Encoding {
    /// One encoding of every kind, with a small fraction and a small rank.
    pub const ALL: [Encoding; 7] = [
        Encoding::F32,
        Encoding::Bf16,
        Encoding::F16,
        Encoding::Int8,
        Encoding::Sign,
        Encoding::TopK(Fraction::TENTH),
        Encoding::PowerSgd(Rank::TWO),
    ];

    /// The encodings that write each value alone or by block: a device can compute them.
    pub const DENSE: [Encoding; 4] = [Encoding::F32, Encoding::Bf16, Encoding::F16, Encoding::Int8];

    /// Whether the encoding leaves out most of a gradient, so that the worker must send the rest later:
    /// error feedback. The rounding errors of the other encodings are small and unbiased.
    pub fn feeds_back(self) -> bool {
        !Self::DENSE.contains(&self)
    }

    /// The length in bytes of this many values. [`Encoding::PowerSgd`]: the maximum; matrices take
    /// less.
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

    /// Checks that `payload` holds `values` values, so it can be decoded. It does not check that they
    /// are finite ([`all_finite`]).
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

    /// Appends `values` to `out`: [`Self::encoded_len`] bytes. Without the shapes of the matrices,
    /// powersgd writes all values as they are; a worker's [`Encoder`] has the shapes.
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

/// NaN if a value is not finite. 0 if every value is so small that the scale would lose precision
/// itself: at most 127 times the smallest normal number. Such values change only weights that are as
/// small.
fn int8_scale(block: &[f32]) -> f32 {
    // Bit patterns order like magnitudes, and non-finite values are above all others.
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
