//! The number of workers that train in a run: fewer while others need the machine, later all of them
//! again.
//!
//! The run's launcher keeps a small file in its folder and polls it, as it does with faults: any
//! process that may write there may change the number.

use crate::{failure::Failure, files::put};
use nix::{errno::Errno, sys::signal::kill, unistd::Pid};
use paraft_worker::{Job, exit};
use serde::{Deserialize, Serialize};
use std::{
    fs, io,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

/// The file, in the run's folder.
const FILE: &str = "workers.json";
/// The poll interval of the file.
const POLL_INTERVAL: Duration = Duration::from_millis(100);
/// The maximal length of the file.
const MAX_BYTES: u64 = 1024;

/// The content of the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Scale {
    /// The requested number of workers.
    workers: u32,
    /// The number of requests so far.
    said: u64,
    /// The number of workers in the job.
    most: u32,
    /// The process that polls the file.
    launcher: i32,
}

impl Scale {
    /// Never blocks: the caller may be a server.
    fn read(dir: &Path) -> io::Result<Self> {
        let path = dir.join(FILE);
        let about = fs::symlink_metadata(&path)?;
        if !about.is_file() || about.len() > MAX_BYTES {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "it is no file of a launcher's"));
        }
        Ok(serde_json::from_slice(&fs::read(path)?)?)
    }

    fn write(self, dir: &Path) -> io::Result<()> {
        put(&dir.join(FILE), &serde_json::to_string(&self)?)
    }

    fn is_followed(self) -> bool {
        self.launcher > 0 && kill(Pid::from_raw(self.launcher), None) != Err(Errno::ESRCH)
    }
}

/// The maximal number of workers of the run in this folder; `None`: no launcher is running that could
/// start and end them.
pub fn most(dir: &Path) -> Option<u32> {
    Scale::read(dir).ok().filter(|s| s.is_followed()).map(|s| s.most)
}

/// Requests this number of workers from the launcher of the run in this folder.
///
/// # Errors
///
/// No launcher is running, or the number is not from 1 to that of the job.
pub fn set(dir: &Path, workers: u32) -> Result<(), Failure> {
    if !dir.is_dir() {
        return Err(Failure::new(exit::CONFIG, format!("{}: no such folder", dir.display()))
            .help("give the folder of a run"));
    }
    let Some(scale) = Scale::read(dir).ok().filter(|s| s.is_followed()) else {
        let what = format!("{}: no launcher follows how many workers its run has", dir.display());
        return Err(Failure::new(exit::UNAVAILABLE, what).help(
            "it is for a run of `paraft train` that goes on, on this machine, of two workers or more; not for scripts and groups of ranks",
        ));
    };
    if !(1..=scale.most).contains(&workers) {
        let what = format!("{workers} workers: the job has {}, and one at least must train", scale.most);
        return Err(Failure::new(exit::USAGE, what)
            .help("start a job with as many workers as it may ever have, and lower the number"));
    }
    Scale { workers, said: scale.said + 1, ..scale }
        .write(dir)
        .map_err(|e| Failure::write(&dir.join(FILE), e))
}

/// The launcher's side; drop removes the file.
#[derive(Debug)]
pub(crate) struct Wanted {
    dir: PathBuf,
    looked: Option<Instant>,
    /// The number, and the number of requests.
    now: (u32, u64),
}

impl Wanted {
    /// For a run that starts with all the job's workers; `None`: their number cannot change.
    pub(crate) fn of(job: &Job, dir: &Path) -> Option<Self> {
        let workers = job.train.workers;
        // A leftover of an earlier run in this folder.
        let _ = fs::remove_file(dir.join(FILE));
        if !job.cluster.script.is_empty() || job.ranks_of_worker() > 1 || workers < 2 {
            return None;
        }
        let launcher = std::process::id() as i32;
        match (Scale { workers, said: 0, most: workers, launcher }).write(dir) {
            Ok(()) => Some(Self { dir: dir.to_path_buf(), looked: None, now: (workers, 0) }),
            Err(e) => {
                eprintln!(
                    "warning: {}: {e}; the run has the workers that it begins with",
                    dir.join(FILE).display()
                );
                None
            }
        }
    }

    /// The requested number, and the number of requests.
    pub(crate) fn now(&mut self) -> (u32, u64) {
        if self.looked.is_none_or(|at| at.elapsed() >= POLL_INTERVAL) {
            self.looked = Some(Instant::now());
            // A missing or invalid file changes nothing.
            let read = Scale::read(&self.dir).ok().filter(|s| s.workers > 0).map(|s| (s.workers, s.said));
            self.now = read.unwrap_or(self.now);
        }
        self.now
    }
}

impl Drop for Wanted {
    fn drop(&mut self) {
        let _ = fs::remove_file(self.dir.join(FILE));
    }
}

#[cfg(test)]
#[path = "scale_tests.rs"]
mod tests;
