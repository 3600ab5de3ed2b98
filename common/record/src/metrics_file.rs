//! Writing, reading and following `metrics.jsonl`.
//!
//! Several processes append to one file. It works without a lock because a line goes out in one `write` to a
//! file opened for appending, which Linux places at the end in one piece on a local file system. NFS does not
//! promise that: there, give each process its own folder.

use crate::{Event, RecordError};
use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

/// The record's name in a run's folder.
pub const METRICS_FILE: &str = "metrics.jsonl";

/// Appends events to a file that other processes append to as well.
#[derive(Debug)]
pub struct MetricsWriter {
    path: PathBuf,
    file: File,
}

impl MetricsWriter {
    /// Opens (or makes) the file at `path` for appending. Its folder must exist.
    pub fn append(path: impl AsRef<Path>) -> Result<Self, RecordError> {
        let path = path.as_ref().to_path_buf();
        let file =
            OpenOptions::new().append(true).create(true).open(&path).map_err(RecordError::io(&path))?;
        Ok(Self { path, file })
    }

    /// Appends one line. When this returns, the line is in the file (not necessarily on the disk): a crash of
    /// this process no longer loses it.
    pub fn write(&mut self, event: &Event) -> Result<(), RecordError> {
        let mut line = serde_json::to_vec(event).map_err(RecordError::Unwritable)?;
        line.push(b'\n');
        // Not write_all: the second half of a line could follow another process's line.
        let written = loop {
            match self.file.write(&line) {
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                other => break other.map_err(RecordError::io(&self.path))?,
            }
        };
        if written < line.len() {
            let what = format!("wrote {written} of a line's {} bytes; is the disk full?", line.len());
            return Err(RecordError::io(&self.path)(std::io::Error::new(ErrorKind::StorageFull, what)));
        }
        self.file.flush().map_err(RecordError::io(&self.path))
    }
}

/// Follows a growing file: each poll returns the events of the lines completed since the poll before.
#[derive(Debug)]
pub struct Tail {
    path: PathBuf,
    read: u64,
    lines: u64,
    partial: Vec<u8>,
}

impl Tail {
    /// Follows `path` from its start. The file may not be there yet.
    pub fn new(path: impl AsRef<Path>) -> Self {
        Self { path: path.as_ref().to_path_buf(), read: 0, lines: 0, partial: Vec::new() }
    }

    /// The events of all newly completed lines; none when the file is not there yet. A last line without its
    /// line end waits for the next poll. A damaged line is an error, once: the next poll continues with the
    /// next line (events between the last poll and the damaged line are not returned).
    pub fn poll(&mut self) -> Result<Vec<Event>, RecordError> {
        match File::open(&self.path) {
            Ok(file) => self.read_from(file),
            Err(e) if e.kind() == ErrorKind::NotFound && self.read == 0 => Ok(Vec::new()),
            Err(e) => Err(RecordError::io(&self.path)(e)),
        }
    }

    fn read_from(&mut self, mut file: File) -> Result<Vec<Event>, RecordError> {
        let now = file.metadata().map_err(RecordError::io(&self.path))?.len();
        if now < self.read {
            return Err(RecordError::Shrunk { path: self.path.clone(), read: self.read, now });
        }
        file.seek(SeekFrom::Start(self.read)).map_err(RecordError::io(&self.path))?;
        self.read += file.read_to_end(&mut self.partial).map_err(RecordError::io(&self.path))? as u64;

        let complete = self.partial.iter().rposition(|&b| b == b'\n').map_or(0, |end| end + 1);
        let rest = self.partial.split_off(complete);
        let lines = std::mem::replace(&mut self.partial, rest);
        let mut events = Vec::new();
        let mut damaged = None;
        for line in lines.split_inclusive(|&b| b == b'\n') {
            self.lines += 1;
            if line.trim_ascii().is_empty() {
                continue;
            }
            match serde_json::from_slice(line) {
                // A later version's kind.
                Ok(Event::Unknown) => {}
                Ok(event) => events.push(event),
                Err(e) => damaged = damaged.or(Some((self.lines, e.to_string()))),
            }
        }
        match damaged {
            None => Ok(events),
            Some((line, reason)) => Err(RecordError::DamagedLine { path: self.path.clone(), line, reason }),
        }
    }
}

/// All events of the file at `path`, which must exist. A last line without its line end is left out: its
/// writer may still be at it.
pub fn read_events(path: impl AsRef<Path>) -> Result<Vec<Event>, RecordError> {
    let path = path.as_ref();
    let file = File::open(path).map_err(RecordError::io(path))?;
    Tail::new(path).read_from(file)
}

#[cfg(test)]
#[path = "metrics_file_tests.rs"]
mod tests;
