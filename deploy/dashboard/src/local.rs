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
    fn launched(&self, job: &Job) -> Option<PathBuf> {
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
fn is_own(job: &Job) -> bool {
    !job.run.contains(':')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_runs_below_the_folder_of_runs_are_believed_to_be_here() {
        let (run, runs) = (Some("/r/a".into()), Some("/r".into()));
        let here = LocalControl { run, runs, ..LocalControl::default() };
        let of = |run: &str| here.launched(&Job { run: run.into(), ..Job::default() });
        let name = paraft_host::name();
        assert_eq!(of(""), Some("/r/a".into()), "its own");
        assert_eq!(of(&format!("{name}:/r/b")), Some("/r/b".into()));
        for folder in ["/etc", "/r/b/c", "/r/..", "/", "r/b", ""] {
            assert_eq!(of(&format!("{name}:{folder}")), None, "{folder}");
        }
        assert_eq!(of("elsewhere:/r/b"), None);
    }

    #[test]
    fn an_engine_page_controls_only_its_own_run() {
        let runs = tempfile::tempdir().expect("a folder");
        let other = runs.path().join("b");
        std::fs::create_dir(&other).expect("a folder");
        std::fs::write(
            other.join("engine.json"),
            r#"{"engine": "compose", "parts": [["worker", "x"]], "args": ["/bin/false"]}"#,
        )
        .expect("written");
        std::fs::write(
            other.join("job.toml"),
            "[model]\nkind = \"logistic-regression\"\n[data]\nkind = \"digits\"\n",
        )
        .expect("written");
        let here = LocalControl {
            run: Some(other.clone()),
            engine: submitted::most(&other),
            runs: Some(runs.path().into()),
            ..LocalControl::default()
        };
        let theirs = Job { run: format!("{}:{}", paraft_host::name(), other.display()), ..Job::default() };
        assert_eq!((here.most(&theirs), here.most(&Job::default())), (None, Some(2)));
        let refused = here.scale(&theirs, 1).expect_err("refused");
        assert!(refused.contains("no launcher follows"), "{refused}");
    }
}
