//! The log of a server, on disk, which all its groups share.
//!
//! A folder of segments, append-only files that are named by the number of their first item. Each item is of one group: a
//! record with its index, or that records were given up. One thread writes; everything that all groups queue while it
//! waits for the disk shares its next sync (group commit). What is written can be read back while the log runs
//! ([`Log::read`]): where each record lies is kept in memory, the records are not.
//!
//! ```text
//! 0000000000000000.log   sealed: full and durable as a whole
//! 0000000000000812.log   active: the last one
//! 0000000000000000.spare purged, kept to be written over (at most 4)
//! cutting                only while the end of a segment is cut off: which
//! LOCK                   held while a log is open here
//! ```
//!
//! Each segment begins with a table: what every group had come to by then. So the oldest segment can go as soon as no group
//! needs a record in it. Where a group that is seldom purged keeps old segments, and they take more than all records that are
//! needed, what is needed of the oldest is written again at the log's end: no more over time than was given up.
//!
//! # Spares
//!
//! Overwriting a file that has its blocks is much cheaper to sync than growing one, which must record the new
//! size and blocks as well. Where this was written, 1 MiB with fdatasync: 0.5 ms over old blocks, 0.7 ms over
//! reserved ones, 3 ms at the end of a growing file. So purged segments are written over, and new ones are
//! reserved.
//!
//! # A torn tail and damage
//!
//! A crash may leave any part of what was not yet synced, in any order: of three items written together, the
//! second may be missing. So an item that fails its checksum is not by itself damage, nor is a good one behind
//! it proof of it. Every item says how far the log was durable when it was written, and that decides. A bad
//! item is
//!
//! - **damage**, if it is in a sealed segment, or if anything behind it in the last one says that it was durable
//!   before; so is a file that is shorter than what was reserved for it;
//! - **a torn tail** otherwise: it and what is behind it are cut. Nothing that was acknowledged is in there,
//!   unless the disk lost it.
//!
//! The last words are the limit. Items of the last batch, acknowledged but with nothing written after them,
//! look the same when a crash tore them and when the disk damaged them later; they are cut, and
//! [`SharedLog::open`] says that bytes were. A log that was closed in order ends with a mark, so after that every bad
//! item is known to be damage. What also cannot be seen: zeros over the last segment from some item to its end;
//! a last segment that was removed, or put back from an older copy; on a file system that reserves nothing, a last
//! segment that was cut short.
//!
//! # Whose damage it is
//!
//! [`SharedLog::open`] opens a log with damage; [`SharedLog::group`] refuses the groups that it may have hit, names file and
//! offset, and lets the others go on. Where only what an item holds is bad, that is its group. Where nobody can tell any more
//! whose items lay there (a head, a segment's beginning, a segment that is gone), it is every group but those whose own
//! numbering of their items, in a later item or table, shows that none of theirs is missing, and those that have purged what was
//! before. A group of which nothing is left at all may have begun there: it is refused until it is begun anew. Nothing of a damaged log is changed, and no segment goes while a group is damaged: [`SharedLog::keep`] copies what
//! there is of the group elsewhere, [`SharedLog::remove`] lets the log go on without it.

mod files;
mod format;
mod groups;
mod keep;
#[cfg(test)]
mod properties;
mod recover;
mod segment;
mod segments;
mod writer;

use crate::{Disk, StoreError};
use bytes::Bytes;
use groups::Groups;
use paraft_common::Payload;
use parking_lot::Mutex;
use std::{
    io,
    ops::Range,
    path::{Path, PathBuf},
    sync::{Arc, mpsc},
    thread::JoinHandle,
};
use writer::{Job, Request, Shared, Unanswered};

/// A record's header has at most so many bytes.
pub const MAX_HEADER_BYTES: usize = 16 << 20;
/// A record's payload has at most so many bytes.
pub const MAX_PAYLOAD_BYTES: usize = 16 << 20;

/// A purge point's tag has at most so many bytes.
const MAX_TAG_BYTES: usize = 4 << 10;
/// A log has at most so many groups.
const MAX_GROUPS: usize = 4096;

/// One record of a group. Indices are consecutive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// Its place in the log; below `u64::MAX`.
    pub index: u64,
    /// What the record is, encoded by the caller; at most [`MAX_HEADER_BYTES`].
    pub header: Bytes,
    /// Bulk that belongs to it and is written as it is; at most [`MAX_PAYLOAD_BYTES`], may be empty.
    pub payload: Payload,
}

impl Record {
    fn bytes(&self) -> u64 {
        (self.header.len() + self.payload.len()) as u64
    }
}

/// How a log is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogOptions {
    /// A segment is full at about so many bytes at most; a single record may be longer. The first has 1 MiB, if that
    /// is less, and each later one as much as the log has by then. That is also what is reserved at once, and the
    /// grain of [`Log::purge`]: a log takes up to twice the disk of its records and five segments, and up to four segments
    /// more for spares. Default 64 MiB; at least 4 KiB.
    pub segment_bytes: u64,
    /// Records are synced before they are acknowledged. Without it a crash of the machine (not of the process)
    /// costs acknowledged records. Default true.
    pub sync: bool,
}

