//! Lanes: messages with bulk over a connection of their own, without HTTP/2.
//!
//! A lane begins with 24 bytes that say what it is for, at the port and at the Unix socket where gRPC is served; HTTP/2's own
//! preface has as many. The server answers with the same. From then on frames go both ways:
//!
//! ```text
//!  ├ header_len: u32 ┼ bulks: u32 ┼ of each: length: u32, place: u64 ┼ ... ┼ header: protobuf ┼ bulk ┼ bulk ...┤
//!  an empty frame (eight zero bytes) says that its sender lives
//! ```
//!
//! The header is the message of the `.proto` files without its bulk; numbers are little-endian. Bulk is written from where it
//! lies, and lands once: in a buffer of its own that has its length, which log and optimizer then use. HTTP/2 would bring it in
//! frames, read with their headers into buffers of its own.
//!
//! A connection carries one stream, so what holds one stream up holds up no other, and the kernel's windows are the flow control.
//!
//! - [`frame`]: frames to messages and back. Pure.
//! - [`Receiver`], [`send`](fn@send), [`Sender`]: over sockets; silence on either side ends a lane.
//! - [`dial`], [`answer`]: its beginning.
//! - [`shared`]: bulk between two processes of one host, which does not travel at all.

mod begin;
pub mod frame;
mod pool;
mod receive;
mod send;
pub mod shared;
mod write;

pub use begin::{DENIED, ONLY_TLS, Purpose, answer, dial};
pub use pool::Pool;
pub use receive::Receiver;
pub use send::{Sender, send};

use std::time::Duration;

/// Who has nothing to say says that it lives this often.
pub const ALIVE_EVERY: Duration = Duration::from_secs(1);

/// So often in a row nothing came where something was due: the other side is gone.
const SILENT_TICKS: u32 = 3;

/// Why a lane ended before its time.
#[derive(Debug, thiserror::Error)]
pub enum LaneError {
    /// The socket's error.
    #[error("{0}")]
    Io(#[from] std::io::Error),
    /// The other side does not take us.
    #[error("{0}")]
    Refused(String),
    /// The other side does not speak this: an older server, or something between that only knows HTTP/2.
    #[error("it speaks no lanes")]
    NoLanes,
    /// Nothing came for so long.
    #[error("nothing was heard for {0:?}")]
    Silent(Duration),
    /// Bytes that are no frame.
    #[error(transparent)]
    Frame(#[from] frame::FrameError),
}

#[cfg(test)]
mod tests;
