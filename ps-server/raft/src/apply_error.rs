//! Why a replica cannot apply a log entry or a snapshot.

use std::io;

/// This replica stops with this text; the other replicas, and other groups on the same server, continue. The
/// request has no effect.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}", self.text())]
pub enum ApplyError {
    /// This host lacks the memory at present. A retry may succeed when there is more.
    NoRoom(String),
    /// A later version of Paraft wrote it. A retry with this version is pointless; nothing is damaged.
    Newer(String),
    /// It is inconsistent with itself or with the state.
    Damaged(String),
}

impl ApplyError {
    /// The text.
    pub fn text(&self) -> &str {
        match self {
            ApplyError::NoRoom(text) | ApplyError::Newer(text) | ApplyError::Damaged(text) => text,
        }
    }

    /// Encodes the kind where only an [`io::Error`] gets through.
    pub fn kind(&self) -> io::ErrorKind {
        match self {
            ApplyError::NoRoom(_) => io::ErrorKind::OutOfMemory,
            ApplyError::Newer(_) => io::ErrorKind::Unsupported,
            ApplyError::Damaged(_) => io::ErrorKind::InvalidData,
        }
    }

    /// Adds the place of the problem.
    #[must_use]
    pub fn at(self, place: impl std::fmt::Display) -> Self {
        let at = |text: String| format!("{place}: {text}");
        match self {
            ApplyError::NoRoom(text) => ApplyError::NoRoom(at(text)),
            ApplyError::Newer(text) => ApplyError::Newer(at(text)),
            ApplyError::Damaged(text) => ApplyError::Damaged(at(text)),
        }
    }
}

impl From<ApplyError> for io::Error {
    fn from(unable: ApplyError) -> Self {
        io::Error::new(unable.kind(), unable)
    }
}

/// A plain text means damage: lack of memory and version have their own variants.
impl From<String> for ApplyError {
    fn from(text: String) -> Self {
        ApplyError::Damaged(text)
    }
}

impl From<&str> for ApplyError {
    fn from(text: &str) -> Self {
        ApplyError::Damaged(text.into())
    }
}
