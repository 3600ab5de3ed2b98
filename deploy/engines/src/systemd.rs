//! systemd: servers and workers as instances of two template units of one host.
//!
//! On several hosts that share the run's folder, a person links the same units on each, and enables there the numbers that are to
//! run there.

use crate::{
    engine::{Artifact, Engine, Handle, Member, ProcessOutput, run, tail},
    error::EngineError,
    fleet::{Files, Fleet, inside},
    place::Role,
};
use std::path::Path;

/// systemd by `systemctl` and `journalctl`: the user's own, or root's of the host.
pub struct Systemd;

/// A unit of a role: a template, or one of its instances.
fn unit(name: &str, role: Role, index: Option<u32>) -> String {
    format!("paraft-{name}-{role}@{}.service", index.map_or(String::new(), |n| n.to_string()))
}

impl Engine for Systemd {
    fn name(&self) -> &'static str {
        "systemd"
    }

    fn render(&self, fleet: &Fleet) -> Result<Vec<Artifact>, EngineError> {
        let dir = fleet.run_dir.to_string_lossy();
        fleet.refuse_line_breaks([&*dir, &fleet.program])?;
        // systemd itself refuses such a name, however it is quoted.
        if fleet.program.contains(['"', '\'', '\\']) {
            return Err(EngineError::usage(format!("`{}`: systemd starts no such program", fleet.program))
                .help("choose a --program without quotes and backslashes"));
        }
        if fleet.image.is_some() || fleet.disk.is_some() || !fleet.mounts.is_empty() || fleet.time.is_some() {
            return Err(EngineError::usage("systemd knows no --image, --mount, --server-disk and --time")
                .help("leave them out; RuntimeMaxSec= and the like may be written into the units"));
        }
        let one = |role| Artifact { name: unit(&fleet.name, role, None), text: template(fleet, role) };
        Ok(fleet.roles().map(one).collect())
    }

    fn submit(&self, fleet: &Fleet) -> Result<Handle, EngineError> {
        let own = fleet.owner.is_some_and(|(user, _)| user != 0);
        let args = own.then(|| "--user".to_string()).into_iter().chain(fleet.args.clone()).collect();
        let all = fleet.roles().flat_map(|role| {
            (0..fleet.part(role).count).map(move |n| (role, unit(&fleet.name, role, Some(n))))
        });
        let handle = Handle { engine: self.name().into(), parts: all.collect(), args, ..Handle::default() };
        for role in fleet.roles() {
            systemctl(&handle, &["link", &inside(&fleet.run_dir, &unit(&fleet.name, role, None))])?;
        }
        systemctl(&handle, &[&["enable", "--now"][..], &units(&handle)].concat())?;
        Ok(handle)
    }

    fn members(&self, handle: &Handle, _: &Path) -> Result<Vec<Member>, EngineError> {
        let show =
            ["show", "--property=Id,ActiveState,SubState,StateChangeTimestamp,NRestarts,ExecMainStatus"];
        let text = systemctl(handle, &[&show[..], &units(handle)].concat())?;
        Ok(text.split("\n\n").filter_map(|block| member(handle, block)).collect())
    }

    fn cancel(&self, handle: &Handle, _: &Path) -> Result<(), EngineError> {
        // Its links too, of instances and of templates.
        systemctl(handle, &[&["disable", "--now"][..], &units(handle)].concat()).map(drop)
    }

    fn logs(&self, handle: &Handle, _: &Path, lines: usize) -> Result<Vec<ProcessOutput>, EngineError> {
        let many = format!("--lines={lines}");
        let said = |(role, unit): &(Role, String)| {
            let given: Vec<&str> = handle.args.iter().map(String::as_str).collect();
            let text = run("journalctl", &[&given[..], &["--unit", unit, &many, "--output=cat"]].concat())?;
            let index = index_of(unit).map_or("?".into(), |n| n.to_string());
            Ok(ProcessOutput { name: format!("{role}-{index}"), text: tail(&text, lines) })
        };
        handle.parts.iter().map(said).collect()
    }

    fn scale(&self, handle: &Handle, _: &Path, workers: u32) -> Result<Handle, EngineError> {
        for (_, unit) in handle.parts.iter().filter(|(role, _)| *role == Role::Worker) {
            let what = if index_of(unit) < Some(workers) { "start" } else { "stop" };
            systemctl(handle, &[what, unit])?;
        }
        Ok(handle.clone())
    }
}

