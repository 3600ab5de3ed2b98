//! The global norm over all shards, for BSP jobs that clip by it. Each shard's leader sends its part; the
//! worker sums the parts in the order of the shards and sends the sum to every shard.
//!
//! If other processes of the worker have the rest of its shards, none has all parts by itself: they exchange
//! their shards' parts, and each sends the sum to its own shards.

use paraft_common::ShardId;
use std::collections::BTreeMap;

/// Parts by step. Kept for a few steps, since a new leader of a shard asks again, and so does a group of
/// ranks that broke.
#[derive(Debug)]
pub struct Norms {
    shards: Vec<ShardId>,
    /// Other processes have the rest of the shards.
    shared: bool,
    parts: BTreeMap<u64, BTreeMap<ShardId, f64>>,
    /// The known sums, each with a script's bound.
    whole: BTreeMap<u64, (f64, Option<f64>)>,
}

const KEPT_STEPS: usize = 4;

/// The sum of parts, in the order of the shards: every process with all parts gets the same bits.
pub fn sum_of_parts(parts: impl IntoIterator<Item = (ShardId, f64)>) -> f64 {
    parts.into_iter().collect::<BTreeMap<_, _>>().values().sum()
}

impl Norms {
    /// `shards` are this process's shards with trained buckets; `shared`: other processes have more.
    pub fn new(shards: Vec<ShardId>, shared: bool) -> Self {
        Self { shards, shared, parts: BTreeMap::new(), whole: BTreeMap::new() }
    }

    /// Whether other processes have more of the shards.
    pub fn is_shared(&self) -> bool {
        self.shared
    }

    /// Takes one part; if the sum is known already, it goes back to that shard alone, with the bound.
    pub fn add(&mut self, step: u64, shard: ShardId, part: f64) -> Option<(f64, Option<f64>)> {
        // A shard that has summed a step again sends its current part.
        self.parts.entry(step).or_default().insert(shard, part);
        while self.parts.len() > KEPT_STEPS {
            self.parts.pop_first();
        }
        self.whole.get(&step).copied()
    }

    /// The parts of a step, once all shards have sent theirs.
    pub fn parts(&self, step: u64) -> Option<BTreeMap<ShardId, f64>> {
        let parts = self.parts.get(&step).cloned().unwrap_or_default();
        self.shards.iter().all(|s| parts.contains_key(s)).then_some(parts)
    }

    /// Sets the sum, and a script's bound; returns the shards to send it to.
    pub fn tell(&mut self, step: u64, sum: f64, bound: Option<f64>) -> Vec<ShardId> {
        self.whole.insert(step, (sum, bound));
        while self.whole.len() > KEPT_STEPS {
            self.whole.pop_first();
        }
        self.shards.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn everyone_is_told_and_who_asks_again_is_told_again() {
        let all = vec![ShardId(0), ShardId(2)];
        let mut n = Norms::new(all.clone(), false);
        assert_eq!(n.add(1, ShardId(2), 4.0), None);
        assert_eq!(n.parts(1), None);
        assert_eq!(n.add(1, ShardId(0), 1.0), None);
        assert_eq!(n.parts(1), Some(BTreeMap::from([(ShardId(0), 1.0), (ShardId(2), 4.0)])));
        assert_eq!(n.tell(1, 5.0, Some(2.0)), all);
        assert_eq!(n.add(1, ShardId(2), 4.0), Some((5.0, Some(2.0))));
        for step in 2..20 {
            n.add(step, ShardId(0), 1.0);
            n.tell(step, 1.0, None);
        }
        assert!(n.parts.len() <= KEPT_STEPS && n.whole.len() <= KEPT_STEPS);
    }

    #[test]
    fn parts_are_added_up_by_shard_in_whatever_order_they_come() {
        let (a, b, c) = ((ShardId(0), 1e16), (ShardId(1), 1.0), (ShardId(2), 1.0));
        assert_eq!(sum_of_parts([c, b, a]).to_bits(), sum_of_parts([a, b, c]).to_bits());
        assert_ne!(sum_of_parts([a, b, c]).to_bits(), (1.0 + 1.0 + 1e16_f64).to_bits());
    }
}
