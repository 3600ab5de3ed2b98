//! How a server is started.

use super::ServerError;
use crate::control::{Shape, Timeouts};
use paraft_common::{JobShard, ServerId};
use paraft_store::Disk;
use paraft_tls::Access;
use std::{path::PathBuf, sync::Arc, time::Duration};

/// How a server finds its fleet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place {
    /// A founding server of the fleet: its index in `servers`.
    Listed(ServerId),
    /// A new server: it asks these addresses for its id.
    Joins(Vec<String>),
}

/// How to start a server.
#[derive(Clone, Debug)]
pub struct ServerOptions {
    /// How it finds its fleet. A server that has been in a fleet before (its data folder says so) returns to
    /// it, with its old id.
    pub place: Place,
    /// Its address, for the other servers and the workers.
    pub address: String,
    /// host:port of the page that this process serves; empty: none.
    pub page: String,
    /// The addresses of the servers that form the fleet, the same list in the same order on each.
    pub servers: Vec<String>,
    /// Shards, replicas, durability: fixed when the fleet is founded; a joining server takes the fleet's.
    pub shape: Shape,
    /// The data folder: the server's identity, the control group's log, and (for `quorum-disk`) the shards'
    /// logs.
    pub data: PathBuf,
    /// The disk under `data`.
    pub disk: Arc<dyn Disk>,
    /// A follower without a heartbeat for three to four times this long starts an election.
    pub election: Duration,
    /// When to replace replicas, and to move leaders back.
    pub timeouts: Timeouts,
    /// Interval at which the replicas of each shard are compared; `None`: never.
    pub check_every: Option<Duration>,
    /// Also listens on this Unix socket, for this user's processes on the same host.
    pub socket: Option<PathBuf>,
    /// The most memory that a job may need on this server, in bytes; `None`: the free memory.
    pub job_memory: Option<u64>,
    /// Which callers may connect over TCP, and how to reach the other servers.
    pub access: Access,
}

impl ServerOptions {
    /// Checks everything that needs no other server.
    pub fn validate(&self) -> Result<(), ServerError> {
        let bad = |m: String| Err(ServerError::Options(m));
        let Place::Listed(id) = &self.place else { return Ok(()) };
        let n = self.servers.len() as u64;
        if id.0 >= n {
            return bad(format!(
                "--id {} names no server: --servers lists {n} (ids are 0 to {})",
                id.0,
                n.saturating_sub(1)
            ));
        }
        let Shape { shards, replicas, .. } = self.shape;
        if shards > JobShard::SHARDS {
            return bad(format!("--shards {shards} is more than {}", JobShard::SHARDS));
        }
        if replicas == 0 || u64::from(replicas) > n {
            return bad(format!("--replicas {replicas} needs as many servers; --servers lists {n}"));
        }
        if replicas.is_multiple_of(2) {
            return bad(format!(
                "--replicas {replicas} is even: it survives no more failures than {} and costs more; use an odd number",
                replicas - 1
            ));
        }
        Ok(())
    }
}
