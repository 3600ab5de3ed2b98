//! Jobs and checkpoints of the control group, and their wire types.

use super::shape::shape_to;
use crate::control::{Job, JobFacts, JobReport, Jobs, MAX_PATH_BYTES, is_in};
use paraft_common::{
    JobId,
    checkpoint::{KnownCheckpoint, MAX_KNOWN_CHECKPOINTS},
};
use paraft_proto::{CheckpointInfo, JobInfo, NoteCheckpointsRequest};

/// Converts a report to its wire form.
pub fn to_report(job: &JobReport) -> paraft_proto::JobReport {
    paraft_proto::JobReport {
        name: job.facts.name.clone(),
        mode: job.facts.mode.to_string(),
        workers: job.facts.workers,
        durability: job.facts.durability.name().into(),
        shards: job.shards,
        finished: job.finished,
        auto: job.auto.as_ref().map(super::auto::to_report),
    }
}

/// A report from the wire; `None`: of an unknown kind.
pub fn from_report(job: paraft_proto::JobReport) -> Option<JobReport> {
    Some(JobReport {
        facts: JobFacts {
            mode: job.mode.parse().ok()?,
            workers: job.workers,
            durability: job.durability.parse().ok()?,
            name: job.name.chars().take(JobFacts::NAME_CHARS).collect(),
        },
        shards: job.shards,
        finished: job.finished,
        auto: job.auto.and_then(super::auto::from_report),
    })
}

/// All jobs, for any caller; `bytes` gives the bytes that all servers hold of one.
pub fn to_info(jobs: &Jobs, bytes: impl Fn(JobId) -> u64) -> Vec<JobInfo> {
    let job = |(id, j): (JobId, &Job)| JobInfo {
        job: id.0,
        founding: j.founding(),
        name: j.name.clone(),
        mode: j.facts.as_ref().map(|f| f.mode.to_string()).unwrap_or_default(),
        workers: j.facts.as_ref().map_or(0, |f| f.workers),
        durability: j.facts.as_ref().map_or(j.shape.durability, |f| f.durability).name().into(),
        state: j.state.name().into(),
        stopping: j.stopping,
        released: j.released,
        first_seen_ms: j.first_seen_ms,
        ended_ms: j.ended_ms,
        keep_ms: j.keep_ms,
        shape: Some(shape_to(j.shape)),
        bytes: bytes(id),
        run: j.run.clone(),
        checkpoints: j.checkpoints.iter().map(Into::into).collect(),
    };
    jobs.iter().map(job).collect()
}

/// Checks a worker's list of checkpoints: the agreed state must not grow with what clients send.
pub fn held_in(request: NoteCheckpointsRequest) -> Result<Vec<KnownCheckpoint>, String> {
    let NoteCheckpointsRequest { folder, held, .. } = request;
    if held.len() > MAX_KNOWN_CHECKPOINTS {
        return Err(format!("{} checkpoints at once; at most {MAX_KNOWN_CHECKPOINTS} are kept", held.len()));
    }
    if folder.len() > MAX_PATH_BYTES {
        return Err(format!("the folder's path has {} bytes; at most {MAX_PATH_BYTES} go", folder.len()));
    }
    let checked = |c: CheckpointInfo| {
        if !is_in(&c.path, &folder) || c.path.len() > MAX_PATH_BYTES {
            return Err(format!(
                "`{}` is no checkpoint in `{folder}` with a path of at most {MAX_PATH_BYTES} bytes",
                c.path
            ));
        }
        Ok(c.into())
    };
    held.into_iter().map(checked).collect()
}

#[cfg(test)]
#[path = "jobs_tests.rs"]
mod tests;
