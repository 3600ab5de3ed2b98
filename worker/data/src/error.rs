//! What can be wrong with data, told so that the reader of the message can mend it.

use std::fmt;
use std::path::PathBuf;

/// Why data could not be read or used. All of them mean: fix the input; none is worth a retry.
#[derive(Debug, thiserror::Error)]
pub enum DataError {
    /// The file cannot be opened or read.
    #[error("cannot read {}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// None of a file's usual names is in the folder.
    #[error("{} holds none of {}; point `path` at the folder with the data set's files, plain or .gz",
        folder.display(), names.join(", "))]
    Missing {
        /// Where it was looked for.
        folder: PathBuf,
        /// The names tried.
        names: Vec<String>,
    },
    /// The content is not what it should be.
    #[error("{}{at}: {what}; {remedy}", path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// Where in it.
        at: Place,
        /// What is wrong there, with what was expected and what was found.
        what: String,
        /// What to do.
        remedy: &'static str,
    },
    /// The data is larger than we are ready to hold in memory.
    #[error("{} has or claims {bytes} bytes of content, the limit is {limit}; use a smaller part of it",
        path.display())]
    TooLarge {
        /// The file.
        path: PathBuf,
        /// What it holds or its header claims.
        bytes: u64,
        /// The limit.
        limit: u64,
    },
    /// An option outside its range.
    #[error("[data] {key}: {why}")]
    Option {
        /// The key of the job file.
        key: &'static str,
        /// What is wrong with it.
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
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File => Ok(()),
            Self::Byte(at) => write!(f, " at byte {at}"),
            Self::Line(at) => write!(f, " line {at}"),
        }
    }
}
