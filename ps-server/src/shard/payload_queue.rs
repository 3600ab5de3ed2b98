//! Bounds the payload that streams have received and the shard's leader has not taken. The leader's queue counts
//! messages, and 1,024 of them are a gigabyte: beyond these bytes a stream is not read, so its worker waits.

use std::sync::Arc;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// For all shards of a server together, if each has [`SHARD_BYTES`] or, with more than 16 shards, its part.
const SERVER_BYTES: usize = 1 << 30;
/// For one shard: as much as one worker may push without an ack, so that a single worker never waits here.
const SHARD_BYTES: usize = 64 << 20;
/// For one shard of 64: the connection's window, which would stop the stream anyway.
const MIN_SHARD_BYTES: usize = 16 << 20;

/// The bound of one shard. Each shard has its own, so that a stalled log does not hold up other shards.
#[derive(Debug)]
pub struct PayloadQueue {
    free: Arc<Semaphore>,
    most: usize,
}

/// Reserved room; dropping it releases the room.
#[derive(Debug)]
pub struct Room(#[allow(dead_code)] Option<OwnedSemaphorePermit>);

impl PayloadQueue {
    /// For one of `shards` shards of the fleet, all of which may be on one server.
    pub fn of_one_in(shards: u32) -> Self {
        Self::of((SERVER_BYTES / shards.max(1) as usize).clamp(MIN_SHARD_BYTES, SHARD_BYTES))
    }

    fn of(most: usize) -> Self {
        Self { free: Arc::new(Semaphore::new(most)), most }
    }

    /// Waits for room for this many bytes, first come, first served. A message larger than the bound takes all of
    /// it.
    pub async fn room(&self, bytes: usize) -> Room {
        let bytes = bytes.min(self.most);
        if bytes == 0 {
            return Room(None);
        }
        // The semaphore is never closed. If it were, no bound is the lesser evil.
        let permits = u32::try_from(bytes).unwrap_or(u32::MAX);
        Room(self.free.clone().acquire_many_owned(permits).await.ok())
    }

    /// Bytes that wait at present.
    pub fn bytes(&self) -> u64 {
        self.most.saturating_sub(self.free.available_permits()) as u64
    }

    /// Maximum bytes that may wait.
    pub fn most(&self) -> u64 {
        self.most as u64
    }
}

#[cfg(test)]
#[path = "payload_queue_tests.rs"]
mod tests;
