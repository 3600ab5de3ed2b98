//! The log of one replica: in memory, and where the job wants it also on disk.
//!
//! Entries are read from memory in both cases, so a follower is served without touching the disk; the disk is
//! for coming back. What a crash costs: in memory, this replica's copy (an entry is acknowledged when a majority
//! holds it, so it survives the loss of any minority); on disk, nothing that was acknowledged.

use super::{
    disk::{DiskLog, Folder},
    types::{Entry, LogId, Types, Vote},
};
use openraft::{
    LogState, OptionalSend, RaftLogReader,
    entry::RaftEntry,
    storage::{IOFlushed, RaftLogStorage},
};
use parking_lot::Mutex;
use std::{collections::BTreeMap, fmt::Debug, io, ops::RangeBounds, sync::Arc};

/// AppendEntries carries at most this many payload bytes, or one entry: openraft bounds messages by entries
/// only, and a follower buffers many messages.
const MAX_APPEND_BYTES: usize = 1 << 20;

#[derive(Clone, Default)]
pub struct ReplicaLog {
    inner: Arc<Mutex<Inner>>,
    disk: Option<Arc<DiskLog>>,
}

#[derive(Default)]
struct Inner {
    vote: Option<Vote>,
    entries: BTreeMap<u64, Entry>,
    /// Of `entries`.
    bytes: usize,
    purged: Option<LogId>,
}

impl Inner {
    fn insert(&mut self, entry: Entry) {
        self.bytes += payload_bytes(&entry);
        if let Some(old) = self.entries.insert(entry.log_id.index, entry) {
            self.bytes -= payload_bytes(&old);
        }
    }

    fn forget(&mut self, gone: &BTreeMap<u64, Entry>) {
        self.bytes -= gone.values().map(payload_bytes).sum::<usize>();
    }
}

impl ReplicaLog {
    /// The log in `folder`, with what it holds.
    pub fn open(folder: &Folder) -> Result<Self, String> {
        let (disk, found) = folder.open_log()?;
        let mut inner = Inner { vote: found.vote, purged: found.purged, ..Inner::default() };
        found.entries.into_iter().for_each(|e| inner.insert(e));
        Ok(Self { inner: Arc::new(Mutex::new(inner)), disk: Some(Arc::new(disk)) })
    }

    /// Entries in memory, and their bytes.
    pub fn held(&self) -> (u64, u64) {
        let inner = self.inner.lock();
        (inner.entries.len() as u64, inner.bytes as u64)
    }
}

fn payload_bytes(e: &Entry) -> usize {
    match &e.payload {
        openraft::EntryPayload::Normal(p) => p.payload().len() + 256,
        _ => 256,
    }
}

impl RaftLogReader<Types> for ReplicaLog {
    async fn try_get_log_entries<RB>(&mut self, range: RB) -> Result<Vec<Entry>, io::Error>
    where
        RB: RangeBounds<u64> + Clone + Debug + OptionalSend,
    {
        Ok(self.inner.lock().entries.range(range).map(|(_, e)| e.clone()).collect())
    }

    async fn limited_get_log_entries(&mut self, start: u64, end: u64) -> Result<Vec<Entry>, io::Error> {
        let inner = self.inner.lock();
        let mut bytes = 0;
        let within = |e: &&Entry| {
            let first = bytes == 0;
            bytes += payload_bytes(e);
            first || bytes <= MAX_APPEND_BYTES
        };
        Ok(inner.entries.range(start..end).map(|(_, e)| e).take_while(within).cloned().collect())
    }

    async fn read_vote(&mut self) -> Result<Option<Vote>, io::Error> {
        Ok(self.inner.lock().vote)
    }
}

impl RaftLogStorage<Types> for ReplicaLog {
    type LogReader = Self;

    async fn get_log_state(&mut self) -> Result<LogState<Types>, io::Error> {
        let inner = self.inner.lock();
        let last = inner.entries.last_key_value().map(|(_, e)| e.log_id());
        Ok(LogState { last_purged_log_id: inner.purged, last_log_id: last.or(inner.purged) })
    }

    async fn get_log_reader(&mut self) -> Self {
        self.clone()
    }

    async fn save_vote(&mut self, vote: &Vote) -> Result<(), io::Error> {
        if let Some(disk) = &self.disk {
            disk.save_vote(vote).await?;
        }
        self.inner.lock().vote = Some(*vote);
        Ok(())
    }

    async fn append<I>(&mut self, entries: I, callback: IOFlushed<Types>) -> Result<(), io::Error>
    where
        I: IntoIterator<Item = Entry> + OptionalSend,
        I::IntoIter: OptionalSend,
    {
        let entries: Vec<Entry> = entries.into_iter().collect();
        {
            let mut inner = self.inner.lock();
            entries.iter().for_each(|e| inner.insert(e.clone()));
        }
        match &self.disk {
            Some(disk) => disk.append(&entries, move |r| callback.io_completed(r))?,
            None => callback.io_completed(Ok(())),
        }
        Ok(())
    }

    async fn truncate_after(&mut self, last: Option<LogId>) -> Result<(), io::Error> {
        if let Some(disk) = &self.disk {
            disk.truncate_after(last.as_ref().map(|l| l.index)).await?;
        }
        let first_gone = last.map_or(0, |l| l.index + 1);
        let mut inner = self.inner.lock();
        let gone = inner.entries.split_off(&first_gone);
        inner.forget(&gone);
        Ok(())
    }

    async fn purge(&mut self, upto: LogId) -> Result<(), io::Error> {
        let gone = {
            let mut inner = self.inner.lock();
            let kept = inner.entries.split_off(&(upto.index + 1));
            inner.purged = Some(upto);
            let gone = std::mem::replace(&mut inner.entries, kept);
            inner.forget(&gone);
            gone
        };
        drop(gone); // megabytes: freed outside the lock
        match &self.disk {
            Some(disk) => disk.purge(upto).await,
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        raft::Change,
        shard::{Command, Proposal},
    };
    use openraft::{EntryPayload, type_config::alias::CommittedLeaderIdOf};

    /// openraft bounds an append by entries: sixteen of 16 MiB in one call cost leaders their lease.
    #[tokio::test]
    async fn an_append_is_a_megabyte_or_one_entry() {
        let mut log = ReplicaLog::default();
        let sizes = [400 << 10, 400 << 10, 400 << 10, 3 << 20, 10, 10];
        for (index, size) in (0u64..).zip(sizes) {
            let change = Proposal { payload: vec![0; size].into(), ..Command::Fence.into() };
            let log_id = LogId::new(CommittedLeaderIdOf::<Types>::new(1), index);
            let entry = Entry { log_id, payload: EntryPayload::Normal(Change::Shard(change)) };
            log.inner.lock().insert(entry);
        }
        let mut batches = Vec::new();
        let mut next = 0;
        while next < sizes.len() as u64 {
            let batch = log.limited_get_log_entries(next, sizes.len() as u64).await.expect("in memory");
            assert!(batch.first().is_some_and(|e| e.log_id.index == next), "there is progress");
            batches.push(batch.len());
            next += batch.len() as u64;
        }
        assert_eq!(batches, [2, 1, 1, 2]);
    }
}
