//! Files and folders that are there whole or not at all, also after a power failure.

use paraft_fleet::failure::Failure;
use paraft_worker::exit;
use std::{
    fs::{self, File},
    io,
    path::{Path, PathBuf},
};

/// How the names of unfinished folders begin.
const TEMPORARY: &str = ".tmp-";
/// Held by the process that writes into a folder.
const LOCK: &str = ".paraft-lock";

/// A file or folder that cannot be written or read.
pub fn failed(path: &Path) -> impl FnOnce(io::Error) -> Failure + '_ {
    move |e| Failure::new(exit::IO, format!("{}: {e}", path.display()))
}

/// Brings a folder's names to the disk.
///
/// # Errors
/// The disk fails.
pub fn sync(folder: &Path) -> Result<(), Failure> {
    File::open(folder).and_then(|folder| folder.sync_all()).map_err(failed(folder))
}

/// Writes a small file: under a temporary name, to the disk, then renamed.
///
/// # Errors
/// The disk fails.
pub fn write(path: &Path, text: &[u8]) -> Result<(), Failure> {
    let part = temporary(path);
    let written = fs::write(&part, text)
        .and_then(|()| File::open(&part)?.sync_all())
        .and_then(|()| fs::rename(&part, path));
    written.map_err(failed(path))
}

/// Copies a file likewise. One with the same bytes is left as it is.
///
/// # Errors
/// The file cannot be read, or the disk fails.
pub fn copy(from: &Path, to: &Path) -> Result<(), Failure> {
    let part = temporary(to);
    fs::copy(from, &part).map_err(failed(from))?;
    let written = File::open(&part).and_then(|part| part.sync_all()).and_then(|()| fs::rename(&part, to));
    written.map_err(failed(to))
}

fn temporary(path: &Path) -> PathBuf {
    let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    path.with_file_name(format!("{TEMPORARY}{name}"))
}

/// A folder into which one process writes folders.
#[derive(Debug)]
pub struct Shelf {
    path: PathBuf,
    _lock: File,
}

impl Shelf {
    /// Makes the folder unless it is there, and removes what a process left that was killed.
    ///
    /// # Errors
    /// Another process writes into it, or the disk fails.
    pub fn open(path: &Path) -> Result<Self, Failure> {
        fs::create_dir_all(path).map_err(failed(path))?;
        let path = fs::canonicalize(path).map_err(failed(path))?;
        let lock = File::options().create(true).truncate(false).write(true).open(path.join(LOCK));
        let lock = lock.map_err(failed(&path))?;
        if lock.try_lock().is_err() {
            let why = format!("{}: another process writes into this folder", path.display());
            return Err(Failure::new(exit::CONFIG, why).help("end it first, or give another folder"));
        }
        let shelf = Self { path, _lock: lock };
        for name in shelf.names()?.iter().filter(|name| name.starts_with(TEMPORARY)) {
            let left = shelf.path.join(name);
            let removed = if left.is_dir() { fs::remove_dir_all(&left) } else { fs::remove_file(&left) };
            removed.map_err(failed(&left))?;
        }
        Ok(shelf)
    }

    /// Where it is: without links, from the root.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What is in it, sorted.
    ///
    /// # Errors
    /// The disk fails.
    pub fn names(&self) -> Result<Vec<String>, Failure> {
        let entries = fs::read_dir(&self.path).map_err(failed(&self.path))?;
        let mut names: Vec<_> =
            entries.flatten().map(|e| e.file_name().to_string_lossy().into_owned()).collect();
        names.sort();
        Ok(names)
    }

    /// Makes a folder: `fill` writes into one with a temporary name, which is renamed when it is on the disk.
    ///
    /// # Errors
    /// `fill` fails, `name` is taken, or the disk fails.
    pub fn make(
        &self,
        name: &str,
        fill: impl FnOnce(&Path) -> Result<(), Failure>,
    ) -> Result<PathBuf, Failure> {
        let (part, whole) = (self.path.join(format!("{TEMPORARY}{name}")), self.path.join(name));
        if part.exists() {
            fs::remove_dir_all(&part).map_err(failed(&part))?;
        }
        fs::create_dir(&part).map_err(failed(&part))?;
        fill(&part)?;
        sync(&part)?;
        fs::rename(&part, &whole).map_err(failed(&whole))?;
        sync(&self.path)?;
        Ok(whole)
    }

    /// Removes a folder, so that it is never seen in part.
    ///
    /// # Errors
    /// The disk fails.
    pub fn remove(&self, name: &str) -> Result<(), Failure> {
        let (whole, part) = (self.path.join(name), self.path.join(format!("{TEMPORARY}old-{name}")));
        fs::rename(&whole, &part).map_err(failed(&whole))?;
        fs::remove_dir_all(&part).map_err(failed(&part))
    }
}
