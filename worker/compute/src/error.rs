//! What a device could not do.

/// Of an operator.
pub type Result<T = ()> = std::result::Result<T, DeviceError>;

/// What a device could not do. On the CPU nothing fails but a group.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DeviceError {
    /// Memory of the device is used up.
    #[error(
        "{device} is out of memory: {asked} bytes for {what}, {free} of {total} bytes are free (smaller train.batch, \
         train.precision = \"bf16\" or train.checkpoint_activations = true need less)"
    )]
    OutOfMemory {
        /// Which device.
        device: String,
        /// What for.
        what: String,
        /// Bytes that were asked for.
        asked: u64,
        /// Bytes that are free.
        free: u64,
        /// Bytes that it has.
        total: u64,
    },
    /// A call failed.
    #[error("{device}: {call} failed: {error}")]
    Call {
        /// Which device.
        device: String,
        /// Which function, or which kernel with its shapes and its launch.
        call: String,
        /// The library's name for it, and what it says.
        error: String,
    },
    /// A kernel cannot be compiled.
    #[error("the kernels of {file} cannot be compiled for {arch}: {log}")]
    Compile {
        /// The source.
        file: String,
        /// For which architecture.
        arch: String,
        /// The compiler's log.
        log: String,
    },
    /// A library or a device that is needed is not there.
    #[error("{0}")]
    Missing(String),
    /// The ranks that compute as one worker are no longer all there: what they have begun together has no result.
    #[error("a rank of the group is gone or the group was aborted: {0}")]
    Group(String),
    /// The operator does not exist for this shape.
    #[error("{0}")]
    Unsupported(String),
}
