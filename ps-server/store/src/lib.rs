//! A server's data on disk: the log of its replicas, small files that are replaced as a whole or
//! overwritten, and snapshots.
//!
//! It handles bytes, indices and files, and knows nothing of Raft, shards or the meaning of an entry. It has no
//! async code: the log has a writer thread, the rest runs on the caller's thread and waits for the disk.
//!
//! Guarantees for every file that it wrote:
//! - Data that was reported durable survives any crash, of the process or of the machine, if the disk keeps what it
//!   synced.
//! - It distinguishes data that a crash cut off, which it cuts, from damage, which it refuses with file and offset.
//!   `log` defines the exact distinction.
//! - No content of a file causes a panic, and no length in a file is trusted beyond the stated bounds.
//!
//! Every file has a magic, a format version and checksums (CRC-32, against accidents, not against forgers).
//! Numbers are little-endian.

mod disk;
mod error;
pub mod faulty;
pub mod files;
mod log;
mod pair;
mod small;
mod snapshot;

pub use disk::{Access, Disk, DiskFile, DiskLock, RealDisk};
pub use error::{StoreError, is_damage, said};
pub use log::{Log, LogOptions, LogStats, MAX_HEADER_BYTES, MAX_PAYLOAD_BYTES, Record, Recovered, SharedLog};
pub use pair::{MAX_PAIR_BYTES, PairContents, PairFile, read_pair};
pub use small::{MAX_SMALL_BYTES, read_small, write_small};
pub use snapshot::{MAX_CHUNK_BYTES, SnapshotReader, SnapshotWriter};
