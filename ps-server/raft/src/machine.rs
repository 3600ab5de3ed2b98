//! Applies committed entries to the state, and takes snapshots.

use super::{
    checks::Checks,
    image::RawImage,
    log::ReplicaLog,
    replicated::{GroupState, OutdatedMemory},
    snapshot::SnapshotFile,
    storage::FolderError,
    types::{LogId, Snapshot, SnapshotMeta, StoredMembership, Types},
};
use futures::{Stream, StreamExt};
use openraft::{
    EntryPayload, OptionalSend, RaftSnapshotBuilder,
    entry::RaftEntry,
    storage::{EntryResponder, RaftStateMachine},
};
use paraft_changes::{Applied, Change};
use paraft_host::compute;
use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};
use tokio::{sync::Notify, time::Instant};

/// The log is compacted after this many entries...
pub const SNAPSHOT_ENTRIES: u64 = 4096;
/// ...or payload bytes, at least; see [`enough_bytes`].
pub const SNAPSHOT_BYTES: u64 = 32 << 20;
/// Maximum size of a log in memory.
const MAX_MEMORY_LOG_BYTES: u64 = 256 << 20;
/// Size of a log in memory that no other replica reads: an applied entry is useless, and buffers that are reused
/// soon are still in the caches, while a long log would need fresh pages from the kernel.
const MAX_LONE_LOG_BYTES: u64 = 4 << 20;

/// A log on disk may be this many times as long as the state: then a snapshot adds an eighth to what is written.
const DISK_LOG_FACTOR: u64 = 8;
/// ...up to this size, which takes a second to apply after a start.
const MAX_DISK_LOG_BYTES: u64 = 256 << 20;

/// Payload bytes after which a log is compacted. A snapshot on disk writes the whole state, so the log must have
/// grown by as much. A log in memory costs memory and its compaction nothing, but a follower further behind gets
/// the whole state.
fn enough_bytes(state_bytes: u64, on_disk: bool, alone: bool) -> u64 {
    match (on_disk, alone) {
        (true, _) => enough_on_disk(state_bytes),
        (false, true) => MAX_LONE_LOG_BYTES,
        (false, false) => state_bytes.clamp(SNAPSHOT_BYTES, MAX_MEMORY_LOG_BYTES),
    }
}

/// [`enough_bytes`] of a log on disk.
pub(super) fn enough_on_disk(state_bytes: u64) -> u64 {
    (DISK_LOG_FACTOR.saturating_mul(state_bytes)).clamp(SNAPSHOT_BYTES, MAX_DISK_LOG_BYTES).max(state_bytes)
}

/// Bound on the memory of replaced state with readers (the snapshot in progress, a digest, a checkpoint, pulls):
/// this many bytes, or a sixteenth of the state if that is more. Beyond it the next changes wait, and with them the
/// workers, while the readers make progress.
const OUTDATED_BYTES: u64 = 1 << 30;
/// Readers that release nothing for this long are not waited for: a hanging one must not stop the group.
const READERS_TIMEOUT: Duration = Duration::from_secs(2);

/// One replica, as openraft runs it.
pub type Raft = openraft::Raft<Types, Machine>;

pub struct Machine {
    state: Arc<GroupState>,
    log: ReplicaLog,
    applied: Option<LogId>,
    membership: StoredMembership,
    /// The snapshot file, for a log on disk. Without it the log is compacted all the same: a follower that needs a
    /// snapshot gets one of that moment.
    file: Option<Arc<SnapshotFile>>,
    since_snapshot: (u64, u64),
    state_bytes: Arc<AtomicU64>,
    installed: Arc<AtomicU64>,
    wants_snapshot: Arc<Notify>,
    checks: Checks,
    outdated_bytes: u64,
    /// The readers hang, and are not waited for until there is room again.
    impatient: bool,
}

