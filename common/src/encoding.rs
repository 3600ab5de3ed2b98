//! How the values of a gradient are written for the way from a worker to the weights.
//!
//! | encoding | bytes for `n` values | a value |
//! |---|---|---|
//! | f32 | 4n | as it is |
//! | bf16 | 2n | rounded to 8 bits of significand, the range of an f32 |
//! | f16 | 2n | rounded to 11 bits of significand, at most 65504 in size |
//! | int8 | n + 4 for each 1024 values begun | a whole number from -127 to 127 times the block's scale |
//!
//! Everything is little-endian. An int8 block is its scale (an f32: the largest magnitude of the block over 127) and
//! then a signed byte for each value.
//!
//! Rounding is to nearest, ties to even. A finite value stays finite: what is beyond the largest finite number of the
//! encoding becomes that number, with its sign. What is not finite stays so (in int8 the whole block becomes NaN), so that the
//! receiver can refuse it. Decoding uses operations that IEEE 754 defines exactly, so it gives the same bits on every
//! host.

mod narrow;
mod scan;
mod values;

pub use scan::{all_finite, sum_of_squares};
pub use values::Values;
pub(crate) use values::Word;

use crate::{
    codec::{F32_BYTES, put_f32_le},
    simd::wide,
};
use serde::{Deserialize, Serialize};

/// Values that share a scale in int8. The scale costs 4 bytes in 1028, 0.4 %; a block decoded takes 4 KiB, an eighth of the
/// smallest first-level cache; and one large value costs the precision of no more than its 1023 neighbours.
pub const INT8_BLOCK: usize = 1024;

/// How a gradient's values are written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
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
}

/// A payload has another length than its values need.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{got} bytes are not {values} values in {encoding}, which are {expected} bytes")]
pub struct WrongLength {
    /// How the values are written.
    pub encoding: Encoding,
    /// Values that there should be.
    pub values: usize,
    /// Bytes that they need.
    pub expected: usize,
    /// Bytes that there are.
    pub got: usize,
}

impl Encoding {
    /// Every encoding.
    pub const ALL: [Encoding; 4] = [Encoding::F32, Encoding::Bf16, Encoding::F16, Encoding::Int8];

    /// As the job file writes it.
    pub fn name(self) -> &'static str {
        match self {
            Encoding::F32 => "f32",
            Encoding::Bf16 => "bf16",
            Encoding::F16 => "f16",
            Encoding::Int8 => "int8",
        }
    }

    /// Bytes of so many values.
    pub fn encoded_len(self, values: usize) -> usize {
        match self {
            Encoding::F32 => values * F32_BYTES,
            Encoding::Bf16 | Encoding::F16 => values * 2,
            Encoding::Int8 => values + values.div_ceil(INT8_BLOCK) * F32_BYTES,
        }
    }

    /// Whether `bytes` bytes can be `values` values.
    pub fn check(self, bytes: usize, values: usize) -> Result<(), WrongLength> {
        let expected = self.encoded_len(values);
        if bytes == expected {
            return Ok(());
        }
        Err(WrongLength { encoding: self, values, expected, got: bytes })
    }

    /// Appends `values` to `out`: [`Self::encoded_len`] bytes.
    pub fn encode(self, values: &[f32], out: &mut Vec<u8>) {
        match self {
            Encoding::F32 => put_f32_le(values, out),
            Encoding::Bf16 => put_halves(values, out, narrow::to_bf16),
            Encoding::F16 => put_halves(values, out, narrow::to_f16),
            Encoding::Int8 => values.chunks(INT8_BLOCK).for_each(|block| put_int8(block, out)),
        }
    }
}

impl std::fmt::Display for Encoding {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
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
mod tests;
