//! Conversion of `f32` values to and from little-endian bytes. No payload is read by a cast: payloads
//! arrive in pieces of any alignment ([`crate::Payload`]). Weights use this format, and so do gradients
//! without a narrower encoding ([`crate::Encoding`]).

use crate::payload::{Reader, Short};
use crate::simd::wide;
use bytes::Bytes;

/// Bytes of one value on the wire.
pub const F32_BYTES: usize = 4;

/// A value's little-endian bytes.
pub(crate) type Word = [u8; F32_BYTES];

/// Appends `values` to `out` as little-endian bytes.
pub fn put_f32_le(values: &[f32], out: &mut Vec<u8>) {
    if cfg!(target_endian = "little") {
        // One copy of the values' own bytes. (Any f32 is four valid bytes; only the opposite cast would
        // need alignment.)
        out.extend_from_slice(bytemuck::cast_slice(values));
    } else {
        out.reserve(values.len() * F32_BYTES);
        values.iter().for_each(|v| out.extend_from_slice(&v.to_le_bytes()));
    }
}

/// Writes `values` to `out` as little-endian bytes.
///
/// # Panics
///
/// If `out` does not have four bytes for each value.
pub fn copy_f32_le(values: &[f32], out: &mut [u8]) {
    if cfg!(target_endian = "little") {
        out.copy_from_slice(bytemuck::cast_slice(values));
    } else {
        assert_eq!(out.len(), values.len() * F32_BYTES);
        let (places, _) = out.as_chunks_mut();
        places.iter_mut().zip(values).for_each(|(place, v)| *place = v.to_le_bytes());
    }
}

/// The values as little-endian bytes. A little-endian host copies nothing: the bytes share the values'
/// memory.
#[cfg(target_endian = "little")]
pub fn value_bytes<T: AsRef<[f32]> + Send + 'static>(values: T) -> Bytes {
    struct ValueBytes<T>(T);

    impl<T: AsRef<[f32]>> AsRef<[u8]> for ValueBytes<T> {
        fn as_ref(&self) -> &[u8] {
            bytemuck::cast_slice(self.0.as_ref())
        }
    }

    Bytes::from_owner(ValueBytes(values))
}

/// The values as little-endian bytes.
#[cfg(target_endian = "big")]
pub fn value_bytes<T: AsRef<[f32]> + Send + 'static>(values: T) -> Bytes {
    let mut le = Vec::new();
    put_f32_le(values.as_ref(), &mut le);
    le.into()
}

/// Reads little-endian bytes into `out`. The lengths must agree: `le.len() == out.len() * 4`.
///
/// # Panics
///
/// If they do not; callers check the length of network data first.
pub fn get_f32_le(le: &[u8], out: &mut [f32]) {
    assert_eq!(le.len(), out.len() * F32_BYTES, "payload and bucket differ in length");
    for (o, b) in out.iter_mut().zip(le.as_chunks::<F32_BYTES>().0) {
        *o = f32::from_le_bytes(*b);
    }
}

/// Writes each byte divided by `divisor` to `out`. The bits are equal on every vector unit.
///
/// # Panics
///
/// If the lengths differ.
pub fn put_quotients(bytes: &[u8], divisor: f32, out: &mut [f32]) {
    assert_eq!(bytes.len(), out.len(), "bytes and values differ in number");
    wide(
        #[inline(always)]
        || {
            for (o, b) in out.iter_mut().zip(bytes) {
                *o = f32::from(*b) / divisor;
            }
        },
    )
}

impl Reader<'_> {
    /// Fills `out` with the next little-endian values. On an error nothing was read.
    pub fn values(&mut self, out: &mut [f32]) -> Result<(), Short> {
        let mut at = 0;
        self.words(out.len(), |run: &[[u8; F32_BYTES]]| {
            out[at..].iter_mut().zip(run).for_each(|(o, b)| *o = f32::from_le_bytes(*b));
            at += run.len();
        })
    }
}

#[cfg(test)]
#[path = "codec_tests.rs"]
mod tests;
