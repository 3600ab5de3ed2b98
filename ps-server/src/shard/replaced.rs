//! What copy-on-write costs: vectors of buckets that an update has replaced while they are still read (by a snapshot that is
//! being written, a digest, a checkpoint, weights on their way to a worker).
//!
//! Not replicated state: who reads what, and for how long, is each replica's own affair.

use super::weights::Read;
use crate::raft::Outdated;
use parking_lot::Mutex;
use std::{any::Any, sync::Weak};

/// Keeps nothing alive: it only counts.
#[derive(Debug, Default)]
pub struct Replaced(Mutex<Inner>);

#[derive(Debug, Default)]
struct Inner {
    data: Vec<(Weak<dyn Any + Send + Sync>, u64)>,
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
    /// An update is about to replace a vector of so many bytes, if it has other readers.
    pub(super) fn add(&self, read: Option<Read>) {
        let Some((data, bytes)) = read else { return };
        let mut inner = self.0.lock();
        if inner.data.len() >= inner.look_at.max(FEW) {
            inner.look();
            inner.look_at = 2 * inner.data.len();
        }
        inner.data.push((data, bytes));
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
    use super::super::weights::Weights;
    use super::*;

    /// Of so many values, which a reader has.
    fn read(values: usize) -> Weights {
        vec![0.0; values].into()
    }

    fn replaces(replaced: &Replaced, read: &Weights) {
        let other = read.clone();
        replaced.add(other.read_elsewhere());
    }

    #[test]
    fn vectors_without_readers_do_not_count() {
        let replaced = Replaced::default();
        let (kept, gone) = (read(30), read(300));
        replaced.add(kept.read_elsewhere());
        assert_eq!(replaced.outdated(0).bytes, 0, "it has no other reader");
        replaces(&replaced, &kept);
        replaces(&replaced, &gone);
        assert_eq!(replaced.outdated(0).bytes, 1320);
        drop(gone);
        assert_eq!(replaced.outdated(2000).bytes, 1320, "not more than asked: it is not counted again");
        assert_eq!(replaced.outdated(1000).bytes, 120);
    }

    #[test]
    fn the_list_does_not_grow_with_what_is_gone() {
        let replaced = Replaced::default();
        let kept = read(3);
        for _ in 0..10 * FEW {
            replaces(&replaced, &read(3));
        }
        replaces(&replaced, &kept);
        assert!(replaced.0.lock().data.len() <= FEW);
        assert_eq!(replaced.outdated(0).bytes, 12);
    }
}
