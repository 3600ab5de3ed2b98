//! Checks: every replica of a group hashes its state at the same log indices. So a diverged replica (broken memory,
//! a bug) is found while the others are still correct.
//!
//! The leader writes a check into the log from time to time. Applying it takes an image between two entries,
//! without copying; a thread hashes it while later entries are applied. The digests go to the control group with
//! the server's report, which compares the replicas (`control/plan.rs`).

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

/// Number of kept digests: replicas that are a little behind are compared too.
const KEPT_DIGESTS: usize = 4;
/// Hashing takes at most this fraction (1 / `HASHING_DIVISOR`) of the time.
const HASHING_DIVISOR: u32 = 20;

/// A check is being hashed until this is dropped, even if hashing panics or never starts.
struct HashingGuard(Checks);

impl Drop for HashingGuard {
    fn drop(&mut self) {
        self.0.inner.lock().hashing = false;
    }
}

/// The checks of one replica. Clones share them.
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
    /// Starts a check after it was applied. If the previous one is still being hashed, this one is skipped: its
    /// image would keep a second state in memory.
    pub fn check(&self, index: u64, image: impl FnOnce() -> RawImage) {
        {
            let mut inner = self.inner.lock();
            inner.last = index;
            if std::mem::replace(&mut inner.hashing, true) {
                return;
            }
        }
        let hashing = HashingGuard(self.clone());
        let image = image();
        tokio::task::spawn_blocking(move || {
            let began = Instant::now();
            let digest = image.into_digest();
            let mut inner = hashing.0.inner.lock();
            inner.took = began.elapsed();
            inner.digests.push_back(Digest { index, digest });
            if inner.digests.len() > KEPT_DIGESTS {
                inner.digests.pop_front();
            }
            drop(inner); // dropping `hashing` takes the lock
        });
    }

    /// The latest digests, ascending by index.
    pub fn digests(&self) -> Vec<Digest> {
        self.inner.lock().digests.iter().copied().collect()
    }

    /// The index of the last check.
    pub fn last(&self) -> u64 {
        self.inner.lock().last
    }

    /// The pause between two checks, at least `wanted`.
    pub fn pause(&self, wanted: Duration) -> Duration {
        wanted.max(self.inner.lock().took * HASHING_DIVISOR)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn hashed(checks: &Checks, index: u64) {
        let began = Instant::now();
        while checks.digests().last().is_none_or(|d| d.index != index) {
            assert!(began.elapsed() < Duration::from_secs(30), "no digest of {index}");
            checks.check(index, RawImage::default);
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    #[tokio::test]
    async fn check_after_one_that_panicked_is_hashed() {
        let checks = Checks::default();
        let by_image = checks.clone();
        let task = tokio::spawn(async move { by_image.check(1, || panic!("on purpose: no image")) });
        task.await.expect_err("it panicked");
        hashed(&checks, 2).await;
    }
}
