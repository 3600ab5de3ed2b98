//! Compose: servers and workers as services of one host, which Docker or Podman restarts after a
//! failure.
//!
//! The run's folder is mounted at its own path. Processes find each other in it, as on an engine with a
//! shared file system, so the host's ports stay free.

use crate::{
    engine::{Artifact, Engine, Handle, Member, ProcessOutput, all_said, run, tail},
    error::{EngineError, Kind},
    fleet::{Files, Fleet, inside},
    place::Role,
};
use serde_json::{Map, Value, json};
use std::path::Path;

/// Docker with its plugin, or Podman with podman-compose.
pub struct Compose;

const FILE: &str = "compose.yaml";

/// The container program, and the program that reads the compose file.
const TOOLS: [(&str, &[&str]); 2] = [("docker", &["docker", "compose"]), ("podman", &["podman-compose"])];

impl Engine for Compose {
    fn name(&self) -> &'static str {
        "compose"
    }

    fn render(&self, fleet: &Fleet) -> Result<Vec<Artifact>, EngineError> {
        if fleet.image.is_none() {
            return Err(EngineError::usage("which image? Compose runs nothing else")
                .help("add --image NAME of an image that has `paraft` and what the job needs"));
        }
        if fleet.time.is_some() || fleet.disk.is_some() {
            return Err(
                EngineError::usage("compose knows no --time and no --server-disk").help("leave them out")
            );
        }
        let mut services = Map::new();
        for role in fleet.roles() {
            for index in 0..fleet.part(role).count {
                services.insert(format!("{role}-{index}"), service(fleet, role, index));
            }
        }
        let all = json!({"name": project(&fleet.name), "services": services});
        let text =
            serde_norway::to_string(&all).map_err(|e| EngineError::new(Kind::Io, format!("{FILE}: {e}")))?;
        // YAML 1.1, which some tools read, takes 1000:50 for a number in base 60.
        let text = match fleet.owner {
            Some((user, group)) => {
                text.replace(&format!("user: {user}:{group}\n"), &format!("user: '{user}:{group}'\n"))
            }
            None => text,
        };
        let what = "# `docker compose up` or `podman-compose up` starts all; what has done its part ends with 0 and stays so.";
        Ok(vec![Artifact { name: FILE.into(), text: format!("{what}\n{text}") }])
    }

    fn submit(&self, fleet: &Fleet) -> Result<Handle, EngineError> {
        let works = |(_, compose): &&(&str, &[&str])| {
            run(compose[0], &[&compose[1..], &["version"]].concat()).is_ok()
        };
        let Some((program, _)) = TOOLS.iter().find(works) else {
            return Err(EngineError::new(
                Kind::Unavailable,
                "neither `docker compose` nor `podman-compose` works here",
            )
            .help("install one, or start the file that --dry-run prints by another program"));
        };
        let parts = fleet.roles().flat_map(|role| {
            let name = project(&fleet.name);
            (0..fleet.part(role).count).map(move |n| (role, format!("{name}-{role}-{n}")))
        });
        let args = [program.to_string()].into_iter().chain(fleet.args.clone()).collect();
        let handle = Handle { engine: self.name().into(), parts: parts.collect(), args, ..Handle::default() };
        compose(&handle, &fleet.run_dir, &["up", "--detach"])?;
        Ok(handle)
    }

    fn members(&self, handle: &Handle, _: &Path) -> Result<Vec<Member>, EngineError> {
        let text = run(program(handle), &["ps", "--all", "--format", "{{.Names}}|{{.State}}|{{.Status}}"])?;
        let line = |line: &str| {
            let [name, state, why] = line.splitn(3, '|').collect::<Vec<_>>().try_into().ok()?;
            let (role, _) = handle.parts.iter().find(|(_, part)| part == name)?;
            let index = name.rsplit_once('-').and_then(|(_, n)| n.parse().ok());
            Some(Member { role: *role, index, state: state.into(), node: String::new(), why: why.into() })
        };
        let mut members: Vec<_> = text.lines().filter_map(line).collect();
        members.sort_by_key(|m| (m.role, m.index));
        Ok(members)
    }

    fn cancel(&self, handle: &Handle, dir: &Path) -> Result<(), EngineError> {
        compose(handle, dir, &["down"]).map(drop)
    }

    fn logs(&self, handle: &Handle, _: &Path, lines: usize) -> Result<Vec<ProcessOutput>, EngineError> {
        let said = |(role, name): &(Role, String)| {
            let index = name.rsplit_once('-').map_or("?", |(_, n)| n);
            let text = all_said(program(handle), &["logs", &format!("--tail={lines}"), name])?;
            Ok(ProcessOutput { name: format!("{role}-{index}"), text: tail(&text, lines) })
        };
        handle.parts.iter().map(said).collect()
    }

    fn scale(&self, handle: &Handle, _: &Path, workers: u32) -> Result<Handle, EngineError> {
        for (n, (_, name)) in handle.parts.iter().filter(|(role, _)| *role == Role::Worker).enumerate() {
            let what = if n < workers as usize { "start" } else { "stop" };
            run(program(handle), &[what, name])?;
        }
        Ok(handle.clone())
    }
}

