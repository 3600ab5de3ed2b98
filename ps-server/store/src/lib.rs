//! What a server keeps on disk: the log of a replica, small files that are replaced as a whole, and snapshots.
//!
//! It knows bytes, indices and files; not Raft, not shards, not what an entry means. It has no async: the log has
//! a writer thread of its own, the rest runs on the caller's thread and waits for the disk.
//!
//! It promises, of every file it wrote:
//! - What was reported durable is there after any crash, of the process or of the machine, as long as the disk
//!   keeps what it synced.
//! - What a crash cut off is told from damage, and cut; damage is refused with the file and the offset named.
//!   `log` says exactly where the line runs.
//! - Nothing read from a file panics, and no length from a file is believed beyond the stated bounds.
//!
//! Every file has a magic, a format version and checksums (CRC-32, against accidents, not against forgers).
//! Numbers are little-endian.

mod disk;
mod error;
pub mod faulty;
mod log;
mod small;
mod snapshot;

pub use disk::{Access, Disk, DiskFile, DiskLock, RealDisk};
pub use error::{StoreError, is_damage, said};
pub use log::{Log, LogOptions, LogStats, MAX_HEADER_BYTES, MAX_PAYLOAD_BYTES, Record, Recovered, SharedLog};
pub use small::{MAX_SMALL_BYTES, read_small, write_small};
pub use snapshot::{MAX_CHUNK_BYTES, SnapshotReader, SnapshotWriter};
