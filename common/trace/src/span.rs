//! What is noted.

use crate::{Moment, Stage};
use paraft_common::{BucketId, ShardId, Step, Version, WorkerId};
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
    /// `None` for a state delta and for a pass, which have many.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bucket: Option<BucketId>,
    /// Whose push or pull; `None` for an update that several have pushed, and for a state delta.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub worker: Option<WorkerId>,
    /// Payload. Of `ready`, the gradient in the model's buffer; of `forward` and `backward` 0.
    pub bytes: u64,
    /// Of `forward` and `backward`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pass: Option<Pass>,
}

/// A micro-batch in a stage of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pass {
    /// Of the step's, from 0.
    pub micro_batch: u32,
    /// Of the weights that it is computed at: so many updates are in all of them.
    pub version: Version,
}
