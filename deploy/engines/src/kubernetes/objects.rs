//! The objects that every cluster supports: ConfigMap, Service, PodDisruptionBudget, StatefulSet, Job.

use super::pod::{self, CONTAINER, ContainerSpec, PORT, label, labels};
use crate::{fleet::Fleet, place::Role};
use serde_json::{Value, json};

pub(super) fn config_map(fleet: &Fleet, name: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "ConfigMap",
        "metadata": {"labels": {"app.kubernetes.io/name": "paraft", pod::INSTANCE: name}, "name": format!("{name}-job")},
        // A run has one job; another job is another run.
        "immutable": true,
        "data": {"job.toml": fleet.job},
    })
}

/// The service that gives each server its name.
pub(super) fn service(name: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Service", "metadata": meta(name, Role::Server),
        "spec": {
            "clusterIP": "None",
            "ports": [{"name": "paraft", "port": PORT}],
            // Servers find each other before any of them is ready.
            "publishNotReadyAddresses": true,
            "selector": labels(name, Role::Server),
        },
    })
}

/// Only one server at a time is drained from its node.
pub(super) fn disruption_budget(name: &str) -> Value {
    json!({
        "apiVersion": "policy/v1", "kind": "PodDisruptionBudget", "metadata": meta(name, Role::Server),
        "spec": {"maxUnavailable": 1, "selector": {"matchLabels": labels(name, Role::Server)}},
    })
}

pub(super) fn stateful_set(fleet: &Fleet, name: &str) -> Value {
    let set = format!("{name}-servers");
    let container_spec = ContainerSpec {
        from: vec![("PARAFT_INDEX", label("apps.kubernetes.io/pod-index"))],
        servers: (0..fleet.servers.count).map(|n| format!("{set}-{n}.{set}:{PORT}")).collect(),
        // A StatefulSet restarts any ended pod.
        until_done: false,
        claimed: fleet.disk.is_some(),
        container: CONTAINER,
    };
    let mut spec = json!({
        "podManagementPolicy": "Parallel",
        "replicas": fleet.servers.count,
        "selector": {"matchLabels": labels(name, Role::Server)},
        "serviceName": set,
        "template": pod::template(fleet, name, Role::Server, "Always", &container_spec),
    });
    if let Some(size) = &fleet.disk {
        // The next run with this name must not find old data.
        spec["persistentVolumeClaimRetentionPolicy"] =
            json!({"whenDeleted": "Delete", "whenScaled": "Retain"});
        spec["volumeClaimTemplates"] = json!([claim(size)]);
    }
    json!({"apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": meta(name, Role::Server), "spec": spec})
}

fn claim(size: &str) -> Value {
    json!({
        "metadata": {"name": "data"},
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": size}}},
    })
}

pub(super) fn indexed_job(fleet: &Fleet, name: &str) -> Value {
    let set = format!("{name}-servers");
    let container_spec = ContainerSpec {
        from: vec![(
            "PARAFT_ATTEMPT",
            "metadata.annotations['batch.kubernetes.io/job-index-failure-count']".into(),
        )],
        servers: (0..fleet.servers.count).map(|n| format!("{set}-{n}.{set}:{PORT}")).collect(),
        until_done: true,
        claimed: false,
        container: CONTAINER,
    };
    json!({
        "apiVersion": "batch/v1", "kind": "Job", "metadata": meta(name, Role::Worker),
        "spec": workers(fleet, pod::template(fleet, name, Role::Worker, "Never", &container_spec), CONTAINER),
    })
}

/// A Job of all workers.
pub(super) fn workers(fleet: &Fleet, template: Value, container: &str) -> Value {
    let count = fleet.workers.count;
    json!({
        "backoffLimitPerIndex": fleet.restarts,
        "completionMode": "Indexed",
        "completions": count,
        // A worker that is given up ends the others, which would wait for it.
        "maxFailedIndexes": 0,
        "parallelism": count,
        "podFailurePolicy": failure_policy(container),
        "template": template,
    })
}

/// The exit codes of `paraft_worker::exit` that mean "retry", and of signals from engines and kernels;
/// Kubernetes accepts no ranges.
const RETRY_CODES: [u8; 17] =
    [69, 74, 129, 130, 131, 132, 133, 134, 135, 136, 137, 138, 139, 140, 141, 142, 143];

/// A drained node does not count; a failure that would repeat ends all.
pub(super) fn failure_policy(container: &str) -> Value {
    json!({"rules": [
        {"action": "Ignore", "onPodConditions": [{"status": "True", "type": "DisruptionTarget"}]},
        {"action": "FailJob", "onExitCodes": {"containerName": container, "operator": "NotIn", "values": RETRY_CODES}},
    ]})
}

fn meta(name: &str, role: Role) -> Value {
    json!({"labels": labels(name, role), "name": format!("{name}-{role}s")})
}
