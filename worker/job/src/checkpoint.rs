//! `[checkpoint]`: interval, number of kept checkpoints, folder; and who gets them without asking.

use crate::{
    Job, SamplerKind,
    check::{Check, bad},
};
use serde::{Deserialize, Serialize};
use std::{path::PathBuf, time::Duration};

/// The least time between two checkpoints of a job that names no interval.
const LEAST_DISTANCE: Duration = Duration::from_secs(60);

/// `[checkpoint]`
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct CheckpointConfig {
    /// A checkpoint after each this many steps, from 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub every_steps: Option<u64>,
    /// A checkpoint after each this many epochs, from 1. If neither key is given: 1, but not more often than once a
    /// minute.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub every_epochs: Option<u64>,
    /// How many are kept; the latest and the best are always kept. 0: the job makes none.
    pub keep: usize,
    /// Their folder. Default: `checkpoints` in the run's folder.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dir: Option<PathBuf>,
}

impl Default for CheckpointConfig {
    fn default() -> Self {
        Self { every_steps: None, every_epochs: None, keep: 3, dir: None }
    }
}

impl CheckpointConfig {
    /// Epochs between two checkpoints, if the interval is in epochs.
    pub fn epochs(&self) -> Option<u64> {
        self.every_epochs.or_else(|| self.every_steps.is_none().then_some(1))
    }

    /// The least time between the beginnings of two checkpoints, except those of the job's last step and of a stop.
    pub fn least_distance(&self) -> Duration {
        match (self.every_steps, self.every_epochs) {
            // Small jobs would spend their time writing.
            (None, None) => LEAST_DISTANCE,
            _ => Duration::ZERO,
        }
    }

    pub(crate) fn check(&self, job: &Job) -> Check {
        if job.train.sampler == SamplerKind::Leased && self.every_steps.is_some() {
            let why = "with the leased sampler checkpoints are cut between epochs, when no worker trains";
            return bad("checkpoint.every_steps", why, "use checkpoint.every_epochs");
        }
        let keys =
            [("checkpoint.every_steps", self.every_steps), ("checkpoint.every_epochs", self.every_epochs)];
        if let Some((key, _)) = keys.iter().find(|(_, every)| *every == Some(0)) {
            return bad(*key, "every 0", "use 1 or more, or leave it out");
        }
        Ok(())
    }
}

impl Job {
    /// Its checkpoints, if it makes any by itself.
    pub fn checkpoints(&self) -> Option<&CheckpointConfig> {
        self.checkpoint.as_ref().filter(|c| c.keep > 0)
    }

    /// Gives a job without `[checkpoint]` the default one. `paraft train` and `paraft submit` call this before they
    /// write the resolved job, so that workers and servers know no other rule. Commands that measure or compare
    /// (`demo`, `bench`, `compare`, `sweep`, `simulate`) do not: their runs are repeated, not continued, and a
    /// checkpoint would cost time that they report. A script's own loop decides when it saves.
    pub fn checkpoint_by_default(&mut self) {
        if self.cluster.script.is_empty() {
            self.checkpoint.get_or_insert_default();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    fn job(more: &str) -> Job {
        let text = format!("[model]\nkind = \"logistic-regression\"\n[data]\nkind = \"digits\"\n{more}");
        Job::parse(&text, Path::new("job.toml"), &[]).expect("a job")
    }

    #[test]
    fn a_job_without_a_section_gets_one_that_its_file_shows() {
        let mut plain = job("");
        assert_eq!(plain.checkpoints(), None, "for the commands that do not ask");
        plain.checkpoint_by_default();
        assert_eq!(plain.checkpoints(), Some(&CheckpointConfig::default()));
        let again = Job::parse(&plain.to_toml(), Path::new("job.toml"), &[]).expect("the resolved job");
        assert_eq!(again.checkpoints(), plain.checkpoints());
        let mut off = job("[checkpoint]\nkeep = 0\nevery_steps = 5\n");
        off.checkpoint_by_default();
        assert_eq!(off.checkpoints(), None);
        let mut script = job("");
        script.cluster.script = vec!["train.py".into()];
        script.checkpoint_by_default();
        assert_eq!(script.checkpoint, None);
    }

    #[test]
    fn an_interval_that_is_named_has_no_least_distance() {
        let least = |more: &str| {
            job(&format!("[checkpoint]\n{more}")).checkpoint.map(|c| c.least_distance().as_secs())
        };
        assert_eq!(least("keep = 5\n"), Some(60));
        assert_eq!((least("every_epochs = 1\n"), least("every_steps = 1\n")), (Some(0), Some(0)));
    }
}
