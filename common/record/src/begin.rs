//! The record of a run whose workers start one by one, by hand or by an engine. The first worker starts
//! the record; other workers and restarted ones append to it.
//!
//! [`Run::founding`] tells a continued run from a new one in the same folder. The servers draw a new
//! value at each start of a job, and every worker that joins receives it. So the order, the time and
//! the flags of the workers do not matter.

use crate::{Event, METRICS_FILE, MetricsWriter, RecordError, Run};
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{BufRead, BufReader, ErrorKind, Read};
use std::path::{Path, PathBuf};

/// Locked while a launcher holds a run's folder. The kernel releases the lock with the process; the
/// file itself remains and has no meaning.
pub const LAUNCHER_LOCK: &str = "launcher.lock";

/// Maximal bytes of a `run` line.
const MAX_FIRST_LINE: u64 = 1 << 20;

/// Creates a run's folder if it is missing.
pub fn make_folder(dir: &Path) -> Result<(), RecordError> {
    fs::create_dir_all(dir).map_err(|source| RecordError::Folder { path: dir.to_path_buf(), source })
}

/// Renames the record in `dir`, if any, to the first free name `metrics.N.jsonl`; returns the new path.
pub fn set_aside(dir: &Path) -> Result<Option<PathBuf>, RecordError> {
    let record = dir.join(METRICS_FILE);
    if !record.exists() {
        return Ok(None);
    }
    let name = |n| dir.join(format!("metrics.{n}.jsonl"));
    let free = (1u64..).map(name).find(|p| !p.exists()).unwrap_or_else(|| record.with_extension("old"));
    fs::rename(&record, &free).map_err(RecordError::io(&free))?;
    Ok(Some(free))
}

/// Opens the record in `dir` for a worker that has joined the job in `run`. The first worker starts the
/// record, and sets an earlier one aside. A launcher's record is left to the launcher.
pub fn join(dir: &Path, run: &Run) -> Result<MetricsWriter, RecordError> {
    // Serialises the check and the start, until drop. On a file system without locks, each process has
    // its own folder.
    let turn = File::open(dir).map_err(RecordError::io(dir))?;
    let _ = turn.lock();
    let record = dir.join(METRICS_FILE);
    let begins = match first_line(&record)? {
        FirstLine::None => true,
        FirstLine::Run(there) if of_another(&there, run) => true,
        FirstLine::Run(there) if !there.founding.is_empty() => false,
        // A launcher's record, or one from before this field existed.
        FirstLine::Run(_) | FirstLine::Other => run.resumed_step.is_some() && held(dir) == Some(false),
    };
    if !begins || run.founding.is_empty() {
        return MetricsWriter::append(record);
    }
    if fs::metadata(&record).is_ok_and(|m| m.len() > 0) {
        set_aside(dir)?;
    }
    let mut writer = MetricsWriter::append(record)?;
    writer.write(&Event::Run(run.clone()))?;
    Ok(writer)
}

fn of_another(there: &Run, run: &Run) -> bool {
    !there.founding.is_empty() && there.founding != run.founding
}

enum FirstLine {
    None,
    Run(Box<Run>),
    Other,
}

fn first_line(record: &Path) -> Result<FirstLine, RecordError> {
    let file = match File::open(record) {
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(FirstLine::None),
        opened => opened.map_err(RecordError::io(record))?,
    };
    let mut line = Vec::new();
    let mut start = BufReader::new(file).take(MAX_FIRST_LINE);
    start.read_until(b'\n', &mut line).map_err(RecordError::io(record))?;
    Ok(match serde_json::from_slice(&line) {
        _ if line.is_empty() => FirstLine::None,
        Ok(Event::Run(run)) => FirstLine::Run(Box::new(run)),
        _ => FirstLine::Other,
    })
}

/// Whether a launcher is known to hold the folder; false if that is unknown.
pub fn is_held(dir: &Path) -> bool {
    held(dir) == Some(true)
}

/// Whether a launcher holds the folder; `None`: unknown.
fn held(dir: &Path) -> Option<bool> {
    // NFS locks only files that are open for writing.
    match OpenOptions::new().write(true).open(dir.join(LAUNCHER_LOCK)).map(|file| file.try_lock()) {
        Err(e) => (e.kind() == ErrorKind::NotFound).then_some(false),
        Ok(Ok(())) => Some(false),
        Ok(Err(TryLockError::WouldBlock)) => Some(true),
        Ok(Err(TryLockError::Error(_))) => None,
    }
}

#[cfg(test)]
#[path = "begin_tests.rs"]
mod tests;
