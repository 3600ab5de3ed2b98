//! What is noted.

use crate::{Moment, Stage};
use paraft_common::{BucketId, ShardId, Step, WorkerId};
use serde::{Deserialize, Serialize};

/// One bucket of one step in one stage.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Span {
    /// Which stage.
    pub stage: Stage,
    /// When it began.
    pub begin: Moment,
    /// When it ended, not before it began.
    pub end: Moment,
    /// The push's step; of weights, the step after which they are read. Of a state delta, the latest of its pushes'.
    pub step: Step,
    /// Of the bucket.
    pub shard: ShardId,
    /// `None` for a state delta, which has many.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bucket: Option<BucketId>,
    /// Whose push or pull; `None` for an update that several have pushed, and for a state delta.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub worker: Option<WorkerId>,
    /// Payload. Of `ready`, the gradient in the model's buffer.
    pub bytes: u64,
}
