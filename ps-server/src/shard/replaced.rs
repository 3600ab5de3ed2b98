//! What copy-on-write costs: data of buckets that an update has replaced while somebody still reads it (a snapshot that is
//! being written, a digest, a checkpoint, weights on their way to a worker).
//!
//! Not replicated state: who reads what, and for how long, is each replica's own affair.

use super::bucket::BucketData;
use crate::raft::Outdated;
use parking_lot::Mutex;
use std::sync::{Arc, Weak};

/// Keeps nothing alive: it only counts.
#[derive(Debug, Default)]
pub struct Replaced(Mutex<Inner>);

#[derive(Debug, Default)]
struct Inner {
    data: Vec<(Weak<BucketData>, u64)>,
    /// Of `data`, some of which may be gone.
    bytes: u64,
    /// Counted anew when there are more.
    look_at: usize,
    /// Parts that readers said they have done with.
    read: u64,
}

/// So few are not worth a look.
const FEW: usize = 1024;

impl Replaced {
    /// An update is about to replace `data`, which has other readers.
    pub(super) fn add(&self, data: &Arc<BucketData>) {
        let mut inner = self.0.lock();
        if inner.data.len() >= inner.look_at.max(FEW) {
            inner.look();
            inner.look_at = 2 * inner.data.len();
        }
        let bytes = data.bytes() as u64;
        inner.data.push((Arc::downgrade(data), bytes));
        inner.bytes += bytes;
    }

    /// A reader has done with a bucket: it gets on, also where that one was not replaced.
    pub(super) fn read_on(&self) {
        self.0.lock().read += 1;
    }

    /// What is still read; exact where it may be more than `beyond`, else at most what is returned.
    pub fn outdated(&self, beyond: u64) -> Outdated {
        let mut inner = self.0.lock();
        if inner.bytes > beyond {
            inner.look();
        }
        Outdated { bytes: inner.bytes, read: inner.read }
    }
}

impl Inner {
    /// Forgets what nobody reads any more.
    fn look(&mut self) {
        self.data.retain(|(data, _)| data.strong_count() > 0);
        self.bytes = self.data.iter().map(|(_, bytes)| bytes).sum();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use paraft_common::Version;

    fn data(values: usize) -> Arc<BucketData> {
        let (weights, slots) = (vec![0.0; values], vec![vec![0.0; values]; 2]);
        Arc::new(BucketData {
            weights: weights.into(),
            slots,
            kept: Default::default(),
            version: Version(0),
            clock: 0.0,
            initialised: true,
        })
    }

    #[test]
    fn what_nobody_reads_any_more_does_not_count() {
        let replaced = Replaced::default();
        let (read, gone) = (data(10), data(100));
        replaced.add(&read);
        replaced.add(&gone);
        assert_eq!(replaced.outdated(0).bytes, 1320);
        drop(gone);
        assert_eq!(replaced.outdated(2000).bytes, 1320, "not more than asked: nobody looks");
        assert_eq!(replaced.outdated(1000).bytes, 120);
    }

    #[test]
    fn the_list_does_not_grow_with_what_is_gone() {
        let replaced = Replaced::default();
        let read = data(1);
        for _ in 0..10 * FEW {
            replaced.add(&data(1));
        }
        replaced.add(&read);
        assert!(replaced.0.lock().data.len() <= FEW);
        assert_eq!(replaced.outdated(0).bytes, 12);
    }
}
