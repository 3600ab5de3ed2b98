//! Weights for readers that do not train, from the applied state of any replica, leading or not.

use super::{
    leader::{Counters, Weights},
    state::Shard,
};
use paraft_common::{
    Step, Version,
    codec::{F32_BYTES, value_bytes},
};
use paraft_trace::Moment;
use std::{collections::BTreeSet, sync::atomic::Ordering::Relaxed};

/// A reader's request that is not complete.
#[derive(Debug)]
pub struct Read {
    /// For each local bucket, the version that it must have reached; may be empty.
    at_least: Vec<Version>,
    /// Local buckets that are not sent; `None` before their number is known.
    todo: Option<BTreeSet<usize>>,
}

impl Read {
    /// A read of these local buckets (empty: all), each at its version of `at_least` or a later one.
    pub fn new(only: Vec<usize>, at_least: Vec<Version>) -> Self {
        let todo = Some(only).filter(|o| !o.is_empty()).map(|o| o.into_iter().collect());
        Self { at_least, todo }
    }

    /// Whether everything was taken.
    pub fn is_over(&self) -> bool {
        self.todo.as_ref().is_some_and(BTreeSet::is_empty)
    }

    /// The next bucket that has reached its version, in ascending order. Call again after the shard has applied
    /// something.
    pub fn due(&mut self, shard: &Shard) -> Option<DueBucket> {
        let conf = shard.configured().filter(|c| c.is_initialised())?;
        let todo = self.todo.get_or_insert_with(|| (0..conf.buckets.len()).collect());
        let here = |place: &usize| {
            let least = self.at_least.get(*place);
            conf.buckets.get(*place).filter(|b| least.is_none_or(|least| b.version() >= *least))
        };
        let (place, bucket) = todo.iter().find_map(|place| Some((*place, here(place)?)))?;
        Some(DueBucket { place, bytes: bucket.spec.len * F32_BYTES })
    }

    /// Copies a due bucket; `with` lives as long as the copy. `None`: it is not due any more, because the shard's
    /// state was replaced.
    pub fn take(
        &mut self,
        due: DueBucket,
        shard: &Shard,
        counters: &Counters,
        with: impl Send + 'static,
    ) -> Option<Weights> {
        let since = Moment::now();
        let (conf, in_force, stop) = shard.view(|conf, m| Some((conf?.clone(), m.in_force, m.stop)))?;
        let bucket = conf.buckets.get(due.place)?;
        // A copy, unlike for workers: an update never has to copy the bucket for a slow reader.
        let (version, values) =
            bucket.peek(|data| data.initialised.then(|| (data.version, data.weights.to_vec())))?;
        let todo = self.todo.as_mut().filter(|todo| todo.contains(&due.place))?;
        if self.at_least.get(due.place).is_some_and(|least| version < *least) {
            return None;
        }
        todo.remove(&due.place);
        let payload = value_bytes(BucketCopy { values, _with: with });
        counters.bytes_pulled.fetch_add(payload.len() as u64, Relaxed);
        Some(Weights {
            bucket: bucket.id,
            version,
            payload,
            not_modified: false,
            last: todo.is_empty(),
            done: Step(0),
            slowest: Step(0),
            stop,
            in_force,
            clock: Step(0),
            finishers: Vec::new(),
            checkpoint: false,
            save: false,
            skipped: 0,
            share: None,
            since,
            unread: None,
            later: None,
        })
    }
}

/// A bucket that a reader may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DueBucket {
    /// Its index in the shard.
    place: usize,
    /// Bytes of its weights.
    pub bytes: usize,
}

struct BucketCopy<W> {
    values: Vec<f32>,
    _with: W,
}

impl<W> AsRef<[f32]> for BucketCopy<W> {
    fn as_ref(&self) -> &[f32] {
        &self.values
    }
}

#[cfg(test)]
#[path = "reads_tests.rs"]
mod tests;
