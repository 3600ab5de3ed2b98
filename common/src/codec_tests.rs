//! Tests of `codec`.

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
            assert!(out.iter().zip(&bytes).all(|(o, b)| o.to_bits() == (f32::from(*b) / divisor).to_bits()));
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
    }
}
