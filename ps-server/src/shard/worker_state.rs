//! State that an algorithm keeps per worker in a bucket: the weights of the worker's last pull, and optimizer state
//! of its own (`paraft_common::algorithm`). Part of the replicated state; empty for algorithms without such state.
//!
//! A worker's part is created with its first pull or push, and dropped with the first update after it has stopped
//! training. It is not in checkpoints, nor in state deltas, which such jobs do not have.

use crate::raft::ApplyError;
use paraft_common::{Version, WorkerId};
use serde::{Deserialize, Serialize};
use std::{collections::BTreeMap, sync::Arc};

/// The owner of the state when several pushes are one update: the fleet. No worker has this id.
pub const FLEET: WorkerId = WorkerId(u32::MAX);

/// By worker.
pub type WorkerStates = BTreeMap<WorkerId, WorkerState>;

/// The state of one worker. Its vectors are shared with copies of the bucket, and with pulls in flight.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct WorkerState {
    /// The weights of its last pull, and their version.
    pub pulled: Option<(Version, Arc<Vec<f32>>)>,
    /// The optimizer's state vectors; none before its first push.
    pub slots: Vec<Arc<Vec<f32>>>,
    /// Its updates of the bucket.
    pub updates: u64,
}

/// [`WorkerState`] without the vectors, for a snapshot's header.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct WorkerStateHeader {
    /// The worker.
    pub worker: WorkerId,
    /// The version of the pulled weights, if there are any.
    pub pulled: Option<Version>,
    /// Number of state vectors.
    pub slots: u32,
    /// Its updates of the bucket.
    pub updates: u64,
}

impl WorkerState {
    /// The header that announces [`Self::vectors`].
    pub fn header(&self, worker: WorkerId) -> WorkerStateHeader {
        let pulled = self.pulled.as_ref().map(|(v, _)| *v);
        WorkerStateHeader { worker, pulled, slots: self.slots.len() as u32, updates: self.updates }
    }

    /// The vectors in order: the pulled weights, then the state vectors.
    pub fn vectors(&self) -> impl Iterator<Item = &Arc<Vec<f32>>> {
        self.pulled.iter().map(|(_, w)| w).chain(&self.slots)
    }

    /// Whether a job with such buckets may have it: `len` values per vector, at most `slots` state vectors.
    pub fn fits(&self, len: usize, keeps_pulled: bool, slots: usize) -> bool {
        (self.slots.is_empty() || self.slots.len() == slots)
            && (keeps_pulled || self.pulled.is_none())
            && self.vectors().all(|v| v.len() == len)
    }
}

impl WorkerStateHeader {
    /// Builds the state from its header; `next` returns the vectors.
    pub fn assemble(
        self,
        mut next: impl FnMut() -> Result<Vec<f32>, ApplyError>,
    ) -> Result<(WorkerId, WorkerState), ApplyError> {
        let pulled = self.pulled.map(|v| Ok::<_, ApplyError>((v, Arc::new(next()?)))).transpose()?;
        let slots = (0..self.slots).map(|_| next().map(Arc::new)).collect::<Result<_, _>>()?;
        Ok((self.worker, WorkerState { pulled, slots, updates: self.updates }))
    }
}
