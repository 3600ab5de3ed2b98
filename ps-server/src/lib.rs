//! A Paraft server: replicas of shards, and the gRPC services around them.
//!
//! - [`shard`]: one shard's replicated state and its leader's work.
//! - [`raft`]: replication; openraft stops there.
//! - [`compute`]: arithmetic off the runtime's threads.
//! - [`connections`]: how many connections there may be, and whose go first.
//! - [`control`]: which servers there are and where each shard is; agreed on by a Raft group of its own.
//! - [`replicas`]: the replicas of shards on this server.
//! - [`replicated`]: what the groups of a server replicate.
//! - [`files`]: every file that a server writes.
//! - [`header`]: small things to bytes and back, for disk and wire.
//! - [`admission`]: may a job begin? Asked of every server.
//! - [`room`]: memory that is set aside for replicas before it is allocated.
//! - [`rpc`]: the services; wire types stop there.
//! - [`settings`]: what a server was founded with, against what it is started with.
//! - [`server`]: parts put together, started and stopped.
//! - [`metrics`]: what Prometheus reads.

pub mod admission;
pub mod compute;
pub mod connections;
pub mod control;
pub mod files;
pub mod header;
pub mod metrics;
pub mod raft;
pub mod replay;
pub mod replicas;
pub mod replicated;
pub mod room;
pub mod rpc;
pub mod server;
pub mod settings;
pub mod shard;

pub use control::{Shape, Timeouts};
pub use server::{Server, ServerError, ServerOptions};
