//! The log of one replica: in memory and, if the job requires it, also on disk.
//!
//! A log on disk survives a crash with everything that was acknowledged. For a log in memory, a crash loses this
//! replica's copy (an entry is acknowledged when a majority holds it, so it survives the loss of any minority).
//!
//! ```text
//!  purged │ ◀─────────────────── on disk ───────────────────▶
//!         │                     ◀───────── in memory ───────────▶
//!         │  applied long ago │ the last RECENT_BYTES │ not durable yet
//! ```
//!
//! A log on disk keeps only its end in memory: entries that are not durable, not applied, or likely to be requested
//! by a follower. The rest is read back when a follower that is behind needs it, or this replica after a start. A
//! log in memory keeps everything until it is purged.

use super::{
    disk::Folder,
    disk_log::DiskLog,
    storage::FolderError,
    types::{Entry, LogId, Types, Vote},
};
use futures::{Stream, StreamExt, TryStreamExt, stream};
use openraft::{
    LogState, OptionalSend, RaftLogReader,
    storage::{IOFlushed, RaftLogStorage},
};
use parking_lot::Mutex;
use std::{
    collections::BTreeMap,
    fmt::Debug,
    io,
    ops::{Bound, Range, RangeBounds},
    sync::Arc,
};

/// Maximum payload of an AppendEntries message, or one entry: openraft bounds messages only by entries, and a
/// follower buffers many messages.
const MAX_APPEND_BYTES: usize = 1 << 20;
/// Entries to apply are read in parts of this many bytes: as many buckets as are applied together.
const MAX_APPLY_BYTES: usize = 16 << 20;
/// Bytes of durable, applied entries that stay in memory: a follower that is only a little behind causes no reads.
const RECENT_BYTES: usize = 64 << 20;
/// Half of that, if the state is not larger: a server counts as much for the log as for the state.
const FEW_RECENT_BYTES: usize = RECENT_BYTES / 2;
/// Bytes of durable, unapplied entries that stay in memory. If applying falls further behind, it reads them back.
const UNAPPLIED_BYTES: usize = 256 << 20;

#[derive(Clone, Default)]
pub struct ReplicaLog {
    inner: Arc<Mutex<Inner>>,
    disk: Option<Arc<DiskLog>>,
}

/// The size of a log.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LogSize {
    /// Entries that are not purged.
    pub entries: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Bytes of those that are in memory.
    pub in_memory: u64,
}

#[derive(Default)]
struct Inner {
    vote: Option<Vote>,
    /// The id of the last entry, in memory or not.
    last: Option<LogId>,
    /// The end of the log: contiguous up to the last entry.
    entries: BTreeMap<u64, Entry>,
    /// Bytes of `entries`.
    bytes: usize,
    purged: Option<LogId>,
    /// Entries below this index are on disk.
    durable: u64,
    /// Entries below this index are applied.
    applied: u64,
    /// As many bytes of applied entries stay in memory; `None`: [`RECENT_BYTES`].
    recent: Option<usize>,
}

impl Inner {
    fn insert(&mut self, entry: Entry) {
        self.last = Some(entry.log_id);
        self.bytes += payload_bytes(&entry);
        if let Some(old) = self.entries.insert(entry.log_id.index, entry) {
            self.bytes -= payload_bytes(&old);
        }
    }

    fn forget(&mut self, gone: &BTreeMap<u64, Entry>) {
        self.bytes -= gone.values().map(payload_bytes).sum::<usize>();
    }

    /// Removes the entries that need not stay in memory.
    fn evict(&mut self) -> Vec<Entry> {
        let mut gone = Vec::new();
        while let Some(first) = self.entries.first_entry() {
            let (index, on_disk) = (*first.key(), *first.key() < self.durable);
            let recent = self.recent.unwrap_or(RECENT_BYTES);
            let most = if index < self.applied { recent } else { UNAPPLIED_BYTES };
            if !on_disk || self.bytes <= most {
                break;
            }
            let entry = first.remove();
            self.bytes -= payload_bytes(&entry);
            gone.push(entry);
        }
        gone
    }
}

/// Removes durable entries from memory. They are megabytes, so they are freed outside the lock.
fn evict(inner: &Mutex<Inner>, note: impl FnOnce(&mut Inner)) {
    let gone = {
        let mut inner = inner.lock();
        note(&mut inner);
        inner.evict()
    };
    drop(gone);
}

