//! Snapshot files: many chunks, written and read as a stream, so that neither side holds all of it.
//!
//! ```text
//! magic "PARAFTSS" 8 | format version 4 | CRC-32 of both 4
//! chunk:   kind 1 (u32) | length 4 | number from 0, 8 | CRC-32 of these and the bytes 4 | bytes
//! closing: kind 2 (u32) | length = 8 | number of chunks 8 | CRC-32 4 | sum of the chunks' lengths 8
//! ```
//!
//! The file gets its name only when it is complete and durable. A reader looks for the closing record first, so a
//! file that another program cut short (an interrupted copy) is refused before its first chunk is used.

use crate::{
    StoreError,
    disk::{Access, Disk, DiskFile},
    error::named,
    small::{folder, temporary},
};
use bytes::{Buf, Bytes};
use paraft_common::Payload;
use std::{
    collections::BTreeMap,
    io::{self, IoSlice},
    path::{Path, PathBuf},
    sync::Arc,
};

/// Maximum bytes of a chunk.
pub const MAX_CHUNK_BYTES: usize = 16 << 20;

const MAGIC: [u8; 8] = *b"PARAFTSS";
const VERSION: u32 = 1;
const PREFIX: u64 = 16;
const HEAD: usize = 20;
const CHUNK: u32 = 1;
const CLOSING: u32 = 2;
const CLOSING_BYTES: u64 = HEAD as u64 + 8;

fn prefix() -> [u8; PREFIX as usize] {
    let mut out = [0; PREFIX as usize];
    out[..8].copy_from_slice(&MAGIC);
    out[8..12].copy_from_slice(&VERSION.to_le_bytes());
    let crc = crc32fast::hash(&out[..12]);
    out[12..].copy_from_slice(&crc.to_le_bytes());
    out
}

fn head(kind: u32, number: u64, pieces: &[impl AsRef<[u8]>]) -> [u8; HEAD] {
    let length: usize = pieces.iter().map(|p| p.as_ref().len()).sum();
    let mut out = [0; HEAD];
    out[..4].copy_from_slice(&kind.to_le_bytes());
    out[4..8].copy_from_slice(&(length as u32).to_le_bytes());
    out[8..16].copy_from_slice(&number.to_le_bytes());
    let mut crc = crc32fast::Hasher::new();
    crc.update(&out[..16]);
    pieces.iter().for_each(|p| crc.update(p.as_ref()));
    out[16..].copy_from_slice(&crc.finalize().to_le_bytes());
    out
}

fn check_length(bytes: usize) -> io::Result<()> {
    if bytes <= MAX_CHUNK_BYTES {
        return Ok(());
    }
    let what = format!("a chunk of {bytes} bytes; at most {MAX_CHUNK_BYTES}");
    Err(io::Error::new(io::ErrorKind::InvalidInput, what))
}

/// Returns the number of written bytes.
fn write_at(
    file: &mut dyn DiskFile,
    path: &Path,
    offset: u64,
    head: &[u8],
    pieces: &[impl AsRef<[u8]>],
) -> io::Result<u64> {
    let parts = pieces.iter().map(|p| IoSlice::new(p.as_ref()));
    let mut parts: Vec<_> = std::iter::once(IoSlice::new(head)).chain(parts).collect();
    let bytes: usize = parts.iter().map(|p| p.len()).sum();
    file.write_at(offset, &mut parts).map_err(named("write", path))?;
    Ok(bytes as u64)
}

/// Writes a snapshot file. If dropped before [`finish`](Self::finish), it leaves no file.
#[derive(Debug)]
pub struct SnapshotWriter {
    disk: Arc<dyn Disk>,
    path: PathBuf,
    temp: PathBuf,
    file: Box<dyn DiskFile>,
    offset: u64,
    chunks: u64,
    bytes: u64,
    /// Chunks with a place that are not written yet, by number: offset and length.
    reserved: BTreeMap<u64, (u64, usize)>,
    /// The temporary file is renamed, so there is nothing to remove.
    named: bool,
}

