//! Errors of data on disk, and how to handle them.

use std::{
    io,
    path::{Path, PathBuf},
};

/// Why a file or folder cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The operating system refused. Retry if the source's kind says so; otherwise the disk or its permissions must
    /// be fixed first.
    #[error("cannot {doing} {}: {}", path.display(), said(source))]
    Io {
        /// The operation, as a verb.
        doing: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// The operating system's error.
        source: io::Error,
    },
    /// The folder is already open.
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
        "{} is damaged at byte {offset}: {what}. Keep it: put back a copy of it, or leave it to the other replicas, \
         which replace it",
        path.display()
    )]
    Damaged {
        /// The file.
        path: PathBuf,
        /// Offset of the damage in the file, in bytes.
        offset: u64,
        /// What is wrong there.
        what: String,
    },
    /// The file was not completed: it holds less than it should, and the format shows it.
    #[error("{} is cut short: {what}. Its writer must write or fetch it again", path.display())]
    CutShort {
        /// The file.
        path: PathBuf,
        /// What is missing.
        what: String,
    },
    /// Another build wrote it.
    #[error(
        "{} has format version {found}, this build reads version {supported}: use the build that wrote it",
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
    /// Whether written data is lost or changed. Every other error is transient, or not for this build to judge: the
    /// files stay, and are tried again.
    pub fn is_damage(&self) -> bool {
        match self {
            StoreError::Io { source, .. } => is_damage(source),
            StoreError::Damaged { .. } | StoreError::CutShort { .. } => true,
            StoreError::Locked { .. } | StoreError::Version { .. } => false,
        }
    }

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

/// Whether an error means that contents are missing or wrong. Other errors (no descriptors, memory, space or
/// permission, a read-only file system, a device error) are transient, and prove nothing about the written data.
pub fn is_damage(e: &io::Error) -> bool {
    matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::UnexpectedEof | io::ErrorKind::InvalidData)
}

/// An error with its symbolic name, if it has one: `ENOSPC: No space left on device (os error 28)`.
pub fn said(e: &io::Error) -> String {
    let by_kind = || match e.kind() {
        // A wrapped error keeps only its kind; it already has its name in the text.
        _ if e.get_ref().is_some_and(|inner| inner.to_string().contains(": E")) => None,
        io::ErrorKind::StorageFull => Some("ENOSPC".into()),
        io::ErrorKind::PermissionDenied => Some("EACCES".into()),
        io::ErrorKind::ReadOnlyFilesystem => Some("EROFS".into()),
        io::ErrorKind::OutOfMemory => Some("ENOMEM".into()),
        io::ErrorKind::TimedOut => Some("ETIMEDOUT".into()),
        _ => None,
    };
    let by_number = e.raw_os_error().map(|n| format!("{:?}", nix::errno::Errno::from_raw(n)));
    by_number.or_else(by_kind).map_or_else(|| e.to_string(), |name: String| format!("{name}: {e}"))
}

/// The same error with the operation and the file.
pub(crate) fn named(doing: &str, path: &Path) -> impl FnOnce(io::Error) -> io::Error {
    move |e| io::Error::new(e.kind(), format!("cannot {doing} {}: {}", path.display(), said(&e)))
}

#[cfg(test)]
#[path = "error_tests.rs"]
mod tests;
