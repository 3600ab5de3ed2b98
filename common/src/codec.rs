//! Conversion of `f32` values to and from little-endian bytes. No payload is read by a cast: payloads
//! arrive in pieces of any alignment ([`crate::Payload`]). Weights use this format, and so do gradients
//! without a narrower encoding ([`crate::Encoding`]).

use crate::payload::{Reader, Short};
use crate::simd::wide;
use bytes::Bytes;

/// Bytes of one value on the wire.
pub const F32_BYTES: usize = 4;

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

    /// Adds the next little-endian values to `out`, one to each. On an error nothing was added.
    pub fn add_values(&mut self, out: &mut [f32]) -> Result<(), Short> {
        let mut at = 0;
        self.words(out.len(), |run: &[[u8; F32_BYTES]]| {
            out[at..].iter_mut().zip(run).for_each(|(o, b)| *o += f32::from_le_bytes(*b));
            at += run.len();
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::payload::{Payload, tests::cut};
    use proptest::prelude::*;

    #[test]
    fn bytes_survive_the_round_trip_at_any_alignment() {
        let v: Vec<f32> = (0..1000).map(|i| (i as f32 - 500.0) * 0.37).collect();
        let mut le = vec![0u8; 3];
        put_f32_le(&v, &mut le);
        let mut back = vec![0f32; 1000];
        get_f32_le(&le[3..], &mut back);
        assert_eq!(v, back);
        let payload = Payload::from(Bytes::from(le).slice(3..));
        assert_eq!(payload.reader().values(&mut back), Ok(()));
        assert_eq!(v, back);
        assert_eq!(payload.reader().add_values(&mut back), Ok(()));
        assert!(v.iter().zip(&back).all(|(a, b)| 2.0 * a == *b));
        let short = Short { wanted: 4004, left: 4000 };
        assert_eq!(payload.reader().values(&mut [1.0; 1001]), Err(short));
    }

    #[test]
    fn quotients_are_those_of_plain_division_with_every_vector_unit() {
        let bytes: Vec<u8> = (0..=255).chain(0..7).collect();
        for level in crate::simd::levels() {
            for divisor in [255.0f32, 1.0, 0.3, 4.0] {
                let mut out = vec![f32::NAN; bytes.len()];
                crate::simd::at(level, || put_quotients(&bytes, divisor, &mut out));
                assert!(
                    out.iter().zip(&bytes).all(|(o, b)| o.to_bits() == (f32::from(*b) / divisor).to_bits())
                );
            }
        }
    }

    proptest! {
        #[test]
        fn the_cuts_change_no_bit(
            values in prop::collection::vec(prop::num::f32::ANY, 0..100),
            at in prop::collection::vec(any::<prop::sample::Index>(), 0..20),
            start in -1e3f32..1e3,
        ) {
            let mut le = Vec::new();
            put_f32_le(&values, &mut le);
            let pieces = cut(&le, &at);
            let bits = |v: &[f32]| v.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
            let mut read = vec![start; values.len()];
            prop_assert_eq!(pieces.reader().values(&mut read), Ok(()));
            prop_assert_eq!(bits(&read), bits(&values));
            let [mut sum, mut expected] = [vec![start; values.len()], vec![start; values.len()]];
            prop_assert_eq!(pieces.reader().add_values(&mut sum), Ok(()));
            expected.iter_mut().zip(&values).for_each(|(s, v)| *s += v);
            let same = |(a, b): (&f32, &f32)| a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan();
            prop_assert!(sum.iter().zip(&expected).all(same));
        }
    }
}
