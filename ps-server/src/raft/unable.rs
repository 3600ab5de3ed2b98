//! Why a replica cannot go on with what its log or a snapshot asks of it.

use std::io;

/// This replica stops, with these words; the others, and other groups on the same server, go on. What was asked is not
/// carried out, and nothing of it is kept.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}", self.text())]
pub enum Unable {
    /// This host has not the memory for it, at present. It may be tried again when there is more.
    NoRoom(String),
    /// A later version of Paraft wrote it. Not to be tried again with this one; nothing is damaged.
    Newer(String),
    /// It contradicts itself, or the state.
    Damaged(String),
}

impl Unable {
    /// The words.
    pub fn text(&self) -> &str {
        match self {
            Unable::NoRoom(text) | Unable::Newer(text) | Unable::Damaged(text) => text,
        }
    }

    /// Tells what passes from what does not, where only an [`io::Error`] gets through.
    pub fn kind(&self) -> io::ErrorKind {
        match self {
            Unable::NoRoom(_) => io::ErrorKind::OutOfMemory,
            Unable::Newer(_) => io::ErrorKind::Unsupported,
            Unable::Damaged(_) => io::ErrorKind::InvalidData,
        }
    }

    /// The same, said of a place.
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

/// What has only words is damage: shortage and age are always said as such.
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