fn systemctl(handle: &Handle, words: &[&str]) -> Result<String, EngineError> {
    let given: Vec<&str> = handle.args.iter().map(String::as_str).collect();
    run("systemctl", &[&given[..], words].concat())
}

fn units(handle: &Handle) -> Vec<&str> {
    handle.parts.iter().map(|(_, unit)| unit.as_str()).collect()
}

fn index_of(unit: &str) -> Option<u32> {
    unit.rsplit_once('@')?.1.strip_suffix(".service")?.parse().ok()
}

/// What `systemctl show` says of one unit.
fn member(handle: &Handle, block: &str) -> Option<Member> {
    let of = |key: &str| {
        block.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix('=')).unwrap_or_default()
    };
    let (role, unit) = handle.parts.iter().find(|(_, unit)| unit == of("Id"))?;
    let mut why = format!("since {}", of("StateChangeTimestamp"));
    if of("ActiveState") != "active" {
        why = format!("{why}, code {}", of("ExecMainStatus"));
    }
    if !matches!(of("NRestarts"), "" | "0") {
        why = format!("{why}, started again {} times", of("NRestarts"));
    }
    let state = format!("{} ({})", of("ActiveState"), of("SubState"));
    Some(Member { role: *role, index: index_of(unit), state, node: String::new(), why })
}

/// A word of a command in a unit: between double quotes with its backslashes, where it has anything but the plainest characters; and
/// `%` begins a specifier also there.
fn word(text: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "/._-+=:,@%$".contains(c);
    // Before a program's name `-`, `@`, `:`, `+` and `!` have a meaning, which quotes do not take away; a path begins with none.
    let text = text.replace('%', "%%");
    match !text.is_empty() && text.chars().all(plain) {
        true => text,
        false => format!("\"{}\"", text.replace('\\', "\\\\").replace('"', "\\\"")),
    }
}

fn template(fleet: &Fleet, role: Role) -> String {
    let Fleet { name, grace, restarts, program, run_dir, .. } = fleet;
    let part = fleet.part(role);
    let run = run_dir.to_string_lossy();
    let job = inside(run_dir, "job.toml");
    let words = fleet.words(role, &Files { run: &run, job: &job, data: None, certs: "" }, true);
    // The program's own name is no place for a variable, so it has no `$` to double.
    let words: Vec<String> = words.iter().map(|w| word(&w.replace('$', "$$"))).collect();
    let (program, words) = (word(program), words.join(" "));
    let mut text = format!(
        "# A {role}; its number is the instance's: {instance}\n\
         [Unit]\n\
         Description=Paraft {role} %i of {name}\n\
         After=network-online.target\n\
         Wants=network-online.target\n\
         StartLimitIntervalSec=1d\n\
         StartLimitBurst={restarts}\n\
         \n\
         [Service]\n\
         Type=exec\n\
         Environment=PARAFT_INDEX=%i\n\
         ExecStart={program} {words}\n\
         Restart=on-failure\n\
         RestartSec=1\n\
         # The same would fail again.\n\
         RestartPreventExitStatus=1 2 65 78\n\
         # It hands over what it holds.\n\
         TimeoutStopSec={stop}\n\
         NoNewPrivileges=yes\n",
        instance = unit(name, role, Some(0)),
        stop = grace + 10,
    );
    text.push_str(&format!("CPUQuota={}%\n", part.cpus * 100));
    if let Some(memory) = &part.memory {
        text.push_str(&format!("MemoryMax={}\n", memory.replace('%', "%%")));
    }
    let wanted =
        if fleet.owner.is_some_and(|(user, _)| user != 0) { "default.target" } else { "multi-user.target" };
    text.push_str(&format!("\n[Install]\nWantedBy={wanted}\n"));
    text
}

#[cfg(test)]
#[path = "systemd_tests.rs"]
mod tests;