impl Machine {
    /// Creates a machine with the state in `file`.
    pub async fn open(
        state: Arc<GroupState>,
        log: ReplicaLog,
        file: Option<Arc<SnapshotFile>>,
        wants_snapshot: Arc<Notify>,
        checks: Checks,
    ) -> Result<Self, FolderError> {
        let found = match &file {
            None => None,
            Some(file) => {
                let (file, state) = (file.clone(), state.clone());
                let read = tokio::task::spawn_blocking(move || file.restore(&*state));
                read.await.map_err(FolderError::passing)??
            }
        };
        let SnapshotMeta { last_log_id, last_membership } = found.unwrap_or_default();
        let machine = Self {
            state,
            log,
            applied: last_log_id,
            membership: last_membership,
            file,
            since_snapshot: (0, 0),
            state_bytes: Arc::default(),
            installed: Arc::default(),
            wants_snapshot,
            checks,
            outdated_bytes: OUTDATED_BYTES,
            impatient: false,
        };
        machine.note_bytes();
        Ok(machine)
    }

    /// Notes the state's size, and returns it.
    fn note_bytes(&self) -> u64 {
        let bytes = self.state.bytes();
        self.state_bytes.store(bytes, Relaxed);
        self.log.keep_recent(bytes);
        bytes
    }

    /// The state's size; shared with the compaction.
    pub fn state_bytes(&self) -> Arc<AtomicU64> {
        self.state_bytes.clone()
    }

    /// Number of other replicas' snapshots that were installed.
    pub fn installed(&self) -> Arc<AtomicU64> {
        self.installed.clone()
    }

    /// The applied id, and a copy of the state at it.
    pub fn image(&self) -> (u64, RawImage) {
        (self.applied.as_ref().map_or(0, |l| l.index), self.state.image())
    }

    fn meta(&self) -> SnapshotMeta {
        SnapshotMeta { last_log_id: self.applied, last_membership: self.membership.clone() }
    }

    fn snapshot(&self) -> Snapshot {
        Snapshot { meta: self.meta(), snapshot: self.state.image() }
    }
}

/// The snapshot is taken when the builder is created, between two entries; building writes it to disk if it must
/// outlive the process.
pub struct Builder {
    meta: SnapshotMeta,
    /// The image, until it is written.
    image: RawImage,
    order: Vec<u32>,
    file: Option<Arc<SnapshotFile>>,
}

impl RaftSnapshotBuilder<Types> for Builder {
    type SnapshotData = RawImage;

    async fn build_snapshot(&mut self) -> Result<Snapshot, io::Error> {
        let RawImage { head, parts } = std::mem::take(&mut self.image);
        if let Some(file) = &self.file {
            let order = std::mem::take(&mut self.order);
            file.write(self.meta.clone(), head, parts, order).await?;
        }
        // openraft reads only the meta; a follower that needs a snapshot gets one of that moment.
        Ok(Snapshot { meta: self.meta.clone(), snapshot: RawImage::default() })
    }
}

/// Maximum of entries that are applied together: their outcomes wait for the last of them.
const MAX_RUN: usize = 16;

/// Changes that are applied together, and the receivers of their outcomes.
#[derive(Default)]
struct Run {
    changes: Vec<Change>,
    waiting: Vec<(LogId, Option<Responder>)>,
}

type Responder = openraft::storage::ApplyResponder<Types>;

impl Machine {
    /// Returns when another run may replace state that readers hold.
    async fn room(&mut self) {
        let most = self.outdated_bytes.max(self.state.bytes() / 16);
        let (mut last, mut since) = (OutdatedMemory { bytes: u64::MAX, read: 0 }, Instant::now());
        loop {
            let outdated = self.state.outdated(most);
            if outdated.bytes <= most {
                self.impatient = false;
            }
            if outdated.bytes <= most || self.impatient {
                return;
            }
            if outdated.bytes < last.bytes || outdated.read != last.read {
                (last, since) = (outdated, Instant::now());
            } else if since.elapsed() >= READERS_TIMEOUT {
                tracing::warn!(
                    outdated.bytes,
                    "readers of earlier states make no progress; updates no longer wait for them"
                );
                self.impatient = true;
            }
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    }

    /// An error ends the replica: openraft stops it, and its metrics contain the reason.
    async fn apply_run(&mut self, run: &mut Run) -> Result<(), io::Error> {
        if run.changes.is_empty() {
            return Ok(());
        }
        let Run { changes, waiting } = std::mem::take(run);
        self.since_snapshot.0 += changes.iter().map(|c| c.payload().len() as u64).sum::<u64>();
        let touched = changes.iter().map(|c| self.state.touched(c)).sum();
        let state = self.state.clone();
        let apply = move || state.apply_run(&changes.iter().collect::<Vec<_>>());
        let applied = compute::run(self.state.share(), touched, apply).await??;
        for ((log_id, responder), applied) in waiting.into_iter().zip(applied) {
            self.is_applied(log_id, responder, applied);
        }
        Ok(())
    }

    fn is_applied(&mut self, log_id: LogId, responder: Option<Responder>, outcome: Applied) {
        self.log.applied(log_id.index);
        self.applied = Some(log_id);
        self.since_snapshot.1 += 1;
        if let Some(r) = responder {
            r.send(outcome);
        }
    }
}

impl RaftStateMachine<Types> for Machine {
    type SnapshotData = RawImage;
    type SnapshotBuilder = Builder;

