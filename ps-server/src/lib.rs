//! A Paraft server: replicas of shards, and the gRPC services around them.
//!
//! - [`shard`]: one shard's replicated state and its leader's work.
//! - [`raft`]: replication; openraft stops there.
//! - [`compute`]: arithmetic off the runtime's threads.
//! - [`connections`]: bound and priority of connections.
//! - [`control`]: the servers and the place of each shard; agreed on by a Raft group of its own.
//! - [`replicas`]: the replicas of shards on this server.
//! - [`replicated`]: the state machines of a server's groups.
//! - [`files`]: every file that a server writes.
//! - [`header`]: small values to bytes and back, for disk and wire.
//! - [`admission`]: may a job begin? Asked of every server.
//! - [`room`]: memory that is reserved for replicas before it is allocated.
//! - [`rpc`]: the services; wire types stop there.
//! - [`settings`]: a server's settings at its founding, against its current ones.
//! - [`server`]: parts put together, started and stopped.
//! - [`metrics`]: what Prometheus reads.

pub mod admission;
pub mod connections;
pub mod control;
pub mod metrics;
pub mod replay;
pub mod replicas;
pub mod replicated;
pub mod room;
pub mod rpc;
pub mod server;
pub mod settings;
pub mod shard;

pub use paraft_changes::header;
pub use paraft_host::compute;
pub use paraft_raft as raft;
pub use paraft_store::files;

pub use control::{Shape, Timeouts};
pub use server::{Server, ServerError, ServerOptions};