impl SnapshotWriter {
    /// Starts the future file `path`; its folder must exist. Until it is finished it has that name with `.tmp` at
    /// its end, so only one writer per path may run.
    pub fn create(disk: Arc<dyn Disk>, path: &Path) -> io::Result<SnapshotWriter> {
        let temp = temporary(path);
        let file = disk.open(&temp, Access::Create).map_err(named("create", &temp))?;
        let mut writer = SnapshotWriter {
            disk,
            path: path.to_path_buf(),
            temp,
            file,
            offset: 0,
            chunks: 0,
            bytes: 0,
            reserved: BTreeMap::new(),
            named: false,
        };
        writer.write(&prefix(), &[] as &[Bytes])?;
        Ok(writer)
    }

    /// Adds chunks of these lengths, whose bytes follow in any order ([`Self::fill`]); returns the number of the
    /// first one.
    pub fn reserve(&mut self, lengths: impl IntoIterator<Item = usize>) -> io::Result<u64> {
        let first = self.chunks;
        for length in lengths {
            check_length(length)?;
            self.reserved.insert(self.chunks, (self.offset, length));
            self.offset += (HEAD + length) as u64;
            self.chunks += 1;
            self.bytes += length as u64;
        }
        Ok(first)
    }

    /// Writes a reserved chunk at its place. Once per chunk.
    pub fn fill(&mut self, number: u64, chunk: &Payload) -> io::Result<()> {
        let place = self.reserved.get(&number).filter(|(_, length)| *length == chunk.len());
        let Some((offset, _)) = place else {
            let what = format!("no chunk {number} of {} bytes is reserved and not written", chunk.len());
            return Err(io::Error::new(io::ErrorKind::InvalidInput, what));
        };
        let head = head(CHUNK, number, chunk.pieces());
        write_at(&mut *self.file, &self.temp, *offset, &head, chunk.pieces())?;
        self.reserved.remove(&number);
        Ok(())
    }

    fn write(&mut self, head: &[u8], pieces: &[impl AsRef<[u8]>]) -> io::Result<()> {
        self.offset += write_at(&mut *self.file, &self.temp, self.offset, head, pieces)?;
        Ok(())
    }

    /// Adds a chunk of at most [`MAX_CHUNK_BYTES`]; it may be empty. After an error the file is unusable: drop the
    /// writer.
    pub fn push(&mut self, chunk: &Payload) -> io::Result<()> {
        check_length(chunk.len())?;
        let head = head(CHUNK, self.chunks, chunk.pieces());
        self.write(&head, chunk.pieces())?;
        self.chunks += 1;
        self.bytes += chunk.len() as u64;
        Ok(())
    }

    /// Completes the file and gives it its name. It is durable on return; an existing file is replaced. Returns the
    /// file's size in bytes.
    pub fn finish(mut self) -> io::Result<u64> {
        if let Some(number) = self.reserved.keys().next() {
            let what = format!("chunk {number} was reserved and not written");
            return Err(io::Error::new(io::ErrorKind::InvalidInput, what));
        }
        let sum = [self.bytes.to_le_bytes()];
        let head = head(CLOSING, self.chunks, &sum);
        self.write(&head, &sum)?;
        self.file.sync().map_err(named("sync", &self.temp))?;
        self.disk.rename(&self.temp, &self.path).map_err(named("rename", &self.temp))?;
        self.named = true;
        self.disk.sync_dir(folder(&self.path)).map_err(named("sync the folder of", &self.path))?;
        Ok(self.offset)
    }
}

impl Drop for SnapshotWriter {
    fn drop(&mut self) {
        if !self.named {
            // Best effort: the next writer of this path replaces the file.
            let _ = self.disk.remove(&self.temp);
        }
    }
}

/// Reads a snapshot file chunk by chunk; checks each before it returns it. It ends after an error.
#[derive(Debug)]
pub struct SnapshotReader {
    path: PathBuf,
    file: Box<dyn DiskFile>,
    /// Position of the closing record.
    end: u64,
    offset: u64,
    number: u64,
    chunks: u64,
    bytes: u64,
    read: u64,
    over: bool,
}

