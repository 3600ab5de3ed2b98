//! The memory cost of copy-on-write: replaced vectors that readers still hold (a snapshot in progress, a digest, a
//! checkpoint, weights in flight to a worker).
//!
//! Not replicated state: the readers differ between replicas.

use super::weights::ReaderEntry;
use crate::raft::OutdatedMemory;
use parking_lot::Mutex;
use std::{any::Any, sync::Weak};

/// Counts only; it keeps no data alive.
#[derive(Debug, Default)]
pub struct ReplacedVectors(Mutex<Inner>);

#[derive(Debug, Default)]
struct Inner {
    data: Vec<(Weak<dyn Any + Send + Sync>, u64)>,
    /// Bytes of `data`, some of which may be released.
    bytes: u64,
    /// Recount when there are more entries.
    look_at: usize,
    /// Parts that readers have released.
    read: u64,
}

/// Below this number of entries a recount is not worthwhile.
const MIN_RECOUNT_ENTRIES: usize = 1024;

impl ReplacedVectors {
    /// Adds a vector that an update is about to replace, if it has other readers.
    pub(super) fn add(&self, read: Option<ReaderEntry>) {
        let Some((data, bytes)) = read else { return };
        let mut inner = self.0.lock();
        if inner.data.len() >= inner.look_at.max(MIN_RECOUNT_ENTRIES) {
            inner.recount();
            inner.look_at = 2 * inner.data.len();
        }
        inner.data.push((data, bytes));
        inner.bytes += bytes;
    }

    /// Records that a reader has released a bucket: it makes progress, even if that bucket was not replaced.
    pub(super) fn read_on(&self) {
        self.0.lock().read += 1;
    }

    /// The bytes still held; exact if they may exceed `beyond`, else an upper bound.
    pub fn outdated(&self, beyond: u64) -> OutdatedMemory {
        let mut inner = self.0.lock();
        if inner.bytes > beyond {
            inner.recount();
        }
        OutdatedMemory { bytes: inner.bytes, read: inner.read }
    }
}

impl Inner {
    /// Drops the entries without readers.
    fn recount(&mut self) {
        self.data.retain(|(data, _)| data.strong_count() > 0);
        self.bytes = self.data.iter().map(|(_, bytes)| bytes).sum();
    }
}

#[cfg(test)]
#[path = "replaced_vectors_tests.rs"]
mod tests;
