//! The worker's side of the protocol: sessions, retries, routing. No GPU, no models.
//!
//! ```text
//!  training thread                         I/O thread (one tokio runtime)
//!  Client::push ──▶ ┌─────────────────────┐ ──▶ stream to the leader of shard 0
//!  Client::pull ◀── │ paraft_session, io  │ ◀── stream to the leader of shard 1 ...
//!                   └─────────────────────┘
//! ```
//!
//! - [`client`]: what a training loop calls; blocking.
//! - `io`: the I/O of a session, whose protocol is in `paraft_session`.
//! - [`acks`]: acknowledgements of this worker's pushes.
//! - [`connect`]: channels, over TCP or the server's Unix socket.
//! - [`checkpoint_parts`]: the shards' images of one step, for a checkpoint.
//! - [`groups`]: which ranks are in a group that acts as one worker.
//! - [`checkpoints`]: which checkpoints there are, for the control group.
//! - `control`: calls to the leader of the control group.
//! - `orders`: a user's orders to one server.
//! - [`reader`]: whole versions of the weights, for processes that do not train.
//! - `rows`: rows of tables, for readers and operators.
//! - `pool`: buffers for payloads.
//! - `initial`: the state that the servers receive if they have no weights yet.
//! - [`error`]: the errors, by cause.

pub mod acks;
pub mod checkpoint_parts;
pub mod checkpoints;
pub mod client;
pub mod connect;
mod control;
pub mod error;
pub mod groups;
mod initial;
mod interrupt;
mod io;
mod orders;
mod outgoing;
mod pool;
pub mod reader;
mod rows;

pub use acks::Acked;
pub use client::{Client, ClientOptions, Counters, Norm, Places, RestOfResults, Shares, address};
pub use connect::{Transport, describe, status, status_with_logs};
pub use error::ClientError;
pub use initial::{Initial, SavedPartition, Values};
pub use interrupt::Interrupt;
pub use orders::{Done, Order, order, save, switch_mode};
pub use paraft_proto::{WireKind, limits::PULL_AHEAD_BYTES};
pub use paraft_session::{Encoders, HANDOVER, Next, Pull, Pulled, Reported, SessionError, sum_of_parts};
pub use rows::{RowsPart, RowsReply, edit_rows, read_rows};
