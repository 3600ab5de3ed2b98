//! Configuration that is not tied to one process.
//!
//! - [`server_job`]: the part of a job that travels to the servers and lives in their replicated state.
//! - [`start`], [`early_stop`]: its parts. [`job_name`], [`fingerprint`]: the rules of two of its texts.
//!
//! The job file itself, with its models and data sets, is `paraft_job`: the servers depend on neither.

pub mod early_stop;
pub mod fingerprint;
pub mod job_name;
pub mod server_job;
pub mod start;

pub use early_stop::{EarlyStop, LastEvaluation, Stopping};
pub use fingerprint::facts_missing;
pub use job_name::{MAX_NAME_CHARS, check_name, check_names};
pub use server_job::{ChunkPlan, MAX_GRACE_MS, MAX_STEP, MIN_LEASE, ServerJob, ServerJobError};
pub use start::{OF_JOB, Start};
