//! The log of one replica, in memory.
//!
//! What a crash costs: this replica's copy. An entry is acknowledged when a majority holds it in memory, so it
//! survives the loss of any minority. A process that lost its memory must not vote again under its old id; see
//! `network` for how that is refused.

use super::types::{Entry, LogId, Types, Vote};
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
pub struct MemoryLog {
    inner: Arc<Mutex<Inner>>,
}

#[derive(Default)]
struct Inner {
    vote: Option<Vote>,
    entries: BTreeMap<u64, Entry>,
    purged: Option<LogId>,
}

fn payload_bytes(e: &Entry) -> usize {
    match &e.payload {
        openraft::EntryPayload::Normal(p) => p.payload.len() + 256,
        _ => 256,
    }
}

impl RaftLogReader<Types> for MemoryLog {
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

impl RaftLogStorage<Types> for MemoryLog {
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
        self.inner.lock().vote = Some(*vote);
        Ok(())
    }

    async fn append<I>(&mut self, entries: I, callback: IOFlushed<Types>) -> Result<(), io::Error>
    where
        I: IntoIterator<Item = Entry> + OptionalSend,
        I::IntoIter: OptionalSend,
    {
        let mut inner = self.inner.lock();
        inner.entries.extend(entries.into_iter().map(|e| (e.log_id().index, e)));
        drop(inner);
        callback.io_completed(Ok(()));
        Ok(())
    }

    async fn truncate_after(&mut self, last: Option<LogId>) -> Result<(), io::Error> {
        let first_gone = last.map_or(0, |l| l.index + 1);
        self.inner.lock().entries.split_off(&first_gone);
        Ok(())
    }

    async fn purge(&mut self, upto: LogId) -> Result<(), io::Error> {
        let mut inner = self.inner.lock();
        let kept = inner.entries.split_off(&(upto.index + 1));
        let gone = std::mem::replace(&mut inner.entries, kept);
        inner.purged = Some(upto);
        drop(inner);
        drop(gone); // megabytes: freed outside the lock
        Ok(())
    }
}
