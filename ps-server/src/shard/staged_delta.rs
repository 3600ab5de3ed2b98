//! The parts of a state delta whose marker has not arrived (`delta`). Replicated state.

use super::shard_config::ShardConfig;
use paraft_changes::delta::{DeltaId, VectorId};
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// A vector and its values.
pub type Vector = (VectorId, Arc<Vec<f32>>);

/// The parts of a delta whose marker has not arrived.
#[derive(Clone, Debug, PartialEq)]
pub struct StagedDelta {
    /// The delta.
    pub delta: DeltaId,
    /// Number of parts that have arrived.
    pub parts: u32,
    /// The vectors in them, in order.
    pub vectors: Vec<Vector>,
}

/// [`StagedDelta`] without the bulk, for a snapshot's header: lengths in values.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StagedDeltaHeader {
    /// The delta.
    pub delta: DeltaId,
    /// Number of parts that have arrived.
    pub parts: u32,
    /// The vectors and their lengths.
    pub vectors: Vec<(VectorId, u64)>,
}

impl StagedDelta {
    /// The header for the vectors.
    pub fn header(&self) -> StagedDeltaHeader {
        let vectors = self.vectors.iter().map(|(of, v)| (*of, v.len() as u64)).collect();
        StagedDeltaHeader { delta: self.delta, parts: self.parts, vectors }
    }

    /// Whether every vector is one of the job's buckets, at its length.
    pub fn fits(&self, conf: &ShardConfig) -> bool {
        self.vectors.iter().all(|(of, v)| vector_len(conf, *of) == Some(v.len()))
    }
}

/// The vector's number of values, if the shard has it.
pub(super) fn vector_len(conf: &ShardConfig, (bucket, vector): VectorId) -> Option<usize> {
    let bucket = &conf.buckets[conf.local(bucket)?];
    (vector as usize <= conf.slots(bucket.spec.kind)).then_some(bucket.spec.len)
}