impl Default for LogOptions {
    fn default() -> Self {
        LogOptions { segment_bytes: 64 << 20, sync: true }
    }
}

/// What was in the log of a group.
#[derive(Clone, Debug, Default)]
pub struct Recovered {
    /// How many records there are after the purge point. They are durable.
    pub records: u64,
    /// The purge point and what [`Log::purge`] was given with it.
    pub purged: Option<(u64, Bytes)>,
}

/// What a log has done since it was opened, for all its groups. Numbers only grow, but for `queued_bytes`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LogStats {
    /// Records written.
    pub records: u64,
    /// Bytes of their headers and payloads.
    pub bytes: u64,
    /// Batches written; with [`LogOptions::sync`], each was one sync.
    pub batches: u64,
    /// Segments begun.
    pub segments: u64,
    /// Segments begun by writing over a spare.
    pub recycled: u64,
    /// Records written again, so that the segment where they were could go.
    pub moved: u64,
    /// Bytes of headers and payloads that wait to be written.
    pub queued_bytes: u64,
}

/// Called once with the outcome of an append.
pub type Done = Box<dyn FnOnce(io::Result<()>) + Send>;

/// A handle to the log of a server. Clones are the same log, and so are the handles to its groups; with the last of them it is
/// closed: what is queued is written, the thread ends, the folder is free.
///
/// After the first failure of the disk the log is poisoned: every later call, of any group, fails with what happened first,
/// nothing is written any more, and the folder is free. Open it anew when the disk is mended; what was acknowledged is there.
#[derive(Clone, Debug)]
pub struct SharedLog {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    shared: Arc<Shared>,
    groups: Arc<Groups>,
    disk: Arc<dyn Disk>,
    dir: PathBuf,
    writer: Mutex<Option<JoinHandle<()>>>,
}

/// A handle to the log of one group within its server's. Clones are the same; with the last one it is closed, and what is
/// queued is written.
#[derive(Clone, Debug)]
pub struct Log {
    open: Arc<Open>,
}

#[derive(Debug)]
struct Open {
    of: SharedLog,
    key: u64,
}

impl SharedLog {
    /// Opens the log in `dir`, or begins one there; the folder belongs to it alone. Cuts a torn tail, and gives how many bytes
    /// of items that had begun that was: 0 after an orderly end, and mostly after a crash. Damage is told of the groups that it
    /// may have hit ([`Self::group`]).
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

    /// Opens the log of the group `key`, or begins one where there is none. Every record after the purge point is read, checked and given to
    /// `each`, in order; on an error forget what was given.
    ///
    /// [`StoreError::Damaged`]: something of it cannot be told any more; nothing was changed. [`StoreError::Locked`]: it is
    /// open already.
    pub fn group(&self, key: u64, each: &mut dyn FnMut(Record)) -> Result<(Log, Recovered), StoreError> {
        if self.inner.groups.known().get(&key).is_some_and(|g| g.open) {
            // The last handle may have gone just now.
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
        if let (Err(StoreError::Damaged { path, offset, what }), Some(group)) =
            (&read, self.inner.groups.known().get_mut(&key))
        {
            let (path, what) = (path.clone(), what.clone());
            group.damage = Some(groups::Fault { path, offset: *offset, what });
        }
        Ok((log, Recovered { records: read?, purged }))
    }

    /// Begins the log of a group that there never was.
    pub fn begin(&self, key: u64) -> Result<Log, StoreError> {
        self.inner.groups.known().entry(key).or_default();
        Ok(self.group(key, &mut |_| ())?.0)
    }

    /// Whether there is anything of the group `key`, damaged or not.
    pub fn has(&self, key: u64) -> bool {
        self.inner.groups.known().get(&key).is_some_and(|g| g.turn > 0 || g.damage.is_some())
    }

    /// The groups of which there is anything.
    pub fn keys(&self) -> Vec<u64> {
        let known = self.inner.groups.known();
        known.iter().filter(|(_, g)| g.turn > 0 || g.damage.is_some()).map(|(key, _)| *key).collect()
    }

    /// Copies what there is of a group into the folder `to`, which [`Log::look`] reads: where it is damaged, the segments in
    /// which it may be, as they are. What was in the folder goes; the copy is durable when this returns. Nobody may write to
    /// the group meanwhile. Waits for the disk.
    pub fn keep(&self, key: u64, to: &Path) -> Result<(), StoreError> {
        let damaged = self.inner.groups.known().get(&key).is_some_and(|g| g.damage.is_some());
        let copied = match damaged {
            true => keep::damaged(self, key, to),
            false => keep::whole(self, key, to),
        };
        match copied {
            // Found out only now.
            Err(StoreError::Damaged { path, offset, what }) if !damaged => {
                if let Some(group) = self.inner.groups.known().get_mut(&key) {
                    group.damage = Some(groups::Fault { path, offset, what });
                }
                keep::damaged(self, key, to)
            }
            copied => copied,
        }
    }

    /// Takes in the log of the group `there` in `dir` ([`Log::look`]) as a new group `key`. It is
    /// durable when this returns; `dir` is not changed. Waits for the disk.
    pub fn take_in(&self, key: u64, dir: &Path, there: u64) -> Result<(), StoreError> {
        let into = self.begin(key)?;
        keep::take_in(&*self.inner.disk, dir, there, into).map_err(|e| match e {
            keep::Failed::Reading(e) => e,
            keep::Failed::Writing(e) => self.at("write to the log in")(e),
        })
    }

    /// Forgets the group `key`, damaged or not, for ever: no group may have this key again, since what a crash or damage leaves
    /// of the two could be taken for one. Durable when it returns. Waits for the disk.
    pub fn remove(&self, key: u64) -> io::Result<()> {
        self.wait(key, Request::Remove)
    }

    /// Writes what is queued, and frees the folder; whatever comes later fails.
    pub fn close(&self) {
        self.inner.close();
    }

    /// Whether nothing is written here any more, after a failure or [`Self::close`].
    pub fn has_ended(&self) -> bool {
        self.inner.shared.has_ended()
    }

    /// What this log has done so far.
    pub fn stats(&self) -> LogStats {
        self.inner.shared.stats()
    }

    fn at(&self, doing: &'static str) -> impl FnOnce(io::Error) -> StoreError {
        StoreError::io(doing, &self.inner.dir)
    }

    fn wait(&self, key: u64, what: Request) -> io::Result<()> {
        if self.inner.on_writer_thread() {
            return Err(io::Error::new(
                io::ErrorKind::Deadlock,
                "the log's own thread cannot wait for the log",
            ));
        }
        let (reply, outcome) = mpsc::sync_channel(1);
        let done: Done = Box::new(move |done| _ = reply.send(done));
        self.inner.shared.push(Job { key, what, done: Unanswered::new(done) });
        outcome.recv().unwrap_or_else(|_| Err(groups::gone()))
    }
}

impl Log {
    /// What is in the log of the group `key` in `dir`, as [`SharedLog::group`] would find and give it, without changing it:
    /// a torn tail is left out and left there.
    ///
    /// [`StoreError::Locked`] if it is open, here or elsewhere.
    pub fn look(
        disk: &dyn Disk,
        dir: &Path,
        key: u64,
        each: &mut dyn FnMut(Record),
    ) -> Result<Recovered, StoreError> {
        recover::look(disk, dir, key, each)
    }

