//! The place of a process in an engine's job: its role, its number, the number of processes, and where
//! they meet.
//!
//! It is a pure function of the engine's variables (and of what [`HostContext`] has): it queries nothing.
//! Precedence: a flag, a `PARAFT_*` variable, then the innermost engine. An engine that runs inside
//! another is more specific. So Ray, whose nodes may be tasks of any other, precedes torchrun, torchrun
//! precedes MPI launchers, and these precede Slurm: they may run in a Slurm step, where Slurm's variables
//! would give all of their ranks the same number. Then follow
//! Slurm, Flux, an Indexed Job (JobSet's too), LeaderWorkerSet, `TF_CONFIG`, SkyPilot, dstack, and the
//! batch systems that start one process: LSF, HTCondor, arrays of PBS and Grid Engine.
//!
//! Without a role, a task is a worker that may bring a server. A single task needs no engine: it
//! launches a fleet on its machine. Several tasks must have an engine, or each would train alone.

mod batch;
mod env;
mod kubernetes;
mod mpi;
mod others;
mod slurm;
mod task;
#[cfg(test)]
mod tests;
mod torchrun;

pub use env::{HostContext, PlaceFlags, variables};
pub use task::{Place, Role};

use crate::error::EngineError;
use env::Env;
use std::collections::BTreeMap;

/// The detection of an engine: `None` if its variables are absent.
type Recognise = fn(&Env<'_>) -> Result<Option<Place>, EngineError>;

/// What a flag names, then the innermost first.
const ENGINES: [Recognise; 15] = [
    others::hostfile,
    others::ray,
    torchrun::recognise,
    mpi::open_mpi,
    mpi::hydra,
    slurm::recognise,
    batch::flux,
    kubernetes::indexed_job,
    kubernetes::leader_worker_set,
    others::tf_config,
    others::skypilot,
    others::dstack,
    batch::lsf,
    batch::htcondor,
    batch::array_element,
];

/// The place of this process; `None`: it belongs to no engine, or it is the only task.
pub fn place(
    variables: &BTreeMap<String, String>,
    asked: &PlaceFlags,
    around: &HostContext,
) -> Result<Option<Place>, EngineError> {
    let env = Env { variables, asked, around };
    let role = asked.role;
    // In a script of `paraft launch`, the engine's variables describe the launcher.
    if env.text("PARAFT_RANK").is_some() && role.is_none() {
        return Ok(None);
    }
    let mut found = None;
    for recognise in ENGINES {
        found = recognise(&env)?;
        if found.is_some() {
            break;
        }
    }
    let index = asked.index.map_or_else(|| env.number("PARAFT_INDEX"), |i| Ok(Some(i)))?;
    let mut place = match (found, role, index) {
        (Some(place), _, _) => place,
        (None, Some(_), Some(index)) => Place::alone("the command", String::new(), index, 0),
        (None, Some(role), None) => {
            return Err(EngineError::usage(format!("nothing says which {role} this is")).help(
                "add --index N or set PARAFT_INDEX, from 0; engines that `paraft env` recognises say it themselves",
            ));
        }
        (None, None, _) => return Ok(None),
    };
    place.role = role.or(place.role);
    place.rank = index.unwrap_or(place.rank);
    place.attempt = env.number("PARAFT_ATTEMPT")?.unwrap_or(place.attempt);
    place.servers = match env.list("PARAFT_SERVERS") {
        none if none.is_empty() => place.servers,
        said => said,
    };
    if place.node.is_empty() {
        place.node.clone_from(&around.own);
    }
    if place.role.is_some() {
        return match place.tasks > 0 && place.rank >= place.tasks {
            true => Err(outside(&place)),
            false => Ok(Some(place)),
        };
    }
    if place.tasks < 2 {
        return Ok(None);
    }
    if place.rank >= place.tasks {
        return Err(outside(&place));
    }
    if place.first.is_empty() {
        return Err(EngineError::usage(format!("nothing says where the tasks of {} meet", place.engine))
            .help("set MASTER_ADDR and MASTER_PORT to the host of task 0 and a port there, in every task; mpirun -x NAME=VALUE and mpiexec -genv NAME VALUE set them"));
    }
    if let Some(asked) = asked.workers.filter(|n| *n != place.tasks) {
        let why = format!("--workers {asked}, and {} has started {} tasks", place.engine, place.tasks);
        return Err(EngineError::usage(why)
            .help("each task is one worker: leave --workers out, or start as many tasks"));
    }
    Ok(Some(place))
}

fn outside(place: &Place) -> EngineError {
    let Place { engine, rank, tasks, .. } = place;
    EngineError::usage(format!("{engine} says that this is task {rank} of {tasks}, from 0"))
}
