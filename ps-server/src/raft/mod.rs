//! Raft for shards: openraft stops here.
//!
//! The rest of the server sees a [`Group`]: propose in order, learn the outcome, know who leads, wait until
//! everything before this term is applied. No other module names an openraft type, and nothing outside may
//! assume that there is a local log: a proposal's outcome is all anyone gets.
//!
//! - `types`: the type configuration.
//! - `log`: the log, in memory in this version.
//! - `machine`: hands committed entries to [`crate::shard::Shard::apply`]; snapshots.
//! - `wire`: openraft's messages to bytes and back, payloads beside the header.
//! - `network`: sends them to peers.
//! - `group`: one replica of one shard.

mod group;
mod log;
mod machine;
mod network;
mod types;
mod wire;

pub use group::{Group, GroupOptions, Leadership, ProposeError, Role};
pub use network::Peers;
