//! Shared by the pods of all kinds: the container, its user, its mounts and its node.

use crate::{
    fleet::{Files, Fleet},
    place::Role,
};
use serde_json::{Map, Value, json};

/// The container whose exit code counts.
pub(super) const CONTAINER: &str = "paraft";
/// The port of every server; each has its own address.
pub(super) const PORT: u16 = 7071;
/// The label of all objects of a run.
pub(super) const INSTANCE: &str = "app.kubernetes.io/instance";
/// The label with the role.
pub(super) const COMPONENT: &str = "app.kubernetes.io/component";
/// The label of a JobSet's pods with the number of the Job in its role.
pub(super) const JOB_INDEX: &str = "jobset.sigs.k8s.io/job-index";

const JOB: &str = "/etc/paraft/job";
const CERTS: &str = "/etc/paraft/certs";
const RUN: &str = "/paraft/run";
const DATA: &str = "/paraft/data";

/// No user of the node, and not root.
const USER: u32 = 65_532;

/// How a pod's process learns its place.
pub(super) struct ContainerSpec {
    /// Variables by name, with the field of the pod for each.
    pub from: Vec<(&'static str, String)>,
    /// The addresses of all servers.
    pub servers: Vec<String>,
    /// A server may exit with 0 when the job is over, and is not restarted then.
    pub until_done: bool,
    /// Each server's data is on its own volume of this name, which the owner of the pod has claimed.
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

/// The pod template of a role. `restart`: the kubelet's restart policy.
pub(super) fn template(
    fleet: &Fleet,
    name: &str,
    role: Role,
    restart: &str,
    container_spec: &ContainerSpec,
) -> Value {
    let mut spec = Map::new();
    let mut set = |key: &str, value: Value| spec.insert(key.into(), value);
    if role == Role::Server {
        set("affinity", apart(fleet, name));
    }
    set("automountServiceAccountToken", json!(false));
    set("containers", json!([container(fleet, name, role, container_spec)]));
    // A lost DNS reply is retried after 1 s instead of 5: servers resolve each other's names.
    set(
        "dnsConfig",
        json!({"options": [{"name": "timeout", "value": "1"}, {"name": "attempts", "value": "5"}]}),
    );
    // Variables for each service of the namespace are useless, and some look like Paraft's.
    set("enableServiceLinks", json!(false));
    set("restartPolicy", json!(restart));
    set(
        "securityContext",
        json!({
            "fsGroup": USER, "runAsGroup": USER, "runAsNonRoot": true, "runAsUser": USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        }),
    );
    // After SIGTERM the process hands over for `grace`, and then needs time to exit.
    set("terminationGracePeriodSeconds", json!(fleet.grace + 10));
    set("volumes", json!(volumes(fleet, name, role, container_spec)));
    json!({"metadata": {"labels": labels(name, role)}, "spec": spec})
}

fn container(fleet: &Fleet, name: &str, role: Role, container_spec: &ContainerSpec) -> Value {
    let job = format!("{JOB}/job.toml");
    let data = (role == Role::Server).then_some(DATA);
    let files = Files { run: RUN, job: &job, data, certs: CERTS };
    // `$(NAME)` is a variable there, and `$$` is a `$`.
    let plain = |word: &str| word.replace('$', "$$");
    let words: Vec<_> =
        fleet.words(role, &files, container_spec.until_done).iter().map(|word| plain(word)).collect();
    let mut it = json!({
        "name": container_spec.container,
        "image": fleet.image,
        "command": [plain(&fleet.program)],
        "args": words,
        "env": env(container_spec),
        "resources": resources(fleet, role),
        "securityContext": {
            "allowPrivilegeEscalation": false, "capabilities": {"drop": ["ALL"]}, "readOnlyRootFilesystem": true,
        },
        "volumeMounts": mounts(fleet, name, role),
    });
    if role == Role::Server {
        it["ports"] = json!([{"containerPort": PORT, "name": "paraft"}]);
        // Ready means that it listens, which needs no quorum.
        it["readinessProbe"] = json!({"periodSeconds": 5, "tcpSocket": {"port": "paraft"}});
    }
    it
}

fn env(container_spec: &ContainerSpec) -> Vec<Value> {
    let from =
        |(name, path): &(&str, String)| json!({"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}});
    let servers = json!({"name": "PARAFT_SERVERS", "value": container_spec.servers.join(",")});
    // After the variables that it refers to.
    container_spec.from.iter().map(from).chain([servers]).collect()
}

fn resources(fleet: &Fleet, role: Role) -> Value {
    let part = fleet.part(role);
    // Also as the limit, from which a process derives its number of threads.
    let mut all = json!({"cpu": part.cpus.to_string()});
    if let Some(memory) = &part.memory {
        all["memory"] = json!(memory);
    }
    if part.gpus > 0 {
        all["nvidia.com/gpu"] = json!(part.gpus);
    }
    json!({"limits": all, "requests": all})
}

/// No two servers on one node; with `--together` only a preference.
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

/// The pod's volumes; `mounts` says where they are in the container.
fn volumes(fleet: &Fleet, name: &str, role: Role, container_spec: &ContainerSpec) -> Vec<Value> {
    let empty = |name: &str| json!({"emptyDir": {}, "name": name});
    let mut all = vec![json!({"configMap": {"name": format!("{name}-job")}, "name": "job"})];
    if let Some(name) = fleet.certs.of(role) {
        let secret = json!({"defaultMode": 0o400, "secretName": name});
        all.push(json!({"name": "certs", "secret": secret}));
    }
    if !fleet.mounts.iter().any(|m| m.at == RUN) {
        all.push(empty("run"));
    }
    if role == Role::Server && !container_spec.claimed {
        all.push(empty("data"));
    }
    all.push(empty("tmp"));
    let claims = fleet.mounts.iter().enumerate();
    all.extend(claims.map(|(n, mount)| {
        json!({"name": format!("mount-{n}"), "persistentVolumeClaim": {"claimName": mount.what}})
    }));
    all
}
