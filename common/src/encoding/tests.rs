//! `half` is the oracle for bf16 and f16, plain arithmetic for int8.

use super::*;
use crate::{
    payload::{Payload, tests::cut},
    simd::{at, levels},
};
use bytes::Bytes;
use half::{bf16, f16};
use proptest::prelude::*;

fn encoded(encoding: Encoding, values: &[f32]) -> Payload {
    let mut out = vec![0xAA]; // payloads arrive at odd addresses
    encoding.encode(values, &mut out);
    Bytes::from(out).slice(1..).into()
}

fn decoded(encoding: Encoding, payload: &Payload, count: usize) -> Vec<f32> {
    let mut out = vec![7.0; count];
    Values::new(payload, encoding, count).expect("its length").read(&mut out).expect("as many");
    out
}

fn there_and_back(encoding: Encoding, values: &[f32]) -> Vec<f32> {
    decoded(encoding, &encoded(encoding, values), values.len())
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

/// Equal bits, or both NaN: the payload of a NaN does not matter.
fn same(a: f32, b: f32) -> bool {
    a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan()
}

#[test]
fn every_half_is_the_number_that_ieee_says() {
    for h in 0..=u16::MAX {
        assert!(same(narrow::from_f16(h), f16::from_bits(h).to_f32()), "f16 {h:#06x}");
        assert!(same(narrow::from_bf16(h), bf16::from_bits(h).to_f32()), "bf16 {h:#06x}");
    }
}

/// Every half survives, and so do its neighbours at the places where rounding turns: half-way to the next half, and one
/// f32 to each side of that.
#[test]
fn every_value_is_rounded_to_the_nearest_half() {
    let oracle16 = |v: f32| match f16::from_f32(v) {
        h if h.is_infinite() && v.is_finite() => f16::MAX.to_bits() | h.to_bits() & 0x8000,
        h => h.to_bits(),
    };
    let oracle_b16 = |v: f32| match bf16::from_f32(v) {
        h if h.is_infinite() && v.is_finite() => bf16::MAX.to_bits() | h.to_bits() & 0x8000,
        h => h.to_bits(),
    };
    for h in 0..=u16::MAX {
        for (value, cut_off) in [(f16::from_bits(h).to_f32(), 13), (bf16::from_bits(h).to_f32(), 16)] {
            let half_way = value.to_bits().wrapping_add(1 << (cut_off - 1));
            for b in [value.to_bits(), half_way.wrapping_sub(1), half_way, half_way.wrapping_add(1)] {
                let v = f32::from_bits(b);
                if v.is_nan() {
                    assert!(narrow::from_f16(narrow::to_f16(v)).is_nan(), "{b:#x}");
                    assert!(narrow::from_bf16(narrow::to_bf16(v)).is_nan(), "{b:#x}");
                    continue;
                }
                assert_eq!(narrow::to_f16(v), oracle16(v), "f16 of {v:e}");
                assert_eq!(narrow::to_bf16(v), oracle_b16(v), "bf16 of {v:e}");
            }
        }
    }
}

/// From the tables of Wikipedia's articles on the two formats.
#[test]
fn published_numbers_have_their_published_bits() {
    for (v, bits) in [
        (0.000000059604645f64, 0x0001),
        (0.000060975552, 0x03ff),
        (0.00006103515625, 0x0400),
        (0.33325195, 0x3555),
        (0.99951172, 0x3bff),
        (1.0, 0x3c00),
        (1.00097656, 0x3c01),
        (65504.0, 0x7bff),
        (-2.0, 0xc000),
        (-0.0, 0x8000),
    ] {
        assert_eq!(narrow::to_f16(v as f32), bits, "{v}");
    }
    for (v, bits) in [
        (1.0f64, 0x3f80),
        (-2.0, 0xc000),
        (3.38953139e38, 0x7f7f),
        (1.17549435e-38, 0x0080),
        (std::f64::consts::PI, 0x4049),
        (1.0 / 3.0, 0x3eab),
    ] {
        assert_eq!(narrow::to_bf16(v as f32), bits, "{v}");
    }
}

#[test]
fn narrow_encoding_saturates_and_keeps_non_finite_values() {
    for (encoding, largest) in [(Encoding::Bf16, bf16::MAX.to_f32()), (Encoding::F16, 65504.0)] {
        let back = there_and_back(encoding, &[f32::MAX, -f32::MAX, largest, -largest]);
        assert_eq!(back, [largest, -largest, largest, -largest], "{encoding}");
    }
    let back = there_and_back(Encoding::Int8, &[f32::MAX, -f32::MAX, 0.0]);
    assert!(back.iter().all(|v| v.is_finite()) && (back[0] / f32::MAX - 1.0).abs() < 1e-6, "{back:?}");
    for encoding in Encoding::ALL {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -f32::NAN] {
            for at in [0, 1, 1023, 1024, 2999] {
                let mut values = vec![f32::MAX; 3000];
                values[0] = f32::MIN_POSITIVE / 2.0;
                let good = encoded(encoding, &values);
                assert_eq!(all_finite(&good, encoding, 3000), Ok(true), "{encoding}");
                values[at] = bad;
                let bad_one = encoded(encoding, &values);
                assert_eq!(all_finite(&bad_one, encoding, 3000), Ok(false), "{encoding}: {bad} at {at}");
            }
        }
    }
    // Not from `encode`: a scale that makes an infinity of a finite byte.
    let overflows = [&f32::MAX.to_le_bytes()[..], &[1, 2]].concat().into();
    assert_eq!(all_finite(&overflows, Encoding::Int8, 2), Ok(false));
}

