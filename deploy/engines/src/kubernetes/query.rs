//! Runs `kubectl` and parses its output about pods.

use super::pod::{COMPONENT, INSTANCE, JOB_INDEX};
use crate::{
    engine::{Handle, Member, run},
    error::{EngineError, Kind},
    place::Role,
};
use serde::Deserialize;
use std::collections::BTreeMap;

/// Runs `kubectl` with the user's flags.
pub(super) fn kubectl(flags: &[String], words: &[&str]) -> Result<String, EngineError> {
    let all: Vec<&str> = flags.iter().map(String::as_str).chain(words.iter().copied()).collect();
    run("kubectl", &all)
}

/// A pod of a run.
pub(super) struct Pod {
    pub name: String,
    pub member: Member,
}

#[derive(Deserialize)]
struct List {
    items: Vec<Item>,
}

#[derive(Deserialize)]
struct Item {
    metadata: Metadata,
    #[serde(default)]
    spec: Spec,
    #[serde(default)]
    status: Status,
}

#[derive(Deserialize)]
struct Metadata {
    name: String,
    #[serde(default)]
    labels: BTreeMap<String, String>,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Spec {
    #[serde(default)]
    node_name: String,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Status {
    #[serde(default)]
    phase: String,
    #[serde(default)]
    start_time: String,
    #[serde(default)]
    conditions: Vec<Reason>,
    #[serde(default)]
    container_statuses: Vec<Container>,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Container {
    #[serde(default)]
    restart_count: u32,
    #[serde(default)]
    state: BTreeMap<String, Reason>,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Reason {
    #[serde(default)]
    reason: String,
    #[serde(default)]
    message: String,
    exit_code: Option<i32>,
}

/// The labels with the number of a pod in its role: the first that exists counts.
const NUMBERS: [&str; 3] = [
    "apps.kubernetes.io/pod-index",
    // For a JobSet's server, the only pod of its Job.
    JOB_INDEX,
    "batch.kubernetes.io/job-completion-index",
];

/// The pods of a run.
pub(super) fn pods(handle: &Handle) -> Result<Vec<Pod>, EngineError> {
    let object = handle.parts.first().map(|(_, object)| object.as_str()).unwrap_or_default();
    let name = match object.split_once('/') {
        Some(("statefulset", set)) => set.strip_suffix("-servers").unwrap_or(set),
        Some((_, name)) => name,
        None => object,
    };
    let one_run = format!("{INSTANCE}={name}");
    parsed(&kubectl(&handle.args, &["get", "pods", "-l", &one_run, "-o", "json"])?)
}

fn parsed(text: &str) -> Result<Vec<Pod>, EngineError> {
    let list: List = serde_json::from_str(text).map_err(|e| {
        EngineError::new(Kind::Refused, format!("kubectl get pods: its answer is not understood: {e}"))
    })?;
    let mut all: Vec<_> = list.items.into_iter().filter_map(pod).collect();
    all.sort_by(|a, b| {
        (a.member.role, a.member.index, &a.name).cmp(&(b.member.role, b.member.index, &b.name))
    });
    Ok(all)
}

fn pod(item: Item) -> Option<Pod> {
    let Item { metadata: Metadata { name, labels }, spec, status } = item;
    let role: Role = labels.get(COMPONENT)?.parse().ok()?;
    // A JobSet's workers are pods of one Job, so its number does not count.
    let numbers = NUMBERS.iter().filter(|label| role == Role::Server || **label != JOB_INDEX);
    let index = numbers.filter_map(|label| labels.get(*label)?.parse().ok()).next();
    let container = status.container_statuses.into_iter().next().unwrap_or_default();
    let mut why = match container.state.into_iter().next() {
        Some((state, said)) if state != "running" => said.describe(),
        Some(_) => format!("since {}", status.start_time),
        None => {
            let said: Vec<_> =
                status.conditions.into_iter().map(Reason::describe).filter(|s| !s.is_empty()).collect();
            said.join("; ")
        }
    };
    if container.restart_count > 0 {
        why = format!("{why}, started again {} times", container.restart_count);
    }
    Some(Pod { name, member: Member { role, index, state: status.phase, node: spec.node_name, why } })
}

impl Reason {
    fn describe(self) -> String {
        let code = self.exit_code.map(|code| format!("code {code}")).unwrap_or_default();
        let parts = [self.reason, code, self.message];
        parts.into_iter().filter(|p| !p.is_empty()).collect::<Vec<_>>().join(", ")
    }
}

#[cfg(test)]
#[path = "query_tests.rs"]
mod tests;
