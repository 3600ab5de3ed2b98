//! What the page's server reaches by the files of its host, beside what the fleet's servers say.

use crate::facts::{Facts, Job};
use paraft_fleet::{faults::Faults, scale};
use paraft_tls::Access;
use std::path::{Path, PathBuf};

/// See the module.
#[derive(Clone, Debug, Default)]
pub struct Here {
    /// The file that the fleet's fault points follow, where it has any.
    pub faults: Option<PathBuf>,
    /// The run whose launcher has started the fleet.
    pub run: Option<PathBuf>,
    /// A folder of runs, which can be compared; those whose launcher is on this host can be told how many workers they have.
    pub runs: Option<PathBuf>,
    /// By what acts come to the servers, where that is not how this process does.
    pub acts: Option<Access>,
}

impl Here {
    /// The folder of a job's run, where its launcher may be on this host. The job that a fleet was founded with is its own; of others,
    /// who submits them says where they are, and only one below `runs` is believed.
    pub fn launched(&self, job: &Job) -> Option<PathBuf> {
        let Some((host, folder)) = job.run.split_once(':') else { return self.run.clone() };
        let (runs, folder) = (self.runs.as_ref()?, Path::new(folder));
        let is_below = folder.parent() == Some(runs) && folder.file_name().is_some();
        (host == paraft_host::name() && is_below).then(|| folder.to_path_buf())
    }

    /// Adds what is known here to what the servers say.
    pub fn add(&self, facts: &mut Facts) {
        // One that cannot be read is said in the servers' logs.
        facts.faults = self.faults.as_ref().map(|file| Faults::read(file).unwrap_or_default().on());
        for job in facts.jobs.iter_mut().filter(|j| j.state == "running") {
            job.most = self.launched(job).and_then(|dir| scale::most(&dir));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_runs_below_the_folder_of_runs_are_believed_to_be_here() {
        let (run, runs) = (Some("/r/a".into()), Some("/r".into()));
        let here = Here { run, runs, ..Here::default() };
        let of = |run: &str| here.launched(&Job { run: run.into(), ..Job::default() });
        let name = paraft_host::name();
        assert_eq!(of(""), Some("/r/a".into()), "its own");
        assert_eq!(of(&format!("{name}:/r/b")), Some("/r/b".into()));
        for folder in ["/etc", "/r/b/c", "/r/..", "/", "r/b", ""] {
            assert_eq!(of(&format!("{name}:{folder}")), None, "{folder}");
        }
        assert_eq!(of("elsewhere:/r/b"), None);
    }
}
