//! The bytes of a file, plain or gzip (by its first two bytes, not its name), with the position in the content for
//! error messages.

use crate::{DataError, Place};
use flate2::bufread::MultiGzDecoder;
use std::fs::File;
use std::io::{BufRead, BufReader, ErrorKind, Read};
use std::path::{Path, PathBuf};

/// The maximum content of one file in memory. A gzip file may unpack to a thousand times its size, so its size on
/// disk is no bound.
pub(crate) const MAX_BYTES: u64 = 8 << 30;

const GZIP_MAGIC: [u8; 2] = [0x1f, 0x8b];

/// The content of a file, read sequentially.
pub(crate) struct Input<'a> {
    path: PathBuf,
    inner: Box<dyn Read + 'a>,
    at: u64,
}

/// Opens a regular file; folders and devices are refused, since a device may never end.
pub(crate) fn open(path: &Path) -> Result<Input<'static>, DataError> {
    let read = |source| DataError::Read { path: path.to_owned(), source };
    let meta = std::fs::metadata(path).map_err(read)?;
    if !meta.is_file() {
        let kind = if meta.is_dir() { "a folder" } else { "not a regular file" };
        return Err(read(std::io::Error::new(ErrorKind::InvalidInput, format!("it is {kind}"))));
    }
    decode(path, BufReader::with_capacity(1 << 16, File::open(path).map_err(read)?))
}

/// Whether a file is uncompressed. For an unreadable file the answer does not matter.
pub(crate) fn is_plain(path: &Path) -> bool {
    let mut head = [0; 2];
    File::open(path).and_then(|mut f| f.read_exact(&mut head)).is_ok() && head != GZIP_MAGIC
}

/// The content of `raw`; `path` is for messages.
pub(crate) fn decode<'a>(path: &Path, mut raw: impl BufRead + 'a) -> Result<Input<'a>, DataError> {
    let head = raw.fill_buf().map_err(|source| DataError::Read { path: path.to_owned(), source })?;
    let inner: Box<dyn Read + 'a> =
        if head.starts_with(&GZIP_MAGIC) { Box::new(MultiGzDecoder::new(raw)) } else { Box::new(raw) };
    Ok(Input { path: path.to_owned(), inner, at: 0 })
}

impl Input<'_> {
    /// Reads up to `limit` bytes; fewer only at the end. Memory grows with the content, not with `limit`.
    pub(crate) fn read_up_to(&mut self, limit: u64) -> Result<Vec<u8>, DataError> {
        let mut out = Vec::with_capacity(limit.min(1 << 20) as usize);
        match self.by_ref().take(limit).read_to_end(&mut out) {
            Ok(_) => Ok(out),
            Err(e) => Err(self.failed(e)),
        }
    }

    /// The rest of the content; more than `limit` bytes are an error.
    pub(crate) fn rest(&mut self, limit: u64) -> Result<Vec<u8>, DataError> {
        let out = self.read_up_to(limit + 1)?;
        if out.len() as u64 > limit { Err(self.too_large(limit + 1, limit)) } else { Ok(out) }
    }

    /// An error at a place of this file.
    pub(crate) fn malformed(&self, at: Place, what: impl Into<String>, remedy: &'static str) -> DataError {
        DataError::Malformed { path: self.path.clone(), at, what: what.into(), remedy }
    }

    /// The error of content above `limit`: `bytes` exist or are claimed.
    pub(crate) fn too_large(&self, bytes: u64, limit: u64) -> DataError {
        DataError::TooLarge { path: self.path.clone(), bytes, limit }
    }

    /// Bytes of content read so far.
    pub(crate) fn at(&self) -> u64 {
        self.at
    }

    /// Converts an error of the reader: a broken gzip stream, or an unreadable file.
    pub(crate) fn failed(&self, e: std::io::Error) -> DataError {
        let what = match e.kind() {
            ErrorKind::UnexpectedEof => "the gzip stream is cut off here".to_owned(),
            ErrorKind::InvalidInput | ErrorKind::InvalidData => format!("the gzip stream is damaged: {e}"),
            _ => return DataError::Read { path: self.path.clone(), source: e },
        };
        self.malformed(Place::Byte(self.at), what, "fetch the file again")
    }
}

impl Read for Input<'_> {
    fn read(&mut self, buf: &mut [u8]) -> std::io::Result<usize> {
        let n = self.inner.read(buf)?;
        self.at += n as u64;
        Ok(n)
    }
}
