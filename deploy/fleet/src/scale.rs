//! How many workers of a run train: fewer while others need the machine, later again as many as its job has.
//!
//! The run's launcher keeps a small file in its folder and follows it, as it does with faults: whoever may write there may change the
//! number.

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
/// How often it is read.
const LOOK: Duration = Duration::from_millis(100);
/// It is no longer.
const BYTES: u64 = 1024;

/// What is in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Scale {
    /// So many are wanted.
    workers: u32,
    /// How often that was said.
    said: u64,
    /// As many as the job has.
    most: u32,
    /// The process that follows the file.
    launcher: i32,
}

impl Scale {
    /// Nothing that waits: who looks may be a server.
    fn read(dir: &Path) -> io::Result<Self> {
        let path = dir.join(FILE);
        let about = fs::symlink_metadata(&path)?;
        if !about.is_file() || about.len() > BYTES {
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

/// As many workers as the run in this folder can have; none: no launcher is there that would start and end them one by one.
pub fn most(dir: &Path) -> Option<u32> {
    Scale::read(dir).ok().filter(|s| s.is_followed()).map(|s| s.most)
}

/// Has the launcher of the run in this folder keep so many workers.
///
/// # Errors
/// There is none, or the number is not within 1 and what its job has.
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

/// The launcher's side, until it is dropped.
#[derive(Debug)]
pub(crate) struct Wanted {
    dir: PathBuf,
    looked: Option<Instant>,
    /// How many, and how often that was said.
    now: (u32, u64),
}

impl Wanted {
    /// Of a run that will begin with all the job's workers; `None`: they can't be told how many they are.
    pub(crate) fn of(job: &Job, dir: &Path) -> Option<Self> {
        let workers = job.train.workers;
        // What a run before has left in a folder that is used again.
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

    /// So many are wanted now, and so often it was said how many.
    pub(crate) fn now(&mut self) -> (u32, u64) {
        if self.looked.is_none_or(|at| at.elapsed() >= LOOK) {
            self.looked = Some(Instant::now());
            // One that is not there, or is none of ours, changes nothing.
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
mod tests {
    use super::*;

    #[test]
    fn a_scale_request_needs_a_running_launcher() {
        let dir = tempfile::tempdir().expect("a folder");
        let dir = dir.path();
        assert_eq!(most(dir), None);
        assert_eq!(set(dir, 1).map_err(|e| e.code()), Err(exit::UNAVAILABLE), "nobody is there");
        let mut job = Job::parse(
            "[model]\nkind = \"logistic-regression\"\n[data]\nkind = \"digits\"\n",
            Path::new("job.toml"),
            &[],
        )
        .expect("a job");
        job.train.workers = 3;
        let mut wanted = Wanted::of(&job, dir).expect("it can have fewer");
        assert_eq!((most(dir), wanted.now()), (Some(3), (3, 0)));
        for n in [0, 4] {
            assert_eq!(set(dir, n).map_err(|e| e.code()), Err(exit::USAGE));
        }
        set(dir, 1).expect("taken");
        wanted.looked = None;
        assert_eq!((most(dir), wanted.now()), (Some(3), (1, 1)));
        set(dir, 1).expect("said again");
        fs::write(dir.join(FILE), "rubbish").expect("written");
        wanted.looked = None;
        assert_eq!((most(dir), wanted.now()), (None, (1, 1)), "as it was");
        drop(wanted);
        // One that was killed leaves the file; no process has its number.
        Scale { workers: 3, said: 0, most: 3, launcher: i32::MAX }.write(dir).expect("written");
        assert_eq!((most(dir), set(dir, 1).map_err(|e| e.code())), (None, Err(exit::UNAVAILABLE)));
        job.train.workers = 1;
        assert!(Wanted::of(&job, dir).is_none() && !dir.join(FILE).exists());
    }
}