    /// Removes a log's files from `dir`; nobody may have it open.
    pub fn clear(disk: &dyn Disk, dir: &Path) -> Result<(), StoreError> {
        keep::clear(disk, dir)
    }

    /// The log that this one is part of.
    pub fn shared(&self) -> &SharedLog {
        &self.open.of
    }

    /// Reads back the records from the first index of `range` on, as far as they follow each other before its end and
    /// have up to `most` bytes together; one is read whatever its size. Empty where the first is purged, or
    /// not written yet: what is queued is not found. What is found is as it was appended, and need not be durable yet.
    ///
    /// Waits for the disk. Segments that go wait for the reads that run.
    pub fn read(&self, range: Range<u64>, most: u64) -> Result<Vec<Record>, StoreError> {
        let inner = &self.open.of.inner;
        inner.groups.read(&*inner.disk, &inner.dir, self.open.key, range, most)
    }

    /// How many records are written and not purged, and the bytes of their headers and payloads.
    pub fn length(&self) -> (u64, u64) {
        self.open.of.inner.groups.length(self.open.key)
    }

    /// Queues `records` and returns. `done` is called when they are durable (or, without
    /// [`LogOptions::sync`], written), or when they failed; appends are done in the order in which they came.
    ///
    /// The first index must be the one after the last record, or after the purge point; an empty log that was
    /// never purged begins anywhere. `ErrorKind::InvalidInput`: it is not, or a record is longer than the
    /// bounds; nothing of this append is written, and the log goes on. Every other error poisons the log.
    ///
    /// `done` runs on the writer's thread: it must be short and must not wait for this log. The queue holds
    /// references to the caller's bytes and has no bound of its own: whoever appends bounds what it has not
    /// yet seen done.
    pub fn append(&self, records: Vec<Record>, done: Done) {
        let bytes = records.iter().map(Record::bytes).sum();
        let (what, done) = (Request::Append { records, bytes }, Unanswered::new(done));
        self.open.of.inner.shared.push(Job { key: self.open.key, what, done });
    }

    /// Drops every record after index `last` (`None`: all), once everything queued before is written. Durable
    /// when it returns. Waits for the disk; do not call it from a `done`.
    pub fn truncate_after(&self, last: Option<u64>) -> io::Result<()> {
        self.open.of.wait(self.open.key, Request::Truncate { last })
    }

    /// Forgets the records up to and including `upto`, once everything queued before is written. The purge
    /// point, with `tag` (at most 4 KiB), is durable when it returns; disk space is given back by whole
    /// segments. `upto` may be beyond the last record: then the log is empty and goes on after it. At or below
    /// an earlier purge point it does nothing. Waits for the disk; do not call it from a `done`.
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
        let done = Unanswered::new(Box::new(|_| ())); // nobody waits for it
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
        // A `done` may hold the last handle: then this is the writer's thread, which cannot wait for itself.
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
