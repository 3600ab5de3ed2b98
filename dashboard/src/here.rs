//! What the page's server reaches by the files of its host, beside what the fleet's servers say.

use crate::facts::{Facts, Job};
use paraft_fleet::{faults::Faults, scale};
use std::{
    collections::HashMap,
    path::{Path, PathBuf},
};

/// See the module.
#[derive(Clone, Debug, Default)]
pub struct Here {
    /// The file that the fleet's fault points follow, where it has any.
    pub faults: Option<PathBuf>,
    /// The run whose launcher has started this server.
    pub run: Option<PathBuf>,
    /// A folder of runs, which can be compared.
    pub runs: Option<PathBuf>,
}

/// As many workers as runs can have, by folder; none: they can't be told how many. Read once.
pub type Most = HashMap<PathBuf, Option<u32>>;

impl Here {
    /// The folder of a job's run, where its launcher is on this host. The job that a fleet was founded with is its own.
    pub fn launched(&self, job: &Job) -> Option<PathBuf> {
        match job.run.split_once(':') {
            None => self.run.clone(),
            Some((host, folder)) => (host == paraft_host::name()).then(|| Path::new(folder).to_path_buf()),
        }
    }

    /// Adds what is known here to what the servers say.
    pub fn add(&self, facts: &mut Facts, known: &mut Most) {
        // One that cannot be read is said in the servers' logs.
        facts.faults = self.faults.as_ref().map(|file| Faults::read(file).unwrap_or_default().on());
        for job in facts.jobs.iter_mut().filter(|j| j.state == "running") {
            let Some(dir) = self.launched(job) else { continue };
            job.most = *known.entry(dir).or_insert_with_key(|dir| scale::most(dir).ok());
        }
    }
}
