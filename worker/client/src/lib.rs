//! The worker's side of the protocol: sessions, retries, routing. No GPU, no models.
//!
//! ```text
//!  training thread                     I/O thread (one tokio runtime)
//!  Client::push ──────commands──────▶ link to shard 0 ⇄ stream to its leader
//!  Client::pull ◀─────events───────── link to shard 1 ⇄ ...
//! ```
//!
//! - [`client`]: what a training loop calls; blocking.
//! - `link`: one shard: finds the leader, keeps what is not acknowledged, pushes it again after a break.
//! - `search`: which server to ask next for the leader.
//! - [`chunks`]: which part of the data to train, where the servers give it out.
//! - [`acks`]: what a worker hears of its pushes.
//! - [`connect`]: channels, over TCP or the server's Unix socket.
//! - [`section`]: the shards' images of one step, for a checkpoint.
//! - [`groups`]: which ranks are in a group that acts as one worker.
//! - [`checkpoints`]: which checkpoints there are, for the control group.
//! - `control`: calls to the leader of the control group.
//! - `pool`: buffers for payloads.
//! - `window`: how much may be pushed without an ack.
//! - `initial`: what the servers get when they have no weights yet.
//! - [`error`]: few kinds, which say what to do.

pub mod acks;
mod backlog;
pub mod checkpoints;
pub mod chunks;
pub mod client;
pub mod connect;
mod control;
mod encoders;
pub mod error;
pub mod groups;
mod initial;
mod link;
mod norms;
mod pool;
mod search;
pub mod section;
mod window;

pub use acks::Acked;
pub use chunks::Next;
pub use client::{Client, ClientOptions, HANDOVER, Pulled, Reported};
pub use connect::{Transport, abandon, describe, drain, forget, status, switch_mode};
pub use encoders::Encoders;
pub use error::ClientError;
pub use initial::Initial;
pub use norms::Norms;
