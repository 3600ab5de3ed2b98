//! Batch systems besides Slurm: Flux, LSF, HTCondor, and arrays of PBS, LSF and Grid Engine.
//!
//! PBS and Grid Engine number no processes but the elements of an array: an MPI launcher in the job
//! does it, or `--hostfile`. PBS's `PBS_NODENUM` and `PBS_TASKNUM` are set in the batch script too, so
//! they don't tell it from a task of `pbsdsh`.

use super::{
    env::Env,
    others::hosts_of,
    slurm,
    task::{DEFAULT_PORT, Place},
};
use crate::error::EngineError;

/// The job of a batch system in which a launcher runs.
pub(super) struct Allocation {
    /// Its id.
    pub(super) id: Option<String>,
    /// Its first host, where launchers start rank 0.
    pub(super) first: Option<String>,
}

impl Allocation {
    pub(super) fn of(env: &Env<'_>) -> Self {
        // The elements of an array of LSF or Grid Engine share the job's number.
        let element = |job: &str, element: &str| {
            let job = env.text(job)?;
            Some(format!("{job}.{}", env.text(element)?))
        };
        let id = env
            .text("SLURM_JOB_ID")
            .or_else(|| env.text("PBS_JOBID"))
            .or_else(|| element("LSB_JOBID", "LSB_JOBINDEX"))
            .or_else(|| env.text("LSB_JOBID"))
            // Others set JOB_ID too; Grid Engine sets both for every job.
            .or_else(|| element("JOB_ID", "SGE_TASK_ID"));
        let first_word = |name: &str| {
            let list = env.text(name)?;
            list.split_whitespace().next().map(str::to_string)
        };
        let first = env
            .text("SLURM_JOB_NODELIST")
            .map(|list| slurm::first_of(&list))
            .or_else(|| first_word("LSB_MCPU_HOSTS"))
            .or_else(|| first_word("LSB_HOSTS"))
            .or_else(|| hosts_of(&env.around.allocation).into_iter().next());
        Self { id, first }
    }
}

/// A rank and the number of ranks, of which a launcher sets both or none.
pub(super) fn rank_and_size(
    env: &Env<'_>,
    engine: &str,
    rank: &str,
    size: &str,
) -> Result<(u32, u32), EngineError> {
    let (own, all) = (env.must_number(engine, rank)?, env.must_number(engine, size)?);
    match own < all {
        true => Ok((own, all)),
        false => Err(EngineError::usage(format!("{rank} is {own} and {size} is {all}: ranks are from 0 to {size} - 1"))
            .help(format!(
                "set both as {engine} does, or unset both for a fleet on this machine alone: env -u {rank} -u {size} paraft launch ..."
            ))),
    }
}

/// A port of this job, below those that the kernel gives away. Two jobs on one host seldom have the same.
pub(super) fn port_of(job: &str) -> u16 {
    // FNV-1a: equal in all processes and releases.
    let mixed =
        job.bytes().fold(0x811c_9dc5_u32, |sum, byte| (sum ^ u32::from(byte)).wrapping_mul(0x0100_0193));
    12_000 + (mixed % 20_000) as u16
}

/// A task that `flux run` or `flux submit` has started. In a batch script of Flux these are not set.
pub(super) fn flux(env: &Env<'_>) -> Result<Option<Place>, EngineError> {
    let engine = "Flux";
    let [rank, size] = ["FLUX_TASK_RANK", "FLUX_JOB_SIZE"];
    if !env.is_set(rank) && !env.is_set(size) {
        return Ok(None);
    }
    let (rank, tasks) = rank_and_size(env, engine, rank, size)?;
    let hosts = env.must_number(engine, "FLUX_JOB_NNODES")?.max(1);
    let id = env.must(engine, "FLUX_JOB_ID")?;
    let local_tasks = tasks.div_ceil(hosts);
    let first = env.text("MASTER_ADDR").or_else(|| (hosts == 1).then(|| "127.0.0.1".to_string()));
    Ok(Some(Place {
        local_rank: env.must_number(engine, "FLUX_TASK_LOCAL_ID")?,
        local_tasks,
        host: rank / local_tasks,
        hosts,
        first: first.unwrap_or_default(),
        port: env.beside_master()?.unwrap_or_else(|| port_of(&id)),
        ..Place::alone(engine, id, rank, tasks)
    }))
}

