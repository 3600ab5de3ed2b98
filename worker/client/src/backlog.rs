//! Weights that have arrived and are not taken yet. Of a large model the network brings them faster than a first pull can
//! put them into memory that is new: without a bound they would be there twice.

use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use tokio::sync::Notify;

/// Bytes over all shards.
#[derive(Debug)]
pub(crate) struct Backlog {
    most: usize,
    bytes: AtomicUsize,
    less: Notify,
}

impl Backlog {
    /// Beyond `most` bytes links read no further. Who sets a bound must take weights whenever any may come: acks wait
    /// behind them.
    pub fn new(most: usize) -> Self {
        Self { most, bytes: AtomicUsize::new(0), less: Notify::new() }
    }

    /// So many bytes wait to be taken.
    pub fn add(&self, bytes: usize) {
        self.bytes.fetch_add(bytes, SeqCst);
    }

    /// They were taken.
    pub fn taken(&self, bytes: usize) {
        self.bytes.fetch_sub(bytes, SeqCst);
        self.less.notify_waiters();
    }

    /// Returns when links may read on.
    pub async fn room(&self) {
        loop {
            let less = self.less.notified(); // from here on nothing is missed
            if self.bytes.load(SeqCst) <= self.most {
                return;
            }
            less.await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::FutureExt;

    #[tokio::test]
    async fn links_read_on_when_what_waits_was_taken() {
        let backlog = Backlog::new(10);
        backlog.add(10);
        backlog.room().await;
        backlog.add(5);
        let mut room = Box::pin(backlog.room());
        assert!((&mut room).now_or_never().is_none());
        backlog.taken(3);
        assert!((&mut room).now_or_never().is_none(), "still 12 of 10");
        backlog.taken(2);
        room.await;
    }
}
