//! Payload that streams have brought and the shard's leader has not taken yet. Its queue counts messages, and 1,024 of
//! them are a gigabyte: beyond these bytes a stream is not read on, and so its worker waits.

use std::sync::Arc;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Of all shards of a server together, while each of them is at [`SHARD_BYTES`] or, with more than 16, at its part.
const SERVER_BYTES: usize = 1 << 30;
/// Of one shard: as much as one worker may have pushed without an ack, so that one alone is never held up here.
const SHARD_BYTES: usize = 64 << 20;
/// Of one shard among 64: the connection's window, which would hold up what follows all the same.
const LEAST_BYTES: usize = 16 << 20;

/// The bytes of one shard. A shard has its own: one whose log stands still must not hold up its neighbours.
#[derive(Debug)]
pub struct Queued {
    free: Arc<Semaphore>,
    most: usize,
}

/// Room that is taken; it is given back with this.
#[derive(Debug)]
pub struct Room(#[allow(dead_code)] Option<OwnedSemaphorePermit>);

impl Queued {
    /// For one of `shards` shards of the fleet, all of which may be on one server.
    pub fn of_one_in(shards: u32) -> Self {
        Self::of((SERVER_BYTES / shards.max(1) as usize).clamp(LEAST_BYTES, SHARD_BYTES))
    }

    fn of(most: usize) -> Self {
        Self { free: Arc::new(Semaphore::new(most)), most }
    }

    /// Waits until there is room for so many bytes, in the order in which streams ask. More than there ever is takes all
    /// of it.
    pub async fn room(&self, bytes: usize) -> Room {
        let bytes = bytes.min(self.most);
        if bytes == 0 {
            return Room(None);
        }
        // The semaphore is never closed; without room there would be no bound, which is the lesser evil.
        let permits = u32::try_from(bytes).unwrap_or(u32::MAX);
        Room(self.free.clone().acquire_many_owned(permits).await.ok())
    }

    /// Bytes that wait now.
    pub fn bytes(&self) -> u64 {
        self.most.saturating_sub(self.free.available_permits()) as u64
    }

    /// Bytes that may wait.
    pub fn most(&self) -> u64 {
        self.most as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::FutureExt;

    #[tokio::test]
    async fn beyond_its_bytes_streams_wait_in_order_and_go_on_as_the_leader_takes() {
        let queued = Queued::of(100);
        let first = queued.room(60).await;
        let mut second = Box::pin(queued.room(60));
        assert!(second.as_mut().now_or_never().is_none(), "no room");
        let mut third = Box::pin(queued.room(10));
        assert!(third.as_mut().now_or_never().is_none(), "it does not overtake");
        drop(first);
        let second = second.await;
        let third = third.await;
        assert_eq!(queued.bytes(), 70);
        drop((second, third));
        assert_eq!(queued.bytes(), 0);
        let all = queued.room(1000).await;
        assert_eq!((queued.bytes(), queued.most()), (100, 100));
        drop(all);
        drop(queued.room(0).await);
    }

    #[test]
    fn all_shards_of_a_server_stay_within_a_gigabyte() {
        for shards in 1..=64 {
            assert!(Queued::of_one_in(shards).most * shards as usize <= SERVER_BYTES, "{shards}");
        }
        assert_eq!((Queued::of_one_in(1).most, Queued::of_one_in(64).most), (SHARD_BYTES, LEAST_BYTES));
    }
}
