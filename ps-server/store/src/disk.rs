//! The file system, or a substitute with injected faults ([`crate::faulty`]).
//!
//! The trait has only what the store needs. Durable are: the contents of a file after [`DiskFile::sync`], and its
//! name after [`Disk::sync_dir`] of its folder; nothing else.

use nix::fcntl::{FallocateFlags, fallocate};
use std::{
    fmt::Debug,
    fs::{self, File, OpenOptions, TryLockError},
    io::{self, IoSlice, Seek, SeekFrom, Write},
    os::unix::fs::{FileExt, OpenOptionsExt},
    path::Path,
};

/// How a file is opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Read an existing file.
    Read,
    /// Read and write an existing file; its contents stay.
    Write,
    /// Read and write an empty file; replaces an existing one.
    Create,
    /// Read and write a file, created if missing and private to its owner; its contents stay.
    Append,
}

/// A file system.
pub trait Disk: Debug + Send + Sync {
    /// Creates `dir` and its missing parents. They are durable on return.
    fn create_dir_all(&self, dir: &Path) -> io::Result<()>;

    /// Names in `dir`, unordered. Omits names that are not UTF-8: the store writes none.
    fn list(&self, dir: &Path) -> io::Result<Vec<String>>;

    /// Opens a file.
    fn open(&self, path: &Path, access: Access) -> io::Result<Box<dyn DiskFile>>;

    /// Renames a file, replacing one with the new name. At any moment, also after a crash, `to` names the complete
    /// old file or the complete new one.
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;

    /// Removes a file.
    fn remove(&self, path: &Path) -> io::Result<()>;

    /// Removes a folder and its content. After an error any part of it may be gone.
    fn remove_dir_all(&self, dir: &Path) -> io::Result<()>;

    /// Makes name changes in `dir` durable: added, renamed and removed names.
    fn sync_dir(&self, dir: &Path) -> io::Result<()>;

    /// Takes the lock of the file `path`, creating it if missing; released when the result is dropped or the
    /// process ends. `ErrorKind::WouldBlock`: it is held.
    fn lock(&self, path: &Path) -> io::Result<DiskLock>;
}

/// Holds a lock until it is dropped.
pub type DiskLock = Box<dyn Debug + Send + Sync>;

/// An open file. One user at a time; offsets and sizes in bytes.
pub trait DiskFile: Debug + Send {
    /// The size of the file.
    fn size(&self) -> io::Result<u64>;

    /// Fills `into` from `offset`; `ErrorKind::UnexpectedEof` if the file is too short.
    fn read_at(&self, offset: u64, into: &mut [u8]) -> io::Result<()>;

    /// Writes all `parts` in order, from `offset`. After an error any part of them may be written.
    fn write_at(&mut self, offset: u64, parts: &mut [IoSlice<'_>]) -> io::Result<()>;

    /// Truncates the file, or extends it with zeros.
    fn set_len(&mut self, size: u64) -> io::Result<()>;

    /// Reserves space so that the file has at least `size` bytes; new bytes read as zeros. A file system without
    /// support returns an error and leaves the file unchanged.
    fn allocate(&mut self, size: u64) -> io::Result<()>;

    /// Returns when contents and size are durable. After an error the durable content is unknown: stop writing.
    fn sync(&mut self) -> io::Result<()>;
}

/// The file system of this machine.
#[derive(Clone, Copy, Debug, Default)]
pub struct RealDisk;

impl Disk for RealDisk {
    fn create_dir_all(&self, dir: &Path) -> io::Result<()> {
        if dir.as_os_str().is_empty() || dir.is_dir() {
            return Ok(());
        }
        let above = dir.parent().unwrap_or(Path::new(""));
        self.create_dir_all(above)?;
        match fs::create_dir(dir) {
            Err(e) if e.kind() != io::ErrorKind::AlreadyExists || !dir.is_dir() => return Err(e),
            _ => {}
        }
        self.sync_dir(above)
    }

    fn list(&self, dir: &Path) -> io::Result<Vec<String>> {
        let names = fs::read_dir(dir)?.map(|entry| entry.map(|e| e.file_name().into_string().ok()));
        names.filter_map(Result::transpose).collect()
    }

    fn open(&self, path: &Path, access: Access) -> io::Result<Box<dyn DiskFile>> {
        let file = match access {
            Access::Read => File::open(path)?,
            Access::Write => OpenOptions::new().read(true).write(true).open(path)?,
            Access::Create => {
                OpenOptions::new().read(true).write(true).create(true).truncate(true).open(path)?
            }
            Access::Append => {
                let mut how = OpenOptions::new();
                how.read(true).write(true).create(true).truncate(false).mode(0o600).open(path)?
            }
        };
        Ok(Box::new(RealFile { file, cursor: 0 }))
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        fs::rename(from, to)
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        fs::remove_file(path)
    }

    fn remove_dir_all(&self, dir: &Path) -> io::Result<()> {
        fs::remove_dir_all(dir)
    }

    fn sync_dir(&self, dir: &Path) -> io::Result<()> {
        let dir = if dir.as_os_str().is_empty() { Path::new(".") } else { dir };
        File::open(dir)?.sync_all()
    }

    fn lock(&self, path: &Path) -> io::Result<DiskLock> {
        let file = OpenOptions::new().create(true).truncate(false).write(true).open(path)?;
        match file.try_lock() {
            Ok(()) => Ok(Box::new(file)),
            Err(TryLockError::WouldBlock) => Err(io::ErrorKind::WouldBlock.into()),
            Err(TryLockError::Error(e)) => Err(e),
        }
    }
}

#[derive(Debug)]
struct RealFile {
    file: File,
    /// The default position of the next write: appending needs no seek.
    cursor: u64,
}

impl DiskFile for RealFile {
    fn size(&self) -> io::Result<u64> {
        Ok(self.file.metadata()?.len())
    }

    fn read_at(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        self.file.read_exact_at(into, offset)
    }

    fn write_at(&mut self, offset: u64, mut parts: &mut [IoSlice<'_>]) -> io::Result<()> {
        if self.cursor != offset {
            self.file.seek(SeekFrom::Start(offset))?;
            self.cursor = offset;
        }
        IoSlice::advance_slices(&mut parts, 0); // drops empty parts: a write of 0 bytes is an error below
        while !parts.is_empty() {
            match self.file.write_vectored(parts) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(n) => {
                    self.cursor += n as u64;
                    IoSlice::advance_slices(&mut parts, n);
                }
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
        Ok(())
    }

    fn set_len(&mut self, size: u64) -> io::Result<()> {
        self.file.set_len(size)
    }

    fn allocate(&mut self, size: u64) -> io::Result<()> {
        let size = i64::try_from(size).map_err(|_| io::ErrorKind::InvalidInput)?;
        Ok(fallocate(&self.file, FallocateFlags::empty(), 0, size)?)
    }

    fn sync(&mut self) -> io::Result<()> {
        // fdatasync includes the size; it omits the times, which the store does not read.
        self.file.sync_data()
    }
}
