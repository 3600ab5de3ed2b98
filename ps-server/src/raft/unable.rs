//! Why a replica cannot apply a log entry or a snapshot.

use std::io;

/// This replica stops with this text; the other replicas, and other groups on the same server, continue. The
/// request has no effect.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}", self.text())]
pub enum Unable {
    /// This host lacks the memory at present. A retry may succeed when there is more.
    NoRoom(String),
    /// A later version of Paraft wrote it. A retry with this version is pointless; nothing is damaged.
    Newer(String),
    /// It is inconsistent with itself or with the state.
    Damaged(String),
}

impl Unable {
    /// The text.
    pub fn text(&self) -> &str {
        match self {
            Unable::NoRoom(text) | Unable::Newer(text) | Unable::Damaged(text) => text,
        }
    }

    /// Encodes the kind where only an [`io::Error`] gets through.
    pub fn kind(&self) -> io::ErrorKind {
        match self {
            Unable::NoRoom(_) => io::ErrorKind::OutOfMemory,
            Unable::Newer(_) => io::ErrorKind::Unsupported,
            Unable::Damaged(_) => io::ErrorKind::InvalidData,
        }
    }

    /// Adds the place of the problem.
    #[must_use]
    pub fn at(self, place: impl std::fmt::Display) -> Self {
        let at = |text: String| format!("{place}: {text}");
        match self {
            Unable::NoRoom(text) => Unable::NoRoom(at(text)),
            Unable::Newer(text) => Unable::Newer(at(text)),
            Unable::Damaged(text) => Unable::Damaged(at(text)),
        }
    }
}

impl From<Unable> for io::Error {
    fn from(unable: Unable) -> Self {
        io::Error::new(unable.kind(), unable)
    }
}

/// A plain text means damage: lack of memory and version have their own variants.
impl From<String> for Unable {
    fn from(text: String) -> Self {
        Unable::Damaged(text)
    }
}

impl From<&str> for Unable {
    fn from(text: &str) -> Self {
        Unable::Damaged(text.into())
    }
}
