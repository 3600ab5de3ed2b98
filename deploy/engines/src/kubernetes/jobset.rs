//! The kinds of others: a JobSet, and a runtime and a job of Kubeflow Trainer, which makes a JobSet of them.

use super::{
    objects::{failure_policy, workers},
    pod::{self, CONTAINER, ContainerSpec, JOB_INDEX, PORT, label, labels},
};
use crate::{fleet::Fleet, place::Role};
use serde_json::{Value, json};

const NAME: &str = "jobset.sigs.k8s.io/jobset-name";
const ATTEMPT: &str = "jobset.sigs.k8s.io/restart-attempt";

pub(super) fn job_set(fleet: &Fleet, name: &str) -> Value {
    // Each server is the only pod of its Job: what is started again is that Job.
    let servers: Vec<_> =
        (0..fleet.servers.count).map(|n| format!("{name}-servers-{n}-0.{name}:{PORT}")).collect();
    let from = |server: bool| {
        let index = server.then(|| ("JOBSET_JOB_INDEX", label(JOB_INDEX)));
        index
            .into_iter()
            .chain([("JOBSET_NAME", label(NAME)), ("JOBSET_RESTART_ATTEMPT", label(ATTEMPT))])
            .collect()
    };
    let container_spec = |role| ContainerSpec {
        from: from(role == Role::Server),
        servers: servers.clone(),
        until_done: true,
        claimed: false,
        container: CONTAINER,
    };
    let template = |role| pod::template(fleet, name, role, "Never", &container_spec(role));
    let spec = json!({
        "failurePolicy": {
            "maxRestarts": fleet.restarts,
            "rules": [
                // What would fail again.
                {"action": "FailJobSet", "name": "never", "onJobFailureReasons": ["PodFailurePolicy"]},
                {"action": "RestartJobAndIgnoreMaxRestarts", "name": "server", "targetReplicatedJobs": ["servers"]},
                {"action": "RestartJob", "name": "workers", "targetReplicatedJobs": ["workers"]},
            ],
        },
        "network": {"enableDNSHostnames": true, "publishNotReadyAddresses": true, "subdomain": name},
        "replicatedJobs": [
            {"name": "servers", "replicas": fleet.servers.count, "template": {"spec": {
                "backoffLimit": 0, "completions": 1, "parallelism": 1,
                "podFailurePolicy": failure_policy(CONTAINER),
                "template": template(Role::Server),
            }}},
            {"name": "workers", "replicas": 1, "template": {"spec": workers(fleet, template(Role::Worker), CONTAINER)}},
        ],
        "successPolicy": {"operator": "All", "targetReplicatedJobs": ["workers"]},
    });
    json!({"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": meta(name), "spec": spec})
}

/// The container that Trainer looks for.
const NODE: &str = "node";

/// Trainer's own templates have one Job of a kind, so all servers are pods of one, which has them started again one by one.
pub(super) fn runtime(fleet: &Fleet, name: &str) -> Value {
    let count = fleet.servers.count;
    // The JobSet has the TrainJob's name, for any submitter.
    let servers: Vec<_> =
        (0..count).map(|n| format!("$(JOBSET_NAME)-servers-0-{n}.$(JOBSET_NAME):{PORT}")).collect();
    let container_spec = |container| ContainerSpec {
        from: vec![("JOBSET_NAME", label(NAME)), ("JOBSET_RESTART_ATTEMPT", label(ATTEMPT))],
        servers: servers.clone(),
        until_done: true,
        claimed: false,
        container,
    };
    let template = |role, container| pod::template(fleet, name, role, "Never", &container_spec(container));
    let job = json!({
        "backoffLimitPerIndex": fleet.restarts,
        "completionMode": "Indexed", "completions": count, "parallelism": count,
        "podFailurePolicy": failure_policy(CONTAINER),
        "template": template(Role::Server, CONTAINER),
    });
    let node = json!({"name": NODE, "template": {
        "metadata": {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}},
        "spec": workers(fleet, template(Role::Worker, NODE), NODE),
    }});
    json!({
        "apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": "ClusterTrainingRuntime",
        "metadata": {"labels": {"trainer.kubeflow.org/framework": "paraft"}, "name": name},
        "spec": {
            "mlPolicy": {"numNodes": fleet.workers.count},
            "template": {"spec": {
                "network": {"enableDNSHostnames": true, "publishNotReadyAddresses": true},
                "replicatedJobs": [{"name": "servers", "replicas": 1, "template": {"spec": job}}, node],
                "successPolicy": {"operator": "All", "targetReplicatedJobs": [NODE]},
            }},
        },
    })
}

pub(super) fn train_job(fleet: &Fleet, name: &str) -> Value {
    json!({
        "apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": "TrainJob", "metadata": meta(name),
        "spec": {"runtimeRef": {"name": name}, "trainer": {"numNodes": fleet.workers.count}},
    })
}

fn meta(name: &str) -> Value {
    let mut labels = labels(name, Role::Server);
    if let Some(all) = labels.as_object_mut() {
        all.remove(pod::COMPONENT);
    }
    json!({"labels": labels, "name": name})
}
