//! The handles of a log: of the log of a server, which all its groups share, and of the part of one group.

use super::{
    groups::{Groups, gone},
    record::{Done, LogOptions, LogStats, MAX_GROUPS, MAX_TAG_BYTES, Record, Recovered},
    recover,
    writer::{self, Job, PendingCallback, Request, Shared},
};
use crate::{Disk, StoreError};
use bytes::Bytes;
use parking_lot::Mutex;
use std::{
    io,
    ops::Range,
    path::{Path, PathBuf},
    sync::{Arc, mpsc},
    thread::JoinHandle,
};

/// A handle to the log of a server. Clones share the log, and so do the handles of its groups. Dropping the last
/// one closes the log: queued data is written, the thread ends, and the folder is released.
///
/// The first disk error poisons the log: every later call, of any group, fails with that error, nothing more is
/// written, and the folder is released. Open it again when the disk is repaired; everything acknowledged is there.
#[derive(Clone, Debug)]
pub struct SharedLog {
    pub(super) inner: Arc<Inner>,
}

/// What the handles of a log share.
#[derive(Debug)]
pub(super) struct Inner {
    pub shared: Arc<Shared>,
    pub groups: Arc<Groups>,
    pub disk: Arc<dyn Disk>,
    pub dir: PathBuf,
    writer: Mutex<Option<JoinHandle<()>>>,
}

impl SharedLog {
    /// Opens the log in `dir`, or creates one; no other log may use the folder. Cuts a torn tail, and returns the
    /// number of its bytes in started items: 0 after a proper close, and usually after a crash. Damage is reported
    /// for the affected groups ([`Self::group`]).
    ///
    /// [`StoreError::Locked`] if it is open elsewhere.
    pub fn open(
        disk: Arc<dyn Disk>,
        dir: &Path,
        options: LogOptions,
    ) -> Result<(SharedLog, u64), StoreError> {
        let (segments, lock, torn_bytes) = recover::open(disk.clone(), dir, options)?;
        let (shared, groups) = (Arc::new(Shared::new(dir.to_path_buf())), segments.groups.clone());
        let writer = writer::spawn(shared.clone(), segments, lock)
            .map_err(StoreError::io("start the writer of the log in", dir))?;
        let writer = Mutex::new(Some(writer));
        let inner = Inner { shared, groups, disk, dir: dir.to_path_buf(), writer };
        Ok((SharedLog { inner: Arc::new(inner) }, torn_bytes))
    }

    /// Opens the log of group `key`, or creates it. Reads and checks every record after the purge point and passes
    /// it to `each`, in order; on an error the caller must ignore these records.
    ///
    /// [`StoreError::Damaged`]: some of it may be lost; nothing was changed. [`StoreError::Locked`]: it is already
    /// open.
    pub fn group(&self, key: u64, each: &mut dyn FnMut(Record)) -> Result<(Log, Recovered), StoreError> {
        if self.inner.groups.known().get(&key).is_some_and(|g| g.open) {
            // Another thread may have just dropped the last handle.
            self.wait(key, Request::Append { records: Vec::new(), bytes: 0 }).map_err(self.at("open"))?;
        }
        let damage = self.inner.groups.damage(key);
        let purged = {
            let mut known = self.inner.groups.known();
            if known.len() >= MAX_GROUPS && !known.contains_key(&key) {
                let e = io::Error::new(
                    io::ErrorKind::InvalidInput,
                    format!("{MAX_GROUPS} groups share it already"),
                );
                return Err(self.at("begin a group in")(e));
            }
            let group = known.entry(key).or_default();
            if let Some(fault) = damage {
                let error = fault.error();
                group.damage = Some(fault);
                return Err(error);
            }
            if std::mem::replace(&mut group.open, true) {
                return Err(StoreError::Locked { dir: self.inner.dir.clone() });
            }
            group.purged.clone()
        };
        let log = Log { open: Arc::new(Open { of: self.clone(), key }) };
        let read = self.inner.groups.read_all(&*self.inner.disk, &self.inner.dir, key, each);
        let records = read.inspect_err(|e| _ = self.inner.groups.note_damage(key, e))?;
        Ok((log, Recovered { records, purged }))
    }

    /// Creates the log of a group that never existed.
    pub fn begin(&self, key: u64) -> Result<Log, StoreError> {
        self.inner.groups.known().entry(key).or_default();
        Ok(self.group(key, &mut |_| ())?.0)
    }

    /// Whether the log contains anything of group `key`, damaged or not.
    pub fn has(&self, key: u64) -> bool {
        self.inner.groups.known().get(&key).is_some_and(|g| g.turn > 0 || g.damage.is_some())
    }

    /// The groups in the log.
    pub fn keys(&self) -> Vec<u64> {
        let known = self.inner.groups.known();
        known.iter().filter(|(_, g)| g.turn > 0 || g.damage.is_some()).map(|(key, _)| *key).collect()
    }

    /// Removes group `key`, damaged or not, forever: the key must not be reused, because the remains of both groups
    /// after a crash or damage could be taken for one. Durable on return. Waits for the disk.
    pub fn remove(&self, key: u64) -> io::Result<()> {
        self.wait(key, Request::Remove)
    }

    /// Writes queued data and releases the folder; later calls fail.
    pub fn close(&self) {
        self.inner.close();
    }

