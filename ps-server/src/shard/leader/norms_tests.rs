//! Tests of `norms`.

use super::*;
use crate::shard::leader::tests::shard_of;
use paraft_common::optim::Overrides;
use paraft_common::{Mode, Payload, config::ServerJob};
use proptest::prelude::*;

proptest! {
    /// A shard's part of a step's norm is known once all its trained buckets are summed, in any order of
    /// events, and its sums leave once.
    #[test]
    fn a_part_is_known_when_every_trained_bucket_is_summed(order in Just((0..12usize).collect::<Vec<_>>()).prop_shuffle()) {
        let shard = shard_of(&ServerJob { buffers_len: 6, ..ServerJob::new("norms", Mode::Bsp, 24, 8) });
        let conf = shard.configured().expect("configured");
        let trained: Vec<usize> =
            (0..conf.buckets.len()).filter(|b| conf.buckets[*b].spec.kind.is_in_norm()).collect();
        prop_assert!(trained.len() < conf.buckets.len());
        let (mut norms, mut seen) = (Norms::default(), BTreeMap::<Step, f64>::new());
        for i in order {
            let (step, at) = (Step(1 + (i / 3) as u64), i % 3);
            let square = 1.0 + i as f64;
            let sum = Sum { contributions: Vec::new(), payload: Payload::default(), factor: 1.0, mean_sum_of_squares: square, overrides: Overrides::default(), skip: false, clipped: false };
            *seen.entry(step).or_default() += square;
            let part = norms.summed(&conf, step, trained[at], sum, |_| false);
            let whole = norms.0[&step].sums.len() == trained.len();
            prop_assert_eq!(part, whole.then(|| seen[&step]));
            prop_assert_eq!(norms.known(&conf).contains(&(step, seen[&step])), whole);
            prop_assert_eq!(norms.is_known(&conf, step), whole);
        }
        for step in (1..=4).map(Step) {
            prop_assert_eq!(norms.take(step).into_keys().collect::<Vec<_>>(), trained.clone());
            prop_assert!(norms.take(step).is_empty(), "once");
        }
        prop_assert!(norms.known(&conf).is_empty());
    }
}
