//! A checkpoint as the fleet knows it: what a worker that has written one tells, and the control group keeps.

use crate::WorkerId;
use serde::{Deserialize, Serialize};

/// The control group keeps so many checkpoints of a job: the newest, and the best.
pub const MAX_KNOWN_CHECKPOINTS: usize = 64;

/// A checkpoint, as the worker that wrote it tells.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct KnownCheckpoint {
    /// Its folder, on the worker's host.
    pub path: String,
    /// The step that it was cut at.
    pub step: u64,
    /// The lowest and the highest version of a bucket in it.
    pub versions: (u64, u64),
    /// Bytes of its files.
    pub bytes: u64,
    /// The held-out loss there, once it is known.
    pub loss: Option<f64>,
    /// When it was written, in ms of unix time, by the clock of its writer.
    pub written_ms: u64,
    /// Who wrote it; `None`: it was in the folder before this job began.
    pub worker: Option<WorkerId>,
    /// It is the one with the lowest held-out loss in its folder.
    pub best: bool,
}

impl KnownCheckpoint {
    /// Whether `other` tells of the same writing of the same checkpoint.
    pub fn is_same(&self, other: &Self) -> bool {
        (&self.path, self.step, self.written_ms) == (&other.path, other.step, other.written_ms)
    }
}
