//! Errors of checkpoints: the faulty part, the cause, and what to do.

use std::{
    fmt, io,
    path::{Path, PathBuf},
};

/// Why a checkpoint or a model file cannot be written or used.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// The file system.
    #[error("{}: {error}", path.display())]
    Io {
        /// Which file.
        path: PathBuf,
        /// The cause.
        error: io::Error,
    },
    /// A folder that cannot hold checkpoints.
    #[error(
        "checkpoints cannot be written to {}: {why}\n  help: make it a folder that this user may write to, or choose \
         another with checkpoint.dir",
        path.display()
    )]
    Unwritable {
        /// The folder.
        path: PathBuf,
        /// The cause.
        why: String,
    },
    /// A file is missing, truncated, changed, or of another checkpoint.
    #[error("the checkpoint {} is not whole: {piece} {why}{}", checkpoint.display(), Offer(offer.as_deref()))]
    NotWhole {
        /// The checkpoint.
        checkpoint: PathBuf,
        /// The faulty file.
        piece: String,
        /// The cause.
        why: String,
        /// The newest complete checkpoint in the same folder.
        offer: Option<PathBuf>,
    },
    /// There is no checkpoint.
    #[error("{}: {why}", path.display())]
    NoCheckpoint {
        /// The searched path.
        path: PathBuf,
        /// What is there instead.
        why: String,
    },
    /// A file is not a safetensors file, or is truncated.
    #[error("{}: {why}", path.display())]
    BadFile {
        /// The file.
        path: PathBuf,
        /// The cause.
        why: String,
    },
    /// The model or optimizer differs from the job's.
    #[error("{} does not fit this job:\n  {}", path.display(), List(differences))]
    Misfit {
        /// The file or checkpoint.
        path: PathBuf,
        /// The differences, or the first of many.
        differences: Vec<String>,
    },
}

/// The maximum number of listed differences.
const MAX_LISTED: usize = 8;

struct Offer<'a>(Option<&'a Path>);

impl fmt::Display for Offer<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(p) => write!(f, "\n  help: the newest whole one is {}", p.display()),
            None => write!(f, "\n  help: no other whole one is in its folder"),
        }
    }
}

struct List<'a>(&'a [String]);

impl fmt::Display for List<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0[..self.0.len().min(MAX_LISTED)].join("\n  "))?;
        match self.0.len().saturating_sub(MAX_LISTED) {
            0 => Ok(()),
            more => write!(f, "\n  and {more} more"),
        }
    }
}

impl CheckpointError {
    pub(crate) fn io(path: &Path) -> impl FnOnce(io::Error) -> Self + '_ {
        |error| Self::Io { path: path.to_path_buf(), error }
    }

    pub(crate) fn bad(path: &Path, why: impl Into<String>) -> Self {
        Self::BadFile { path: path.to_path_buf(), why: why.into() }
    }

    /// Whether the disk failed, rather than its content.
    pub fn is_io(&self) -> bool {
        matches!(self, Self::Io { .. } | Self::Unwritable { .. })
    }
}
