//! Unpacked or parsed data, once per host: the first process that loads it writes the values to a file in the
//! user's cache, and all processes map that file ([`crate::values`]).
//!
//! ```text
//!  PARAFT_CACHE, or $XDG_CACHE_HOME/paraft, or ~/.cache/paraft
//!    lock                      held while a data set is made: the others wait and find it
//!    <name>.data               magic | length, description as JSON | labels, values of the training part, of the test part | XXH3
//! ```
//!
//! The name is a hash of the sources' paths, their file-system metadata (device, inode, length, time of the last
//! change) and the reader's options: a replaced source has another name. A file whose hash does not match is made
//! again. Files unused for 30 days are removed when another is made.
//!
//! Sources below 1 MiB need no file, and are kept in memory. The same holds for all data if the cache cannot be
//! written (`PARAFT_CACHE=` disables it): the job is the same, only each process holds a copy.

mod file;

use crate::{DataError, Split};
use file::{open, write};
use std::fs::{self, DirBuilder, File, TryLockError};
use std::io::{self, ErrorKind};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};
use xxhash_rust::xxh3::Xxh3;

/// Smaller sources are read by each process separately.
const SMALL: u64 = 1 << 20;
const MAGIC: &[u8; 8] = b"PARAFTD1";
const MAX_UNUSED_AGE: Duration = Duration::from_secs(30 * 24 * 60 * 60);

/// The folder of unpacked data.
#[derive(Clone, Debug)]
pub struct Cache {
    folder: Option<PathBuf>,
}

impl Cache {
    /// The user's cache, from the environment.
    pub fn of_user() -> Self {
        let var = |name| std::env::var_os(name);
        let folder = match var("PARAFT_CACHE") {
            Some(folder) => Some(PathBuf::from(folder)),
            None => {
                let home = || var("HOME").map(|h| Path::new(&h).join(".cache"));
                var("XDG_CACHE_HOME").map(PathBuf::from).or_else(home).map(|c| c.join("paraft"))
            }
        };
        Self { folder: folder.filter(|f| f.is_absolute()) }
    }

    /// A cache in this folder, which is created.
    pub fn at(folder: &Path) -> Self {
        Self { folder: Some(folder.to_path_buf()) }
    }

    /// No cache files: everything is kept in memory.
    pub fn none() -> Self {
        Self { folder: None }
    }

    /// The result of `read` on the sources, from a file if one exists or can be made. `how` names the reader's
    /// options.
    pub(crate) fn split(
        &self,
        sources: &[&Path],
        how: &str,
        read: impl FnOnce() -> Result<Split, DataError>,
    ) -> Result<Split, DataError> {
        let (Some(folder), Ok((name, bytes))) = (&self.folder, name_of(sources, how)) else { return read() };
        if bytes < SMALL {
            return read();
        }
        let path = folder.join(name).with_extension("data");
        if let Ok(split) = open(&path) {
            return Ok(split);
        }
        let lock = lock(folder);
        if lock.is_ok()
            && let Ok(split) = open(&path)
        {
            return Ok(split);
        }
        let split = read()?;
        // Without a file the data is still available.
        let made = lock.and_then(|_held| {
            clear(folder);
            write(&path, &split)?;
            open(&path)
        });
        Ok(made.unwrap_or(split))
    }
}

/// The name for these files and options, and the files' bytes.
fn name_of(sources: &[&Path], how: &str) -> io::Result<(String, u64)> {
    let (mut hash, mut bytes) = (Xxh3::new(), 0);
    hash.update(MAGIC);
    hash.update(how.as_bytes());
    for source in sources {
        let path = source.canonicalize()?;
        let meta = fs::metadata(&path)?;
        hash.update(path.as_os_str().as_bytes());
        for n in [meta.dev(), meta.ino(), meta.len(), meta.mtime() as u64, meta.mtime_nsec() as u64] {
            hash.update(&n.to_le_bytes());
        }
        bytes += meta.len();
    }
    Ok((format!("{:032x}", hash.digest128()), bytes))
}

/// How long to wait for another process to make a file. After that the data is read without a file.
const LOCK_TIMEOUT: Duration = Duration::from_secs(60);
/// After this wait the user is notified.
const WORD: Duration = Duration::from_secs(3);

/// Waits until no other process makes a file. None does until the result is dropped.
fn lock(folder: &Path) -> io::Result<File> {
    DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
    let lock = File::options().create(true).truncate(false).write(true).open(folder.join("lock"))?;
    let began = Instant::now();
    let mut said = false;
    loop {
        match lock.try_lock() {
            Ok(()) => return Ok(lock),
            Err(TryLockError::Error(e)) => return Err(e),
            Err(TryLockError::WouldBlock) if began.elapsed() >= LOCK_TIMEOUT => {
                return Err(ErrorKind::TimedOut.into());
            }
            Err(TryLockError::WouldBlock) => {}
        }
        if began.elapsed() >= WORD && !std::mem::replace(&mut said, true) {
            tracing::warn!(folder = %folder.display(), "waiting for another process that reads data into the cache");
        }
        thread::sleep(Duration::from_millis(20));
    }
}

/// Removes files that are long unused, and the leftovers of killed processes.
fn clear(folder: &Path) {
    let Ok(entries) = fs::read_dir(folder) else { return };
    for entry in entries.flatten() {
        let ours = entry.path().extension().is_some_and(|e| e == "data" || e == "part");
        let used = entry.metadata().and_then(|m| m.modified());
        if ours && used.is_ok_and(|t| t.elapsed().is_ok_and(|age| age > MAX_UNUSED_AGE)) {
            let _ = fs::remove_file(entry.path()); // another process may have been faster
        }
    }
}

#[cfg(test)]
#[path = "cache_tests.rs"]
mod tests;
