//! Lanes: messages with bulk over a connection of their own, without HTTP/2.
//!
//! A lane starts with 24 bytes that name its purpose, at the port and the Unix socket where gRPC is served;
//! HTTP/2's own preface has as many. The server answers with the same bytes. From then on frames go both
//! ways:
//!
//! ```text
//! ├ header_len: u32 ┼ bulks: u32 ┼ of each: length: u32, place: u64 ┼ ... ┼ header: protobuf ┼ bulk ┼ bulk ...┤
//! an empty frame (eight zero bytes) is a keepalive
//! ```
//!
//! The header is the message of the `.proto` files without its bulk; numbers are little-endian. Bulk is
//! written without a copy, and read once: into a buffer of its own length, which log and optimizer then use.
//! HTTP/2 would deliver it in frames, read with their headers into its own buffers.
//!
//! A connection carries one stream, so a blocked stream blocks no other, and the kernel's windows are the
//! flow control.
//!
//! - [`frame`]: frames to messages and back. Pure.
//! - [`Receiver`], [`send`](fn@send), [`Sender`]: over sockets; silence on either side ends a lane.
//! - [`dial`], [`answer`]: its start.
//! - [`shared`]: bulk between two processes of one host, which is not sent at all.

mod error;
pub mod frame;
mod opening;
mod pool;
mod receive;
mod send;
pub mod shared;
mod write;

pub use error::{FrameError, LaneError};
pub use opening::{DENIED, ONLY_TLS, Purpose, answer, dial};
pub use pool::Pool;
pub use receive::Receiver;
pub use send::{Sender, send};

use std::time::Duration;

/// Interval of keepalives while there is nothing else to send.
pub const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(1);

/// After this many consecutive ticks without bytes, while some were due, the peer is gone.
const SILENT_TICKS: u32 = 3;

#[cfg(test)]
mod tests;
