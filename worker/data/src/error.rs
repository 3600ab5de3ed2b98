//! Errors of data, with what the user can do.

use std::fmt;
use std::path::PathBuf;

/// Why data could not be read or used. In every case the input must be fixed; a retry does not help.
#[derive(Debug, thiserror::Error)]
pub enum DataError {
    /// The file cannot be opened or read.
    #[error("cannot read {}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// None of a file's usual names is in the folder.
    #[error("{} holds none of {}; point `path` at the folder with the data set's files, plain or .gz",
        folder.display(), names.join(", "))]
    Missing {
        /// The searched folder.
        folder: PathBuf,
        /// The names tried.
        names: Vec<String>,
    },
    /// The content is not what it should be.
    #[error("{}{at}: {what}; {remedy}", path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// The place in the file.
        at: Place,
        /// The fault there, with the expected and the found content.
        what: String,
        /// What to do.
        remedy: &'static str,
    },
    /// The data exceeds the memory limit.
    #[error("{} has or claims {bytes} bytes of content, the limit is {limit}; use a smaller part of it",
        path.display())]
    TooLarge {
        /// The file.
        path: PathBuf,
        /// The size of the content, or the size that its header claims.
        bytes: u64,
        /// The limit.
        limit: u64,
    },
    /// An option outside its range.
    #[error("[data] {key}: {why}")]
    Option {
        /// The key of the job file.
        key: &'static str,
        /// The fault.
        why: String,
    },
    /// The parts of a data set do not fit each other.
    #[error("{0}")]
    Mismatch(String),
    /// The thread that prepares batches panicked, or stopped after an error already reported.
    #[error("the data thread stopped: {0}")]
    Stopped(String),
}

/// A place in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// The file as a whole.
    File,
    /// A byte of the content (after decompression), counted from 0.
    Byte(u64),
    /// A line, counted from 1.
    Line(u64),
    /// A byte of a line, both counted from 1.
    Column {
        /// The line.
        line: u64,
        /// The byte in it.
        column: u64,
    },
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File => Ok(()),
            Self::Byte(at) => write!(f, " at byte {at}"),
            Self::Line(at) => write!(f, " line {at}"),
            Self::Column { line, column } => write!(f, " line {line}, column {column}"),
        }
    }
}
