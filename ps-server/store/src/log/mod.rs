//! The log of one replica, on disk.
//!
//! A folder of segments, append-only files that are named by the index of their first record, and the purge
//! point. One thread writes; everything that is queued while it waits for the disk shares its next sync (group
//! commit). What is written can be read back while the log runs ([`Log::read`]): where each record lies is kept in
//! memory (24 bytes a record), the records are not.
//!
//! ```text
//! 0000000000000000.log   sealed: full and durable as a whole
//! 0000000000000812.log   active: the last one
//! 0000000000000000.spare purged, kept to be written over (at most 4)
//! purged                 the purge point and its tag
//! cutting                only while the end of a segment is cut off: which
//! LOCK                   held while a log is open here
//! ```
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
//! A crash may leave any part of what was not yet synced, in any order: of three records written together, the
//! second may be missing. So a record that fails its checksum is not by itself damage, nor is a good one behind
//! it proof of it. Every record says how far the log was durable when it was written, and that decides. A bad
//! record is
//!
//! - **damage**, if it is in a sealed segment, or if anything behind it in the last one says that it was durable
//!   before, or if the file is shorter than what was reserved for it: [`Log::open`] refuses, names file and offset,
//!   and changes nothing;
//! - **a torn tail** otherwise: it and what is behind it are cut. Nothing that was acknowledged is in there,
//!   unless the disk lost it.
//!
//! The last words are the limit. Records of the last batch, acknowledged but with nothing written after them,
//! look the same when a crash tore them and when the disk damaged them later; they are cut, and
//! [`Recovered::torn_bytes`] is not 0. A log that was closed in order ends with a mark, so after that every bad
//! record is known to be damage. What also cannot be seen: zeros over the last segment from some record to its end;
//! a last segment that was removed, or put back from an older copy; on a file system that reserves nothing, a last
//! segment that was cut short.

mod format;
mod places;
mod recover;
mod segment;
mod segments;
mod writer;

use crate::{Disk, StoreError};
use bytes::Bytes;
use paraft_common::Payload;
use parking_lot::Mutex;
use places::Places;
use std::{
    io,
    ops::Range,
    path::{Path, PathBuf},
    sync::{Arc, mpsc},
    thread::JoinHandle,
};
use writer::{Job, Owed, Shared};

/// A record's header has at most so many bytes.
pub const MAX_HEADER_BYTES: usize = 16 << 20;
/// A record's payload has at most so many bytes.
pub const MAX_PAYLOAD_BYTES: usize = 16 << 20;

/// A purge point's tag has at most so many bytes.
const MAX_TAG_BYTES: usize = 64 << 10;

/// One record of a log. Indices are consecutive.
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
    /// grain of [`Log::purge`]: a log takes up to twice the disk of its records, and up to four segments more for
    /// spares. Default 64 MiB; at least 4 KiB.
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

/// What was in the folder.
#[derive(Clone, Debug, Default)]
pub struct Recovered {
    /// How many records there are after the purge point. They are durable.
    pub records: u64,
    /// The purge point and what [`Log::purge`] was given with it.
    pub purged: Option<(u64, Bytes)>,
    /// Bytes of records that were begun and not whole, or came after such, and were cut. 0 after an orderly
    /// end, and mostly after a crash.
    pub torn_bytes: u64,
}

/// What a log has done since it was opened. Numbers only grow, but for `queued_bytes`.
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
    /// Bytes of headers and payloads that wait to be written.
    pub queued_bytes: u64,
}

/// Called once with the outcome of an append.
pub type Done = Box<dyn FnOnce(io::Result<()>) + Send>;

/// A handle to one replica's log. Clones are the same log; with the last one it is closed: what is queued is
/// written, the thread ends, the folder is free.
///
/// After the first failure of the disk the log is poisoned: every later call fails with what happened first,
/// nothing is written any more. Open it anew when the disk is mended; what was acknowledged is there.
#[derive(Clone, Debug)]
pub struct Log {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    shared: Arc<Shared>,
    places: Arc<Places>,
    disk: Arc<dyn Disk>,
    dir: PathBuf,
    writer: Mutex<Option<JoinHandle<()>>>,
}

