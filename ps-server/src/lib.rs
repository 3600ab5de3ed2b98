//! A Paraft server: replicas of shards, and the gRPC services around them.
//!
//! - [`shard`]: one shard's replicated state and its leader's work.
//! - [`raft`]: replication; openraft stops there.
//! - [`rpc`]: the services; wire types stop there.
//! - [`server`]: parts put together, started and stopped.
//! - [`metrics`]: what Prometheus reads.

pub mod metrics;
pub mod raft;
pub mod rpc;
pub mod server;
pub mod shard;

pub use server::{Server, ServerError, ServerOptions};
