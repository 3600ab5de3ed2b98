//! Serving weights to readers that do not train: which bucket a reader gets next, and its message.
//!
//! A source is a replica of a shard, or whatever else holds a shard's weights. The caller waits for changes of the
//! source and for room for copies, and sends.

use paraft_common::{
    BucketId, InForce, Version,
    codec::{F32_BYTES, value_bytes},
};
use paraft_proto::Weights;
use std::collections::BTreeSet;

/// The weights of a shard.
pub trait WeightSource {
    /// The number of buckets, once all of them have weights.
    fn buckets(&self) -> Option<usize>;
    /// The version of a bucket, and its number of values.
    fn bucket(&self, place: usize) -> Option<(Version, usize)>;
    /// Copies a bucket, so that the source holds nothing for a slow reader.
    fn copy(&self, place: usize) -> Option<WeightCopy>;
}

/// A copy of a bucket's weights.
#[derive(Clone, Debug)]
pub struct WeightCopy {
    /// The bucket.
    pub bucket: BucketId,
    /// Updates in the weights.
    pub version: Version,
    /// The weights.
    pub values: Vec<f32>,
    /// The job ends early.
    pub stop: bool,
    /// The mode in force.
    pub in_force: InForce,
}

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

    /// The next bucket that has reached its version, in ascending order. Call again after the source has changed.
    pub fn due(&mut self, source: &impl WeightSource) -> Option<DueBucket> {
        let buckets = source.buckets()?;
        let todo = self.todo.get_or_insert_with(|| (0..buckets).collect());
        let here = |place: usize| {
            let (version, len) = source.bucket(place)?;
            let least = self.at_least.get(place);
            least.is_none_or(|least| version >= *least).then_some(DueBucket { place, bytes: len * F32_BYTES })
        };
        todo.iter().copied().find_map(here)
    }

    /// Copies a due bucket; `with` lives as long as the copy. `None`: it is not due any more, because the source was
    /// replaced.
    pub fn take(
        &mut self,
        due: DueBucket,
        source: &impl WeightSource,
        with: impl Send + 'static,
    ) -> Option<Weights> {
        let WeightCopy { bucket, version, values, stop, in_force } = source.copy(due.place)?;
        let todo = self.todo.as_mut().filter(|todo| todo.contains(&due.place))?;
        if self.at_least.get(due.place).is_some_and(|least| version < *least) {
            return None;
        }
        todo.remove(&due.place);
        let last = todo.is_empty();
        Some(Weights {
            bucket: bucket.0,
            version: version.0,
            payload: value_bytes(HeldCopy { values, _with: with }),
            last,
            stop,
            mode: if last { in_force.mode.to_string() } else { String::new() },
            mode_number: in_force.number,
            ..Weights::default()
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

struct HeldCopy<W> {
    values: Vec<f32>,
    _with: W,
}

impl<W> AsRef<[f32]> for HeldCopy<W> {
    fn as_ref(&self) -> &[f32] {
        &self.values
    }
}
