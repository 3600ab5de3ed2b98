//! The record of a run whose workers come one by one, by hand or by an engine: whoever of them comes first begins it, the others and
//! those that come back go on in it.
//!
//! What tells a run that goes on from one that begins again in the folder is [`Run::founding`]: the servers draw a new one whenever a job
//! begins, and who joins later hears the same. So it does not matter who asks, when, or with which flags.

use crate::{Event, METRICS_FILE, MetricsWriter, RecordError, Run};
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{BufRead, BufReader, ErrorKind, Read};
use std::path::{Path, PathBuf};

/// Locked while a launcher has a run's folder. The lock goes with the process, however that ends; the file stays and says
/// nothing by itself.
pub const LAUNCHER_LOCK: &str = "launcher.lock";

/// A `run` line is shorter.
const MAX_FIRST_LINE: u64 = 1 << 20;

/// Makes a run's folder where there is none.
pub fn make_folder(dir: &Path) -> Result<(), RecordError> {
    fs::create_dir_all(dir).map_err(|source| RecordError::Folder { path: dir.to_path_buf(), source })
}

/// Gives the record in `dir`, if there is one, the first free name `metrics.N.jsonl`: where it is now.
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

/// Opens the record in `dir` for a worker that has joined the job of which `run` tells, and begins it where this is the first one there.
/// The record of an earlier beginning is set aside. A launcher's is the launcher's business.
pub fn join(dir: &Path, run: &Run) -> Result<MetricsWriter, RecordError> {
    // One at a time looks and begins, until this is dropped. Where a file system has no locks each process has a folder of its own.
    let turn = File::open(dir).map_err(RecordError::io(dir))?;
    let _ = turn.lock();
    let record = dir.join(METRICS_FILE);
    let begins = match first_line(&record)? {
        FirstLine::None => true,
        FirstLine::Run(there) if of_another(&there, run) => true,
        FirstLine::Run(there) if !there.founding.is_empty() => false,
        // A launcher's; or from before foundings were recorded.
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

/// Whether a launcher is known to have the folder; where that can't be told none has.
pub fn is_held(dir: &Path) -> bool {
    held(dir) == Some(true)
}

/// Whether a launcher has the folder; `None`: nobody can know.
fn held(dir: &Path) -> Option<bool> {
    // NFS locks only what is open for writing.
    match OpenOptions::new().write(true).open(dir.join(LAUNCHER_LOCK)).map(|file| file.try_lock()) {
        Err(e) => (e.kind() == ErrorKind::NotFound).then_some(false),
        Ok(Ok(())) => Some(false),
        Ok(Err(TryLockError::WouldBlock)) => Some(true),
        Ok(Err(TryLockError::Error(_))) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Train, read_events};
    use paraft_common::Step;

    fn run(founding: &str, resumed: Option<u64>) -> Run {
        Run {
            founding: founding.into(),
            batch: 4,
            workers: 2,
            resumed_step: resumed.map(Step),
            ..Run::default()
        }
    }

    fn train(samples: u64) -> Event {
        Event::Train(Train { samples, ..Train::default() })
    }

    /// The records in the folder, the present one first: each its founding, if it says one, and its number of lines.
    fn records(dir: &Path) -> Vec<(String, usize)> {
        let all = [METRICS_FILE, "metrics.1.jsonl", "metrics.2.jsonl"];
        let said = |name: &str| {
            let events = read_events(dir.join(name)).unwrap();
            let founding = events.iter().find_map(|e| match e {
                Event::Run(r) => Some(r.founding.clone()),
                _ => None,
            });
            (founding.unwrap_or_default(), events.len())
        };
        all.into_iter().filter(|name| dir.join(name).exists()).map(said).collect()
    }

    #[test]
    fn of_workers_that_come_at_any_time_one_begins_the_record() {
        let folder = tempfile::tempdir().unwrap();
        let dir = folder.path();
        let worker = |founding: &str, resumed| join(dir, &run(founding, resumed)).unwrap().write(&train(1));
        let come = |founding: &str, resumed| {
            std::thread::scope(|s| {
                (0..8).for_each(|_| _ = s.spawn(|| worker(founding, resumed).unwrap()));
            });
        };
        let one = |founding: &str, lines| (founding.to_string(), lines);
        come("a", None);
        assert_eq!(records(dir), [one("a", 9)]);
        // The servers are new: the run begins again at a checkpoint.
        come("b", Some(10));
        assert_eq!(records(dir), [one("b", 9), one("a", 9)]);
        // Who comes back goes on, whatever it was started with.
        come("b", Some(10));
        come("b", None);
        assert_eq!(records(dir), [one("b", 25), one("a", 9)]);
        // A fleet has lost its state, and there was no checkpoint.
        come("c", None);
        assert_eq!(records(dir), [one("c", 9), one("a", 9), one("b", 25)]);
    }

    #[test]
    fn a_record_without_bootstrap_is_replaced_without_a_launcher() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path();
        let write = |event| MetricsWriter::append(dir.join(METRICS_FILE)).unwrap().write(&event).unwrap();
        write(Event::Run(Run::default()));
        let lock = File::create(dir.join(LAUNCHER_LOCK)).unwrap();
        lock.try_lock().unwrap();
        join(dir, &run("a", Some(10))).unwrap();
        assert_eq!(records(dir), [(String::new(), 1)], "the launcher lives");
        drop(lock);
        join(dir, &run("a", None)).unwrap();
        assert_eq!(records(dir), [(String::new(), 1)], "nobody begins again");
        join(dir, &run("a", Some(10))).unwrap();
        assert_eq!(records(dir), [("a".into(), 1), (String::new(), 1)], "the launcher was killed");
        std::fs::remove_file(dir.join(METRICS_FILE)).unwrap();
        write(train(1));
        join(dir, &run("b", Some(10))).unwrap();
        assert_eq!(records(dir).len(), 3, "of workers that wrote no `run` line");
    }
}
