//! What an acknowledged push survives.

use serde::{Deserialize, Serialize};
use std::{fmt, str::FromStr};

/// When a push is acknowledged, and so what a crash can cost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Durability {
    /// Acknowledged when a majority of the replicas has it on disk (fsynced). Nothing acknowledged is lost, not
    /// even when every server loses power at once; what is lost with a disk is lost with its minority.
    QuorumDisk,
    /// Acknowledged when a majority of the replicas has it in memory. Nothing acknowledged is lost while fewer
    /// than half of a shard's servers are down at the same time; when a majority is, the shard's state since the
    /// last checkpoint is gone (and is reported, never silently replaced).
    #[default]
    QuorumMemory,
    /// Acknowledged when the leader has applied it. The loss of a leader may cost the pushes of the last
    /// window, bounded in time and number; the failover counts them.
    Leader,
}

impl Durability {
    /// Whether logs are kept on disk.
    pub fn on_disk(self) -> bool {
        self == Durability::QuorumDisk
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
