//! Hosts with only `sshd`: a script runs each process on its host and restarts it by its exit code.
//!
//! The names of their hosts identify the servers, so hosts need no shared file system. A lost host is
//! not replaced: the fleet continues with a majority of its servers.

mod host;

use crate::{
    engine::{Artifact, Engine, Handle, Member, ProcessOutput, run_with_input},
    error::{EngineError, Kind},
    fleet::{Fleet, quoted},
    place::Role,
};
use host::{SCRIPT, carried, put, script, start};
use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

/// ssh, with keys that need no prompt.
pub struct Ssh;

/// The hosts of a file in the format of DeepSpeed and MPI, `host slots=N`, each repeated by its slots.
pub fn hosts_of(text: &str) -> Result<Vec<String>, EngineError> {
    let mut hosts = Vec::new();
    for line in text.lines().map(|line| line.split('#').next().unwrap_or_default()) {
        let mut words = line.split_whitespace();
        let Some(host) = words.next() else { continue };
        let mut slots = 1;
        for word in words {
            slots = word.strip_prefix("slots=").and_then(|n| n.parse().ok()).filter(|n| *n > 0).ok_or_else(
                || {
                    EngineError::usage(format!("`{line}`: `{word}` is no slots=N"))
                        .help("write one host in each line, as `n1` or `n1 slots=8`")
                },
            )?;
        }
        let plain = |c: char| c.is_ascii_alphanumeric() || "._-:@[]".contains(c);
        if host.starts_with('-') || !host.chars().all(plain) {
            return Err(EngineError::usage(format!("`{host}` is no host"))
                .help("write its name or address, or USER@HOST"));
        }
        hosts.extend(std::iter::repeat_n(host.to_string(), slots));
    }
    Ok(hosts)
}

impl Engine for Ssh {
    fn name(&self) -> &'static str {
        "ssh"
    }

    fn render(&self, fleet: &Fleet) -> Result<Vec<Artifact>, EngineError> {
        placed(fleet)?;
        if fleet.image.is_some() || fleet.disk.is_some() || !fleet.mounts.is_empty() || fleet.time.is_some() {
            return Err(EngineError::usage("ssh knows no --image, --mount, --server-disk and --time")
                .help("leave them out"));
        }
        Ok(vec![Artifact { name: SCRIPT.into(), text: script(fleet)? }])
    }

    fn submit(&self, fleet: &Fleet) -> Result<Handle, EngineError> {
        let parts = placed(fleet)?;
        let servers = addresses(fleet, &parts);
        let handle = Handle { engine: self.name().into(), parts, args: fleet.args.clone(), servers };
        let files = carried(fleet)?;
        let hosts = by_host(&handle);
        // All hosts have all files before any process starts.
        for (host, parts) in &hosts {
            remote(&handle, host, &put(fleet, parts, &files)?)?;
        }
        for (host, parts) in &hosts {
            let start: String = parts.iter().map(|(role, n)| start(&fleet.run_dir, *role, *n)).collect();
            if let Err(e) = remote(&handle, host, &start) {
                let _ = self.cancel(&handle, &fleet.run_dir);
                return Err(e);
            }
        }
        Ok(handle)
    }

    fn members(&self, handle: &Handle, dir: &Path) -> Result<Vec<Member>, EngineError> {
        let dir = whole(dir)?;
        let mut members = Vec::new();
        for (host, parts) in by_host(handle) {
            let names: Vec<_> = parts.iter().map(|(role, n)| format!("{role}-{n}")).collect();
            let look = format!(
                "cd {dir} || exit 74\n{ALIVE}for name in {names}; do\n\
                 if alive \"$name\"; then echo \"RUNNING|pid $pid\"\n\
                 elif [ -e \"$name.code\" ]; then echo \"ENDED|code $(cat \"$name.code\")\"\n\
                 else echo 'LOST|it was killed with its script, or its host was started again'; fi\ndone\n",
                names = names.join(" "),
            );
            let said = remote(handle, &host, &look);
            for (n, (role, index)) in parts.into_iter().enumerate() {
                let (state, why) = match &said {
                    Ok(said) => {
                        said.lines().nth(n).and_then(|line| line.split_once('|')).unwrap_or(("UNKNOWN", ""))
                    }
                    Err(e) => ("UNREACHABLE", e.why.lines().last().unwrap_or_default()),
                };
                let (state, why) = (state.into(), why.into());
                members.push(Member { role, index: Some(index), state, node: host.clone(), why });
            }
        }
        members.sort_by_key(|m| (m.role, m.index));
        Ok(members)
    }

    fn cancel(&self, handle: &Handle, dir: &Path) -> Result<(), EngineError> {
        self.end(handle, dir, |_, _| true)
    }

    fn logs(&self, handle: &Handle, dir: &Path, lines: usize) -> Result<Vec<ProcessOutput>, EngineError> {
        let dir = whole(dir)?;
        let one = |(role, n): (Role, u32), host: &str| {
            let name = format!("{role}-{n}");
            let text = remote(handle, host, &format!("tail -n {lines} {dir}/{name}.said\n"))
                .unwrap_or_else(|e| e.why);
            ProcessOutput { name, text }
        };
        let mut all: Vec<_> = by_host(handle)
            .into_iter()
            .flat_map(|(host, parts)| parts.into_iter().map(move |part| one(part, &host)))
            .collect();
        all.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(all)
    }

    fn scale(&self, handle: &Handle, dir: &Path, workers: u32) -> Result<Handle, EngineError> {
        self.end(handle, dir, |role, n| role == Role::Worker && n >= workers)?;
        let path = PathBuf::from(dir).canonicalize().map_err(|e| unreadable(dir, &e))?;
        for (host, parts) in by_host(handle) {
            let back = parts.iter().filter(|(role, n)| *role == Role::Worker && *n < workers);
            let text: String = back
                .map(|(role, n)| format!("alive {role}-{n} || {{ {}}}\n", start(&path, *role, *n)))
                .collect();
            if !text.is_empty() {
                remote(handle, &host, &format!("cd {} || exit 74\n{ALIVE}{text}", whole(dir)?))?;
            }
        }
        Ok(handle.clone())
    }
}

