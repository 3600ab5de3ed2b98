//! Errors of a replica's files, and waiting for the disk.

use paraft_store::{StoreError, said};
use std::{fmt, io, path::Path};

/// Why a replica cannot be started from what its folder holds.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{what}")]
pub struct FolderError {
    what: String,
    damage: bool,
}

impl FolderError {
    /// Written data is lost or changed: the error is permanent.
    pub fn damage(what: impl fmt::Display) -> Self {
        Self { what: what.to_string(), damage: true }
    }

    /// The data may be intact: it may be readable later, or by another build.
    pub fn passing(what: impl fmt::Display) -> Self {
        Self { what: what.to_string(), damage: false }
    }

    /// Whether the data is damaged.
    pub fn is_damage(&self) -> bool {
        self.damage
    }

    /// An operating system error of a file or folder.
    pub fn at(path: &Path) -> impl FnOnce(io::Error) -> Self {
        move |e| Self {
            what: format!("{}: {}", path.display(), said(&e)),
            damage: paraft_store::is_damage(&e),
        }
    }
}

impl From<StoreError> for FolderError {
    fn from(e: StoreError) -> Self {
        Self { damage: e.is_damage(), what: e.to_string() }
    }
}

impl From<FolderError> for String {
    fn from(e: FolderError) -> Self {
        e.what
    }
}

pub(super) fn invalid(e: impl fmt::Display) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, e.to_string())
}

pub(super) async fn blocking<T: Send + 'static>(
    f: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> io::Result<T> {
    tokio::task::spawn_blocking(f).await.map_err(io::Error::other)?
}
