//! When a log is compacted: often enough to bound its length, and not while a follower needs it.

use super::{
    leadership::{Leadership, Role, behind},
    log::{LogSize, ReplicaLog},
    machine::{Raft, SNAPSHOT_BYTES, SNAPSHOT_ENTRIES, enough_on_disk},
    sleep_state::Sleep,
    types::Types,
};
use openraft::async_runtime::WatchReceiver;
use std::{
    sync::{
        Arc,
        atomic::{
            AtomicU64,
            Ordering::{Relaxed, SeqCst},
        },
    },
    time::Duration,
};
use tokio::sync::{Notify, watch};

/// The inputs of the decision.
pub(super) struct CompactionInputs {
    pub log: ReplicaLog,
    pub state_bytes: Arc<AtomicU64>,
    pub sleep: Arc<Sleep>,
}

/// A log that is still needed is kept up to this multiple of the size that triggers compaction. A follower that
/// receives a snapshot needs the entries since; without them, under load, the snapshot would always be too old.
const MAX_KEPT_FACTOR: u64 = 3;

/// Whether there is no other replica.
fn is_alone(raft: &Raft) -> bool {
    raft.server_metrics().borrow_watched().membership_config.nodes().count() <= 1
}

impl CompactionInputs {
    /// Whether the log must be kept for now.
    fn is_needed(&self, raft: &Raft) -> bool {
        let LogSize { entries, bytes, in_memory } = self.log.size();
        // A host short of memory spends none on a follower that can receive a snapshot.
        if in_memory > SNAPSHOT_BYTES && paraft_host::memory::is_short() {
            return false;
        }
        let state_bytes = self.state_bytes.load(Relaxed);
        let enough = match self.log.is_on_disk() {
            true => enough_on_disk(state_bytes),
            false => state_bytes.max(SNAPSHOT_BYTES),
        };
        if bytes >= MAX_KEPT_FACTOR * enough || entries >= MAX_KEPT_FACTOR * 4 * SNAPSHOT_ENTRIES {
            return false;
        }
        !behind(raft).is_empty()
    }
}

/// Timeout of a snapshot.
const SNAPSHOT_TIMEOUT: Duration = Duration::from_secs(30);

/// For a sleeping replica: takes a snapshot of the applied state, and purges the whole log.
async fn compact_whole(raft: &Raft) {
    let applied = raft.metrics().borrow_watched().last_applied.as_ref().map(|l| l.index);
    if let Err(e) = raft.trigger().snapshot().await {
        return tracing::warn!(error = %e, "a snapshot failed");
    }
    let taken = |m: &openraft::RaftMetrics<Types>| m.snapshot.as_ref().map(|l| l.index) >= applied;
    let is_taken =
        raft.wait(Some(SNAPSHOT_TIMEOUT)).metrics(taken, "a snapshot of all that is applied").await;
    if is_taken.is_ok()
        && let Err(e) = raft.trigger().purge_log(u64::MAX).await
    {
        tracing::warn!(error = %e, "the log was not purged");
    }
}

/// Takes a snapshot whenever the state machine requests one, and purges the log before it.
pub(super) async fn compact(
    raft: Raft,
    held: CompactionInputs,
    wants: Arc<Notify>,
    mut alive: watch::Receiver<Leadership>,
) {
    loop {
        tokio::select! {
            () = wants.notified() => {
                if held.sleep.asleep.load(SeqCst) {
                    compact_whole(&raft).await;
                    continue;
                }
                while held.is_needed(&raft) && alive.borrow().role != Role::Stopped {
                    tokio::time::sleep(Duration::from_millis(20)).await;
                }
                // openraft keeps a snapshot's last entries for followers that are a little behind. Without
                // followers they are purged when the next snapshot is due: buffers that are reused soon are still
                // in the caches.
                if is_alone(&raft) && raft.trigger().purge_log(u64::MAX).await.is_err() {
                    return;
                }
                if let Err(e) = raft.trigger().snapshot().await {
                    tracing::warn!(error = %e, "a snapshot failed");
                    return;
                }
            }
            changed = alive.changed() => if changed.is_err() { return },
        }
    }
}
