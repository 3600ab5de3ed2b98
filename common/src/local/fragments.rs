//! The parts of a model that are pushed and pulled in turn.

use crate::{BucketId, Layout};
use std::ops::Range;

/// See [`Diloco`](super::Diloco).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Fragments {
    /// How many, from 1.
    pub count: u64,
}

impl Default for Fragments {
    fn default() -> Self {
        Self { count: 1 }
    }
}

impl Fragments {
    /// Whether there is more to it than one push and one pull of everything.
    pub fn stream(&self) -> bool {
        self.count > 1
    }

    /// The buckets whose turn it is after minibatch `i` (from 1) of the `of` of a step. Each bucket has one turn in a step; all
    /// have had theirs after the last minibatch.
    pub fn due(&self, i: u64, of: u64, layout: &Layout) -> Range<usize> {
        let buckets = layout.buckets().len() as u64;
        // Turns that are over after i minibatches: turn t comes after ceil(t * of / count).
        let turns = |i: u64| i.saturating_mul(self.count) / of.max(1);
        let upto = |i: u64| (turns(i).min(self.count) * buckets / self.count) as usize;
        upto(i - 1)..upto(i)
    }

    /// The ids of these buckets.
    pub fn ids(buckets: Range<usize>) -> Vec<BucketId> {
        buckets.map(|b| BucketId(b as u32)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::TensorSpec;

    #[test]
    fn each_bucket_has_one_turn_in_a_step() {
        for buckets in [1usize, 2, 5, 8] {
            let layout = Layout::new(vec![TensorSpec::param("p", &[buckets * 3])], 3).expect("a layout");
            for (count, of) in [(1, 1), (1, 7), (3, 7), (4, 8), (7, 7), (5, 2), (3, 1)] {
                let fragments = Fragments { count };
                let turns: Vec<_> = (1..=of).map(|i| fragments.due(i, of, &layout)).collect();
                let all: Vec<usize> = turns.iter().cloned().flatten().collect();
                assert_eq!(all, (0..buckets).collect::<Vec<_>>(), "{count} fragments, {of} minibatches");
            }
        }
        let layout = Layout::new(vec![TensorSpec::param("p", &[8])], 1).expect("a layout");
        let four = Fragments { count: 4 };
        let turns: Vec<_> = (1..=8).map(|i| four.due(i, 8, &layout)).filter(|t| !t.is_empty()).collect();
        assert_eq!(turns, [0..2, 2..4, 4..6, 6..8], "a fragment every other minibatch");
    }
}