    async fn applied_state(&mut self) -> Result<(Option<LogId>, StoredMembership), io::Error> {
        Ok((self.applied, self.membership.clone()))
    }

    async fn apply<S>(&mut self, entries: S) -> Result<(), io::Error>
    where
        S: Stream<Item = Result<EntryResponder<Types>, io::Error>> + Unpin + OptionalSend,
    {
        // Committed entries that are available are applied together, so that they can use several cores.
        let mut entries = entries.ready_chunks(MAX_RUN);
        while let Some(items) = entries.next().await {
            self.room().await;
            let mut run = Run::default();
            for item in items {
                let (entry, responder) = item?;
                let log_id = entry.log_id();
                self.state.in_term(log_id.leader_id.term);
                match entry.payload {
                    EntryPayload::Normal(change) if change.is_check() => {
                        self.apply_run(&mut run).await?;
                        self.checks.check(log_id.index, || self.state.image());
                    }
                    EntryPayload::Normal(change) => {
                        run.changes.push(change);
                        run.waiting.push((log_id, responder));
                        continue;
                    }
                    EntryPayload::Blank => self.apply_run(&mut run).await?,
                    EntryPayload::Membership(m) => {
                        self.apply_run(&mut run).await?;
                        self.membership = StoredMembership::new(Some(log_id), m);
                    }
                }
                self.is_applied(log_id, responder, Applied::default());
            }
            self.apply_run(&mut run).await?;
        }
        let (bytes, count) = self.since_snapshot;
        let state_bytes = self.note_bytes();
        let alone = self.membership.nodes().count() <= 1;
        if bytes > enough_bytes(state_bytes, self.file.is_some(), alone) || count > SNAPSHOT_ENTRIES {
            self.since_snapshot = (0, 0);
            self.wants_snapshot.notify_one();
        }
        Ok(())
    }

    async fn get_snapshot_builder(&mut self) -> Builder {
        let image = self.file.as_ref().map(|_| self.state.image()).unwrap_or_default();
        Builder { meta: self.meta(), image, order: self.state.order(), file: self.file.clone() }
    }

    async fn install_snapshot(&mut self, meta: &SnapshotMeta, image: RawImage) -> Result<(), io::Error> {
        self.state.room_for(&image.head)?;
        if let Some(file) = &self.file {
            file.write(meta.clone(), image.head.clone(), image.parts.clone(), Vec::new()).await?;
        }
        let (state, bytes, RawImage { head, parts }) = (self.state.clone(), image.bytes(), image);
        if let Some(last) = &meta.last_log_id {
            state.in_term(last.leader_id.term);
        }
        // Each part is freed once its values are installed.
        let install = move || state.install_parts(&head, &mut parts.into_iter().map(|part| Ok(part.read())));
        let installed = compute::long(bytes, install).await?;
        installed?;
        if let Some(last) = &meta.last_log_id {
            self.log.applied(last.index);
        }
        self.applied = meta.last_log_id;
        self.membership = meta.last_membership.clone();
        self.note_bytes();
        self.since_snapshot = (0, 0);
        self.installed.fetch_add(1, Relaxed);
        Ok(())
    }

    async fn get_current_snapshot(&mut self) -> Result<Option<Snapshot>, io::Error> {
        // The state already contains the snapshot on disk.
        Ok(self.applied.is_some().then(|| self.snapshot()))
    }
}

#[cfg(test)]
#[path = "machine_tests.rs"]
mod tests;