impl Ssh {
    fn end(&self, handle: &Handle, dir: &Path, which: impl Fn(Role, u32) -> bool) -> Result<(), EngineError> {
        let dir = whole(dir)?;
        let mut failed = Ok(());
        // All processes are signalled before any is awaited, so they hand over at the same time.
        let tell = "alive \"$name\" && kill -TERM \"$pid\"";
        let wait = "n=0; while alive \"$name\"; do\n[ $n -lt 1200 ] || kill -KILL -- \"-$pid\"; n=$((n + 1)); sleep 0.1\ndone";
        for what in [tell, wait] {
            for (host, parts) in by_host(handle) {
                let names = parts.iter().filter(|(role, n)| which(*role, *n));
                let names: Vec<_> = names.map(|(role, n)| format!("{role}-{n}")).collect();
                if names.is_empty() {
                    continue;
                }
                let names = names.join(" ");
                let text = format!(
                    "cd {dir} 2>/dev/null || exit 0\n{ALIVE}for name in {names}; do\n{what}\ndone\ntrue\n"
                );
                // The other hosts are ended anyway.
                failed = remote(handle, &host, &text).map(drop).and(failed);
            }
        }
        failed
    }
}

/// Checks whether the script of a process runs, as `$pid`.
const ALIVE: &str =
    "alive() { pid=$(cat \"$1.pid\" 2>/dev/null) && grep -qs start.sh \"/proc/$pid/cmdline\"; }\n";

fn unreadable(dir: &Path, e: &std::io::Error) -> EngineError {
    EngineError::new(Kind::Io, format!("{}: {e}", dir.display()))
}

/// The run's folder, quoted for a shell.
fn whole(dir: &Path) -> Result<String, EngineError> {
    let whole = dir.canonicalize().map_err(|e| unreadable(dir, &e))?;
    Ok(quoted(&whole.to_string_lossy()))
}

/// Runs a script in a shell on the host. Its input is in no process list.
fn remote(handle: &Handle, host: &str, script: &str) -> Result<String, EngineError> {
    let given: Vec<&str> = handle.args.iter().map(String::as_str).collect();
    let own = ["-o", "BatchMode=yes", "-o", "ConnectTimeout=10", host, "sh -s"];
    run_with_input("ssh", &[&given[..], &own].concat(), script)
        .map_err(|e| EngineError { why: format!("{host}: {}", e.why), ..e })
}

/// The host of each process, as `N@HOST`: servers on the first hosts, workers by slots.
fn placed(fleet: &Fleet) -> Result<Vec<(Role, String)>, EngineError> {
    let mut distinct: Vec<&String> = Vec::new();
    fleet.hosts.iter().for_each(|host| {
        if !distinct.contains(&host) {
            distinct.push(host)
        }
    });
    let (servers, workers) = (fleet.servers.count as usize, fleet.workers.count as usize);
    if distinct.is_empty() {
        return Err(EngineError::usage("which hosts?")
            .help("add --hosts FILE, with a host in each line, as `n1` or `n1 slots=8`"));
    }
    if fleet.spread && servers > distinct.len() {
        return Err(EngineError::usage(format!("{servers} servers, and {} hosts", distinct.len()))
            .help("name more hosts, set cluster.servers, or let servers share hosts: --together"));
    }
    let slotted = fleet.hosts.len() > distinct.len();
    if slotted && workers > fleet.hosts.len() {
        return Err(EngineError::usage(format!(
            "{workers} workers, and the hosts have {} slots",
            fleet.hosts.len()
        ))
        .help("give them more slots, or set train.workers"));
    }
    let servers = (0..servers).map(|n| (Role::Server, format!("{n}@{}", distinct[n % distinct.len()])));
    // From the last host on, since the first ones run servers.
    let workers = (0..workers).map(|n| {
        let host = &fleet.hosts[fleet.hosts.len() - 1 - n % fleet.hosts.len()];
        (Role::Worker, format!("{n}@{host}"))
    });
    Ok(servers.chain(workers).collect())
}

type Parts = Vec<(Role, u32)>;

fn by_host(handle: &Handle) -> BTreeMap<String, Parts> {
    let mut hosts: BTreeMap<String, Parts> = BTreeMap::new();
    for (role, part) in &handle.parts {
        if let Some((n, host)) = part.split_once('@').and_then(|(n, host)| Some((n.parse().ok()?, host))) {
            hosts.entry(host.into()).or_default().push((*role, n));
        }
    }
    hosts
}

/// The servers' addresses: each has its own port, since servers may share a host.
fn addresses(fleet: &Fleet, parts: &[(Role, String)]) -> Vec<String> {
    let servers = parts.iter().filter(|(role, _)| *role == Role::Server).enumerate();
    let host = |part: &str| part.rsplit_once('@').map_or(part, |(_, host)| host).to_string();
    servers.map(|(n, (_, part))| format!("{}:{}", host(part), usize::from(fleet.port) + n)).collect()
}

#[cfg(test)]
mod tests;
