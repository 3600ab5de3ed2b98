//! Hands committed entries to the state, and takes snapshots.

use super::{
    disk::SnapshotFile,
    image::RawImage,
    parity::Parity,
    types::{LogId, Snapshot, SnapshotMeta, StoredMembership, Types},
};
use crate::{
    control,
    shard::{Outcome, Proposal},
};
use futures::{Stream, StreamExt};
use openraft::{
    EntryPayload, OptionalSend, RaftSnapshotBuilder,
    entry::RaftEntry,
    storage::{EntryResponder, RaftStateMachine},
};
use paraft_common::Payload;
use serde::{Deserialize, Serialize};
use std::{
    fmt, io,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};
use tokio::sync::Notify;

/// The replicated state of a group. It changes only in `apply`, deterministically.
pub trait Replicated: Send + Sync + 'static {
    /// Applies one committed change.
    fn apply(&self, change: &Change) -> Applied;
    /// Applies changes that follow each other, as [`Self::apply`] one by one; it may use several cores.
    fn apply_run(&self, changes: &[&Change]) -> Vec<Applied> {
        changes.iter().map(|c| self.apply(c)).collect()
    }
    /// The whole state; the bulk is shared until it changes.
    fn image(&self) -> RawImage;
    /// Replaces the whole state; on an error nothing has changed.
    fn install(&self, image: &RawImage) -> Result<(), String>;
}

/// An entry of a log.
#[derive(Clone, PartialEq, Serialize, Deserialize)]
#[allow(missing_docs)]
pub enum Change {
    Shard(Proposal),
    Control(control::Command),
    /// Changes nothing: every replica hashes its state here.
    Check,
}

impl Change {
    /// The bulk, which travels and is stored beside the rest.
    pub fn payload(&self) -> &Payload {
        static NONE: Payload = Payload::EMPTY;
        match self {
            Change::Shard(p) => &p.payload,
            Change::Control(_) | Change::Check => &NONE,
        }
    }

    /// The proposal, if it is a shard's.
    pub fn proposal(&self) -> Option<&Proposal> {
        match self {
            Change::Shard(p) => Some(p),
            Change::Control(_) | Change::Check => None,
        }
    }

    /// Puts the bulk back where serde skipped it.
    pub fn attach(&mut self, payload: Payload) {
        if let Change::Shard(p) = self {
            p.payload = payload;
        }
    }
}

impl fmt::Debug for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Change::Shard(p) => p.fmt(f),
            Change::Control(c) => c.fmt(f),
            Change::Check => f.write_str("Check"),
        }
    }
}

impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

/// What applying a change gave; only the leader that proposed it reads this.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[allow(missing_docs)]
pub enum Applied {
    /// A blank or membership entry, or an entry of another kind of group.
    None,
    Shard(Outcome),
    Control(control::Outcome),
}

impl fmt::Display for Applied {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

/// A snapshot shares its bulk with the live state until that changes.
pub type SnapshotData = Arc<RawImage>;

/// The log is compacted after this many payload bytes, or as many as the state has, whichever is more...
pub const SNAPSHOT_BYTES: u64 = 32 << 20;
/// ...or after this many entries, whichever comes first.
pub const SNAPSHOT_ENTRIES: u64 = 4096;

pub struct Machine {
    state: Arc<dyn Replicated>,
    applied: Option<LogId>,
    membership: StoredMembership,
    /// Where snapshots are kept, for a log on disk. Without it the log is compacted all the same: a follower
    /// that needs a snapshot gets one of that moment.
    file: Option<Arc<SnapshotFile>>,
    since_snapshot: (u64, u64),
    state_bytes: Arc<AtomicU64>,
    installed: Arc<AtomicU64>,
    wants_snapshot: Arc<Notify>,
    parity: Parity,
}

impl Machine {
    pub fn new(
        state: Arc<dyn Replicated>,
        file: Option<Arc<SnapshotFile>>,
        wants_snapshot: Arc<Notify>,
        parity: Parity,
    ) -> Self {
        Self {
            state,
            applied: None,
            membership: StoredMembership::default(),
            file,
            since_snapshot: (0, 0),
            state_bytes: Arc::default(),
            installed: Arc::default(),
            wants_snapshot,
            parity,
        }
    }

    /// The state's size at the last snapshot; shared with who decides when the log is compacted.
    pub fn state_bytes(&self) -> Arc<AtomicU64> {
        self.state_bytes.clone()
    }

    /// Snapshots of other replicas that were installed.
    pub fn installed(&self) -> Arc<AtomicU64> {
        self.installed.clone()
    }

    /// What is applied, and a copy of the state at that point.
    pub fn image(&self) -> (u64, RawImage) {
        (self.applied.as_ref().map_or(0, |l| l.index), self.state.image())
    }

