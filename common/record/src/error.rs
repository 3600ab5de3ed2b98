//! What can go wrong with a record, with the file (and line) in every message.

use std::path::{Path, PathBuf};

/// Why a record could not be written or read.
#[derive(Debug, thiserror::Error)]
pub enum RecordError {
    /// The file system said no.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file or folder concerned.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// There is no folder for the record, and none can be made.
    #[error("{}: the run's folder cannot be made: {source}", path.display())]
    Folder {
        /// The folder.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// A completed line is no event. The lines before it are fine.
    #[error("{}:{line}: not an event: {reason}", path.display())]
    DamagedLine {
        /// The file concerned.
        path: PathBuf,
        /// Counted from 1.
        line: u64,
        /// What the JSON reader said.
        reason: String,
    },
    /// The file got shorter while it was followed; read it again from the start.
    #[error("{}: was {read} bytes long and is now {now}: another process rewrote it", path.display())]
    Shrunk {
        /// The file concerned.
        path: PathBuf,
        /// Bytes read so far.
        read: u64,
        /// Bytes there now.
        now: u64,
    },
    /// An event could not be written as one JSON line.
    #[error("an event has no JSON form: {0}")]
    Unwritable(#[source] serde_json::Error),
    /// There is no `run` event, so nothing says what the numbers belong to.
    #[error("{}: no `run` event; it is the first line of a run's record", path.display())]
    NoRun {
        /// The file concerned.
        path: PathBuf,
    },
}

impl RecordError {
    /// For `map_err`: an I/O error with its path.
    pub(crate) fn io(path: &Path) -> impl FnOnce(std::io::Error) -> RecordError + '_ {
        move |source| RecordError::Io { path: path.to_path_buf(), source }
    }
}
