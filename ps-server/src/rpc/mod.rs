//! The gRPC services. Wire types stop here.
//!
//! - [`rights`]: the role that each request needs; [`audit`]: the record of requests.
//! - `checkpoint`: a shard's part of a checkpoint, to the worker that writes it.
//! - `auto`: the rule that chooses a job's staleness bound, on the wire.
//! - [`control`]: how servers form a fleet.
//! - [`jobs`]: jobs and checkpoints of the control group.
//! - [`digests`]: digests of states, shared by concurrent callers.
//! - [`shards`]: the service for workers. `hosted`: the local replica that a request is about.
//! - `exchange`: a worker's stream to a shard; `lane`: this and the peers' appends over lanes.
//! - `save`: a checkpoint that a person asks for; `switch`: another mode.
//! - `inherit`: weights for a job that starts from another's.
//! - [`peers`]: Raft messages of the other servers.
//! - `reads`: weights for readers, from any replica; [`readers`]: bounds on their memory.
//! - [`rows`]: rows of tables for readers; `versions`: whole weights of one moment; [`relay`]: likewise, of a process that has
//!   read them itself.
//! - [`status`]: what this server knows.
//! - `convert`: wire to domain and back, with every check that needs no state of the leader.

pub mod audit;
mod auto;
mod checkpoint;
pub mod control;
pub mod convert;
pub mod digests;
mod exchange;
pub mod groups;
mod hosted;
mod inherit;
pub mod jobs;
mod lane;
pub mod memory;
pub mod peers;
pub mod readers;
mod reads;
pub mod relay;
pub mod rights;
pub mod rows;
mod save;
pub mod shape;
pub mod shards;
pub mod status;
mod switch;
mod versions;

pub use lane::Lanes;

use paraft_proto::{PROTOCOL, RefusalKind};

/// Refuses a client of another protocol.
fn check_protocol(client: u32) -> Result<(), RefusalKind> {
    match client == PROTOCOL {
        true => Ok(()),
        false => Err(RefusalKind::Protocol { client, server: PROTOCOL }),
    }
}
