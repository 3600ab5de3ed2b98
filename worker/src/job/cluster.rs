//! `[cluster]`: servers, replicas, what an acknowledgement means, how long is waited.

use paraft_common::{Durability, LeaderWindow};
use serde::{Deserialize, Serialize};

/// `[cluster]`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ClusterConfig {
    /// Server processes; read only where `addresses` is empty (the launcher picks ports).
    pub servers: u32,
    /// `host:port` of servers that are started by hand.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub addresses: Vec<String>,
    /// Raft groups that share the model. Default: one for each server.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub shards: Option<u32>,
    /// Replicas of each shard: 1 (nothing survives a lost server) or 3.
    pub replicas: u32,
    /// A silent server's replicas are moved to another server after this long.
    pub replace_ms: u64,
    /// The launcher starts a process that was killed again, at most this often each.
    pub max_restarts: u32,
    /// After this long.
    pub restart_ms: u64,
    /// The replicas of each shard are compared this often; 0: never.
    pub parity_ms: u64,
    /// Bytes of a bucket, 4 to 1048576. Default: such that every shard gets a part, at most 1 MiB.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bucket_bytes: Option<usize>,
    /// A follower that hears nothing for three to four times this long stands for election.
    pub election_ms: u64,
    /// The lease of a worker: without a sign of life for so long it is taken out.
    pub grace_ms: u64,
    /// Workers and servers give up after this long without a leader.
    pub patience_ms: u64,
    /// What an acknowledgement of a push promises: `quorum-disk`, `quorum-memory` or `leader`.
    pub durability: Durability,
    /// At the level `leader`, and only there: pushes wait when the oldest acknowledged one that no majority holds is this
    /// old. Default: [`LeaderWindow::default`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub leader_window_ms: Option<u64>,
    /// At the level `leader`, and only there: pushes wait when so many acknowledged ones are held by no majority.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub leader_window_pushes: Option<u64>,
    /// `auto` (Unix sockets on the same host, else TCP) or `tcp`.
    pub transport: TransportConfig,
    /// The worker's command instead of `paraft worker`, for a binary with a model of its own.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub worker_command: Vec<String>,
}

/// How workers reach servers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TransportConfig {
    /// Unix sockets on the same host, else TCP.
    #[default]
    Auto,
    /// TCP.
    Tcp,
}

impl Default for ClusterConfig {
    fn default() -> Self {
        Self {
            servers: 3,
            addresses: Vec::new(),
            shards: None,
            replicas: 3,
            replace_ms: 10_000,
            max_restarts: 0,
            restart_ms: 1_000,
            parity_ms: 5_000,
            bucket_bytes: None,
            election_ms: 150,
            grace_ms: 1000,
            patience_ms: 30_000,
            durability: Durability::default(),
            leader_window_ms: None,
            leader_window_pushes: None,
            transport: TransportConfig::Auto,
            worker_command: Vec::new(),
        }
    }
}

impl ClusterConfig {
    /// The bound on what a leader may have acknowledged alone.
    pub fn leader_window(&self) -> LeaderWindow {
        let LeaderWindow { ms, pushes } = LeaderWindow::default();
        LeaderWindow {
            ms: self.leader_window_ms.unwrap_or(ms),
            pushes: self.leader_window_pushes.unwrap_or(pushes),
        }
    }
}
