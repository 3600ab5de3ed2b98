//! What the page's server controls through the files of its host, besides the fleet's servers.

use crate::facts::{Facts, Job};
use paraft_fleet::{failure::Failure, faults::Faults, scale, submitted};
use paraft_tls::Access;
use std::path::{Path, PathBuf};

/// See the module documentation.
#[derive(Clone, Debug, Default)]
pub struct LocalControl {
    /// The faults file that the fleet's fault points poll, if any.
    pub faults: Option<PathBuf>,
    /// The run that the fleet was started for.
    pub run: Option<PathBuf>,
    /// With an engine, the maximal number of workers that it can run. Files in `run` name the engine's
    /// commands. No other folder may do so, since its owner may be another user.
    pub engine: Option<u32>,
    /// A folder of runs for comparison. The page can scale a run of it whose launcher is on this host.
    pub runs: Option<PathBuf>,
    /// The access of actions to the servers, if it differs from this process's own.
    pub acts: Option<Access>,
}

impl LocalControl {
    /// The maximal number of workers of a job, if this host can change it.
    fn most(&self, job: &Job) -> Option<u32> {
        match self.engine.filter(|_| is_own(job)) {
            Some(most) => Some(most),
            None => scale::most(&self.launched(job)?),
        }
    }

    /// Sets the number of a job's workers. Waits for an engine's command.
    ///
    /// # Errors
    ///
    /// This host does not control the job's workers, or the number is refused.
    pub fn scale(&self, job: &Job, workers: u32) -> Result<(), String> {
        let none = "nothing on this host starts and ends its workers: use `paraft fleet scale` where that is";
        let run = self.launched(job).ok_or(none)?;
        let said = |e: Failure| e.message().to_string();
        match self.engine.filter(|_| is_own(job)) {
            Some(_) => submitted::scale(&run, workers).map_err(said),
            None => scale::set(&run, workers).map_err(said),
        }
    }

    /// The folder of a job's run, if its launcher may be on this host. The job that started the fleet
    /// uses its own folder. For other jobs the submitter names the folder, which is trusted only below
    /// `runs`.
    pub(crate) fn launched(&self, job: &Job) -> Option<PathBuf> {
        let Some((host, folder)) = job.run.split_once(':') else { return self.run.clone() };
        let (runs, folder) = (self.runs.as_ref()?, Path::new(folder));
        let is_below = folder.parent() == Some(runs) && folder.file_name().is_some();
        (host == paraft_host::name() && is_below).then(|| folder.to_path_buf())
    }

    /// Adds this host's knowledge to the servers' snapshot.
    pub fn add(&self, facts: &mut Facts) {
        // The servers log an unreadable faults file.
        facts.faults = self.faults.as_ref().map(|file| Faults::read(file).unwrap_or_default().on());
        for job in facts.jobs.iter_mut().filter(|j| j.state == "running") {
            job.most = self.most(job);
        }
    }
}

/// Whether the fleet was started for this job.
pub(crate) fn is_own(job: &Job) -> bool {
    !job.run.contains(':')
}

#[cfg(test)]
#[path = "local_tests.rs"]
mod tests;
