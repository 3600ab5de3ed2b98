//! What a job starts from.

use super::Stopping;
use serde::{Deserialize, Serialize};

/// The prefix of [`Start::from`], and of `train.init` in a job file, that names a job.
pub const OF_JOB: &str = "job:";

/// The initial state of a job, without the bulk data that the workers send.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Start {
    /// Hash of the source file: workers that read different files do not train together. `job:NAME`
    /// names another job of the fleet.
    pub from: String,
    /// Finished steps: workers resume from here.
    pub step: u64,
    /// Finished epochs, with the leased sampler.
    #[serde(default)]
    pub epochs: u64,
    /// The state of early stopping.
    #[serde(default)]
    pub stopping: Stopping,
    /// Workers bring the rows of tables, too.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub rows: bool,
}

impl Start {
    /// Starts with the weights of another job of the fleet, which the servers copy. All other state
    /// starts fresh.
    pub fn of_job(name: &str) -> Self {
        Self {
            from: format!("{OF_JOB}{name}"),
            step: 0,
            epochs: 0,
            stopping: Stopping::default(),
            rows: false,
        }
    }

    /// The job whose weights this one starts with.
    pub fn job(&self) -> Option<&str> {
        self.from.strip_prefix(OF_JOB).filter(|name| !name.is_empty())
    }
}
