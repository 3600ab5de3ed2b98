//! Known checkpoints to the wire and back.

use crate::CheckpointInfo;
use paraft_common::{WorkerId, checkpoint::KnownCheckpoint};

impl From<&KnownCheckpoint> for CheckpointInfo {
    fn from(c: &KnownCheckpoint) -> Self {
        Self {
            path: c.path.clone(),
            step: c.step,
            lowest_version: c.versions.0,
            highest_version: c.versions.1,
            bytes: c.bytes,
            loss: c.loss,
            written_ms: c.written_ms,
            worker: c.worker.map(|w| w.0),
            best: c.best,
        }
    }
}

/// A loss that is not a number is left out.
impl From<CheckpointInfo> for KnownCheckpoint {
    fn from(c: CheckpointInfo) -> Self {
        Self {
            path: c.path,
            step: c.step,
            versions: (c.lowest_version, c.highest_version),
            bytes: c.bytes,
            loss: c.loss.filter(|l| l.is_finite()),
            written_ms: c.written_ms,
            worker: c.worker.map(WorkerId),
            best: c.best,
        }
    }
}
