//! The files of a run's folder, and the time that is written in them.

use std::time::{SystemTime, UNIX_EPOCH};

/// The job as it was resolved, in the run's folder.
pub const JOB_FILE: &str = "job.toml";

/// Unix time, as lines of the record have it.
pub(crate) fn wall() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |d| d.as_secs_f64())
}
