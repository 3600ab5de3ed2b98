//! Tests of `difference`.

use super::*;
use proptest::prelude::*;

fn bytes(width: usize, values: &[u32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()[..width].to_vec()).collect()
}

fn agree(width: usize, old: &[u8], new: &[u8]) -> Code {
    match encode(width, old, new) {
        None => Code::Whole,
        Some((code, packed)) => {
            assert!(packed.len() < new.len().max(1));
            assert_eq!(decode(code, width, old, &packed).unwrap(), new, "{code:?}");
            code
        }
    }
}

#[test]
fn neighbouring_floats_are_one_apart_across_zero() {
    let bf16 = |v: f32| half::bf16::from_f32(v).to_bits().to_le_bytes();
    let place = |bits: [u8; 2]| u16::of(&bits)[0];
    assert_eq!(place(bf16(1.0)) + 1, place(0x3f81u16.to_le_bytes()));
    assert_eq!(place(bf16(-0.0)) + 1, place(bf16(0.0)));
    assert_eq!(place(bf16(-1.0)), place(0xbf81u16.to_le_bytes()) + 1);
    assert!(place(bf16(-2.0)) < place(bf16(-1.0)) && place(bf16(-1.0)) < place(bf16(1e-30)));
    for bits in 0..=u16::MAX {
        assert_eq!(u16::bytes(&u16::of(&bits.to_le_bytes())), bits.to_le_bytes());
    }
}

#[test]
fn code_follows_the_share_of_changed_values() {
    let old = vec![0x3f80_u32; 1 << 12];
    let with = |every: usize| {
        let new: Vec<_> = old.iter().enumerate().map(|(i, v)| v + u32::from(i % every == 0)).collect();
        [2, 4].map(|width| agree(width, &bytes(width, &old), &bytes(width, &new)))
    };
    assert_eq!(with(100), [Code::Gaps; 2]);
    assert_eq!(with(4), [Code::Bitmap; 2]);
    assert_eq!(with(1), [Code::Bitmap, Code::Whole]);
    assert_eq!(agree(2, &bytes(2, &old), &bytes(2, &old)), Code::Same);
}

#[test]
fn tiny_steps_of_most_bf16_values_take_a_fifth() {
    let old: Vec<u32> = (0..1u32 << 16).map(|i| 0x3c00 + i.wrapping_mul(2_654_435_761) % 0x300).collect();
    let new: Vec<u32> =
        old.iter().enumerate().map(|(i, v)| v + (i as u32).wrapping_mul(40_503) / 7 % 3 - 1).collect();
    let (old, new) = (bytes(2, &old), bytes(2, &new));
    let (code, packed) = encode(2, &old, &new).unwrap();
    assert_eq!(code, Code::Bitmap);
    assert!(packed.len() * 5 < new.len(), "{} of {}", packed.len(), new.len());
    assert_eq!(decode(code, 2, &old, &packed).unwrap(), new);
}

proptest! {
    #[test]
    fn any_difference_gives_the_bits_of_the_whole(
        old in prop::collection::vec(any::<u32>(), 1..600),
        share in 0..=100u32,
        small in any::<bool>(),
        draws in prop::collection::vec((any::<u32>(), 0..100u32), 600),
    ) {
        for width in [2, 4] {
            let new: Vec<_> = old.iter().zip(&draws).map(|(v, (other, draw))| match (*draw < share, small) {
                (false, _) => *v,
                (true, false) => *other,
                (true, true) => v.wrapping_add(other % 5),
            }).collect();
            agree(width, &bytes(width, &old), &bytes(width, &new));
        }
    }

    #[test]
    fn foreign_bytes_are_an_error_or_values(
        number in 0..5u32,
        foreign in prop::collection::vec(any::<u8>(), 0..80),
        flip in any::<(usize, u8)>(),
    ) {
        let old = bytes(2, &(0..500).collect::<Vec<_>>());
        let new = bytes(2, &(0..500).map(|v| v + u32::from(v % 40 == 0)).collect::<Vec<_>>());
        let (_, mut packed) = encode(2, &old, &new).unwrap();
        let at = flip.0 % packed.len();
        packed[at] ^= flip.1;
        for bytes in [packed, foreign] {
            for width in [2, 4] {
                if let Some(code) = Code::of(number)
                    && let Ok(values) = decode(code, width, &old, &bytes) {
                    prop_assert!(code == Code::Whole || values.len() == old.len());
                }
            }
        }
    }
}
