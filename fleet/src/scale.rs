//! How many workers of a run train: fewer while others need the machine, later again as many as its job has.
//!
//! The run's launcher follows a small file in its folder, as it does with faults: whoever may write there may change the number.

use crate::{ask, failure::Failure, files::JOB_FILE};
use paraft_worker::{Job, exit};
use std::{
    fs,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

/// The file, in the run's folder: a number.
const FILE: &str = "workers";
/// How often it is read.
const LOOK: Duration = Duration::from_millis(100);

/// As many workers as the run in this folder can have, whose launcher starts and ends them one by one.
///
/// # Errors
/// It is no such run.
pub fn most(dir: &Path) -> Result<u32, Failure> {
    let job = Job::load(&dir.join(JOB_FILE), &[])?;
    let no = |why: &str| Err(Failure::new(exit::CONFIG, format!("{}: {why}", dir.display())));
    match () {
        () if !job.cluster.script.is_empty() => {
            no("its workers are processes of a script, which decides how many there are")
        }
        () if job.ranks_of_worker() > 1 => no("its workers are groups of ranks, which begin together"),
        () if job.train.workers < 2 => no("it has one worker"),
        () => Ok(job.train.workers),
    }
}

/// Has the launcher of the run in this folder keep so many workers.
///
/// # Errors
/// It is no such run, it is over, or the number is not within 1 and what its job has.
pub fn set(dir: &Path, workers: u32) -> Result<(), Failure> {
    let most = most(dir)?;
    if !(1..=most).contains(&workers) {
        let what = format!("{workers} workers: the job has {most}, and one at least must train");
        return Err(Failure::new(exit::USAGE, what)
            .help("start a job with as many workers as it may ever have, and lower the number"));
    }
    let servers = ask::addresses(Some(dir), &[])?;
    if ask::ask_all(&servers, false).iter().all(Result::is_err) {
        return Err(Failure::new(
            exit::UNAVAILABLE,
            format!("{}: none of its servers answers", dir.display()),
        )
        .help("only a run that trains has workers"));
    }
    let (path, beside) = (dir.join(FILE), dir.join(format!("{FILE}.new")));
    let write = || fs::write(&beside, format!("{workers}\n")).and_then(|()| fs::rename(&beside, &path));
    write().map_err(|e| Failure::write(&path, e))
}

/// The launcher's side.
#[derive(Debug)]
pub(crate) struct Wanted {
    file: PathBuf,
    looked: Option<Instant>,
    workers: u32,
}

impl Wanted {
    /// Of the run in this folder, which begins with all its workers.
    pub(crate) fn new(dir: &Path, all: u32) -> Self {
        let file = dir.join(FILE);
        // Of a run before, in a folder that is used again.
        let _ = fs::remove_file(&file);
        Self { file, looked: None, workers: all }
    }

    /// So many are wanted now.
    pub(crate) fn now(&mut self) -> u32 {
        if self.looked.is_none_or(|at| at.elapsed() >= LOOK) {
            self.looked = Some(Instant::now());
            // One that is not there, or is none of ours, changes nothing.
            let read = fs::read_to_string(&self.file).ok().and_then(|text| text.trim().parse().ok());
            self.workers = read.filter(|n| *n > 0).unwrap_or(self.workers);
        }
        self.workers
    }
}
