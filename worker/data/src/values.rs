//! Values that stay in a file and are read sample by sample.
//!
//! All processes of a host share the page cache's copy; a batch is decoded from there, and its bytes are then
//! dropped. A file of our cache is mapped, so that a sample costs no system call. A user's file is read, because it
//! may be truncated, which fails a read but would kill a process that maps it. Either file is checked at opening,
//! and must not change while a job runs: with other bytes it is other data.

use crate::DataError;
use paraft_host::Mapped;
use std::fs::File;
use std::io::{self, ErrorKind};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

/// The format of the values in the file, concatenated, little-endian.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum ValueFormat {
    /// One byte each, divided by this.
    Bytes { divisor: f32 },
    /// `f32`.
    Floats,
    /// `u32`, below `vocab`; a sample has `context` of them.
    Tokens { context: usize, vocab: usize },
}

impl ValueFormat {
    /// Bytes per value.
    pub(crate) fn width(self) -> usize {
        match self {
            Self::Bytes { .. } => 1,
            Self::Floats | Self::Tokens { .. } => 4,
        }
    }
}

/// The file of the values.
#[derive(Clone, Debug)]
pub(crate) enum Source {
    /// A file of our cache.
    Mapped(Arc<Mapped>),
    /// A user's file.
    Read(Arc<File>),
}

impl Source {
    fn len(&self) -> io::Result<u64> {
        match self {
            Self::Mapped(mapped) => Ok(mapped.len() as u64),
            Self::Read(file) => Ok(file.metadata()?.len()),
        }
    }
}

/// Values in a file.
#[derive(Clone, Debug)]
pub struct FileValues {
    source: Source,
    path: Arc<Path>,
    at: u64,
    len: usize,
    of: ValueFormat,
}

/// Equal if they are the same values of the same path.
impl PartialEq for FileValues {
    fn eq(&self, other: &Self) -> bool {
        (&self.path, self.at, self.len, self.of) == (&other.path, other.at, other.len, other.of)
    }
}

impl FileValues {
    /// `len` values from byte `at` on; they must exist.
    pub(crate) fn new(
        source: Source,
        path: Arc<Path>,
        at: u64,
        len: usize,
        of: ValueFormat,
    ) -> io::Result<Self> {
        let end = (len as u64).checked_mul(of.width() as u64).and_then(|n| n.checked_add(at));
        let there = source.len()?;
        if end.is_none_or(|end| there < end) {
            return Err(io::Error::new(ErrorKind::UnexpectedEof, "the file is too short"));
        }
        Ok(Self { source, path, at, len, of })
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn of(&self) -> ValueFormat {
        self.of
    }

    /// The bytes of these values, in place or in `room`, whose content they replace.
    ///
    /// # Panics
    /// If the range ends after the last value.
    pub(crate) fn bytes<'a>(
        &'a self,
        range: Range<usize>,
        room: &'a mut Vec<u8>,
    ) -> Result<&'a [u8], DataError> {
        assert!(range.end <= self.len, "values {range:?} of {}", self.len);
        let width = self.of.width();
        let (at, len) = (self.at + (range.start * width) as u64, range.len() * width);
        match &self.source {
            // It fits, or the file would have been refused; and a mapped file fits a usize.
            Source::Mapped(mapped) => Ok(&mapped[at as usize..][..len]),
            Source::Read(file) => {
                room.resize(len, 0);
                file.read_exact_at(room, at)
                    .map_err(|source| DataError::Read { path: self.path.to_path_buf(), source })?;
                Ok(room)
            }
        }
    }

    /// The bytes of all values, in pieces of a multiple of eight, except the last.
    pub(crate) fn pieces(&self, mut each: impl FnMut(&[u8]) -> io::Result<()>) -> Result<(), DataError> {
        const VALUES: usize = 1 << 18;
        let mut room = Vec::new();
        for from in (0..self.len).step_by(VALUES) {
            let bytes = self.bytes(from..(from + VALUES).min(self.len), &mut room)?;
            each(bytes).map_err(|source| DataError::Read { path: self.path.to_path_buf(), source })?;
        }
        Ok(())
    }
}

/// Little-endian words of four bytes.
pub(crate) fn words(bytes: &[u8]) -> impl ExactSizeIterator<Item = u32> + '_ {
    bytes.as_chunks::<4>().0.iter().map(|w| u32::from_le_bytes(*w))
}