/// The program found at the submission.
fn program(handle: &Handle) -> &str {
    handle.args.first().map_or(TOOLS[0].0, |program| program)
}

fn compose(handle: &Handle, dir: &Path, words: &[&str]) -> Result<String, EngineError> {
    let own = program(handle);
    let tool = TOOLS.iter().find(|(program, _)| *program == own).map_or(TOOLS[0].1, |(_, compose)| compose);
    let file = inside(dir, FILE);
    let given = handle.args.iter().skip(1).map(String::as_str);
    let args: Vec<&str> = tool[1..]
        .iter()
        .copied()
        .chain(["--file", &file])
        .chain(given)
        .chain(words.iter().copied())
        .collect();
    run(tool[0], &args)
}

/// A valid compose name: lower case.
fn project(name: &str) -> String {
    name.to_ascii_lowercase().trim_start_matches('-').to_string()
}

fn service(fleet: &Fleet, role: Role, index: u32) -> Value {
    let part = fleet.part(role);
    let run = fleet.run_dir.to_string_lossy();
    let files = Files { run: &run, job: &inside(&fleet.run_dir, "job.toml"), data: None, certs: "" };
    // In compose files `$` starts a variable.
    let plain = |word: &str| word.replace('$', "$$");
    let folder = |what: &str, at: &str| json!({"type": "bind", "source": plain(what), "target": plain(at)});
    let volumes: Vec<_> =
        [folder(&run, &run)].into_iter().chain(fleet.mounts.iter().map(|m| folder(&m.what, &m.at))).collect();
    let words: Vec<_> = fleet.words(role, &files, true).iter().map(|word| plain(word)).collect();
    let mut limits = json!({"cpus": part.cpus.to_string()});
    if let Some(memory) = &part.memory {
        limits["memory"] = json!(memory);
    }
    let mut resources = json!({"limits": limits});
    if part.gpus > 0 {
        let gpus = json!([{"capabilities": ["gpu"], "count": part.gpus, "driver": "nvidia"}]);
        resources["reservations"] = json!({"devices": gpus});
    }
    let mut it = json!({
        "cap_drop": ["ALL"],
        "command": words,
        "container_name": format!("{}-{role}-{index}", project(&fleet.name)),
        "deploy": {"resources": resources},
        "entrypoint": [plain(&fleet.program)],
        "environment": {"PARAFT_INDEX": index.to_string()},
        "image": fleet.image.as_deref().map(plain),
        "read_only": true,
        // Compose ignores exit codes, so a permanent failure is also retried this often.
        "restart": format!("on-failure:{}", fleet.restarts),
        "security_opt": ["no-new-privileges"],
        "stop_grace_period": format!("{}s", fleet.grace + 10),
        "tmpfs": ["/tmp"],
        "volumes": volumes,
    });
    if let Some((user, group)) = fleet.owner {
        it["user"] = json!(format!("{user}:{group}"));
    }
    it
}

#[cfg(test)]
#[path = "compose_tests.rs"]
mod tests;
