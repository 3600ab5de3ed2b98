//! A pod of an Indexed Job, also as one of a JobSet's, or of a LeaderWorkerSet.

use super::{
    env::{Env, needs},
    task::{DEFAULT_PORT, Place},
};
use crate::error::EngineError;

pub(super) fn indexed_job(env: &Env<'_>) -> Result<Option<Place>, EngineError> {
    let engine = "an Indexed Job";
    // Where each Job has one pod, as a JobSet's servers, the Job's number is what counts; the manifest hands it over.
    let job = env.number("JOBSET_JOB_INDEX")?;
    let Some(pod) = env.number("JOB_COMPLETION_INDEX")? else { return Ok(None) };
    let id = env.text("JOBSET_NAME").unwrap_or_default();
    let attempt = env.number("JOBSET_RESTART_ATTEMPT")?.unwrap_or(0);
    if env.asked.role.is_some() {
        let rank = job.unwrap_or(pod);
        return Ok(Some(Place { attempt, ..Place::alone(engine, id, rank, 0) }));
    }
    let tasks = env.asked.workers.map_or_else(|| env.number("WORLD_SIZE"), |n| Ok(Some(n)))?;
    let tasks = tasks.ok_or_else(|| {
        EngineError::usage(format!("this is pod {pod} of an Indexed Job, and nothing says of how many")).help(
            "add --workers N, the Job's completions; for a fleet in each pod: env -u JOB_COMPLETION_INDEX paraft launch ...",
        )
    })?;
    let first = env
        .text("MASTER_ADDR")
        .or_else(|| first_pod(&env.text("HOSTNAME")?, pod, &env.around.hosts))
        .ok_or_else(|| needs(engine, "MASTER_ADDR"))?;
    // The pods of one Job have their service's name to themselves.
    let port = env.beside_master()?.unwrap_or(DEFAULT_PORT);
    Ok(Some(Place { attempt, port, first: first.clone(), ..Place::alone(engine, first, pod, tasks) }))
}

pub(super) fn leader_worker_set(env: &Env<'_>) -> Result<Option<Place>, EngineError> {
    let engine = "a LeaderWorkerSet";
    let Some(first) = env.text("LWS_LEADER_ADDRESS") else { return Ok(None) };
    let (rank, tasks) =
        (env.must_number(engine, "LWS_WORKER_INDEX")?, env.must_number(engine, "LWS_GROUP_SIZE")?);
    let port = env.beside_master()?.unwrap_or(DEFAULT_PORT);
    Ok(Some(Place { port, first: first.clone(), ..Place::alone(engine, first, rank, tasks) }))
}

/// The name of pod 0 as the others find it: that of this pod with another number, in the domain of its headless service, which
/// is in the hosts file of a pod that has one.
fn first_pod(own: &str, index: u32, hosts: &str) -> Option<String> {
    let stem = own.strip_suffix(&format!("-{index}"))?;
    let whole = |line: &str| {
        let mut names = line.split('#').next()?.split_whitespace().skip(1);
        let domain = names.find_map(|name| name.strip_prefix(own)?.strip_prefix('.'))?;
        Some(format!("{stem}-0.{domain}"))
    };
    Some(hosts.lines().find_map(whole).unwrap_or_else(|| format!("{stem}-0")))
}
