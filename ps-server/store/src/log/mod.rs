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
mod record;
mod recover;
mod scan;
mod segment;
mod segments;
mod shared_log;
mod writer;

pub use record::{LogOptions, LogStats, MAX_HEADER_BYTES, MAX_PAYLOAD_BYTES, Record, Recovered};
pub use shared_log::{Log, SharedLog};