    /// Whether nothing more is written, after an error or [`Self::close`].
    pub fn has_ended(&self) -> bool {
        self.inner.shared.has_ended()
    }

    /// The log's counts so far.
    pub fn stats(&self) -> LogStats {
        self.inner.shared.stats()
    }

    /// The error of the log's folder.
    pub(super) fn at(&self, doing: &'static str) -> impl FnOnce(io::Error) -> StoreError {
        StoreError::io(doing, &self.inner.dir)
    }

    /// Waits until the writer has handled a request.
    pub(super) fn wait(&self, key: u64, what: Request) -> io::Result<()> {
        if self.inner.on_writer_thread() {
            return Err(io::Error::new(
                io::ErrorKind::Deadlock,
                "the log's own thread cannot wait for the log",
            ));
        }
        let (reply, outcome) = mpsc::sync_channel(1);
        let done: Done = Box::new(move |done| _ = reply.send(done));
        self.inner.shared.push(Job { key, what, done: PendingCallback::new(done) });
        outcome.recv().unwrap_or_else(|_| Err(gone()))
    }
}

/// A handle to the log of one group within its server's. Clones share it; dropping the last one closes it, and
/// queued data is written.
#[derive(Clone, Debug)]
pub struct Log {
    open: Arc<Open>,
}

#[derive(Debug)]
struct Open {
    of: SharedLog,
    key: u64,
}

impl Log {
    /// Reads the log of group `key` in `dir` as [`SharedLog::group`] does, without changing it: a torn tail is
    /// ignored and kept.
    ///
    /// [`StoreError::Locked`] if it is open, here or elsewhere.
    pub fn inspect(
        disk: &dyn Disk,
        dir: &Path,
        key: u64,
        each: &mut dyn FnMut(Record),
    ) -> Result<Recovered, StoreError> {
        recover::inspect(disk, dir, key, each)
    }

    /// The server's log that contains this one.
    pub fn shared(&self) -> &SharedLog {
        &self.open.of
    }

    /// Reads the records from the first index of `range` on, up to its end, the first gap, or `most` bytes
    /// together; one is read whatever its size. Returns nothing if the first is purged, or not written yet: queued
    /// records are not found. A found record is as it was appended, and need not be durable yet.
    ///
    /// Waits for the disk. The removal of segments waits for running reads.
    pub fn read(&self, range: Range<u64>, most: u64) -> Result<Vec<Record>, StoreError> {
        let inner = &self.open.of.inner;
        inner.groups.read(&*inner.disk, &inner.dir, self.open.key, range, most)
    }

    /// The number of written records that are not purged, and the bytes of their headers and payloads.
    pub fn length(&self) -> (u64, u64) {
        self.open.of.inner.groups.length(self.open.key)
    }

    /// Queues `records` and returns. `done` is called when they are durable (without [`LogOptions::sync`], written)
    /// or have failed; appends complete in the order of the calls.
    ///
    /// The first index must follow the last record or the purge point; an empty log that was never purged accepts
    /// any. `ErrorKind::InvalidInput`: it does not, or a record is too long; nothing of this append is written, and
    /// the log stays usable. Every other error poisons the log.
    ///
    /// `done` runs on the writer's thread: it must be short and must not wait for this log. The queue holds
    /// references to the caller's bytes and is unbounded: the caller must bound its outstanding appends.
    pub fn append(&self, records: Vec<Record>, done: Done) {
        let bytes = records.iter().map(Record::bytes).sum();
        let (what, done) = (Request::Append { records, bytes }, PendingCallback::new(done));
        self.open.of.inner.shared.push(Job { key: self.open.key, what, done });
    }

    /// Drops every record after index `last` (`None`: all), once everything queued before is written. Durable on
    /// return. Waits for the disk; must not be called from a `done`.
    pub fn truncate_after(&self, last: Option<u64>) -> io::Result<()> {
        self.open.of.wait(self.open.key, Request::Truncate { last })
    }

    /// Purges the records up to and including `upto`, once everything queued before is written. The purge point,
    /// with `tag` (at most 4 KiB), is durable on return; disk space is released in whole segments. `upto` may be
    /// beyond the last record: then the log is empty and continues after it. At or below an earlier purge point it
    /// does nothing. Waits for the disk; must not be called from a `done`.
    pub fn purge(&self, upto: u64, tag: Bytes) -> io::Result<()> {
        if tag.len() > MAX_TAG_BYTES || upto == u64::MAX {
            let what = format!("a purge up to {upto} with a tag of {} bytes", tag.len());
            return Err(io::Error::new(io::ErrorKind::InvalidInput, what));
        }
        self.open.of.wait(self.open.key, Request::Purge { upto, tag })
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        let done = PendingCallback::new(Box::new(|_| ())); // no caller waits for it
        self.of.inner.shared.push(Job { key: self.key, what: Request::Close, done });
    }
}

impl Inner {
    fn on_writer_thread(&self) -> bool {
        let writer = self.writer.lock();
        writer.as_ref().is_some_and(|w| w.thread().id() == std::thread::current().id())
    }

    fn close(&self) {
        self.shared.close();
        // A `done` may hold the last handle: then this is the writer's thread, which cannot join itself.
        if self.on_writer_thread() {
            return;
        }
        let writer = self.writer.lock().take();
        // It reported every failure through the jobs.
        let _ = writer.map(JoinHandle::join);
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.close();
    }
}
