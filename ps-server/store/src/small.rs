//! Small files that are replaced as a whole: a vote, an identity, a purge point.
//!
//! ```text
//! magic "PARAFTSM" 8 | format version 4 | length 4 | CRC-32 of version, length and contents 4 | contents
//! ```

use crate::{
    StoreError,
    disk::{Access, Disk},
    error::named,
};
use bytes::Buf;
use std::{
    io::{self, IoSlice},
    path::{Path, PathBuf},
};

/// Maximum bytes of contents, because a small file is read into memory at once.
pub const MAX_SMALL_BYTES: usize = 1 << 20;

pub(crate) const MAGIC: [u8; 8] = *b"PARAFTSM";
const VERSION: u32 = 1;
pub(crate) const PREFIX: usize = 20;

pub(crate) fn checksum(version: u32, contents: &[u8]) -> u32 {
    let mut crc = crc32fast::Hasher::new();
    crc.update(&version.to_le_bytes());
    crc.update(&(contents.len() as u32).to_le_bytes());
    crc.update(contents);
    crc.finalize()
}

/// The temporary name of a file while it is written.
pub(crate) fn temporary(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".tmp");
    name.into()
}

pub(crate) fn folder(path: &Path) -> &Path {
    path.parent().unwrap_or(Path::new(""))
}

/// Replaces the file `path` by one with the contents `bytes`, at most [`MAX_SMALL_BYTES`]. It is durable on return;
/// after an error or a crash the file has the old contents or the new ones, never a mixture.
///
/// Waits for the disk twice. Only one writer per path: it uses the name with `.tmp` at its end meanwhile.
pub fn write_small(disk: &dyn Disk, path: &Path, bytes: &[u8]) -> io::Result<()> {
    if bytes.len() > MAX_SMALL_BYTES {
        let what = format!("{} bytes for {}; at most {MAX_SMALL_BYTES}", bytes.len(), path.display());
        return Err(io::Error::new(io::ErrorKind::InvalidInput, what));
    }
    let prefix = prefix(VERSION, bytes);
    replace(disk, path, &mut [IoSlice::new(&prefix), IoSlice::new(bytes)])
}

/// What precedes contents.
pub(crate) fn prefix(version: u32, contents: &[u8]) -> [u8; PREFIX] {
    let mut out = [0; PREFIX];
    out[..8].copy_from_slice(&MAGIC);
    out[8..12].copy_from_slice(&version.to_le_bytes());
    out[12..16].copy_from_slice(&(contents.len() as u32).to_le_bytes());
    out[16..].copy_from_slice(&checksum(version, contents).to_le_bytes());
    out
}

/// Replaces the file `path` by one of these parts. It is durable on return.
pub(crate) fn replace(disk: &dyn Disk, path: &Path, parts: &mut [IoSlice<'_>]) -> io::Result<()> {
    let temp = temporary(path);
    let written = (|| {
        let mut file = disk.open(&temp, Access::Create)?;
        file.write_at(0, parts)?;
        file.sync()?;
        disk.rename(&temp, path)
    })();
    if written.is_err() {
        // Cleanup only; if it fails too, the next writer replaces the file.
        let _ = disk.remove(&temp);
    }
    written.and_then(|()| disk.sync_dir(folder(path))).map_err(named("replace", path))
}

/// Reads a small file; `None` if it does not exist. The contents are durable on return, even if the writer died
/// before it synced them: a power failure must not undo what a caller decides on them.
///
/// [`StoreError::Damaged`] if it is not what [`write_small`] wrote. A crash does not cause that.
pub fn read_small(disk: &dyn Disk, path: &Path) -> Result<Option<Vec<u8>>, StoreError> {
    let file = match disk.open(path, Access::Read) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        opened => opened.map_err(StoreError::io("open", path))?,
    };
    let size = file.size().map_err(StoreError::io("read", path))?;
    if size < PREFIX as u64 || size > (PREFIX + MAX_SMALL_BYTES) as u64 {
        let what = format!("it has {size} bytes; {PREFIX} to {} are possible", PREFIX + MAX_SMALL_BYTES);
        return Err(StoreError::damaged(path, 0, what));
    }
    let mut all = vec![0; size as usize];
    file.read_at(0, &mut all).map_err(StoreError::io("read", path))?;
    let contents = all.split_off(PREFIX);
    let mut prefix = all.as_slice();
    if !prefix.starts_with(&MAGIC) {
        return Err(StoreError::damaged(path, 0, "it does not begin as a small file of paraft does"));
    }
    prefix.advance(MAGIC.len());
    let (version, length, crc) = (prefix.get_u32_le(), prefix.get_u32_le(), prefix.get_u32_le());
    if crc != checksum(version, &contents) || length as usize != contents.len() {
        return Err(StoreError::damaged(path, 8, "its checksum does not fit its contents"));
    }
    // After the checksum: a flipped bit is damage, not another version.
    if version != VERSION {
        return Err(StoreError::Version { path: path.into(), found: version, supported: VERSION });
    }
    disk.sync_dir(folder(path)).map_err(StoreError::io("sync the folder of", path))?;
    Ok(Some(contents))
}