/// A task of LSF's `blaunch`.
pub(super) fn lsf(env: &Env<'_>) -> Result<Option<Place>, EngineError> {
    let engine = "LSF";
    let name = "LSF_PM_TASKID";
    if !env.is_set(name) {
        return Ok(None);
    }
    env.must(engine, "LSB_JOBID")?;
    // It counts from 1.
    let task = env.must_number(engine, name)?;
    let rank = task.checked_sub(1).ok_or_else(|| {
        EngineError::usage(format!("{name} is 0, and blaunch counts from 1"))
            .help(format!("start it with blaunch, or unset {name}"))
    })?;
    // blaunch starts a task for each slot, or for each host that it is given: only the user knows.
    let tasks = env.asked.workers.map_or_else(|| env.must_number(engine, "LSB_DJOB_NUMPROC"), Ok)?;
    let allocation = Allocation::of(env);
    let id = allocation.id.unwrap_or_default();
    let slots = env.text("LSB_MCPU_HOSTS").and_then(|list| slot(&list, rank, tasks));
    let (local_rank, local_tasks, host, hosts) = slots.unwrap_or((0, 1, rank, tasks));
    Ok(Some(Place {
        local_rank,
        local_tasks,
        host,
        hosts,
        first: env.text("MASTER_ADDR").or(allocation.first).unwrap_or_default(),
        port: env.beside_master()?.unwrap_or_else(|| port_of(&id)),
        ..Place::alone(engine, id, rank, tasks)
    }))
}

/// Of hosts and slots like `n1 4 n2 2`: the number on its host, how many are there, the host, how many
/// hosts. `None` where slots are not tasks.
pub(super) fn slot(list: &str, rank: u32, tasks: u32) -> Option<(u32, u32, u32, u32)> {
    let words: Vec<&str> = list.split_whitespace().collect();
    let number = |host: &[&str]| host.get(1)?.parse::<u32>().ok();
    let slots = words.chunks(2).map(number).collect::<Option<Vec<u32>>>()?;
    if slots.iter().try_fold(0_u32, |sum, n| sum.checked_add(*n))? != tasks {
        return None;
    }
    let mut before = 0_u32;
    for (host, n) in slots.iter().enumerate() {
        if rank - before < *n {
            return Some((rank - before, *n, host as u32, slots.len() as u32));
        }
        before += n;
    }
    None
}

/// A node of HTCondor's parallel universe.
pub(super) fn htcondor(env: &Env<'_>) -> Result<Option<Place>, EngineError> {
    let engine = "HTCondor";
    let [rank, size] = ["_CONDOR_PROCNO", "_CONDOR_NPROCS"];
    if !env.is_set(rank) && !env.is_set(size) {
        return Ok(None);
    }
    let (rank, tasks) = rank_and_size(env, engine, rank, size)?;
    let first = env.text("MASTER_ADDR").unwrap_or_default();
    let port = env.beside_master()?.unwrap_or(DEFAULT_PORT);
    Ok(Some(Place { port, first: first.clone(), ..Place::alone(engine, first, rank, tasks) }))
}

/// An element of an array of jobs. Without a role each element is a job of its own.
pub(super) fn array_element(env: &Env<'_>) -> Result<Option<Place>, EngineError> {
    if env.asked.role.is_none() {
        return Ok(None);
    }
    // PBS numbers as `qsub -J` says; the others count from 1, and name what is no element thus.
    for (engine, job, index, first, none) in [
        ("PBS", "PBS_ARRAY_ID", "PBS_ARRAY_INDEX", 0, ""),
        ("LSF", "LSB_JOBID", "LSB_JOBINDEX", 1, "0"),
        ("Grid Engine", "JOB_ID", "SGE_TASK_ID", 1, "undefined"),
    ] {
        if env.text(index).is_none_or(|text| text == none) {
            continue;
        }
        let number = env.must_number(engine, index)?;
        let rank = number.checked_sub(first).ok_or_else(|| {
            EngineError::usage(format!("{index} is {number}, and {engine} counts from {first}"))
                .help("give --index N, from 0")
        })?;
        // Not how many: a later array may have more.
        return Ok(Some(Place::alone(engine, env.must(engine, job)?, rank, 0)));
    }
    Ok(None)
}
