//! A small file that is overwritten in place, for contents that change while others wait for it: a vote.
//!
//! Replacing a file takes the file system two commits of its journal, in a queue with everybody else's. Overwriting
//! it takes one write of one block: measured on the development machine, 0.6 and 0.1 ms.
//!
//! ```text
//! two copies, each at the start of a block of 4 KiB:
//! magic "PARAFTSM" 8 | format version 4 | length 4 | CRC-32 of version, length and the rest 4 |
//! number of the contents 8 | contents
//! ```
//!
//! The first copy is written, and the contents are durable. Then the second is written, before the first is
//! overwritten again. So a crash at any point leaves one whole copy, with these contents or the ones before; and a
//! copy that is damaged later is replaced by the other.

use crate::{
    StoreError,
    disk::{Access, Disk, DiskFile},
    error::named,
    read_small,
    small::{MAGIC, PREFIX, checksum, folder, prefix, replace},
};
use bytes::Buf;
use std::{
    io::{self, IoSlice},
    path::{Path, PathBuf},
};

const VERSION: u32 = 2;
const BLOCK: usize = 4 << 10;
const NUMBER: usize = 8;

/// Maximum bytes of contents.
pub const MAX_PAIR_BYTES: usize = BLOCK - PREFIX - NUMBER;

/// The contents of a file with two copies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PairContents {
    /// The later contents.
    pub bytes: Vec<u8>,
    /// They are in both copies, or were written by [`write_small`](crate::write_small): they are durable. Otherwise
    /// the writer died before the second copy, or one is damaged: create the file again before you rely on them.
    pub agree: bool,
}

/// An open file with two copies.
#[derive(Debug)]
pub struct PairFile {
    path: PathBuf,
    file: Box<dyn DiskFile>,
    number: u64,
    /// The copy that is in the first place and not yet in the second.
    ahead: Option<Vec<u8>>,
}

/// A copy of these contents, a whole block.
fn copy(number: u64, bytes: &[u8]) -> io::Result<Vec<u8>> {
    if bytes.len() > MAX_PAIR_BYTES {
        let what = format!("{} bytes of contents; at most {MAX_PAIR_BYTES}", bytes.len());
        return Err(io::Error::new(io::ErrorKind::InvalidInput, what));
    }
    let contents = [&number.to_le_bytes(), bytes].concat();
    let mut block = [&prefix(VERSION, &contents)[..], &contents].concat();
    block.resize(BLOCK, 0);
    Ok(block)
}

impl PairFile {
    /// Replaces the file `path` by one with these contents, at most [`MAX_PAIR_BYTES`]. It is durable on return; after
    /// an error or a crash the file has the old contents or the new ones.
    pub fn create(disk: &dyn Disk, path: &Path, bytes: &[u8]) -> io::Result<PairFile> {
        let block = copy(0, bytes)?;
        replace(disk, path, &mut [IoSlice::new(&block), IoSlice::new(&block)])?;
        let file = disk.open(path, Access::Write).map_err(named("open", path))?;
        Ok(PairFile { path: path.to_path_buf(), file, number: 0, ahead: None })
    }

    /// Changes the contents; they are durable on return. Call [`Self::complete`] soon. After an error of either, which
    /// contents the file has is unknown: create it again.
    pub fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.complete()?;
        let block = copy(self.number + 1, bytes)?;
        self.put(0, &block)?;
        (self.number, self.ahead) = (self.number + 1, Some(block));
        Ok(())
    }

    /// Writes the second copy, if it is not yet there.
    pub fn complete(&mut self) -> io::Result<()> {
        let Some(block) = self.ahead.take() else { return Ok(()) };
        self.put(BLOCK as u64, &block)
    }

    fn put(&mut self, at: u64, block: &[u8]) -> io::Result<()> {
        self.file.write_at(at, &mut [IoSlice::new(block)]).map_err(named("write", &self.path))?;
        self.file.sync().map_err(named("sync", &self.path))
    }
}

/// The number and contents of a copy.
fn contents(path: &Path, at: u64, block: &[u8]) -> Result<(u64, Vec<u8>), StoreError> {
    let damaged = |what: &str| StoreError::damaged(path, at, what);
    let Some(mut rest) = block.strip_prefix(&MAGIC) else {
        return Err(damaged("it does not begin as a small file of paraft does"));
    };
    let (version, length, crc) = (rest.get_u32_le(), rest.get_u32_le(), rest.get_u32_le());
    let Some(mut contents) = rest.get(..length as usize).filter(|c| crc == checksum(version, c)) else {
        return Err(damaged("its checksum does not fit its contents"));
    };
    if version != VERSION || contents.len() < NUMBER {
        return Err(StoreError::Version { path: path.into(), found: version, supported: VERSION });
    }
    Ok((contents.get_u64_le(), contents.to_vec()))
}

/// Reads a file with two copies, or one by [`write_small`](crate::write_small); `None` if it does not exist.
///
/// [`StoreError::Damaged`] if no copy is whole. A crash does not cause that.
pub fn read_pair(disk: &dyn Disk, path: &Path) -> Result<Option<PairContents>, StoreError> {
    let file = match disk.open(path, Access::Read) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        opened => opened.map_err(StoreError::io("open", path))?,
    };
    let size = file.size().map_err(StoreError::io("read", path))?;
    if size != 2 * BLOCK as u64 {
        return Ok(read_small(disk, path)?.map(|bytes| PairContents { bytes, agree: true }));
    }
    let mut both = vec![0; 2 * BLOCK];
    file.read_at(0, &mut both).map_err(StoreError::io("read", path))?;
    let (first, second) = both.split_at(BLOCK);
    let found = match (contents(path, 0, first), contents(path, BLOCK as u64, second)) {
        (Ok(first), Ok(second)) => {
            let agree = first == second;
            PairContents { bytes: if second.0 > first.0 { second.1 } else { first.1 }, agree }
        }
        (Ok((_, bytes)), Err(e)) | (Err(e), Ok((_, bytes))) if e.is_damage() => {
            PairContents { bytes, agree: false }
        }
        (Err(e), _) | (_, Err(e)) => return Err(e),
    };
    disk.sync_dir(folder(path)).map_err(StoreError::io("sync the folder of", path))?;
    Ok(Some(found))
}
