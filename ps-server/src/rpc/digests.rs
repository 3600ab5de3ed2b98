//! Digests of replicas. Each reads a whole state: only one is computed at a time for a replica, callers that
//! come meanwhile share the next one, and it is computed off the runtime's threads.

use crate::{
    compute,
    raft::{RawImage, ReplicaId},
    replicated::Group,
};
use paraft_common::JobShard;
use parking_lot::Mutex;
use std::{collections::BTreeMap, sync::Arc, time::Instant};

/// The last digest of each replica.
#[derive(Debug, Default)]
pub struct Digests {
    of: Mutex<BTreeMap<(JobShard, ReplicaId), Arc<DigestSlot>>>,
}

/// The holder of the lock computes a digest; the others wait.
type DigestSlot = tokio::sync::Mutex<Option<CachedDigest>>;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct CachedDigest {
    /// The state was read after this moment.
    since: Instant,
    index: u64,
    digest: u64,
}

impl Digests {
    /// A replica's log index and its digest there, no older than the call. `None`: it has stopped, or the
    /// digest failed.
    pub async fn of(&self, shard: JobShard, group: &Group) -> Option<(u64, u64)> {
        let asked = {
            let mut of = self.of.lock();
            // Drop entries of replaced replicas.
            of.retain(|(s, node), _| *s != shard || *node == group.me());
            of.entry((shard, group.me())).or_default().clone()
        };
        let read = || async { group.image().await.ok() };
        share(&asked, || group.applied_index(), read).await
    }
}

async fn share<F>(
    asked: &DigestSlot,
    applied: impl Fn() -> u64,
    read: impl FnOnce() -> F,
) -> Option<(u64, u64)>
where
    F: Future<Output = Option<(u64, RawImage)>>,
{
    let came = Instant::now();
    let mut last = asked.lock().await;
    // Computed while this call waited, or still that of the current state.
    if let Some(made) = last.filter(|m| m.since >= came || m.index == applied()) {
        return Some((made.index, made.digest));
    }
    let since = Instant::now();
    let (index, image) = read().await?;
    let digest = compute::long(image.bytes(), move || image.into_digest()).await.ok()?;
    *last = Some(CachedDigest { since, index, digest });
    Some((index, digest))
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::future::join_all;
    use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

    #[tokio::test]
    async fn concurrent_callers_share_a_digest_no_older_than_the_call() {
        let (asked, applied, reads) = (DigestSlot::default(), AtomicU64::new(1), AtomicU64::new(0));
        let ask = || {
            share(
                &asked,
                || applied.load(Relaxed),
                || async {
                    // The state changes while it is read, as in training.
                    let index = applied.fetch_add(1, Relaxed);
                    reads.fetch_add(1, Relaxed);
                    tokio::task::yield_now().await;
                    let head = index.to_le_bytes().to_vec().into();
                    Some((index, RawImage { head, parts: Vec::new() }))
                },
            )
        };
        let answers = join_all((0..1000).map(|_| ask())).await;
        assert!(answers.iter().all(Option::is_some));
        assert_eq!(reads.load(Relaxed), 2, "the first one's, and one for all that came meanwhile");
        let before = applied.load(Relaxed);
        let (index, digest) = ask().await.expect("a digest");
        assert_eq!((index, reads.load(Relaxed)), (before, 3), "it is of now");
        applied.store(index, Relaxed);
        assert_eq!(ask().await, Some((index, digest)));
        assert_eq!(reads.load(Relaxed), 3, "nothing has changed since");
    }
}
