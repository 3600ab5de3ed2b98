//! The weights that a reply brings, now or once its stream has room.

use super::Counters;
use crate::shard::{
    bucket::{BucketData, Shared, pulled_bytes, vector_bytes},
    state::{Shard, ShardConfig},
};
use bytes::Bytes;
use paraft_common::{BucketId, InForce, Share, Step, Version, WorkerId, codec::value_bytes};
use paraft_trace::Moment;
use std::sync::{Arc, Weak};

/// One bucket of a pull's reply.
#[derive(Debug)]
#[allow(missing_docs)] // as in shard.proto
pub struct Weights {
    pub bucket: BucketId,
    pub version: Version,
    pub payload: Bytes,
    pub not_modified: bool,
    pub last: bool,
    pub done: Step,
    pub slowest: Step,
    pub stop: bool,
    pub in_force: InForce,
    /// The worker's own clock. It is beyond `done` if rounds closed without the worker.
    pub clock: Step,
    pub finishers: Vec<WorkerId>,
    pub checkpoint: bool,
    /// This worker must write a checkpoint of this moment.
    pub save: bool,
    /// The session's steps that were skipped here.
    pub skipped: u64,
    /// With `last`, from shard 0: the samples that this worker evaluates if the step is evaluated.
    pub share: Option<Share>,
    /// Since when the pull may be answered.
    pub since: Moment,
    /// Counts as an unsent reply with weights of its stream, until it is sent.
    pub unread: Option<Arc<()>>,
    /// Where the weights are taken from once the stream has room; until then `payload` is empty.
    pub later: Option<DeferredWeights>,
}

/// A bucket whose weights are taken only when they can be sent. So a worker that does not read its replies holds no
/// weights, and an update copies nothing for it. The weights may be newer than those that the pull waited for,
/// never older.
#[derive(Debug)]
pub struct DeferredWeights {
    /// The shard. A weak reference, so a reply does not keep it alive.
    pub shard: Weak<Shard>,
    /// The configuration of its buckets at that time; also weak.
    pub conf: Weak<ShardConfig>,
    /// The leader's term: updates of a later leader are served by that leader only.
    pub term: u64,
    /// The local bucket.
    pub bucket: usize,
    /// The worker that pulls.
    pub worker: WorkerId,
    /// The version that the worker has.
    pub have: Option<Version>,
    /// Send the algorithm's look-ahead weights, if it has them.
    pub ahead: bool,
    /// Measure the staleness of this worker's pushes.
    pub measured: bool,
    /// The shard's counters.
    pub counters: Arc<Counters>,
}

impl DeferredWeights {
    /// The configuration, if it is unchanged and this replica still leads.
    fn conf(&self) -> Option<Arc<ShardConfig>> {
        let (shard, conf) = (self.shard.upgrade()?, self.conf.upgrade()?);
        let same = shard.configured().is_some_and(|now| Arc::ptr_eq(&now, &conf));
        (same && shard.term() <= self.term).then_some(conf)
    }

    /// The weights of `data`, or the weights that the log assigned to the worker (`logged`).
    pub(super) fn take(
        &self,
        conf: &ShardConfig,
        data: &BucketData,
        logged: Option<LoggedWeights>,
    ) -> BucketWeights {
        let version = logged.as_ref().map_or(data.version, |(version, _)| *version);
        if self.measured {
            let weights = logged.as_ref().map_or(&*data.weights, |(_, weights)| weights.as_slice());
            self.counters.staleness.pulled(self.worker, self.bucket, version, weights);
        }
        // A version that the worker already has is not sent again.
        let not_modified = self.have == Some(version);
        let payload = match logged {
            _ if not_modified => Bytes::new(),
            Some((_, weights)) => value_bytes(Shared(weights)),
            None if self.ahead => pulled_bytes(&conf.job, conf.buckets[self.bucket].spec, data),
            None => vector_bytes(data, 0),
        };
        self.counters.pulled(payload.len(), not_modified);
        BucketWeights { version, not_modified, payload }
    }
}

/// Weights that the log assigned to a worker, and their version.
type LoggedWeights = (Version, Arc<Vec<f32>>);

/// The weights of one bucket, ready to send.
pub(super) struct BucketWeights {
    pub version: Version,
    pub not_modified: bool,
    pub payload: Bytes,
}

impl Weights {
    /// The reply with its weights; deferred weights are taken now. `None`: this replica no longer has them.
    pub(super) fn taken(mut self) -> Option<Self> {
        let Some(later) = self.later.take() else { return Some(self) };
        let conf = later.conf()?;
        let bucket = &conf.buckets[later.bucket];
        if let Some(memory) = conf.shared() {
            bucket.share(memory);
        }
        let taken = later.take(&conf, &bucket.image(), None);
        (self.version, self.not_modified, self.payload) = (taken.version, taken.not_modified, taken.payload);
        Some(self)
    }
}