impl SnapshotReader {
    /// Opens `path` and checks its closing record: [`StoreError::CutShort`] if there is none. The file is then
    /// durable, even if its writer died before it synced it: a log may be purged up to it.
    pub fn open(disk: &dyn Disk, path: &Path) -> Result<SnapshotReader, StoreError> {
        let file = disk.open(path, Access::Read).map_err(StoreError::io("open", path))?;
        let size = file.size().map_err(StoreError::io("read", path))?;
        let short = |what: String| StoreError::CutShort { path: path.to_path_buf(), what };
        if size < PREFIX + CLOSING_BYTES {
            return Err(short(format!("it has {size} bytes, fewer than an empty snapshot")));
        }
        let mut start = [0; PREFIX as usize];
        file.read_at(0, &mut start).map_err(StoreError::io("read", path))?;
        let mut rest = &start[8..];
        let (version, crc) = (rest.get_u32_le(), rest.get_u32_le());
        if !start.starts_with(&MAGIC) || crc != crc32fast::hash(&start[..12]) {
            return Err(StoreError::damaged(path, 0, "it does not begin as a snapshot does"));
        }
        if version != VERSION {
            return Err(StoreError::Version { path: path.into(), found: version, supported: VERSION });
        }
        let end = size - CLOSING_BYTES;
        let mut closing = [0; CLOSING_BYTES as usize];
        file.read_at(end, &mut closing).map_err(StoreError::io("read", path))?;
        let chunks = (&closing[8..]).get_u64_le();
        let sum = &closing[HEAD..];
        if closing[..HEAD] != head(CLOSING, chunks, &[sum]) {
            return Err(short(format!("there is no closing record at its end (byte {end})")));
        }
        let bytes = (&closing[HEAD..]).get_u64_le();
        disk.sync_dir(folder(path)).map_err(StoreError::io("sync the folder of", path))?;
        let path = path.to_path_buf();
        Ok(SnapshotReader { path, file, end, offset: PREFIX, number: 0, chunks, bytes, read: 0, over: false })
    }

    /// The number of chunks in the file.
    pub fn chunks(&self) -> u64 {
        self.chunks
    }

    /// Sum of the chunks' lengths.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    fn chunk(&mut self) -> Result<Option<Bytes>, StoreError> {
        let damaged = |what: String| Err(StoreError::damaged(&self.path, self.offset, what));
        if self.offset == self.end {
            if self.number != self.chunks || self.read != self.bytes {
                return damaged(format!("it has {} chunks where {} were written", self.number, self.chunks));
            }
            return Ok(None);
        }
        let left = self.end - self.offset;
        let mut found = [0; HEAD];
        if left < HEAD as u64 {
            return damaged(format!("chunk {} does not fit before the end", self.number));
        }
        self.file.read_at(self.offset, &mut found).map_err(StoreError::io("read", &self.path))?;
        let length = (&found[4..]).get_u32_le() as usize;
        if length > MAX_CHUNK_BYTES || length as u64 > left - HEAD as u64 {
            return damaged(format!("chunk {} claims {length} bytes", self.number));
        }
        let mut chunk = vec![0; length];
        let at = self.offset + HEAD as u64;
        self.file.read_at(at, &mut chunk).map_err(StoreError::io("read", &self.path))?;
        if found != head(CHUNK, self.number, &[&chunk]) {
            return damaged(format!("chunk {} fails its checksum", self.number));
        }
        self.offset = at + length as u64;
        self.number += 1;
        self.read += length as u64;
        Ok(Some(chunk.into()))
    }
}

impl Iterator for SnapshotReader {
    type Item = Result<Bytes, StoreError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.over {
            return None;
        }
        let next = self.chunk().transpose();
        self.over = !matches!(next, Some(Ok(_)));
        next
    }
}
