//! Counts by key; a key with a count of zero is not kept.

use std::collections::{BTreeMap, btree_map::Entry};

/// Adds one to a count.
pub(super) fn increment<K: Ord>(counts: &mut BTreeMap<K, usize>, of: K) {
    *counts.entry(of).or_insert(0) += 1;
}

/// Subtracts one from a count.
pub(super) fn decrement<K: Ord>(counts: &mut BTreeMap<K, usize>, of: K) {
    if let Entry::Occupied(mut n) = counts.entry(of) {
        *n.get_mut() -= 1;
        if *n.get() == 0 {
            n.remove();
        }
    }
}
