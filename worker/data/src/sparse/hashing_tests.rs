//! Tests of `hashing`.

use super::*;
use std::collections::BTreeSet;

#[test]
fn with_64_bits_no_two_ids_of_a_field_meet() {
    let hashing = Hashing::new(64).expect("in range");
    let ids: BTreeSet<u64> = (0..4)
        .flat_map(|field| (0..50_000).map(move |id| (field, id)))
        .map(|(f, id)| hashing.id(f, id))
        .collect();
    assert_eq!(ids.len(), 200_000);
}

#[test]
fn ids_fill_the_space_evenly() {
    let hashing = Hashing::new(10).expect("in range");
    let mut counts = [0u32; 1024];
    (0..1 << 20).for_each(|id| counts[hashing.id(3, id << 20) as usize] += 1);
    // 1024 a number; the deviation is 32.
    assert!(counts.iter().all(|n| (850..1200).contains(n)), "{counts:?}");
}

#[test]
fn the_ids_never_change() {
    let id = |bits, field, id| Hashing::new(bits).expect("in range").id(field, id);
    assert_eq!(
        [id(64, 0, 0), id(18, 0, 0), id(18, 25, u64::MAX)],
        [12_035_550_249_420_947_055, 171_035, 257_197]
    );
}

#[test]
fn bits_outside_1_to_64_are_refused() {
    for bits in [0, 65] {
        let error = Hashing::new(bits).expect_err("refused").to_string();
        assert_eq!(error, format!("[data] hash_bits: {bits} is not from 1 to 64"));
    }
}
