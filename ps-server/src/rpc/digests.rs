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
#[path = "digests_tests.rs"]
mod tests;
