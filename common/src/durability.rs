//! What an acknowledgement of a push promises.
//!
//! The three levels differ in what a crash can cost. Not every level goes with every mode, and [`check`] says why: the
//! job file's validation and the servers' use the same sentences.

use crate::consistency::Mode;
use serde::{Deserialize, Serialize};
use std::{fmt, str::FromStr, time::Duration};

/// What must have happened before a push is acknowledged.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Durability {
    /// The log entry that holds the push is fsynced on a majority of the shard's replicas. A crash costs nothing
    /// that was acknowledged, even where every server loses its power, as long as a majority of the disks
    /// survives.
    QuorumDisk,
    /// The log entry that holds the push is in the memory of a majority. A crash of any minority costs nothing
    /// that was acknowledged; the loss of a majority at once costs the shard.
    #[default]
    QuorumMemory,
    /// The leader has applied the push. Each change of leadership costs at most [`LeaderWindow::pushes`]
    /// acknowledged pushes (the leader stops acknowledging there, and [`LeaderWindow::ms`] after the oldest push
    /// that no majority holds yet); how many were lost is counted and reported.
    Leader,
}

impl Durability {
    /// Whether logs are kept on disk.
    pub fn on_disk(self) -> bool {
        self == Durability::QuorumDisk
    }

    /// Whether the leader acknowledges alone: pushes change its working copies, and replicas get the weights and state of
    /// changed buckets, not the updates.
    pub fn is_leader(self) -> bool {
        self == Durability::Leader
    }

    /// The word in job files and flags.
    pub fn name(self) -> &'static str {
        match self {
            Durability::QuorumDisk => "quorum-disk",
            Durability::QuorumMemory => "quorum-memory",
            Durability::Leader => "leader",
        }
    }
}

impl fmt::Display for Durability {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A text that names no level.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is no durability level; write `quorum-disk`, `quorum-memory` or `leader`")]
pub struct ParseDurabilityError(String);

impl FromStr for Durability {
    type Err = ParseDurabilityError;

    fn from_str(s: &str) -> Result<Self, Self::Err> {
        [Durability::QuorumDisk, Durability::QuorumMemory, Durability::Leader]
            .into_iter()
            .find(|d| d.name() == s)
            .ok_or_else(|| ParseDurabilityError(s.to_string()))
    }
}

/// How much a leader may have acknowledged that no majority holds yet; read at the level `leader`. No key of a job sets it: the
/// default is what one leader change may cost, and small beside what a worker notices. Tests set other windows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LeaderWindow {
    /// Further pushes wait when the oldest such push is this old; 2 to 60000 ms.
    pub ms: u64,
    /// Further pushes wait when there are this many; 1 to 1000000. A push is one bucket of one step of one
    /// worker.
    pub pushes: u64,
}

impl Default for LeaderWindow {
    fn default() -> Self {
        Self { ms: 250, pushes: 256 }
    }
}

impl LeaderWindow {
    /// The bound in time.
    pub fn age(self) -> Duration {
        Duration::from_millis(self.ms)
    }
}

/// Which of a job's keys contradict each other or are out of range.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message} ({remedy})")]
pub struct DurabilityError {
    /// What of the job is to blame.
    pub key: &'static str,
    /// What is wrong.
    pub message: String,
    /// What to do.
    pub remedy: &'static str,
}

/// Whether these go together.
pub fn check(mode: Mode, durability: Durability, window: LeaderWindow) -> Result<(), DurabilityError> {
    let bad = |key, message: String, remedy| Err(DurabilityError { key, message, remedy });
    if mode.averages() && durability.is_leader() {
        return bad(
            "durability",
            format!("{mode} promises the weights of one process; a lost acknowledged push would break it"),
            "use durability quorum-memory or quorum-disk, or mode ssp:S or asp",
        );
    }
    if !(2..=60_000).contains(&window.ms) {
        return bad("leader_window.ms", format!("a window of {} ms", window.ms), "use 2 to 60000");
    }
    if !(1..=1_000_000).contains(&window.pushes) {
        let message = format!("a window of {} pushes", window.pushes);
        return bad("leader_window.pushes", message, "use 1 to 1000000");
    }
    Ok(())
}

#[cfg(test)]
#[path = "durability_tests.rs"]
mod tests;
