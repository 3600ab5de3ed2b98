//! The log that all groups of a server share, and which part of it belongs to which replica.
//!
//! It lies beside the replicas' folders. It is opened when first needed, and reopened after a disk failure. A small
//! file in a replica's folder names the place of its log: the shared log or, in a quarantined folder, the folder
//! itself. In that case the log is imported into the shared one when the replica is next started.

use paraft_store::{Disk, LogOptions, SharedLog, StoreError};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

/// Segment size of the log: purging frees whole segments.
const SEGMENT_BYTES: u64 = 64 << 20;

/// Where a replica's log is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Place {
    /// In the folder itself, under this key.
    pub own: Option<u64>,
    /// In the shared log, under this key. If `own` is set too, the shared log has only an incomplete copy, which is
    /// ignored.
    pub shared: Option<u64>,
}

/// The log of a data folder. Clones share it.
#[derive(Clone)]
pub struct Logs {
    inner: Arc<Inner>,
}

struct Inner {
    disk: Arc<dyn Disk>,
    path: PathBuf,
    open: Mutex<Option<SharedLog>>,
}

impl Logs {
    /// The log of a server's data folder, which need not exist yet.
    pub fn new(disk: Arc<dyn Disk>, data: &Path) -> Self {
        Self { inner: Arc::new(Inner { disk, path: data.join("log"), open: Mutex::default() }) }
    }

    /// The disk.
    pub fn disk(&self) -> &Arc<dyn Disk> {
        &self.inner.disk
    }

    /// The log's path.
    pub(super) fn path(&self) -> &Path {
        &self.inner.path
    }

    /// The log, opened if necessary. [`StoreError::Locked`]: another process has it open, or the failed one is not
    /// closed yet.
    pub fn get(&self) -> Result<SharedLog, StoreError> {
        let mut open = self.inner.open.lock();
        if let Some(log) = open.as_ref().filter(|log| !log.has_ended()) {
            return Ok(log.clone());
        }
        *open = None;
        let (path, options) = (&self.inner.path, LogOptions { segment_bytes: SEGMENT_BYTES, sync: true });
        let (log, torn_bytes) = SharedLog::open(self.inner.disk.clone(), path, options)?;
        if torn_bytes > 0 {
            tracing::warn!(path = %path.display(), bytes = torn_bytes, "the log's torn tail was cut");
        }
        Ok(open.insert(log).clone())
    }

    /// Writes everything queued and closes the log. Open parts of it fail from then on.
    pub fn close(&self) {
        let log = self.inner.open.lock().take();
        if let Some(log) = log {
            log.close();
        }
    }
}

#[cfg(test)]
#[path = "logs_tests.rs"]
mod tests;
