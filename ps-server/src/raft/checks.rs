//! Checks: every replica of a group hashes its state at the same log indices, so that a replica that has diverged
//! (broken memory, a bug) is found while the others are still right.
//!
//! The leader writes a check into the log now and then. Applying it takes an image, between two entries and without
//! copying; a thread hashes it while the next entries are applied. The digests go to the control group with the
//! server's report, and there the replicas' are compared (`control/plan.rs`).

use super::image::RawImage;
use parking_lot::Mutex;
use std::{
    collections::VecDeque,
    sync::Arc,
    time::{Duration, Instant},
};

/// A replica's digest at a log index.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Digest {
    /// The index of the check.
    pub index: u64,
    /// The hash of the whole state there.
    pub digest: u64,
}

/// Checks whose digests are kept: replicas that are a little behind are compared too.
const KEPT: usize = 4;
/// Hashing takes at most this part of the time.
const MOST: u32 = 20;

/// The checks of one replica. Clones are the same.
#[derive(Clone, Debug, Default)]
pub struct Checks {
    inner: Arc<Mutex<Inner>>,
}

#[derive(Debug, Default)]
struct Inner {
    digests: VecDeque<Digest>,
    /// The last check that was applied.
    last: u64,
    took: Duration,
    hashing: bool,
}

impl Checks {
    /// A check was applied. Where the one before is still being hashed, this one is left out: the image would
    /// keep the memory of two states.
    pub fn check(&self, index: u64, image: impl FnOnce() -> RawImage) {
        {
            let mut inner = self.inner.lock();
            inner.last = index;
            if std::mem::replace(&mut inner.hashing, true) {
                return;
            }
        }
        let (this, image) = (self.clone(), image());
        tokio::task::spawn_blocking(move || {
            let began = Instant::now();
            let digest = image.into_digest();
            let mut inner = this.inner.lock();
            inner.took = began.elapsed();
            inner.hashing = false;
            inner.digests.push_back(Digest { index, digest });
            if inner.digests.len() > KEPT {
                inner.digests.pop_front();
            }
        });
    }

    /// The latest digests, by rising index.
    pub fn digests(&self) -> Vec<Digest> {
        self.inner.lock().digests.iter().copied().collect()
    }

    /// Where the last check was.
    pub fn last(&self) -> u64 {
        self.inner.lock().last
    }

    /// How long to wait between two checks, if `wanted` is asked for.
    pub fn pause(&self, wanted: Duration) -> Duration {
        wanted.max(self.inner.lock().took * MOST)
    }
}
