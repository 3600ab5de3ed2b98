//! `f32` values to and from little-endian bytes. Nothing here reads a payload by casting: payloads arrive at
//! any alignment, in pieces ([`Payload`]).

use crate::payload::{Payload, Reader, Short};

/// Bytes of one value on the wire.
pub const F32_BYTES: usize = 4;

/// Appends `values` to `out` as little-endian bytes.
pub fn put_f32_le(values: &[f32], out: &mut Vec<u8>) {
    if cfg!(target_endian = "little") {
        // The values' own bytes, in one copy. (Any f32 is four valid bytes; it is the way back, bytes of the
        // network to f32, that would need an alignment.)
        out.extend_from_slice(bytemuck::cast_slice(values));
    } else {
        out.reserve(values.len() * F32_BYTES);
        values.iter().for_each(|v| out.extend_from_slice(&v.to_le_bytes()));
    }
}

/// Reads little-endian bytes into `out`. The lengths must agree: `le.len() == out.len() * 4`.
///
/// # Panics
/// When they do not; callers have checked the length of what came from outside.
pub fn get_f32_le(le: &[u8], out: &mut [f32]) {
    assert_eq!(le.len(), out.len() * F32_BYTES, "payload and bucket differ in length");
    for (o, b) in out.iter_mut().zip(le.as_chunks::<F32_BYTES>().0) {
        *o = f32::from_le_bytes(*b);
    }
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

/// Whether these are whole little-endian values, every one of them finite (no NaN, no infinity). Works on whole words,
/// without branches per value.
pub fn all_finite_le(le: &Payload) -> bool {
    const EXPONENT: u32 = 0x7f80_0000;
    const BLOCK: usize = 1024;
    let bad = |block: &[[u8; F32_BYTES]]| {
        block.iter().fold(false, |bad, b| bad | (u32::from_le_bytes(*b) & EXPONENT == EXPONENT))
    };
    let mut finite = le.len().is_multiple_of(F32_BYTES);
    let read = le.reader().words(le.len() / F32_BYTES, |run| {
        finite = finite && !run.chunks(BLOCK).any(bad);
    });
    read.is_ok() && finite
}

/// Sum of the squares of little-endian values in `f64`: the same number on every host, however the bytes are cut.
pub fn sum_of_squares_le(le: &Payload) -> f64 {
    let mut sums = Squares::default();
    // Cannot fail: no more than there is.
    let _ = le.reader().words(le.len() / F32_BYTES, |run| sums.add(run));
    sums.0.iter().sum()
}

/// Eight running sums break the dependency chain. The value at place `i` of the vector goes to sum `i % 8`, so their
/// order of addition is fixed by the vector alone; the second number is the next value's sum.
#[derive(Default)]
struct Squares([f64; 8], usize);

impl Squares {
    fn add(&mut self, run: &[[u8; F32_BYTES]]) {
        let (head, rest) = run.split_at(run.len().min((8 - self.1) % 8));
        let (blocks, tail) = rest.as_chunks::<8>();
        head.iter().for_each(|b| self.one(b));
        for block in blocks {
            for (sum, b) in self.0.iter_mut().zip(block) {
                *sum += square(b);
            }
        }
        tail.iter().for_each(|b| self.one(b));
    }

    fn one(&mut self, word: &[u8; F32_BYTES]) {
        self.0[self.1] += square(word);
        self.1 = (self.1 + 1) % 8;
    }
}

/// Exact: an `f32` squared fits an `f64`.
fn square(word: &[u8; F32_BYTES]) -> f64 {
    let v = f64::from(f32::from_le_bytes(*word));
    v * v
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::payload::tests::cut;
    use bytes::Bytes;
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
        let direct: f64 = v.iter().map(|x| f64::from(*x) * f64::from(*x)).sum();
        assert!((sum_of_squares_le(&payload) - direct).abs() < 1e-9 * direct);
    }

    #[test]
    fn one_bad_value_is_found_anywhere() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -f32::NAN] {
            for at in [0, 1, 1023, 1024, 2999] {
                let mut v = vec![f32::MAX; 3000];
                v[0] = f32::MIN_POSITIVE / 2.0;
                let mut le = Vec::new();
                put_f32_le(&v, &mut le);
                assert!(all_finite_le(&le.clone().into()));
                le[at * 4..at * 4 + 4].copy_from_slice(&bad.to_le_bytes());
                assert!(!all_finite_le(&le.into()), "{bad} at {at}");
            }
        }
        assert!(!all_finite_le(&vec![0, 0, 0].into()));
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
            let (whole, pieces) = (Payload::from(le.clone()), cut(&le, &at));
            prop_assert_eq!(all_finite_le(&pieces), values.iter().all(|v| v.is_finite()));
            let [a, b] = [&whole, &pieces].map(sum_of_squares_le);
            prop_assert!(a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan(), "{} and {}", a, b);
            let direct: f64 = values.iter().map(|v| f64::from(*v).powi(2)).sum();
            let off = (b - direct).abs();
            prop_assert!(off <= 1e-13 * direct || !direct.is_finite());
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
