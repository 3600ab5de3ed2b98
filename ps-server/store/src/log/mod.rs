//! The log of a server on disk, which all its groups share.
//!
//! A folder of segments: append-only files that are named by the number of their first item. Each item belongs to
//! one group: it is a record with its index, or gives up records. One thread writes; everything that all groups
//! queue while it waits for the disk shares its next sync (group commit). Written records can be read back while
//! the log runs ([`Log::read`]): memory holds the place of each record, not the records.
//!
//! ```text
//! 0000000000000000.log   sealed: full and durable as a whole
//! 0000000000000812.log   active: the last one
//! 0000000000000000.spare purged, kept to be written over (at most 4)
//! cutting                only while the end of a segment is cut off: which
//! LOCK                   held while a log is open here
//! ```
//!
//! Each segment starts with a table: the state of every group at that time. So the oldest segment can be removed as
//! soon as no group needs a record in it. If a seldom purged group keeps old segments, and they take more than all
//! needed records, the needed records of the oldest are copied to the log's end: over time no more than was given
//! up.
//!
//! # Spares
//!
//! A write over allocated blocks is much cheaper to sync than one that grows a file, which must record the new size
//! and blocks as well. Measured on the development machine, 1 MiB with fdatasync: 0.5 ms over old blocks, 0.7 ms
//! over reserved ones, 3 ms at the end of a growing file. So purged segments are reused, and new ones are reserved.
//!
//! # A torn tail and damage
//!
//! A crash may leave any part of the unsynced data, in any order: of three items written together, the second may
//! be missing. So an item with a wrong checksum is not necessarily damage, and a valid item after it does not prove
//! damage. Every item records up to where the log was durable when it was written, and that decides. An invalid
//! item is
//!
//! - **damage**, if it is in a sealed segment, or if an item after it in the last segment records that it was
//!   durable; so is a file that is shorter than its reserved size;
//! - **a torn tail** otherwise: it and everything after it are cut. That contains nothing acknowledged, unless the
//!   disk lost it.
//!
//! The exception is the limit of this method. Items of the last batch, acknowledged but with nothing written after
//! them, look the same whether a crash tore them or the disk damaged them later. They are cut, and
//! [`SharedLog::open`] returns the number of bytes. A properly closed log ends with a mark, so after that every
//! invalid item is known to be damage. Three more cases cannot be detected: zeros over the last segment from some
//! item to its end; a last segment that was removed, or replaced by an older copy; on a file system that reserves
//! nothing, a last segment that was shortened.
//!
//! # The groups that damage affects
//!
//! [`SharedLog::open`] opens a damaged log. [`SharedLog::group`] refuses the groups that the damage may affect,
//! names file and offset, and serves the others. If only an item's body is bad, that affects its group. If the
//! groups of the items in a place are unknown (a head, a segment's start, a missing segment), it affects every
//! group, with two exceptions: groups whose turns in a later item or table show that none of their items is
//! missing, and groups that have purged everything before. A group of which nothing is left may have started there:
//! it is refused until it is started again. Nothing of a damaged log is changed, and no segment is removed while a
//! group is damaged: [`SharedLog::keep`] copies the remains of the group elsewhere, and [`SharedLog::remove`] lets
//! the log continue without it.

mod files;
mod format;
mod group_copy;
mod groups;
#[cfg(test)]
mod properties;
mod reclaim;
mod recover;
mod scan;
mod segment;
mod segments;
mod shared_log;
mod writer;

pub use shared_log::SharedLog;

use crate::{Disk, StoreError};
use bytes::Bytes;
use paraft_common::Payload;
use std::{io, ops::Range, path::Path, sync::Arc};
use writer::{Job, PendingCallback, Request};

/// Maximum bytes of a record's header.
pub const MAX_HEADER_BYTES: usize = 16 << 20;
/// Maximum bytes of a record's payload.
pub const MAX_PAYLOAD_BYTES: usize = 16 << 20;

/// Maximum bytes of a purge point's tag.
const MAX_TAG_BYTES: usize = 4 << 10;
/// Maximum number of groups in a log.
const MAX_GROUPS: usize = 4096;

/// One record of a group. Indices are consecutive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// Its index in the group's log; below `u64::MAX`.
    pub index: u64,
    /// The caller's encoded header; at most [`MAX_HEADER_BYTES`].
    pub header: Bytes,
    /// Bulk data, written unchanged; at most [`MAX_PAYLOAD_BYTES`], may be empty.
    pub payload: Payload,
}

impl Record {
    fn bytes(&self) -> u64 {
        (self.header.len() + self.payload.len()) as u64
    }
}

/// Options of a log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogOptions {
    /// Approximate maximum size of a segment; a single record may be longer. The first has 1 MiB, if that is less,
    /// and each later one has the log's size at that time. This is also the size reserved at once, and the
    /// granularity of [`Log::purge`]: a log takes up to twice the disk space of its records plus five segments, and
    /// up to four segments more for spares. Default 64 MiB; at least 4 KiB.
    pub segment_bytes: u64,
    /// Sync records before they are acknowledged. Without it a crash of the machine (not of the process) loses
    /// acknowledged records. Default true.
    pub sync: bool,
}

impl Default for LogOptions {
    fn default() -> Self {
        LogOptions { segment_bytes: 64 << 20, sync: true }
    }
}

/// The recovered content of a group's log.
#[derive(Clone, Debug, Default)]
pub struct Recovered {
    /// Number of records after the purge point. They are durable.
    pub records: u64,
    /// The purge point and the tag that [`Log::purge`] got with it.
    pub purged: Option<(u64, Bytes)>,
}

/// Counts of a log since it was opened, for all its groups. They only grow, except `queued_bytes`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LogStats {
    /// Records written.
    pub records: u64,
    /// Bytes of their headers and payloads.
    pub bytes: u64,
    /// Written batches; with [`LogOptions::sync`], each is one sync.
    pub batches: u64,
    /// Started segments.
    pub segments: u64,
    /// Segments that reused a spare.
    pub recycled: u64,
    /// Records that were copied so that their old segment could be removed.
    pub moved: u64,
    /// Bytes of headers and payloads that wait to be written.
    pub queued_bytes: u64,
}

/// Called once with the outcome of an append.
pub type Done = Box<dyn FnOnce(io::Result<()>) + Send>;

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

    /// Removes a log's files from `dir`; no process may have it open.
    pub fn clear(disk: &dyn Disk, dir: &Path) -> Result<(), StoreError> {
        group_copy::clear(disk, dir)
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
