//! The log that all groups of a server share, and which part of it is a replica's.
//!
//! It lies beside the replicas' folders, is opened when it is first needed, and anew after its disk has failed. A replica's own
//! folder says in a small file where its log lies: in the shared one, or, in a folder that was put aside, in
//! the folder itself. From there it is taken in when the replica is next started.

use paraft_store::{Disk, LogOptions, SharedLog, StoreError};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

/// A segment of the log: purges let whole segments go.
const SEGMENT_BYTES: u64 = 64 << 20;

/// Where a replica's log lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Place {
    /// In the folder itself, under this key.
    pub own: Option<u64>,
    /// In the shared log, under this key. Where it lies in the folder itself, what there is in the shared log is what a copy
    /// left that did not come to its end: of no use.
    pub shared: Option<u64>,
}

/// The log of a data folder. Clones are the same.
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
    /// Of a server's data folder; it need not exist yet.
    pub fn new(disk: Arc<dyn Disk>, data: &Path) -> Self {
        Self { inner: Arc::new(Inner { disk, path: data.join("log"), open: Mutex::default() }) }
    }

    /// Its disk.
    pub fn disk(&self) -> &Arc<dyn Disk> {
        &self.inner.disk
    }

    /// Where it lies.
    pub(super) fn path(&self) -> &Path {
        &self.inner.path
    }

    /// The log, opened if it is not, or not any more. [`StoreError::Locked`]: another process has it, or the one that failed
    /// has not ended quite.
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

    /// Writes what is queued and frees the folder. Whoever still has a part of it open fails from then on.
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
