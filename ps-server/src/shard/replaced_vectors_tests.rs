//! Tests of `replaced_vectors`.

use super::super::weights::Weights;
use super::*;

/// A vector of this many values, with a reader.
fn read(values: usize) -> Weights {
    vec![0.0; values].into()
}

fn replaces(replaced: &ReplacedVectors, read: &Weights) {
    let other = read.clone();
    replaced.add(other.read_elsewhere());
}

#[test]
fn vectors_without_readers_do_not_count() {
    let replaced = ReplacedVectors::default();
    let (kept, gone) = (read(30), read(300));
    replaced.add(kept.read_elsewhere());
    assert_eq!(replaced.outdated(0).bytes, 0, "it has no other reader");
    replaces(&replaced, &kept);
    replaces(&replaced, &gone);
    assert_eq!(replaced.outdated(0).bytes, 1320);
    drop(gone);
    assert_eq!(replaced.outdated(2000).bytes, 1320, "not more than asked: it is not counted again");
    assert_eq!(replaced.outdated(1000).bytes, 120);
}

#[test]
fn the_list_does_not_grow_with_what_is_gone() {
    let replaced = ReplacedVectors::default();
    let kept = read(3);
    for _ in 0..10 * MIN_RECOUNT_ENTRIES {
        replaces(&replaced, &read(3));
    }
    replaces(&replaced, &kept);
    assert!(replaced.0.lock().data.len() <= MIN_RECOUNT_ENTRIES);
    assert_eq!(replaced.outdated(0).bytes, 12);
}
