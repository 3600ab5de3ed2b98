//! Failures of a device.

/// The result of an operator.
pub type Result<T = ()> = std::result::Result<T, DeviceError>;

/// A failure of a device. On the CPU only a group can fail.
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
        /// The purpose.
        what: String,
        /// Requested bytes.
        asked: u64,
        /// Free bytes.
        free: u64,
        /// Total bytes.
        total: u64,
    },
    /// A call failed.
    #[error("{device}: {call} failed: {error}")]
    Call {
        /// Which device.
        device: String,
        /// The function, or the kernel with its shapes and launch.
        call: String,
        /// The library's name and text of the error.
        error: String,
    },
    /// A kernel cannot be compiled.
    #[error("the kernels of {file} cannot be compiled for {arch}: {log}")]
    Compile {
        /// The source.
        file: String,
        /// The architecture.
        arch: String,
        /// The compiler's log.
        log: String,
    },
    /// A required library or device is missing.
    #[error("{0}")]
    Missing(String),
    /// The ranks that compute as one worker are no longer complete: their common work has no result.
    #[error("a rank of the group is gone or the group was aborted: {0}")]
    Group(String),
    /// The operator does not exist for this shape.
    #[error("{0}")]
    Unsupported(String),
}
