//! What the pods of all kinds have in common: the container, who it runs as, what it sees, on which node it may be.

use super::query::{COMPONENT, INSTANCE};
use crate::{
    Role,
    fleet::{Files, Fleet},
};
use serde_json::{Map, Value, json};

/// The container that an exit code is of.
pub(super) const CONTAINER: &str = "paraft";
/// Where servers listen. Each has its own address, so it is the same for all.
pub(super) const PORT: u16 = 7071;
/// The label of a JobSet's pods that numbers the Jobs of one role.
pub(super) const JOB_INDEX: &str = "jobset.sigs.k8s.io/job-index";

const JOB: &str = "/etc/paraft/job";
const CERTS: &str = "/etc/paraft/certs";
const RUN: &str = "/paraft/run";
const DATA: &str = "/paraft/data";

/// No user of the node's, and not root.
const USER: u32 = 65_532;

/// How a pod is told what it is, by what has made it.
pub(super) struct ContainerSpec {
    /// Variables by name, and what of the pod each has.
    pub from: Vec<(&'static str, String)>,
    /// Where all servers are.
    pub servers: Vec<String>,
    /// A server may end with 0 when the job is over: nothing starts it again then.
    pub until_done: bool,
    /// Each server's data is on a volume of its own, of this name, that who made the pod has claimed.
    pub claimed: bool,
    /// The container's name.
    pub container: &'static str,
}

pub(super) fn labels(name: &str, role: Role) -> Value {
    json!({"app.kubernetes.io/name": "paraft", INSTANCE: name, COMPONENT: role.to_string()})
}

pub(super) fn label(label: &str) -> String {
    format!("metadata.labels['{label}']")
}

/// The pod of a role, as a template has it. `restart`: what the kubelet does where it ends.
pub(super) fn template(fleet: &Fleet, name: &str, role: Role, restart: &str, told: &ContainerSpec) -> Value {
    let mut spec = Map::new();
    let mut set = |key: &str, value: Value| spec.insert(key.into(), value);
    if role == Role::Server {
        set("affinity", apart(fleet, name));
    }
    set("automountServiceAccountToken", json!(false));
    set("containers", json!([container(fleet, name, role, told)]));
    // An answer that is lost on the way is asked for again after 1 s, not after 5: servers look each other's names up.
    set(
        "dnsConfig",
        json!({"options": [{"name": "timeout", "value": "1"}, {"name": "attempts", "value": "5"}]}),
    );
    // A variable for each service of the namespace is of no use, and some look like ours.
    set("enableServiceLinks", json!(false));
    set("restartPolicy", json!(restart));
    set(
        "securityContext",
        json!({
            "fsGroup": USER, "runAsGroup": USER, "runAsNonRoot": true, "runAsUser": USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        }),
    );
    // After SIGTERM it hands over for `grace`, and then has still to end.
    set("terminationGracePeriodSeconds", json!(fleet.grace + 10));
    set("volumes", json!(volumes(fleet, name, role, told)));
    json!({"metadata": {"labels": labels(name, role)}, "spec": spec})
}

fn container(fleet: &Fleet, name: &str, role: Role, told: &ContainerSpec) -> Value {
    let job = format!("{JOB}/job.toml");
    let data = (role == Role::Server).then_some(DATA);
    let files = Files { run: RUN, job: &job, data, certs: CERTS };
    // `$(NAME)` is a variable there, and `$$` a `$`.
    let plain = |word: &str| word.replace('$', "$$");
    let words: Vec<_> = fleet.words(role, &files, told.until_done).iter().map(|word| plain(word)).collect();
    let mut it = json!({
        "name": told.container,
        "image": fleet.image,
        "command": [plain(&fleet.program)],
        "args": words,
        "env": env(told),
        "resources": resources(fleet, role),
        "securityContext": {
            "allowPrivilegeEscalation": false, "capabilities": {"drop": ["ALL"]}, "readOnlyRootFilesystem": true,
        },
        "volumeMounts": mounts(fleet, name, role),
    });
    if role == Role::Server {
        it["ports"] = json!([{"containerPort": PORT, "name": "paraft"}]);
        // It listens: that needs no quorum.
        it["readinessProbe"] = json!({"periodSeconds": 5, "tcpSocket": {"port": "paraft"}});
    }
    it
}

fn env(told: &ContainerSpec) -> Vec<Value> {
    let from =
        |(name, path): &(&str, String)| json!({"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}});
    let servers = json!({"name": "PARAFT_SERVERS", "value": told.servers.join(",")});
    // Behind those whose values stand in it.
    told.from.iter().map(from).chain([servers]).collect()
}

fn resources(fleet: &Fleet, role: Role) -> Value {
    let part = fleet.part(role);
    // The limit too: by it a process knows how many threads to start.
    let mut all = json!({"cpu": part.cpus.to_string()});
    if let Some(memory) = &part.memory {
        all["memory"] = json!(memory);
    }
    if part.gpus > 0 {
        all["nvidia.com/gpu"] = json!(part.gpus);
    }
    json!({"limits": all, "requests": all})
}

/// No two servers on one node; with `--together` only where that can be.
fn apart(fleet: &Fleet, name: &str) -> Value {
    let term = json!({
        "labelSelector": {"matchLabels": labels(name, Role::Server)}, "topologyKey": "kubernetes.io/hostname",
    });
    json!({"podAntiAffinity": match fleet.spread {
        true => json!({"requiredDuringSchedulingIgnoredDuringExecution": [term]}),
        false => json!({"preferredDuringSchedulingIgnoredDuringExecution": [{"podAffinityTerm": term, "weight": 100}]}),
    }})
}

fn mounts(fleet: &Fleet, name: &str, role: Role) -> Vec<Value> {
    let mut all = vec![json!({"mountPath": JOB, "name": "job", "readOnly": true})];
    if fleet.certs.of(role).is_some() {
        all.push(json!({"mountPath": CERTS, "name": "certs", "readOnly": true}));
    }
    if !fleet.mounts.iter().any(|m| m.at == RUN) {
        all.push(json!({"mountPath": RUN, "name": "run"}));
    }
    if role == Role::Server {
        all.push(json!({"mountPath": DATA, "name": "data"}));
    }
    all.push(json!({"mountPath": "/tmp", "name": "tmp"}));
    for (n, mount) in fleet.mounts.iter().enumerate() {
        let mut one = json!({"mountPath": mount.at, "name": format!("mount-{n}")});
        if mount.at == RUN {
            // Each run has its own folder on it.
            one["subPath"] = json!(name);
        }
        all.push(one);
    }
    all
}

fn volumes(fleet: &Fleet, name: &str, role: Role, told: &ContainerSpec) -> Vec<Value> {
    let empty = |name: &str| json!({"emptyDir": {}, "name": name});
    let mut all = vec![json!({"configMap": {"name": format!("{name}-job")}, "name": "job"})];
    if let Some(name) = fleet.certs.of(role) {
        let secret = json!({"defaultMode": 0o400, "secretName": name});
        all.push(json!({"name": "certs", "secret": secret}));
    }
    if !fleet.mounts.iter().any(|m| m.at == RUN) {
        all.push(empty("run"));
    }
    if role == Role::Server && !told.claimed {
        all.push(empty("data"));
    }
    all.push(empty("tmp"));
    let claims = fleet.mounts.iter().enumerate();
    all.extend(claims.map(|(n, mount)| {
        json!({"name": format!("mount-{n}"), "persistentVolumeClaim": {"claimName": mount.what}})
    }));
    all
}