#[test]
fn a_block_of_zeros_or_of_numbers_near_zero_is_zeros() {
    let tiny = 126.0 * f32::MIN_POSITIVE;
    let values = [vec![0.0; INT8_BLOCK], vec![-0.0, tiny, -tiny, f32::MIN_POSITIVE]].concat();
    let back = there_and_back(Encoding::Int8, &values);
    assert!(back.iter().all(|v| v.to_bits() == 0));
}

#[test]
fn a_payload_of_another_length_is_refused() {
    for encoding in Encoding::ALL {
        for count in [0, 1, 1023, 1024, 1025, 5000] {
            let payload = encoded(encoding, &vec![1.0; count]);
            assert_eq!(payload.len(), encoding.encoded_len(count));
            // Of the others some take as many bytes for another value.
            let another = Encoding::DENSE.contains(&encoding).then_some((payload.len(), count + 1));
            for (got, values) in [(payload.len() + 1, count)].into_iter().chain(another) {
                let payload = vec![0; got].into();
                let expected = encoding.encoded_len(values);
                let wrong = BadPayload::Length(WrongLength { encoding, values, expected, got });
                assert_eq!(Values::new(&payload, encoding, values).err(), Some(wrong));
                assert_eq!(all_finite(&payload, encoding, values), Err(wrong));
                assert_eq!(sum_of_squares(&payload, encoding, values), Err(wrong));
            }
            let mut values = Values::new(&payload, encoding, count).expect("its length");
            assert!(values.read(&mut vec![0.0; count + 1]).is_err(), "more than there are");
            assert_eq!(values.left(), count);
        }
    }
    let text = Encoding::Int8.check(&vec![0; 7].into(), 4).expect_err("no").to_string();
    assert_eq!(text, "7 bytes are not 4 values in int8, which are 8 bytes");
}

