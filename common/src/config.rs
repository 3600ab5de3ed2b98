//! Configuration that is not tied to one process.
//!
//! - [`server_job`]: the part of a job that travels to the servers and lives in their replicated state.
//!
//! The job file itself, with its models and data sets, is `paraft_job`: the servers depend on neither.

pub mod server_job;

pub use server_job::{
    ChunkPlan, EarlyStop, LastEvaluation, MAX_BUCKET_LEN, MAX_GRACE_MS, MAX_NAME_CHARS, MAX_STEP, MIN_LEASE,
    OF_JOB, ServerJob, ServerJobError, Start, Stopping, check_name, check_names, facts_missing,
};
