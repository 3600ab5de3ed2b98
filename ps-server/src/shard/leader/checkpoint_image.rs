//! The image of a shard that a checkpoint is written from.

use crate::shard::{
    bucket::BucketData,
    state::{Meta, ShardConfig},
};
use paraft_common::{BucketId, Step, WorkerId, config::Stopping};
use parking_lot::Mutex;
use std::sync::Arc;

/// A consistent copy of what a checkpoint stores of a shard.
#[derive(Debug)]
pub struct CheckpointImage {
    /// The requested step. In BSP the state is that of this step.
    pub step: Step,
    /// The job as TOML.
    pub job: String,
    /// Notified when the buckets are released.
    conf: Arc<ShardConfig>,
    /// The buckets, by ascending id. Fetched buckets are `None`.
    buckets: Vec<(BucketId, Mutex<Option<Arc<BucketData>>>)>,
    /// Each member's clock, and whether it has finished. In SSP and ASP a bucket may hold one push more.
    pub members: Vec<(WorkerId, Step, bool)>,
    /// Early stopping (shard 0).
    pub stopping: Stopping,
}

impl CheckpointImage {
    /// Creates the image of a shard that is at `step`; `state` belongs to `conf`. Shares the buckets.
    pub(super) fn of(step: Step, conf: &Arc<ShardConfig>, state: &Meta) -> Self {
        let buckets = conf.buckets.iter().map(|b| (b.id, Mutex::new(Some(b.image())))).collect();
        let members = state.members.iter().map(|(w, m)| (w, m.clock(), m.finished)).collect();
        let (stopping, job) = (state.stopping(conf.job.early_stop), state.job.clone());
        Self { step, job, conf: conf.clone(), buckets, members, stopping }
    }

    /// Number of buckets, including the released ones.
    pub fn buckets(&self) -> usize {
        self.buckets.len()
    }

    /// The bucket at a place among the shard's, unless it was released.
    pub fn bucket(&self, place: usize) -> Option<(BucketId, Arc<BucketData>)> {
        let (id, data) = self.buckets.get(place)?;
        Some((*id, data.lock().clone()?))
    }

    /// Releases the bucket at a place: it was fetched, and an update need no longer copy it.
    pub fn release(&self, place: usize) {
        if let Some((_, data)) = self.buckets.get(place) {
            data.lock().take();
            self.conf.note_release();
        }
    }

    pub(super) fn is_whole(&self) -> bool {
        self.buckets.iter().all(|(_, data)| data.lock().is_some())
    }
}