/// Values as gradients have them: of very different sizes, some of them zero.
fn gradient() -> impl Strategy<Value = Vec<f32>> {
    let value = (-1f32..1.0, -140i32..120).prop_map(|(v, e)| v * (e as f32 / 4.0).exp2());
    prop::collection::vec(prop_oneof![8 => value, 1 => Just(0.0)], 0..2100)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn decoding_gives_the_nearest_encodable_value(values in gradient()) {
        prop_assert_eq!(bits(&there_and_back(Encoding::F32, &values)), bits(&values));
        for (encoding, significand, smallest) in
            [(Encoding::Bf16, 8, 2f64.powi(-133)), (Encoding::F16, 11, 2f64.powi(-24))]
        {
            let back = there_and_back(encoding, &values);
            for (v, b) in values.iter().zip(&back) {
                let (v, b) = (f64::from(*v), f64::from(*b));
                if encoding == Encoding::F16 && v.abs() > 65504.0 {
                    prop_assert_eq!(b, 65504f64.copysign(v));
                    continue;
                }
                let place = 2f64.powi(v.abs().log2().floor().max(-1000.0) as i32 - significand + 1);
                prop_assert!((b - v).abs() <= place.max(smallest) / 2.0, "{} of {}: {}", encoding, v, b);
            }
            prop_assert_eq!(bits(&there_and_back(encoding, &back)), bits(&back), "once rounded, for ever");
        }
        let back = there_and_back(Encoding::Int8, &values);
        for (v, b) in values.chunks(INT8_BLOCK).zip(back.chunks(INT8_BLOCK)) {
            let scale = f64::from(v.iter().fold(0f32, |m, v| m.max(v.abs())) / 127.0);
            for (v, b) in v.iter().zip(b) {
                let off = (f64::from(*v) - f64::from(*b)).abs();
                // Half a step, and what the quotient and the product round.
                prop_assert!(off <= scale * (0.5 + 1e-4), "{} became {} with scale {}", v, b, scale);
            }
        }
    }

    #[test]
    fn multiples_of_a_power_of_two_survive_in_int8(
        mut places in prop::collection::vec(-127i8..=127, 1..2100), exponent in -100i32..100,
    ) {
        for block in places.chunks_mut(INT8_BLOCK) {
            block[0] = 127;
        }
        let values: Vec<f32> = places.iter().map(|p| f32::from(*p) * (exponent as f32).exp2()).collect();
        prop_assert_eq!(bits(&there_and_back(Encoding::Int8, &values)), bits(&values));
    }

    #[test]
    fn the_cuts_change_no_bit(
        values in gradient(), at in prop::collection::vec(any::<prop::sample::Index>(), 0..20), n in 1usize..1500,
    ) {
        for encoding in Encoding::ALL {
            let whole = encoded(encoding, &values);
            let pieces = cut(&whole.to_bytes(), &at);
            let count = values.len();
            let expected = decoded(encoding, &whole, count);
            prop_assert_eq!(bits(&decoded(encoding, &pieces, count)), bits(&expected));
            // In parts of any length, some read and some added.
            let mut reader = Values::new(&pieces, encoding, count).expect("its length");
            let mut sums = vec![0.5; count];
            for (i, part) in sums.chunks_mut(n).enumerate() {
                if i % 2 == 0 { reader.read(part) } else { reader.add_to(part) }.expect("they are there");
            }
            for (i, (s, e)) in sums.iter().zip(&expected).enumerate() {
                prop_assert_eq!(*s, if i / n % 2 == 0 { *e } else { 0.5 + e });
            }
            let [a, b] = [&whole, &pieces].map(|p| sum_of_squares(p, encoding, count).expect("its length"));
            prop_assert_eq!(a.to_bits(), b.to_bits());
            let direct: f64 = expected.iter().map(|v| f64::from(*v).powi(2)).sum();
            prop_assert!((a - direct).abs() <= 1e-12 * direct);
        }
    }

    #[test]
    fn the_vector_unit_changes_no_bit(
        mut values in gradient(), cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..4),
        bad in prop::option::of(any::<prop::sample::Index>()),
    ) {
        if let Some(bad) = bad.filter(|_| !values.is_empty()) {
            let i = bad.index(values.len());
            values[i] = f32::INFINITY;
        }
        let count = values.len();
        for encoding in Encoding::ALL {
            let results = levels().into_iter().map(|level| at(level, || {
                let sent = encoded(encoding, &values);
                let pieces = cut(&sent.to_bytes(), &cuts);
                let mut sum = vec![0.1; count];
                Values::new(&pieces, encoding, count).expect("its length").add_to(&mut sum).expect("as many");
                let finite = all_finite(&pieces, encoding, count);
                // The sign and the payload of a NaN are open.
                let squares = sum_of_squares(&pieces, encoding, count).map(|s| s.is_finite().then(|| s.to_bits()));
                let number = |v: &f32| v.is_finite().then(|| v.to_bits());
                let back: Vec<_> = decoded(encoding, &pieces, count).iter().map(number).collect();
                let sum: Vec<_> = sum.iter().map(number).collect();
                (sent.to_bytes(), back, sum, finite, squares)
            }));
            let results: Vec<_> = results.collect();
            prop_assert!(results.windows(2).all(|r| r[0] == r[1]), "{}", encoding);
        }
    }

    #[test]
    fn the_decoder_takes_any_bytes(bytes in prop::collection::vec(any::<u8>(), 0..3000)) {
        for encoding in Encoding::ALL {
            let fits = |n: &usize| encoding.encoded_len(*n) == bytes.len();
            let Some(count) = (0..=bytes.len()).find(fits) else { continue };
            let payload = bytes.clone().into();
            if encoding.check(&payload, count).is_err() {
                prop_assert!(Values::new(&payload, encoding, count).is_err());
                continue;
            }
            let all = decoded(encoding, &payload, count).iter().all(|v| v.is_finite());
            prop_assert_eq!(all_finite(&payload, encoding, count), Ok(all));
        }
    }
}
