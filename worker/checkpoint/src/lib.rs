//! Checkpoints as files: streamed writing, verification, comparison, export. Model files of PyTorch. No network, no
//! training.
//!
//! ```text
//!  checkpoints/
//!    latest                      one line: step-0000001200
//!    best                        likewise, and the held-out loss it had
//!    step-0000001200/
//!      model.safetensors         all tensors, buffers included, with PyTorch's names
//!      optimizer.safetensors     exp_avg.0.weight, exp_avg_sq.0.weight, ...
//!      table-NAME.safetensors    ids, weights, optimizer state of the rows of a sparse table
//!      checkpoint.json           everything else: step, versions, clocks, job; size and CRC of the two files
//!     .tmp-step-0000001300-...    incomplete: never read, removed by the next writer
//! ```
//!
//! - [`writer`]: writes one checkpoint: temporary folder, fsync, rename.
//! - [`folder`]: many checkpoints: the latest, the best, removal of old ones.
//! - [`read`]: one checkpoint: verification and content.
//! - [`manifest`]: the file `checkpoint.json`.
//! - [`table`]: the file of a sparse table. [`export`]: a folder with rows of one, all or what has changed.
//! - [`tensors`]: a safetensors file, read in pieces.
//! - [`weights`]: weights to and from separate files.
//! - [`compare`]: norms, differences.
//! - [`error`]: the faulty part, the cause, and what to do.
//!
//! `latest` and `best` are files, not links: links do not survive every file system, copy or archive, and a rename
//! also replaces a file atomically.

pub mod compare;
pub mod error;
pub mod export;
pub mod folder;
pub mod manifest;
pub mod read;
pub mod table;
pub mod tensors;
pub mod weights;
pub mod writer;

pub use error::CheckpointError;
pub use folder::Folder;
pub use manifest::Manifest;
pub use read::{Checkpoint, State};
pub use writer::Writer;

/// The weights' file, in a checkpoint and in a run's folder.
pub const MODEL_FILE: &str = "model.safetensors";
/// The optimizer's state vectors.
pub const OPTIMIZER_FILE: &str = "optimizer.safetensors";
/// Everything else.
pub const MANIFEST_FILE: &str = "checkpoint.json";

/// Bytes per read or write.
pub(crate) const CHUNK_BYTES: usize = 1 << 20;
