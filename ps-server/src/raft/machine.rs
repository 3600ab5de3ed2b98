//! Hands committed entries to the shard, and cuts snapshots.

use super::types::{LogId, Snapshot, SnapshotMeta, StoredMembership, Types};
use crate::shard::{Outcome, Shard, image::Image};
use futures::{Stream, StreamExt};
use openraft::{
    EntryPayload, OptionalSend, RaftSnapshotBuilder,
    entry::RaftEntry,
    storage::{EntryResponder, RaftStateMachine},
};
use std::{io, sync::Arc};
use tokio::sync::Notify;

/// A snapshot shares the buckets with the live state until they change.
pub type SnapshotData = Arc<Image>;

/// The log is cut after this many payload bytes...
const SNAPSHOT_BYTES: usize = 32 << 20;
/// ...or this many entries, whichever comes first.
const SNAPSHOT_ENTRIES: usize = 4096;

pub struct Machine {
    shard: Arc<Shard>,
    applied: Option<LogId>,
    membership: StoredMembership,
    snapshot: Option<Snapshot>,
    since_snapshot: (usize, usize),
    wants_snapshot: Arc<Notify>,
}

impl Machine {
    pub fn new(shard: Arc<Shard>, wants_snapshot: Arc<Notify>) -> Self {
        Self {
            shard,
            applied: None,
            membership: StoredMembership::default(),
            snapshot: None,
            since_snapshot: (0, 0),
            wants_snapshot,
        }
    }

    /// What is applied, and a copy of the state at that point.
    pub fn image(&self) -> (u64, Image) {
        (self.applied.as_ref().map_or(0, |l| l.index), self.shard.image())
    }
}

/// The cut is made when the builder is made, between two entries; building only wraps it.
pub struct Cut(SnapshotMeta, SnapshotData);

impl RaftSnapshotBuilder<Types> for Cut {
    type SnapshotData = SnapshotData;

    async fn build_snapshot(&mut self) -> Result<Snapshot, io::Error> {
        Ok(Snapshot { meta: self.0.clone(), snapshot: self.1.clone() })
    }
}

impl RaftStateMachine<Types> for Machine {
    type SnapshotData = SnapshotData;
    type SnapshotBuilder = Cut;

    async fn applied_state(&mut self) -> Result<(Option<LogId>, StoredMembership), io::Error> {
        Ok((self.applied, self.membership.clone()))
    }

    async fn apply<S>(&mut self, mut entries: S) -> Result<(), io::Error>
    where
        S: Stream<Item = Result<EntryResponder<Types>, io::Error>> + Unpin + OptionalSend,
    {
        while let Some(item) = entries.next().await {
            let (entry, responder) = item?;
            let log_id = entry.log_id();
            let outcome = match entry.payload {
                EntryPayload::Blank => Outcome::None,
                EntryPayload::Membership(m) => {
                    self.membership = StoredMembership::new(Some(log_id), m);
                    Outcome::None
                }
                EntryPayload::Normal(proposal) => {
                    self.since_snapshot.0 += proposal.payload.len();
                    self.shard.apply(&proposal)
                }
            };
            self.applied = Some(log_id);
            self.since_snapshot.1 += 1;
            if let Some(r) = responder {
                r.send(outcome);
            }
        }
        let (bytes, count) = self.since_snapshot;
        if bytes > SNAPSHOT_BYTES || count > SNAPSHOT_ENTRIES {
            self.since_snapshot = (0, 0);
            self.wants_snapshot.notify_one();
        }
        Ok(())
    }

    async fn get_snapshot_builder(&mut self) -> Cut {
        let meta = SnapshotMeta { last_log_id: self.applied, last_membership: self.membership.clone() };
        let image = Arc::new(self.shard.image());
        self.snapshot = Some(Snapshot { meta: meta.clone(), snapshot: image.clone() });
        Cut(meta, image)
    }

    async fn install_snapshot(&mut self, meta: &SnapshotMeta, image: SnapshotData) -> Result<(), io::Error> {
        self.shard.install(&image).map_err(|e| io::Error::new(io::ErrorKind::InvalidData, e))?;
        self.applied = meta.last_log_id;
        self.membership = meta.last_membership.clone();
        self.snapshot = Some(Snapshot { meta: meta.clone(), snapshot: image });
        self.since_snapshot = (0, 0);
        Ok(())
    }

    async fn get_current_snapshot(&mut self) -> Result<Option<Snapshot>, io::Error> {
        Ok(self.snapshot.clone())
    }
}
