//! What the processes of one fleet share that an engine has started: how they find each other, and what they have agreed on before
//! there are servers to agree on anything. Two ways: the run's folder on a shared file system ([`Folder`]), or names that are known
//! beforehand (`--servers`, DNS), which need nothing of this module but a server's own [`Lock`].
//!
//! What it is not: the fleet's agreement, which is the control group's. Nothing here is read once a server is in its fleet, but for
//! addresses by those that look for it.

mod folder;
mod founding;
mod lock;
mod own;
mod worker;

pub use folder::{Address, Ended, Folder};
pub use founding::{Answering, Way};
pub use lock::Lock;
pub use own::own_host;
pub use worker::Worker;

use std::{
    fs::{self, File},
    hash::{BuildHasher, RandomState},
    io::{self, Write},
    path::{Path, PathBuf},
};

/// A file that only this call writes, with this text, whole and durable: to be renamed or linked.
fn written(dir: &Path, text: &str) -> io::Result<PathBuf> {
    let path = dir.join(format!(".new-{:016x}", token()));
    let mut file = File::create_new(&path)?;
    file.write_all(text.as_bytes())
        .and_then(|()| file.sync_all())
        .inspect_err(|_| _ = fs::remove_file(&path))?;
    Ok(path)
}

/// Puts a file with this text at `path`, in one piece; it replaces what is there.
pub(crate) fn put(path: &Path, text: &str) -> io::Result<()> {
    let dir = path.parent().unwrap_or(Path::new("."));
    let new = written(dir, text)?;
    fs::rename(&new, path).inspect_err(|_| _ = fs::remove_file(&new))?;
    File::open(dir)?.sync_all()
}

/// Puts a file with this text at `path` unless there is one, in one piece, so that of many at once one wins and nobody reads half of
/// it; what is there afterwards.
pub(crate) fn put_once(path: &Path, text: &str) -> io::Result<String> {
    let dir = path.parent().unwrap_or(Path::new("."));
    let new = written(dir, text)?;
    let linked = fs::hard_link(&new, path);
    let _ = fs::remove_file(&new);
    match linked {
        Ok(()) => File::open(dir)?.sync_all()?,
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {}
        Err(e) => return Err(e),
    }
    fs::read_to_string(path)
}

/// What a file has; `None` where there is none.
pub(crate) fn read(path: &Path) -> io::Result<Option<String>> {
    match fs::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(e),
    }
}

/// A number that nobody else has.
fn token() -> u64 {
    RandomState::new().hash_one((std::process::id(), std::time::SystemTime::now()))
}
