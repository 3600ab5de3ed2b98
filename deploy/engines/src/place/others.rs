//! Ray's actors, and engines that give a rank and a list of hosts: `TF_CONFIG`, SkyPilot, dstack, and a
//! file of hosts.

use super::{
    env::Env,
    task::{DEFAULT_PORT, Place, Role},
};
use crate::error::EngineError;
use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet};

/// What TensorFlow's parameter servers are told, by Kubeflow's operator and by others.
#[derive(Deserialize)]
struct TfConfig {
    cluster: BTreeMap<String, Vec<String>>,
    task: TfTask,
}

#[derive(Deserialize)]
struct TfTask {
    #[serde(rename = "type")]
    kind: String,
    index: u32,
}

/// The child of an actor of `paraft.ray.fit`, which gives it a role and a number by flags.
pub(super) fn ray(env: &Env<'_>) -> Result<Option<Place>, EngineError> {
    let Some(node) = env.text("PARAFT_RAY_NODE").filter(|_| env.asked.role.is_some()) else {
        return Ok(None);
    };
    let rank = env.asked.index.unwrap_or_default();
    Ok(Some(Place { node, ..Place::alone("Ray", String::new(), rank, 0) }))
}

pub(super) fn tf_config(env: &Env<'_>) -> Result<Option<Place>, EngineError> {
    let engine = "TF_CONFIG";
    let Some(text) = env.text(engine) else { return Ok(None) };
    let config: TfConfig = serde_json::from_str(&text)
        .map_err(|e| EngineError::usage(format!("TF_CONFIG cannot be read: {e}")))?;
    let of = |kind: &str| config.cluster.get(kind).cloned().unwrap_or_default();
    let role: Role =
        config.task.kind.parse().map_err(|why| EngineError::usage(format!("TF_CONFIG: {why}")))?;
    // The chief trains too, as the first worker.
    let chiefs: Vec<String> = of("chief").into_iter().chain(of("master")).collect();
    let before = if config.task.kind == "worker" { chiefs.len() as u32 } else { 0 };
    let workers: Vec<String> = chiefs.into_iter().chain(of("worker")).collect();
    let servers = of("ps");
    let tasks = if role == Role::Server { servers.len() } else { workers.len() } as u32;
    let meet = servers.first().or(workers.first()).cloned().unwrap_or_default();
    let (first, port) = meet.rsplit_once(':').unwrap_or((&meet, ""));
    Ok(Some(Place {
        // Without servers of their own, the tasks are workers that bring some.
        role: (!servers.is_empty()).then_some(role),
        first: first.to_string(),
        port: port.parse().unwrap_or(DEFAULT_PORT),
        servers,
        ..Place::alone(engine, meet.clone(), before + config.task.index, tasks)
    }))
}

pub(super) fn skypilot(env: &Env<'_>) -> Result<Option<Place>, EngineError> {
    let engine = "SkyPilot";
    let Some(rank) = env.number("SKYPILOT_NODE_RANK")? else { return Ok(None) };
    let tasks = env.must_number(engine, "SKYPILOT_NUM_NODES")?;
    let nodes = env.must(engine, "SKYPILOT_NODE_IPS")?;
    nodes_of(env, engine, "SKYPILOT_TASK_ID", (rank, tasks), nodes.split_whitespace().next())
}

pub(super) fn dstack(env: &Env<'_>) -> Result<Option<Place>, EngineError> {
    let engine = "dstack";
    let Some(rank) = env.number("DSTACK_NODE_RANK")? else { return Ok(None) };
    let tasks = env.must_number(engine, "DSTACK_NODES_NUM")?;
    let first = env.must(engine, "DSTACK_MASTER_NODE_IP")?;
    nodes_of(env, engine, "DSTACK_RUN_NAME", (rank, tasks), Some(&first))
}

/// One task on each host of a list.
fn nodes_of(
    env: &Env<'_>,
    engine: &'static str,
    id: &str,
    (rank, tasks): (u32, u32),
    first: Option<&str>,
) -> Result<Option<Place>, EngineError> {
    let first = first.unwrap_or_default().to_string();
    let id = env.text(id).unwrap_or_else(|| first.clone());
    let port = env.beside_master()?.unwrap_or(DEFAULT_PORT);
    Ok(Some(Place { first, port, ..Place::alone(engine, id, rank, tasks) }))
}

/// A list of hosts as DeepSpeed and MPI have it: this host's line is its number.
pub(super) fn hostfile(env: &Env<'_>) -> Result<Option<Place>, EngineError> {
    let engine = "--hostfile";
    let Some(path) = &env.asked.hostfile else { return Ok(None) };
    let path = path.display().to_string();
    let (mut hosts, mut seen) = (hosts_of(&env.around.hostfile), BTreeSet::new());
    // Batch systems list a host once for each of its slots.
    hosts.retain(|host| seen.insert(host.clone()));
    let Some(first) = hosts.first() else {
        return Err(EngineError::usage(format!("--hostfile: {path} names no host"))
            .help("write one host in each line, as `n1` or `n1 slots=8`"));
    };
    let own = &env.around.own;
    let short = own.split('.').next().unwrap_or_default();
    let is_own = |host: &String| host == own || host.split('.').next() == Some(short);
    let Some(rank) = hosts.iter().position(is_own) else {
        return Err(EngineError::usage(format!("--hostfile: this host, {own}, is not in {path}"))
            .help("write its name as `hostname` prints it, or give --index N"));
    };
    let place = Place::alone(engine, path, rank as u32, hosts.len() as u32);
    let port = env.beside_master()?.unwrap_or(DEFAULT_PORT);
    Ok(Some(Place { first: first.clone(), port, ..place }))
}

/// The hosts of such a file, in its order.
pub fn hosts_of(text: &str) -> Vec<String> {
    let lines = text.lines().map(|l| l.split('#').next().unwrap_or_default());
    lines.filter_map(|l| l.split_whitespace().next()).map(str::to_string).collect()
}