impl Log {
    /// Opens the log in `dir`, or begins one there; the folder belongs to it alone. Cuts a torn tail, refuses
    /// damage (the module's text says what is which). Every record after the purge point is read, checked and given to
    /// `each`, in order, one in memory at a time; on an error forget what was given.
    ///
    /// [`StoreError::Locked`] if it is open elsewhere.
    pub fn open(
        disk: Arc<dyn Disk>,
        dir: &Path,
        options: LogOptions,
        each: &mut dyn FnMut(Record),
    ) -> Result<(Log, Recovered), StoreError> {
        let (segments, lock, recovered) = recover::open(disk.clone(), dir, options, each)?;
        let (shared, places) = (Arc::new(Shared::default()), segments.places.clone());
        let writer = writer::spawn(shared.clone(), segments, lock)
            .map_err(StoreError::io("start the writer of the log in", dir))?;
        let writer = Mutex::new(Some(writer));
        let inner = Inner { shared, places, disk, dir: dir.to_path_buf(), writer };
        Ok((Log { inner: Arc::new(inner) }, recovered))
    }

    /// What is in the log in `dir`, as [`Log::open`] would find and give it, without changing it: a torn tail is left
    /// out and left there.
    ///
    /// [`StoreError::Locked`] if it is open, here or elsewhere.
    pub fn look(
        disk: Arc<dyn Disk>,
        dir: &Path,
        each: &mut dyn FnMut(Record),
    ) -> Result<Recovered, StoreError> {
        recover::look(disk, dir, each)
    }

    /// Reads back the records from the first index of `range` on, as far as they follow each other before its end and
    /// have up to `most` bytes together; one is read whatever its size. Empty where the first is purged, or
    /// not written yet: what is queued is not found. What is found is as it was appended, and need not be durable yet.
    ///
    /// Waits for the disk. A purge or a truncation waits for the reads that run.
    pub fn read(&self, range: Range<u64>, most: u64) -> Result<Vec<Record>, StoreError> {
        self.inner.places.read(&*self.inner.disk, &self.inner.dir, range, most)
    }

    /// How many records are written and not purged, and the bytes of their headers and payloads.
    pub fn length(&self) -> (u64, u64) {
        self.inner.places.length()
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
        self.inner.shared.push(Job::Append { records, bytes, done: Owed::new(done) });
    }

    /// Drops every record after index `last` (`None`: all), once everything queued before is written. Durable
    /// when it returns. Waits for the disk; do not call it from a `done`.
    pub fn truncate_after(&self, last: Option<u64>) -> io::Result<()> {
        self.wait(|reply| Job::Truncate { last, reply })
    }

    /// Forgets the records up to and including `upto`, once everything queued before is written. The purge
    /// point, with `tag` (at most 64 KiB), is durable when it returns; disk space is given back by whole
    /// segments. `upto` may be beyond the last record: then the log is empty and goes on after it. At or below
    /// an earlier purge point it does nothing. Waits for the disk; do not call it from a `done`.
    pub fn purge(&self, upto: u64, tag: Bytes) -> io::Result<()> {
        if tag.len() > MAX_TAG_BYTES || upto == u64::MAX {
            let what = format!("a purge up to {upto} with a tag of {} bytes", tag.len());
            return Err(io::Error::new(io::ErrorKind::InvalidInput, what));
        }
        self.wait(|reply| Job::Purge { upto, tag, reply })
    }

    /// What this log has done so far.
    pub fn stats(&self) -> LogStats {
        self.inner.shared.stats()
    }

    fn wait(&self, job: impl FnOnce(mpsc::SyncSender<io::Result<()>>) -> Job) -> io::Result<()> {
        if self.inner.on_writer_thread() {
            return Err(io::Error::new(
                io::ErrorKind::Deadlock,
                "the log's own thread cannot wait for the log",
            ));
        }
        let (reply, outcome) = mpsc::sync_channel(1);
        self.inner.shared.push(job(reply));
        outcome.recv().unwrap_or_else(|_| Err(writer::gone()))
    }
}

impl Inner {
    fn on_writer_thread(&self) -> bool {
        let writer = self.writer.lock();
        writer.as_ref().is_some_and(|w| w.thread().id() == std::thread::current().id())
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
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
