//! The files of a run's folder, the time that is written in them, and how one is put where others may read it at once.

use std::{
    fs::{self, File},
    hash::{BuildHasher, RandomState},
    io::{self, Write},
    path::{Path, PathBuf},
    time::{SystemTime, UNIX_EPOCH},
};

/// The job as it was resolved, in the run's folder.
pub const JOB_FILE: &str = "job.toml";
/// Where a fleet's servers are, in the folder of its run: host:port, with commas between them.
pub const SERVERS_FILE: &str = "servers";

/// Unix time, as lines of the record have it.
pub(crate) fn wall() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |d| d.as_secs_f64())
}

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
pub(crate) fn token() -> u64 {
    RandomState::new().hash_one((std::process::id(), SystemTime::now()))
}
