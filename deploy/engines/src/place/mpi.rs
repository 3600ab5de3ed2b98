//! A rank of an MPI launcher: Open MPI's `mpirun`, or hydra, the `mpiexec` of MPICH and Intel MPI.
//!
//! Both give the rank, and neither gives the host of rank 0. On one host it is this one. On several the
//! batch system around the launcher gives it, else the user in `MASTER_ADDR`. Ranks that a batch system
//! starts without such a launcher are its own (`batch`, `slurm`).

use super::{batch, batch::Allocation, env::Env, slurm, task::Place};
use crate::error::EngineError;

/// Rank, number of ranks; the same among those of this host.
type Names = [&'static str; 4];

const OPEN_MPI: Names = [
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
];

const HYDRA: Names = ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"];

/// Where the ranks of one host meet.
const THIS_HOST: &str = "127.0.0.1";

/// A rank of Open MPI 4 or 5. `PMIX_RANK` alone is not enough: Slurm's own ranks have it too.
pub(super) fn open_mpi(env: &Env<'_>) -> Result<Option<Place>, EngineError> {
    let [rank, size, ..] = OPEN_MPI;
    if !env.is_set(rank) && !env.is_set(size) {
        return Ok(None);
    }
    rank_of(env, "Open MPI", &OPEN_MPI, env.text("PMIX_NAMESPACE")).map(Some)
}

/// A rank of hydra.
pub(super) fn hydra(env: &Env<'_>) -> Result<Option<Place>, EngineError> {
    let [rank, size, local_rank, local_size] = HYDRA;
    if !env.is_set(rank) && !env.is_set(size) {
        return Ok(None);
    }
    // srun and Flux set these two as well, for MPI programs that they start. Their own variables say more.
    let by_srun = !env.is_set(local_rank) && !env.is_set(local_size) && slurm::step(env)?.is_some();
    let same = |own: &str, other: &str| env.text(own).is_some() && env.text(own) == env.text(other);
    if by_srun || same("FLUX_TASK_RANK", rank) && same("FLUX_JOB_SIZE", size) {
        return Ok(None);
    }
    // Intel MPI names the job. MPICH does not; on one host all ranks have the same process above them.
    let proxy = env.around.proxy.filter(|_| same(size, local_size)).map(|pid| format!("hydra {pid}"));
    rank_of(env, "hydra", &HYDRA, env.text("I_MPI_HYDRA_UUID").or(proxy)).map(Some)
}

fn rank_of(
    env: &Env<'_>,
    engine: &'static str,
    names: &Names,
    job: Option<String>,
) -> Result<Place, EngineError> {
    let [rank, size, local_rank, local_size] = *names;
    let (rank, tasks) = batch::rank_and_size(env, engine, rank, size)?;
    let (local_rank, local_tasks) = batch::rank_and_size(env, engine, local_rank, local_size)?;
    let allocation = Allocation::of(env);
    let given = env.text("MASTER_PORT").map(|port| format!("port {port}"));
    let id = match job.or(allocation.id).or(given) {
        Some(id) => id,
        // The processes of a role have the run's folder in common, and a single rank has no others.
        None if env.asked.role.is_some() || tasks < 2 => String::new(),
        None => {
            return Err(EngineError::usage(format!(
                "this is rank {rank} of {tasks} of {engine}, which gives the job no name that all of its hosts know"
            ))
            .help("set MASTER_ADDR to the host of rank 0 and MASTER_PORT to a port there, in every rank: mpiexec -genv MASTER_PORT 29400 ..."));
        }
    };
    let one_host = local_tasks == tasks;
    let first = env.text("MASTER_ADDR").or_else(|| one_host.then(|| THIS_HOST.to_string()));
    Ok(Place {
        local_rank,
        local_tasks,
        // The launchers don't number hosts; by default they fill one after the other.
        host: rank / local_tasks,
        hosts: tasks.div_ceil(local_tasks),
        first: first.or(allocation.first).unwrap_or_default(),
        port: env.beside_master()?.unwrap_or_else(|| batch::port_of(&id)),
        ..Place::alone(engine, id, rank, tasks)
    })
}
