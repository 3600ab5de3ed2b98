//! Why a lane ends, and why bytes are not a frame.

use std::time::Duration;

/// Why a lane ended early.
#[derive(Debug, thiserror::Error)]
pub enum LaneError {
    /// The socket's error.
    #[error("{0}")]
    Io(#[from] std::io::Error),
    /// The peer refuses us.
    #[error("{0}")]
    Refused(String),
    /// The peer does not speak lanes: an older server, or a proxy that only knows HTTP/2.
    #[error("it speaks no lanes")]
    NoLanes,
    /// Nothing arrived for this long.
    #[error("nothing was heard for {0:?}")]
    Silent(Duration),
    /// Bytes that are not a frame.
    #[error(transparent)]
    Frame(#[from] FrameError),
}

/// Why bytes are not a valid frame.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    /// A length beyond the bounds.
    #[error("a frame says that it has {what} of {got}; at most {most} are taken")]
    TooLong {
        /// Whose length.
        what: &'static str,
        /// The length.
        got: usize,
        /// The bound.
        most: usize,
    },
    /// The connection ended within a frame.
    #[error("the connection ended within a message")]
    CutShort,
    /// The header is not a valid message.
    #[error("a message cannot be read: {0}")]
    Malformed(String),
    /// Bulk is said to lie in shared memory, and there is none.
    #[error("a payload lies outside of what was shared")]
    NotShared,
    /// The received memory cannot be read.
    #[error("shared memory cannot be used: {0}")]
    Memory(String),
    /// The number of payloads differs from the message's.
    #[error("a message came with {got} payloads; it has {expected}")]
    Bulks {
        /// Payloads of the message.
        expected: usize,
        /// Payloads received.
        got: usize,
    },
}
