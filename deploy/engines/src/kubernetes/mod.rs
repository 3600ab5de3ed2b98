//! Kubernetes: servers as a StatefulSet and workers as an Indexed Job; or both as one JobSet; or as a
//! runtime of Kubeflow Trainer.
//!
//! - `pod`: shared by all pods. `objects`: the objects that every cluster supports. `jobset`: those of
//!   JobSet and Trainer. `query`: `kubectl` and its output.
//!
//! The names of their pods identify the servers, and stay the same on any node. No probe checks for a
//! leader: in a partition Kubernetes must not restart healthy servers.

mod jobset;
mod objects;
mod pod;
mod query;
#[cfg(test)]
mod schema;
#[cfg(test)]
mod tests;

use crate::{
    certs::{Certs, FILES},
    engine::{Artifact, Engine, Handle, Member, ProcessOutput, tail},
    error::{EngineError, Kind},
    fleet::Fleet,
    place::Role,
};
use serde_json::{Value, json};
use std::path::Path;

/// Kubernetes by `kubectl`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kubernetes {
    /// A StatefulSet and an Indexed Job.
    Sets,
    /// A JobSet, 0.12 or later.
    JobSet,
    /// A ClusterTrainingRuntime and a TrainJob.
    Trainer,
}

/// File name, heading comment and content of each manifest.
type Manifests = Vec<(&'static str, &'static str, Vec<Value>)>;

impl Kubernetes {
    fn manifests(self, fleet: &Fleet, name: &str) -> Manifests {
        let job = ("job.yaml", "The job file, as all pods see it.", vec![objects::config_map(fleet, name)]);
        let mut files = vec![job];
        match self {
            Self::Sets => {
                let servers = vec![
                    objects::service(name),
                    objects::disruption_budget(name),
                    objects::stateful_set(fleet, name),
                ];
                files.push((
                    "servers.yaml",
                    "The servers. They stand until `paraft fleet down`, also when the job is done.",
                    servers,
                ));
                if fleet.workers.count > 0 {
                    let what = "The workers. Codes that may pass (69, 74, signals) start one again; any other ends them all.";
                    files.push(("workers.yaml", what, vec![objects::indexed_job(fleet, name)]));
                }
            }
            Self::JobSet => {
                let what = "Servers and workers. A server that is lost is started again alone; when all workers are done, all is over.";
                let all = vec![objects::disruption_budget(name), jobset::job_set(fleet, name)];
                files.push(("jobset.yaml", what, all));
            }
            Self::Trainer => {
                let what = "How Kubeflow Trainer runs this fleet: for all TrainJobs of the cluster.";
                files.push(("runtime.yaml", what, vec![jobset::runtime(fleet, name)]));
                files.push(("trainjob.yaml", "The job.", vec![jobset::train_job(fleet, name)]));
            }
        }
        files
    }
}

