//! The entries of one replica on disk: its part of the server's log, and its vote.

use super::{
    disk::Folder,
    records::{entry_of, record_of},
    storage::{blocking, invalid},
    types::{Entry, LogId, Vote},
    vote_file::VoteFile,
    wire,
};
use paraft_store::Log;
use paraft_store::files::DataFile;
use parking_lot::RwLock;
use std::{
    io,
    ops::Range,
    sync::atomic::{AtomicBool, Ordering::Relaxed},
};

/// The log's files, and the vote.
pub struct DiskLog {
    /// `None` after [`Self::close`].
    log: RwLock<Option<Log>>,
    folder: Folder,
    vote: VoteFile,
    begun: AtomicBool,
}

impl DiskLog {
    /// `begun`: the log is known to have had entries.
    pub fn new(log: Log, folder: Folder, begun: bool) -> Self {
        let vote = VoteFile::new(folder.clone());
        Self { log: RwLock::new(Some(log)), folder, vote, begun: begun.into() }
    }

    /// Closes its part of the server's log: later calls fail, and the replica can be opened again even while
    /// handles of the ended one exist.
    pub fn close(&self) {
        self.vote.close();
        let log = self.log.write().take();
        drop(log); // outside the lock
    }

    /// After [`Self::close`], waits until no vote is being written.
    pub fn settle(&self) {
        self.vote.settle();
    }

    fn log(&self) -> io::Result<Log> {
        let closed =
            || io::Error::new(io::ErrorKind::BrokenPipe, "this replica has ended: its log is closed");
        self.log.read().clone().ok_or_else(closed)
    }

    /// Queues entries; calls `done` when they are on disk.
    pub fn append(
        &self,
        entries: &[Entry],
        done: impl FnOnce(io::Result<()>) + Send + 'static,
    ) -> io::Result<()> {
        let log = self.log()?;
        let records = entries.iter().map(record_of).collect::<Result<_, _>>().map_err(invalid)?;
        // The marker is written after the first entries are on disk and before they are acknowledged: a process
        // that is killed in between has lost nothing. Later entries are acknowledged after these.
        if !entries.is_empty() && !self.begun.swap(true, Relaxed) {
            let folder = self.folder.clone();
            let mark = move || folder.write(DataFile::Begun, &[]).map_err(io::Error::other);
            log.append(records, Box::new(move |written| done(written.and_then(|()| mark()))));
        } else {
            log.append(records, Box::new(done));
        }
        Ok(())
    }

    /// Reads entries back; see [`Log::read`].
    pub async fn read(&self, range: Range<u64>, most: u64) -> io::Result<Vec<Entry>> {
        let log = self.log()?;
        blocking(move || {
            let records = log.read(range, most).map_err(io::Error::other)?;
            records.into_iter().map(entry_of).collect::<Result<_, _>>().map_err(invalid)
        })
        .await
    }

    /// Number and bytes of the entries that are written and not purged.
    pub fn length(&self) -> (u64, u64) {
        self.log.read().as_ref().map_or((0, 0), Log::length)
    }

    /// Returns when the vote and everything queued before it is on disk. Both are written at the same time: a vote
    /// without these entries is that of a replica that had not received them.
    pub async fn save_vote(&self, vote: &Vote) -> io::Result<()> {
        let log = self.log()?;
        let Some(voted) = self.vote.write(*vote, wire::encode(vote).map_err(invalid)?) else { return Ok(()) };
        let (tx, rx) = tokio::sync::oneshot::channel();
        log.append(Vec::new(), Box::new(move |r| _ = tx.send(r)));
        rx.await.map_err(|_| io::Error::other("the log's writer has ended"))??;
        voted.await.map_err(|_| io::Error::other("the vote's writer has ended"))?
    }

    /// Drops every entry after `last`.
    pub async fn truncate_after(&self, last: Option<u64>) -> io::Result<()> {
        let log = self.log()?;
        blocking(move || log.truncate_after(last)).await
    }

    /// Drops every entry up to `upto`.
    pub async fn purge(&self, upto: LogId) -> io::Result<()> {
        let (log, tag) = (self.log()?, wire::encode(&upto).map_err(invalid)?);
        blocking(move || log.purge(upto.index, tag)).await
    }
}