impl ReplicaLog {
    /// Opens the log in `folder` with its entries.
    pub fn open(folder: &Folder) -> Result<Self, FolderError> {
        let this = Self::default();
        let mut inner = this.inner.lock();
        let (log, found) = folder.open_log(&mut |entry| {
            inner.durable = entry.log_id.index + 1;
            // Nothing is applied yet, but that will take some time: the entries are read back then.
            inner.applied = inner.durable;
            inner.insert(entry);
            inner.evict();
        })?;
        (inner.applied, inner.vote, inner.purged, inner.last) = (0, found.vote, found.purged, found.last);
        let disk = DiskLog::new(log, folder.clone(), found.begun);
        drop(inner);
        Ok(Self { disk: Some(Arc::new(disk)), ..this })
    }

    /// Closes its files, for all clones; later calls fail.
    pub fn close(&self) {
        if let Some(disk) = &self.disk {
            disk.close();
        }
    }

    /// After [`Self::close`], waits until no vote is being written.
    pub fn settle(&self) {
        if let Some(disk) = &self.disk {
            disk.settle();
        }
    }

    /// The log's size.
    pub fn size(&self) -> LogSize {
        let (entries, in_memory) = {
            let inner = self.inner.lock();
            (inner.entries.len() as u64, inner.bytes as u64)
        };
        let (entries, bytes) = self.disk.as_ref().map_or((entries, in_memory), |disk| disk.length());
        LogSize { entries, bytes, in_memory }
    }

    /// Returns a function for the bytes in memory; it does not keep the log alive.
    pub fn in_memory(&self) -> impl Fn() -> u64 + Send + Sync + 'static {
        let inner = Arc::downgrade(&self.inner);
        move || inner.upgrade().map_or(0, |inner| inner.lock().bytes as u64)
    }

    /// Whether it is on disk.
    pub(super) fn is_on_disk(&self) -> bool {
        self.disk.is_some()
    }

    /// Keeps about as many bytes of applied entries in memory as the state has.
    pub(super) fn keep_recent(&self, state_bytes: u64) {
        let state_bytes = usize::try_from(state_bytes).unwrap_or(usize::MAX);
        self.inner.lock().recent = Some(state_bytes.clamp(FEW_RECENT_BYTES, RECENT_BYTES));
    }

    /// Records that all entries up to `index` are applied.
    pub fn applied(&self, index: u64) {
        match &self.disk {
            Some(_) => evict(&self.inner, |inner| inner.applied = index + 1),
            None => self.inner.lock().applied = index + 1,
        }
    }

    /// The entries of `range` from its start: up to `most` bytes, or one entry. Missing ones (purged or not
    /// written) are left out.
    async fn get(&self, range: Range<u64>, most: usize) -> Result<Vec<Entry>, io::Error> {
        let mut found = Vec::new();
        let before = {
            let inner = self.inner.lock();
            let first = inner.entries.first_key_value().map_or(u64::MAX, |(index, _)| *index);
            let purged = inner.purged.as_ref().map_or(0, |p| p.index + 1);
            let before = range.start.max(purged)..range.end.min(first);
            if before.is_empty() || self.disk.is_none() {
                return Ok(inner.up_to(range, most));
            }
            before
        };
        let Some(disk) = &self.disk else { return Ok(found) };
        let end = before.end;
        found.extend(disk.read(before, most as u64).await?);
        let bytes: usize = found.iter().map(payload_bytes).sum();
        // The end was in memory above. Entries that were evicted meanwhile are omitted with their successors, so
        // there is no gap.
        if bytes < most && found.last().is_some_and(|e| e.log_id.index + 1 == end) && end < range.end {
            let inner = self.inner.lock();
            if inner.entries.first_key_value().is_some_and(|(first, _)| *first <= end) {
                found.extend(inner.up_to(end..range.end, most - bytes));
            }
        }
        Ok(found)
    }
}

impl Inner {
    /// Entries in memory: up to `most` bytes, or one.
    fn up_to(&self, range: Range<u64>, most: usize) -> Vec<Entry> {
        let mut bytes = 0;
        let within = |e: &&Entry| {
            let first = bytes == 0;
            bytes += payload_bytes(e);
            first || bytes <= most
        };
        if range.is_empty() {
            return Vec::new();
        }
        self.entries.range(range).map(|(_, e)| e).take_while(within).cloned().collect()
    }
}

