//! When a log is compacted: often enough for its length to be bounded, and not while a follower needs it.

use super::{
    asleep::Sleep,
    leadership::{Leadership, Role, behind},
    log::{LogSize, ReplicaLog},
    machine::{Raft, SNAPSHOT_BYTES, SNAPSHOT_ENTRIES},
    replicated::Logged,
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

/// What decides about it.
pub(super) struct Held<C: Logged> {
    pub log: ReplicaLog<C>,
    pub state_bytes: Arc<AtomicU64>,
    pub sleep: Arc<Sleep>,
}

/// A log that somebody still needs is kept while it is shorter than so many times what is enough to compact it. A follower that gets a snapshot needs what came meanwhile; without it, under load, the snapshot would
/// always be too old, and the follower never done.
const KEPT: u64 = 3;

/// Whether there is no other replica.
fn is_alone<C: Logged>(raft: &Raft<C>) -> bool {
    raft.server_metrics().borrow_watched().membership_config.nodes().count() <= 1
}

impl<C: Logged> Held<C> {
    /// Whether the log is to be kept a while longer.
    fn is_needed(&self, raft: &Raft<C>) -> bool {
        let LogSize { entries, bytes, in_memory } = self.log.size();
        // Memory that the host lacks is not spent on a follower that can be sent a snapshot.
        if in_memory > SNAPSHOT_BYTES && paraft_host::memory::is_short() {
            return false;
        }
        let enough = self.state_bytes.load(Relaxed).max(SNAPSHOT_BYTES);
        if bytes >= KEPT * enough || entries >= KEPT * 4 * SNAPSHOT_ENTRIES {
            return false;
        }
        !behind(raft).is_empty()
    }
}

/// A snapshot takes so long at most.
const SNAPSHOT: Duration = Duration::from_secs(30);

/// Of a replica that sleeps: a snapshot of what is applied, and of the log nothing.
async fn compact_whole<C: Logged>(raft: &Raft<C>) {
    let applied = raft.metrics().borrow_watched().last_applied.as_ref().map(|l| l.index);
    if let Err(e) = raft.trigger().snapshot().await {
        return tracing::warn!(error = %e, "no snapshot");
    }
    let taken = |m: &openraft::RaftMetrics<Types<C>>| m.snapshot.as_ref().map(|l| l.index) >= applied;
    let is_taken = raft.wait(Some(SNAPSHOT)).metrics(taken, "a snapshot of all that is applied").await;
    if is_taken.is_ok()
        && let Err(e) = raft.trigger().purge_log(u64::MAX).await
    {
        tracing::warn!(error = %e, "the log is not cut");
    }
}

/// Takes a snapshot whenever the state machine asks for one, and lets the log before it go.
pub(super) async fn compact<C: Logged>(
    raft: Raft<C>,
    held: Held<C>,
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
                // openraft leaves a snapshot's last entries for followers that are a little behind. Where there are none they go when the
                // next snapshot is due: buffers that come back soon are still in the caches.
                if is_alone(&raft) && raft.trigger().purge_log(u64::MAX).await.is_err() {
                    return;
                }
                if let Err(e) = raft.trigger().snapshot().await {
                    tracing::warn!(error = %e, "no snapshot");
                    return;
                }
            }
            changed = alive.changed() => if changed.is_err() { return },
        }
    }
}
