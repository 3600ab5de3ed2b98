//! A task of a Slurm step, or an element of a job array.

use super::{env::Env, task::Place};
use crate::error::EngineError;

const ENGINE: &str = "Slurm";

/// From here on Slurm numbers what is no step of `srun`'s: the batch script, a shell.
const FIRST_SPECIAL_STEP: u32 = 0xffff_fff0;

/// The step of `srun` in which this is.
pub(super) fn step(env: &Env<'_>) -> Result<Option<u32>, EngineError> {
    Ok(env.number("SLURM_STEP_ID")?.filter(|step| *step < FIRST_SPECIAL_STEP))
}

pub(super) fn recognise(env: &Env<'_>) -> Result<Option<Place>, EngineError> {
    let has_role = env.asked.role.is_some();
    if has_role && let Some(element) = env.number("SLURM_ARRAY_TASK_ID")? {
        // Each element is a job of its own, which Slurm starts again by itself; the array is what they have in common.
        let id = env.must(ENGINE, "SLURM_ARRAY_JOB_ID")?;
        // Not how many this array has: workers that are added later form another array with consecutive numbers.
        let tasks = env.number("SLURM_ARRAY_TASK_MAX")?.map_or(0, |last: u32| last.saturating_add(1));
        return Ok(Some(started(env, Place::alone(ENGINE, id, element, tasks))?));
    }
    let Some(step) = step(env)? else { return Ok(None) };
    let of = |name: &str| env.must_number(ENGINE, name);
    let host = of("SLURM_NODEID")?;
    let job = of("SLURM_JOB_ID")?;
    let nodes = env.must(ENGINE, "SLURM_STEP_NODELIST")?;
    let on_each = env.must(ENGINE, "SLURM_STEP_TASKS_PER_NODE")?;
    let port = env.beside_master()?;
    // Another for each step that may run on the same node, below the ports that the kernel gives away.
    let port = port.unwrap_or(12_000 + (job.wrapping_mul(64).wrapping_add(step) % 20_000) as u16);
    let (rank, tasks) = (of("SLURM_PROCID")?, of("SLURM_STEP_NUM_TASKS")?);
    started(
        env,
        Place {
            local_rank: of("SLURM_LOCALID")?,
            local_tasks: nth(&on_each, host).unwrap_or(1),
            host,
            hosts: env.number("SLURM_STEP_NUM_NODES")?.unwrap_or(1),
            first: first_of(&nodes),
            port,
            ..Place::alone(ENGINE, format!("{job}.{step}"), rank, tasks)
        },
    )
    .map(Some)
}

/// With where Slurm has started it, and how often.
fn started(env: &Env<'_>, place: Place) -> Result<Place, EngineError> {
    let attempt = env.number("SLURM_RESTART_COUNT")?.unwrap_or(0);
    Ok(Place { attempt, node: env.text("SLURMD_NODENAME").unwrap_or_default(), ..place })
}

/// The first host of a list as Slurm writes it: `n[03-05,9],m1` begins with `n03`.
pub(super) fn first_of(list: &str) -> String {
    let mut first = String::new();
    let mut rest = list.chars();
    while let Some(c) = rest.next() {
        match c {
            ',' => break,
            '[' => {
                let inside: String = rest.by_ref().take_while(|c| *c != ']').collect();
                first.extend(inside.chars().take_while(|c| *c != ',' && *c != '-'));
            }
            _ => first.push(c),
        }
    }
    first
}

/// Of a list like `2(x3),1`, that of the node.
pub(super) fn nth(list: &str, node: u32) -> Option<u32> {
    let mut before = 0;
    for part in list.split(',') {
        let (tasks, times) = part.split_once("(x").unwrap_or((part, "1)"));
        before += times.trim_end_matches(')').parse::<u32>().ok()?;
        if node < before {
            return tasks.parse().ok();
        }
    }
    None
}
