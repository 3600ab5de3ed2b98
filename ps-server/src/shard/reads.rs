//! A shard as a source of weights for readers that do not train: the applied state of any replica, leading or not.

use super::state::Shard;
use paraft_common::Version;
use paraft_session::serve::{WeightCopy, WeightSource};

impl WeightSource for Shard {
    fn buckets(&self) -> Option<usize> {
        self.configured().filter(|c| c.is_initialised()).map(|c| c.buckets.len())
    }

    fn bucket(&self, place: usize) -> Option<(Version, usize)> {
        self.configured()?.buckets.get(place).map(|b| (b.version(), b.spec.len))
    }

    fn copy(&self, place: usize) -> Option<WeightCopy> {
        let (conf, in_force, stop) = self.view(|conf, m| Some((conf?.clone(), m.in_force, m.stop)))?;
        let bucket = conf.buckets.get(place)?;
        // A copy, unlike for workers: an update never has to copy the bucket for a slow reader.
        let (version, values) =
            bucket.peek(|data| data.initialised.then(|| (data.version, data.weights.to_vec())))?;
        Some(WeightCopy { bucket: bucket.id, version, values, stop, in_force })
    }
}

#[cfg(test)]
#[path = "reads_tests.rs"]
mod tests;