impl Engine for Kubernetes {
    fn name(&self) -> &'static str {
        match self {
            Self::Sets => "kubernetes",
            Self::JobSet => "jobset",
            Self::Trainer => "trainer",
        }
    }

    fn render(&self, fleet: &Fleet) -> Result<Vec<Artifact>, EngineError> {
        let name = name_of(&fleet.name)?;
        if fleet.image.is_none() {
            return Err(EngineError::usage("which image? Kubernetes runs nothing else")
                .help("add --image NAME of an image that has `paraft` and what the job needs; docs/kubernetes.md builds one"));
        }
        if fleet.time.is_some() {
            return Err(EngineError::usage(
                "Kubernetes starts nothing again whose time is up: there is no --time",
            )
            .help("leave it out; activeDeadlineSeconds in workers.yaml ends a job for good"));
        }
        if *self != Self::Sets && fleet.workers.count == 0 {
            return Err(EngineError::usage(format!(
                "--on {}: a fleet without a job is no job of its own",
                self.name()
            ))
            .help("use --on kubernetes for servers that stand"));
        }
        if *self != Self::Sets && fleet.disk.is_some() {
            // JobSet claims one volume for all pods.
            return Err(EngineError::usage(format!("--on {} has no volume for each server", self.name()))
                .help("leave --server-disk out, or use --on kubernetes, whose StatefulSet has"));
        }
        let manifests = self.manifests(fleet, &name);
        let names: Vec<_> = manifests.iter().map(|(file, ..)| *file).collect();
        let mut index = json!({
            "apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization", "resources": names,
        });
        if let Certs::Each { server, worker } = &fleet.certs {
            // Created from the run's folder; a user with Secrets of these names removes it.
            let secret = |name: &str, folder: &str| {
                let files = FILES.map(|file| format!("{file}=certs/{folder}/{file}"));
                json!({"name": name, "files": files})
            };
            index["secretGenerator"] = json!([secret(server, "peer"), secret(worker, "worker")]);
            index["generatorOptions"] = json!({"disableNameSuffixHash": true});
        }
        let what = "kubectl create -k of this folder submits all; an overlay may name it as its base.";
        let index = ("kustomization.yaml", what, vec![index]);
        [index].into_iter().chain(manifests).map(|(file, what, all)| written(file, what, &all)).collect()
    }

    fn submit(&self, fleet: &Fleet) -> Result<Handle, EngineError> {
        let name = name_of(&fleet.name)?;
        let dir = fleet.run_dir.to_string_lossy();
        // All objects are validated, and none may exist, before the first is created.
        for more in [&["--dry-run=server"][..], &[]] {
            query::kubectl(&fleet.args, &[&["create", "-k", &dir][..], more].concat()).map_err(
                |e| match e.kind {
                    Kind::Refused => e.help(format!(
                        "if a run has this name already, end it, or name this one: --set name={name}-2"
                    )),
                    _ => e,
                },
            )?;
        }
        let part = |role| {
            let object = match (self, role) {
                (Self::Sets, Role::Server) => format!("statefulset/{name}-servers"),
                (Self::Sets, Role::Worker) => format!("job/{name}-workers"),
                (Self::JobSet, _) => format!("jobset/{name}"),
                (Self::Trainer, _) => format!("trainjob/{name}"),
            };
            (role, object)
        };
        let parts = fleet.roles().map(part).collect();
        Ok(Handle { engine: self.name().into(), parts, args: fleet.args.clone(), ..Handle::default() })
    }

    fn members(&self, handle: &Handle, _: &Path) -> Result<Vec<Member>, EngineError> {
        Ok(query::pods(handle)?.into_iter().map(|pod| pod.member).collect())
    }

    fn cancel(&self, handle: &Handle, dir: &Path) -> Result<(), EngineError> {
        let dir = dir.to_string_lossy();
        query::kubectl(&handle.args, &["delete", "--ignore-not-found", "-k", &dir]).map(drop)
    }

    fn logs(&self, handle: &Handle, _: &Path, lines: usize) -> Result<Vec<ProcessOutput>, EngineError> {
        let many = format!("--tail={lines}");
        let said = |pod: query::Pod| {
            let Member { role, index, .. } = &pod.member;
            let index = index.map_or("?".into(), |n| n.to_string());
            // A pod that has not started has only a reason, no log.
            let text = query::kubectl(&handle.args, &["logs", &pod.name, &many]).unwrap_or_else(|e| e.why);
            ProcessOutput { name: format!("{role}-{index}"), text: tail(&text, lines) }
        };
        Ok(query::pods(handle)?.into_iter().map(said).collect())
    }

    fn scales(&self) -> bool {
        *self == Self::Sets
    }

    fn scale(&self, handle: &Handle, _: &Path, workers: u32) -> Result<Handle, EngineError> {
        let job = handle.parts.iter().find(|(role, _)| *role == Role::Worker).map(|(_, object)| object);
        let Some(job) = job.filter(|_| self.scales()) else {
            return Err(EngineError::new(
                Kind::Usage,
                format!("--on {} has as many workers as it began with", self.name()),
            )
            .help("submit the job with --on kubernetes, whose Indexed Job can be scaled"));
        };
        let spec = json!({"spec": {"parallelism": workers, "completions": workers}}).to_string();
        query::kubectl(&handle.args, &["patch", job, "--type=merge", "--patch", &spec])?;
        Ok(handle.clone())
    }
}

/// A valid Service name, with room for the suffixes of controllers.
fn name_of(name: &str) -> Result<String, EngineError> {
    let lower = name.to_ascii_lowercase();
    let fits = lower.len() <= 40
        && lower.starts_with(|c: char| c.is_ascii_lowercase())
        && lower.ends_with(|c: char| c.is_ascii_alphanumeric())
        && lower.chars().all(|c| c.is_ascii_alphanumeric() || c == '-');
    match fits {
        true => Ok(lower),
        false => Err(EngineError::usage(format!(
            "`{name}` is no name for Kubernetes: a letter, then letters, digits and `-`, 40 at most"
        ))
        .help("give the job another one: --set name=NAME")),
    }
}

fn written(file: &str, what: &str, all: &[Value]) -> Result<Artifact, EngineError> {
    let mut text = format!("# {what}\n");
    // A separator before the first too: --dry-run prints all files as one stream.
    for one in all {
        let one =
            serde_norway::to_string(one).map_err(|e| EngineError::new(Kind::Io, format!("{file}: {e}")))?;
        text.push_str(&format!("---\n{one}"));
    }
    Ok(Artifact { name: file.into(), text })
}
