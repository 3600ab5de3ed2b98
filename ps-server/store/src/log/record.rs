//! What a log takes and tells: records and their bounds, its options, what was recovered, counts.

use bytes::Bytes;
use paraft_common::Payload;
use std::io;

/// Maximum bytes of a record's header.
pub const MAX_HEADER_BYTES: usize = 16 << 20;
/// Maximum bytes of a record's payload.
pub const MAX_PAYLOAD_BYTES: usize = 16 << 20;

/// Maximum bytes of a purge point's tag.
pub(super) const MAX_TAG_BYTES: usize = 4 << 10;
/// Maximum number of groups in a log.
pub(super) const MAX_GROUPS: usize = 4096;

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
    /// Bytes of header and payload.
    pub(super) fn bytes(&self) -> u64 {
        (self.header.len() + self.payload.len()) as u64
    }
}

/// Options of a log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogOptions {
    /// Approximate maximum size of a segment; a single record may be longer. The first has 1 MiB, if that is less,
    /// and each later one has the log's size at that time. This is also the size reserved at once, and the
    /// granularity of [`Log::purge`](super::Log::purge): a log takes up to twice the disk space of its records plus five segments, and
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
    /// The purge point and the tag that [`Log::purge`](super::Log::purge) got with it.
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
