//! What can be wrong with what is on disk, and what to do about it.

use std::{
    io,
    path::{Path, PathBuf},
};

/// Why a file or folder cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The operating system refused. Retry where the source's kind says so; else the disk or the rights on it
    /// have to be mended first.
    #[error("cannot {doing} {}: {source}", path.display())]
    Io {
        /// What was tried, as a verb.
        doing: &'static str,
        /// On which file or folder.
        path: PathBuf,
        /// What the operating system said.
        source: io::Error,
    },
    /// Someone else has this folder open.
    #[error(
        "{} is in use by another process, or by another log of this one: stop that one, or use another folder",
        dir.display()
    )]
    Locked {
        /// The folder.
        dir: PathBuf,
    },
    /// The contents are not what was written. Nothing of the file was used or changed.
    #[error(
        "{} is damaged at byte {offset}: {what}. Put back a copy, or remove this replica's folder and let it \
         join anew from the others",
        path.display()
    )]
    Damaged {
        /// The file.
        path: PathBuf,
        /// Bytes from the file's start to what is wrong.
        offset: u64,
        /// What is wrong there.
        what: String,
    },
    /// The writing of the file never came to its end: it holds less than it should, and says so.
    #[error("{} is cut short: {what}. Remove it and fetch or write it again", path.display())]
    CutShort {
        /// The file.
        path: PathBuf,
        /// What is missing.
        what: String,
    },
    /// Another build wrote it.
    #[error(
        "{} has format version {found}, this build reads version {supported}: use the build that wrote it, or \
         remove this replica's folder and let it join anew from the others",
        path.display()
    )]
    Version {
        /// The file.
        path: PathBuf,
        /// Its version.
        found: u32,
        /// The version of this build.
        supported: u32,
    },
}

impl StoreError {
    pub(crate) fn io(doing: &'static str, path: &Path) -> impl FnOnce(io::Error) -> StoreError {
        let path = path.to_path_buf();
        move |source| StoreError::Io { doing, path, source }
    }

    pub(crate) fn damaged(path: &Path, offset: u64, what: impl Into<String>) -> StoreError {
        StoreError::Damaged { path: path.to_path_buf(), offset, what: what.into() }
    }
}

impl From<StoreError> for io::Error {
    fn from(e: StoreError) -> io::Error {
        let kind = match &e {
            StoreError::Io { source, .. } => source.kind(),
            StoreError::Locked { .. } => io::ErrorKind::WouldBlock,
            StoreError::Damaged { .. } | StoreError::CutShort { .. } => io::ErrorKind::InvalidData,
            StoreError::Version { .. } => io::ErrorKind::Unsupported,
        };
        io::Error::new(kind, e)
    }
}

/// The same error, saying what was tried on which file.
pub(crate) fn named(doing: &str, path: &Path) -> impl FnOnce(io::Error) -> io::Error {
    move |e| io::Error::new(e.kind(), format!("cannot {doing} {}: {e}", path.display()))
}
