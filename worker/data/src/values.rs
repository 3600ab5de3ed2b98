//! Values that stay in a file and are read a sample at a time.
//!
//! The page cache is the one copy that all processes of a host share; what a process reads is decoded into its batch and
//! forgotten. A file is checked when it is opened. It must stay as it is while a job runs: one that was cut short since is an
//! error of the read, one whose bytes were changed is other data.

use crate::DataError;
use std::fs::File;
use std::io::{self, ErrorKind};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

/// What lies in the file, one value after another, numbers with the low byte first.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Of {
    /// A byte each, divided by this.
    Bytes { divisor: f32 },
    /// `f32`.
    Floats,
    /// `u32`, below `vocab`; `context` of them are a sample.
    Tokens { context: usize, vocab: usize },
}

impl Of {
    /// Bytes of a value.
    pub(crate) fn width(self) -> usize {
        match self {
            Self::Bytes { .. } => 1,
            Self::Floats | Self::Tokens { .. } => 4,
        }
    }
}

/// Values in a file.
#[derive(Clone, Debug)]
pub struct FileValues {
    file: Arc<File>,
    path: Arc<Path>,
    at: u64,
    len: usize,
    of: Of,
}

/// The same values of the same file, as far as its name says.
impl PartialEq for FileValues {
    fn eq(&self, other: &Self) -> bool {
        (&self.path, self.at, self.len, self.of) == (&other.path, other.at, other.len, other.of)
    }
}

impl FileValues {
    /// `len` values from byte `at` on; they must be there.
    pub(crate) fn new(file: Arc<File>, path: Arc<Path>, at: u64, len: usize, of: Of) -> io::Result<Self> {
        let end = (len as u64).checked_mul(of.width() as u64).and_then(|n| n.checked_add(at));
        if end.is_none_or(|end| file.metadata().is_ok_and(|m| m.len() < end)) {
            return Err(io::Error::new(ErrorKind::UnexpectedEof, "the file is too short"));
        }
        Ok(Self { file, path, at, len, of })
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn of(&self) -> Of {
        self.of
    }

    /// Replaces what is in `bytes` by the bytes of these values.
    ///
    /// # Panics
    /// When the range ends behind the last value.
    pub(crate) fn read(&self, range: Range<usize>, bytes: &mut Vec<u8>) -> Result<(), DataError> {
        assert!(range.end <= self.len, "values {range:?} of {}", self.len);
        let width = self.of.width();
        bytes.resize(range.len() * width, 0);
        self.file
            .read_exact_at(bytes, self.at + (range.start * width) as u64)
            .map_err(|source| DataError::Read { path: self.path.to_path_buf(), source })
    }

    /// The bytes of all values, in pieces of a multiple of eight, but for the last.
    pub(crate) fn pieces(&self, mut each: impl FnMut(&[u8]) -> io::Result<()>) -> Result<(), DataError> {
        const VALUES: usize = 1 << 18;
        let mut bytes = Vec::new();
        for from in (0..self.len).step_by(VALUES) {
            self.read(from..(from + VALUES).min(self.len), &mut bytes)?;
            each(&bytes).map_err(|source| DataError::Read { path: self.path.to_path_buf(), source })?;
        }
        Ok(())
    }
}

/// Four bytes each, the low one first.
pub(crate) fn words(bytes: &[u8]) -> impl ExactSizeIterator<Item = u32> + '_ {
    bytes.as_chunks::<4>().0.iter().map(|w| u32::from_le_bytes(*w))
}
