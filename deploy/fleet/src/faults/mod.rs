//! Injected faults of links and disks. Only a fleet started with `--faults` has fault points.
//!
//! - [`Faults`]: the current faults, a small JSON file in the run's folder. `paraft chaos` or a user
//!   writes it.
//! - [`proxy`]: a proxy in front of each server, for resets, partitions and slow links.
//! - [`link`]: a simulated link with latency and bandwidth between workers and servers, for
//!   comparisons.
//! - [`process`]: finds, kills, pauses and restarts processes of this machine; it needs no fault
//!   points.

pub mod link;
pub mod process;
pub mod proxy;

use serde::{Deserialize, Serialize};
use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    path::Path,
    time::Duration,
};

/// The file's name in a run's folder.
pub const FAULTS_FILE: &str = "faults.json";
/// The poll interval of the file.
pub const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// The current faults. Servers are named by their place in the list, from 0.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Faults {
    /// Servers that are cut off from all servers and workers.
    pub isolated: BTreeSet<u32>,
    /// Pairs of servers that cannot reach each other; workers reach both.
    pub cut: BTreeSet<(u32, u32)>,
    /// Milliseconds by which all data to the server is delayed.
    pub slow_link_ms: BTreeMap<u32, u64>,
    /// Counters: when a server's counter grows, all connections to it are reset.
    pub resets: BTreeMap<u32, u64>,
    /// Servers whose addresses refuse new connections, as without a listener.
    pub refused: BTreeSet<u32>,
    /// Servers whose files cannot grow.
    pub full_disk: BTreeSet<u32>,
    /// Milliseconds added to every fsync of the server.
    pub slow_disk_ms: BTreeMap<u32, u64>,
    /// Servers whose reads fail with EIO.
    pub failing_reads: BTreeSet<u32>,
    /// Servers whose writes and fsyncs fail with EIO.
    pub failing_writes: BTreeSet<u32>,
    /// Servers whose file system is read-only.
    pub read_only: BTreeSet<u32>,
    /// Servers that have no room for a vote (ENOSPC), though every other file can be written.
    pub full_votes: BTreeSet<u32>,
    /// Seconds by which the clock of the server's host is ahead (or behind, if negative).
    pub clock_s: BTreeMap<u32, i64>,
}

/// A lasting fault of one server, by its name in `paraft chaos --faults`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Fault {
    /// The server is cut off from all servers and workers.
    Partition,
    /// Data to the server is delayed.
    SlowLink,
    /// Its files cannot grow.
    DiskFull,
    /// Its fsyncs take longer.
    SlowDisk,
    /// Its writes and fsyncs fail with EIO.
    Eio,
    /// Its file system is read-only.
    Readonly,
}

impl Fault {
    /// The fault's name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Partition => "partition",
            Self::SlowLink => "slow-link",
            Self::DiskFull => "disk-full",
            Self::SlowDisk => "slow-disk",
            Self::Eio => "eio",
            Self::Readonly => "readonly",
        }
    }
}

/// The kernel's errno of "Input/output error" and "Read-only file system".
pub const EIO: i32 = 5;
const EROFS: i32 = 30;
/// The kernel's errno of "No space left on device".
pub const ENOSPC: i32 = 28;

impl Faults {
    /// Whether the link from `from` (a server, or another process) to server `to` is blocked.
    pub fn blocks(&self, from: Option<u32>, to: u32) -> bool {
        let isolated = |s: u32| self.isolated.contains(&s);
        isolated(to)
            || from.is_some_and(|from| {
                isolated(from) || self.cut.contains(&(from, to)) || self.cut.contains(&(to, from))
            })
    }

    /// The errno of changes to the server's files.
    pub fn errno_of_changes(&self, server: u32) -> Option<i32> {
        let eio = self.failing_writes.contains(&server).then_some(EIO);
        eio.or(self.read_only.contains(&server).then_some(EROFS))
    }

    /// Sets a fault on a server; a slow link or disk adds `ms` milliseconds.
    pub fn put(&mut self, fault: Fault, server: u32, ms: u64) {
        match fault {
            Fault::Partition => _ = self.isolated.insert(server),
            Fault::SlowLink => _ = self.slow_link_ms.insert(server, ms),
            Fault::DiskFull => _ = self.full_disk.insert(server),
            Fault::SlowDisk => _ = self.slow_disk_ms.insert(server, ms),
            Fault::Eio => _ = self.failing_writes.insert(server),
            Fault::Readonly => _ = self.read_only.insert(server),
        }
    }

    /// Clears a fault; for a partition also the cut pairs that start with the server.
    pub fn heal(&mut self, fault: Fault, server: u32) {
        match fault {
            Fault::Partition => {
                self.isolated.remove(&server);
                self.cut.retain(|(a, _)| *a != server);
            }
            Fault::SlowLink => _ = self.slow_link_ms.remove(&server),
            Fault::DiskFull => _ = self.full_disk.remove(&server),
            Fault::SlowDisk => _ = self.slow_disk_ms.remove(&server),
            Fault::Eio => _ = self.failing_writes.remove(&server),
            Fault::Readonly => _ = self.read_only.remove(&server),
        }
    }

    /// The current faults, by server.
    pub fn on(&self) -> BTreeSet<(u32, Fault)> {
        let of =
            |servers: &BTreeSet<u32>, fault| servers.iter().map(move |s| (*s, fault)).collect::<Vec<_>>();
        let slow = |ms: &BTreeMap<u32, u64>, fault| ms.keys().map(move |s| (*s, fault)).collect();
        let cut: BTreeSet<u32> =
            self.isolated.iter().copied().chain(self.cut.iter().map(|(a, _)| *a)).collect();
        [
            of(&cut, Fault::Partition),
            slow(&self.slow_link_ms, Fault::SlowLink),
            of(&self.full_disk, Fault::DiskFull),
            slow(&self.slow_disk_ms, Fault::SlowDisk),
            of(&self.failing_writes, Fault::Eio),
            of(&self.read_only, Fault::Readonly),
        ]
        .into_iter()
        .flatten()
        .collect()
    }

    /// Reads the file; a missing file means no faults.
    pub fn read(path: &Path) -> io::Result<Self> {
        match std::fs::read(path) {
            Ok(bytes) => serde_json::from_slice(&bytes).map_err(io::Error::from),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(Self::default()),
            Err(e) => Err(e),
        }
    }

    /// Replaces the file atomically: a concurrent reader sees the old or the new one.
    pub fn write(&self, path: &Path) -> io::Result<()> {
        let beside = path.with_extension("json.new");
        std::fs::write(&beside, serde_json::to_vec(self)?)?;
        std::fs::rename(&beside, path)
    }
}

#[cfg(test)]
mod tests;
