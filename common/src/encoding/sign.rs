//! The encoding `sign`: one bit for each value, and a scale for each block.

use super::INT8_BLOCK;
use crate::{
    codec::{F32_BYTES, Word},
    payload::{Reader, Short},
    simd::wide,
};

/// Bytes of so many values.
pub(super) fn encoded_len(values: usize) -> usize {
    // Whole blocks end with a whole byte.
    values.div_ceil(INT8_BLOCK) * F32_BYTES + values.div_ceil(8)
}

/// Writes a block: its mean magnitude, and the signs. NaN is the mean where a value is not finite.
pub(super) fn put(block: &[f32], out: &mut Vec<u8>) {
    let sum: f64 = block.iter().map(|v| f64::from(v.abs())).sum();
    let mean = (sum / block.len().max(1) as f64) as f32;
    let mean = if mean.is_finite() { mean } else { f32::NAN };
    out.extend_from_slice(&mean.to_le_bytes());
    let byte = |eight: &[f32]| (0..).zip(eight).fold(0u8, |bits, (i, v)| bits | u8::from(*v < 0.0) << i);
    out.extend(block.chunks(8).map(byte));
}

/// The block that is being read.
#[derive(Clone, Debug)]
pub(super) struct Block {
    scale: u32,
    signs: [u8; INT8_BLOCK / 8],
}

impl Block {
    /// Before the first one.
    pub const NONE: Block = Block { scale: 0, signs: [0; INT8_BLOCK / 8] };

    /// Reads one of so many values.
    pub fn load(&mut self, reader: &mut Reader<'_>, values: usize) -> Result<(), Short> {
        let mut scale = [0; F32_BYTES];
        reader.bytes(&mut scale)?;
        self.scale = u32::from_le_bytes(scale);
        reader.bytes(&mut self.signs[..values.div_ceil(8)])
    }

    /// Its values from the one `at` on.
    pub fn decode(&self, at: usize, out: &mut [Word]) {
        wide(
            #[inline(always)]
            || {
                for (i, o) in (at..).zip(out) {
                    let negative = u32::from(self.signs[i / 8 % self.signs.len()] >> (i % 8)) << 31;
                    *o = (self.scale ^ negative).to_le_bytes();
                }
            },
        );
    }
}
