//! The files of a run's folder, their timestamps, and atomic writes.

use std::{
    fs::{self, File},
    hash::{BuildHasher, RandomState},
    io::{self, Write},
    path::{Path, PathBuf},
    time::{SystemTime, UNIX_EPOCH},
};

/// The resolved job, in the run's folder.
pub const JOB_FILE: &str = "job.toml";
/// The servers' addresses, in the run's folder: host:port, comma-separated.
pub const SERVERS_FILE: &str = "servers";

/// The report, in the run's folder.
pub const REPORT_FILE: &str = "report.html";

/// The folder of a server's identity and logs.
pub fn server_data(run_dir: &Path, id: u32) -> PathBuf {
    run_dir.join(format!("server-{id}"))
}

/// The log file of a local server; it remains after the run.
pub fn server_log(run_dir: &Path, id: u32) -> PathBuf {
    run_dir.join(format!("server-{id}.log"))
}

/// Unix time, as in the record.
pub(crate) fn wall() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |d| d.as_secs_f64())
}

/// Writes a durable temporary file with this text, to be renamed or linked.
fn written(dir: &Path, text: &str) -> io::Result<PathBuf> {
    let path = dir.join(format!(".new-{:016x}", token()));
    let mut file = File::create_new(&path)?;
    file.write_all(text.as_bytes())
        .and_then(|()| file.sync_all())
        .inspect_err(|_| _ = fs::remove_file(&path))?;
    Ok(path)
}

/// Writes a file atomically; it replaces an existing one.
pub(crate) fn put(path: &Path, text: &str) -> io::Result<()> {
    let dir = path.parent().unwrap_or(Path::new("."));
    let new = written(dir, text)?;
    fs::rename(&new, path).inspect_err(|_| _ = fs::remove_file(&new))?;
    File::open(dir)?.sync_all()
}

/// Writes a file atomically unless it exists. Of concurrent writers one wins, and no reader sees a
/// part. Returns the final content.
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

/// The content of a file; `None` if it does not exist.
pub(crate) fn read(path: &Path) -> io::Result<Option<String>> {
    match fs::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(e),
    }
}

/// A random number.
pub(crate) fn token() -> u64 {
    RandomState::new().hash_one((std::process::id(), SystemTime::now()))
}