fn payload_bytes(e: &Entry) -> usize {
    match &e.payload {
        openraft::EntryPayload::Normal(p) => p.payload().len() + 256,
        _ => 256,
    }
}

fn half_open(range: &impl RangeBounds<u64>) -> Range<u64> {
    let start = match range.start_bound() {
        Bound::Included(i) => *i,
        Bound::Excluded(i) => i.saturating_add(1),
        Bound::Unbounded => 0,
    };
    let end = match range.end_bound() {
        Bound::Included(i) => i.saturating_add(1),
        Bound::Excluded(i) => *i,
        Bound::Unbounded => u64::MAX,
    };
    start..end
}

impl RaftLogReader<Types> for ReplicaLog {
    async fn try_get_log_entries<RB>(&mut self, range: RB) -> Result<Vec<Entry>, io::Error>
    where
        RB: RangeBounds<u64> + Clone + Debug + OptionalSend,
    {
        self.get(half_open(&range), usize::MAX).await
    }

    /// In parts: the entries to apply after a start may be as long as the log.
    async fn entries_stream<RB>(
        &mut self,
        range: RB,
    ) -> impl Stream<Item = Result<Entry, io::Error>> + OptionalSend
    where
        RB: RangeBounds<u64> + Clone + Debug + OptionalSend,
    {
        let (log, range) = (self.clone(), half_open(&range));
        let end = self.inner.lock().last.as_ref().map_or(0, |l| l.index + 1).min(range.end);
        let parts = stream::try_unfold(range.start, move |next| {
            let log = log.clone();
            async move {
                if next >= end {
                    return Ok::<_, io::Error>(None);
                }
                let part = log.get(next..end, MAX_APPLY_BYTES).await?;
                let after = part.last().map(|e| e.log_id.index + 1);
                let after =
                    after.ok_or_else(|| io::Error::other(format!("entry {next} is not in the log")))?;
                Ok(Some((stream::iter(part.into_iter().map(Ok)), after)))
            }
        });
        parts.try_flatten().boxed()
    }

    async fn limited_get_log_entries(&mut self, start: u64, end: u64) -> Result<Vec<Entry>, io::Error> {
        self.get(start..end, MAX_APPEND_BYTES).await
    }

    async fn read_vote(&mut self) -> Result<Option<Vote>, io::Error> {
        Ok(self.inner.lock().vote)
    }
}

impl RaftLogStorage<Types> for ReplicaLog {
    type LogReader = Self;

    async fn get_log_state(&mut self) -> Result<LogState<Types>, io::Error> {
        let inner = self.inner.lock();
        Ok(LogState { last_purged_log_id: inner.purged, last_log_id: inner.last.max(inner.purged) })
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
            Some(disk) => {
                let (inner, last) = (self.inner.clone(), entries.last().map(|e| e.log_id.index));
                disk.append(&entries, move |done| {
                    if let (Ok(()), Some(last)) = (&done, last) {
                        evict(&inner, |inner| inner.durable = last + 1);
                    }
                    callback.io_completed(done);
                })?;
            }
            None => callback.io_completed(Ok(())),
        }
        Ok(())
    }

    async fn truncate_after(&mut self, last: Option<LogId>) -> Result<(), io::Error> {
        if let Some(disk) = &self.disk {
            disk.truncate_after(last.as_ref().map(|l| l.index)).await?;
        }
        let first_gone = last.as_ref().map_or(0, |l| l.index + 1);
        let mut inner = self.inner.lock();
        let gone = inner.entries.split_off(&first_gone);
        inner.forget(&gone);
        inner.durable = inner.durable.min(first_gone);
        inner.last = inner.last.min(last);
        Ok(())
    }

    async fn purge(&mut self, upto: LogId) -> Result<(), io::Error> {
        let gone = {
            let mut inner = self.inner.lock();
            let kept = inner.entries.split_off(&(upto.index + 1));
            inner.purged = Some(upto);
            if inner.last.is_none_or(|last| last.index <= upto.index) {
                inner.last = None; // the log is empty
            }
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
#[path = "log_tests.rs"]
mod tests;