    fn snapshot(&self) -> Snapshot {
        let meta = SnapshotMeta { last_log_id: self.applied, last_membership: self.membership.clone() };
        Snapshot { meta, snapshot: Arc::new(self.state.image()) }
    }
}

/// The snapshot is taken when the builder is made, between two entries; building writes it where it must outlive
/// the process.
pub struct Builder(Snapshot, Option<Arc<SnapshotFile>>);

impl RaftSnapshotBuilder<Types> for Builder {
    type SnapshotData = SnapshotData;

    async fn build_snapshot(&mut self) -> Result<Snapshot, io::Error> {
        let (meta, image) = (self.0.meta.clone(), self.0.snapshot.clone());
        if let Some(file) = &self.1 {
            file.write(meta.clone(), image.clone()).await?;
        }
        // openraft drops what is returned here; nothing holds the snapshot any longer than this.
        Ok(Snapshot { meta, snapshot: image })
    }
}

/// Entries that are applied together, at most: their outcomes wait for the last of them.
const MAX_RUN: usize = 16;

type Responder = openraft::storage::ApplyResponder<Types>;

impl Machine {
    fn apply_run(&mut self, run: &mut Vec<(LogId, Change, Option<Responder>)>) {
        let changes: Vec<&Change> = run.iter().map(|(_, c, _)| c).collect();
        let applied = self.state.apply_run(&changes);
        for ((log_id, change, responder), applied) in run.drain(..).zip(applied) {
            self.since_snapshot.0 += change.payload().len() as u64;
            self.is_applied(log_id, responder, applied);
        }
    }

    fn is_applied(&mut self, log_id: LogId, responder: Option<Responder>, applied: Applied) {
        self.applied = Some(log_id);
        self.since_snapshot.1 += 1;
        if let Some(r) = responder {
            r.send(applied);
        }
    }
}

impl RaftStateMachine<Types> for Machine {
    type SnapshotData = SnapshotData;
    type SnapshotBuilder = Builder;

    async fn applied_state(&mut self) -> Result<(Option<LogId>, StoredMembership), io::Error> {
        Ok((self.applied, self.membership.clone()))
    }

    async fn apply<S>(&mut self, entries: S) -> Result<(), io::Error>
    where
        S: Stream<Item = Result<EntryResponder<Types>, io::Error>> + Unpin + OptionalSend,
    {
        // What is committed and here already is applied together, so that it can use the cores.
        let mut entries = entries.ready_chunks(MAX_RUN);
        while let Some(items) = entries.next().await {
            let mut run = Vec::new();
            for item in items {
                let (entry, responder) = item?;
                let log_id = entry.log_id();
                match entry.payload {
                    EntryPayload::Normal(Change::Check) => {
                        self.apply_run(&mut run);
                        self.parity.check(log_id.index, || self.state.image());
                    }
                    EntryPayload::Normal(change) => {
                        run.push((log_id, change, responder));
                        continue;
                    }
                    EntryPayload::Blank => self.apply_run(&mut run),
                    EntryPayload::Membership(m) => {
                        self.apply_run(&mut run);
                        self.membership = StoredMembership::new(Some(log_id), m);
                    }
                }
                self.is_applied(log_id, responder, Applied::None);
            }
            self.apply_run(&mut run);
        }
        let (bytes, count) = self.since_snapshot;
        // A snapshot on disk writes the whole state: not more often than the log has grown by as much. And while a
        // follower gets one, the log must keep what comes meanwhile.
        let enough = self.state_bytes.load(Relaxed).max(SNAPSHOT_BYTES);
        if bytes > enough || count > SNAPSHOT_ENTRIES {
            self.since_snapshot = (0, 0);
            self.wants_snapshot.notify_one();
        }
        Ok(())
    }

    async fn get_snapshot_builder(&mut self) -> Builder {
        let snapshot = self.snapshot();
        self.state_bytes.store(snapshot.snapshot.bytes(), Relaxed);
        Builder(snapshot, self.file.clone())
    }

    async fn install_snapshot(&mut self, meta: &SnapshotMeta, image: SnapshotData) -> Result<(), io::Error> {
        if let Some(file) = &self.file {
            file.write(meta.clone(), image.clone()).await?;
        }
        self.state.install(&image).map_err(|e| io::Error::new(io::ErrorKind::InvalidData, e))?;
        self.applied = meta.last_log_id;
        self.membership = meta.last_membership.clone();
        self.state_bytes.store(image.bytes(), Relaxed);
        self.since_snapshot = (0, 0);
        self.installed.fetch_add(1, Relaxed);
        Ok(())
    }

    async fn get_current_snapshot(&mut self) -> Result<Option<Snapshot>, io::Error> {
        if self.applied.is_some() {
            return Ok(Some(self.snapshot()));
        }
        match &self.file {
            Some(file) => file.read().await,
            None => Ok(None),
        }
    }
}
