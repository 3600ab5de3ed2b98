//! A push is applied once or not at all.

use super::{BUCKETS, History};
use crate::shard::Shard;

impl History {
    pub(super) fn exactly_once(&self, truth: &Shard) {
        let Some(conf) = truth.configured() else { return };
        let mut in_weights = 0u64;
        for bucket in 0..BUCKETS {
            let image = conf.buckets[bucket].image();
            for (place, weight) in image.weights.iter().enumerate() {
                let Some(push) = self.pushed.get(place) else {
                    assert_eq!(*weight, 0.0, "place {place} of bucket {bucket} is nobody's");
                    continue;
                };
                let share = -weight;
                in_weights += u64::from(share != 0.0);
                // In a round of n, a push counts 1/n.
                let once = [1.0, 0.5, 1.0 / 3.0];
                let right = share == 0.0 || if self.averages { once.contains(&share) } else { share == 1.0 };
                assert!(right, "{push:?} is {share} times in bucket {bucket}");
            }
        }
        // Two halves would look like one whole push.
        let counted = truth.read(|m| m.pushes);
        assert_eq!(counted, in_weights, "pushes that were applied, and that are in the weights");
    }
}
