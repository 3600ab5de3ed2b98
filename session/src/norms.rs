//! The global norm over all shards, for BSP jobs that clip by it: each shard's leader says its part, the worker
//! adds the parts up in the order of the shards and tells every shard the sum.

use paraft_common::ShardId;
use std::collections::BTreeMap;

/// Parts by step. Kept for a few steps, since a shard whose leader changed asks again.
#[derive(Debug)]
pub struct Norms {
    shards: Vec<ShardId>,
    parts: BTreeMap<u64, BTreeMap<ShardId, f64>>,
}

const KEPT_STEPS: usize = 4;

impl Norms {
    /// `shards` are those that hold trained buckets.
    pub fn new(shards: Vec<ShardId>) -> Self {
        Self { shards, parts: BTreeMap::new() }
    }

    /// Takes one part; gives the sum, and whom to tell, when all are in. A part that comes again goes back to
    /// its shard alone.
    pub fn add(&mut self, step: u64, shard: ShardId, part: f64) -> Option<(f64, Vec<ShardId>)> {
        let parts = self.parts.entry(step).or_default();
        let again = parts.len() == self.shards.len();
        parts.entry(shard).or_insert(part);
        let complete = self.shards.iter().all(|s| parts.contains_key(s));
        let sum = parts.values().sum();
        while self.parts.len() > KEPT_STEPS {
            self.parts.pop_first();
        }
        complete.then(|| (sum, if again { vec![shard] } else { self.shards.clone() }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn everyone_is_told_once_and_who_asks_again_is_told_again() {
        let all = vec![ShardId(0), ShardId(2)];
        let mut n = Norms::new(all.clone());
        assert_eq!(n.add(1, ShardId(2), 4.0), None);
        assert_eq!(n.add(1, ShardId(0), 1.0), Some((5.0, all)));
        assert_eq!(n.add(1, ShardId(2), 4.0), Some((5.0, vec![ShardId(2)])));
        for step in 2..20 {
            n.add(step, ShardId(0), 1.0);
        }
        assert!(n.parts.len() <= KEPT_STEPS);
    }
}
