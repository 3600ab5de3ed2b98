//! Processes of this machine, as the kernel shows them in /proc: which is a server, who owns a connection, how a server
//! was started.

use std::{
    ffi::OsString,
    fs,
    io::{self, Read},
    os::unix::ffi::OsStringExt,
    path::{Path, PathBuf},
};

/// How a process was started: enough to start it again.
#[derive(Clone, Debug)]
pub struct Started {
    /// Its program and arguments.
    pub args: Vec<OsString>,
    /// Its environment.
    pub env: Vec<(OsString, OsString)>,
    /// Its working folder.
    pub cwd: PathBuf,
    /// The program's file.
    pub exe: PathBuf,
}

fn strings(bytes: &[u8]) -> Vec<OsString> {
    let trimmed = bytes.strip_suffix(&[0]).unwrap_or(bytes);
    trimmed.split(|b| *b == 0).map(|s| OsString::from_vec(s.to_vec())).collect()
}

/// How `pid` was started.
pub fn started(pid: u32) -> io::Result<Started> {
    let of = |what: &str| format!("/proc/{pid}/{what}");
    let env = strings(&fs::read(of("environ"))?).into_iter().filter_map(|s| {
        let text = s.to_str()?;
        let (k, v) = text.split_once('=')?;
        Some((k.into(), v.into()))
    });
    let exe = fs::read_link(of("exe"))?;
    Ok(Started {
        args: strings(&fs::read(of("cmdline"))?),
        env: env.collect(),
        cwd: fs::read_link(of("cwd"))?,
        // A program that was replaced on disk since is started from its new file.
        exe: exe.to_str().and_then(|e| e.strip_suffix(" (deleted)")).map_or(exe.clone(), PathBuf::from),
    })
}

fn pids() -> impl Iterator<Item = u32> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.filter_map(|e| e.file_name().to_str()?.parse().ok())
}

fn arguments(pid: u32) -> Option<Vec<String>> {
    let bytes = fs::read(format!("/proc/{pid}/cmdline")).ok()?;
    Some(strings(&bytes).into_iter().map(|s| s.to_string_lossy().into_owned()).collect())
}

/// Servers of the run in `run_dir`, by their data folder `server-N`: place in the list, and process.
pub fn servers_of(run_dir: &Path) -> Vec<(u32, u32)> {
    let place = |pid: u32| {
        let args = arguments(pid)?;
        let server = args.get(1).is_some_and(|a| a == "server");
        let data = args.iter().position(|a| a == "--data").and_then(|i| args.get(i + 1))?;
        let name = Path::new(data).strip_prefix(run_dir).ok()?.to_str()?;
        let place = name.strip_prefix("server-")?.parse().ok()?;
        server.then_some((place, pid))
    };
    let mut found: Vec<_> = pids().filter_map(place).collect();
    found.sort_unstable();
    found
}

/// The sockets of the kernel's table for which `wanted(local port, state)` holds, by inode. State 0x0A listens.
fn sockets(wanted: impl Fn(u16, &str) -> bool) -> Vec<String> {
    let mut found = Vec::new();
    for table in ["/proc/net/tcp", "/proc/net/tcp6"] {
        let mut text = String::new();
        let read = fs::File::open(table).and_then(|mut f| f.read_to_string(&mut text));
        if read.is_err() {
            continue;
        }
        for line in text.lines().skip(1) {
            let fields: Vec<&str> = line.split_whitespace().collect();
            let [_, local, _, state, _, _, _, _, _, inode, ..] = fields.as_slice() else { continue };
            let port = local.rsplit(':').next().and_then(|p| u16::from_str_radix(p, 16).ok());
            if port.is_some_and(|p| wanted(p, state)) {
                found.push(format!("socket:[{inode}]"));
            }
        }
    }
    found
}

fn holds(pid: u32, sockets: &[String]) -> bool {
    let links = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
    links.filter_map(|l| fs::read_link(l.path()).ok()).any(|l| {
        let link = l.to_string_lossy();
        sockets.iter().any(|s| *s == link)
    })
}

/// Which of these servers (place and process) has a connection with this local port; `None`: none of them.
pub fn owner_of(servers: &[(u32, u32)], port: u16) -> Option<u32> {
    let sockets = sockets(|p, state| p == port && state != "0A");
    servers.iter().find(|(_, pid)| holds(*pid, &sockets)).map(|(place, _)| *place)
}

/// The process that listens on this port of this machine, where it is one that this user may look into.
pub fn listener(port: u16) -> Option<u32> {
    let sockets = sockets(|p, state| p == port && state == "0A");
    if sockets.is_empty() {
        return None;
    }
    pids().find(|pid| holds(*pid, &sockets))
}

/// The port on which a process listens for its fleet: the first of `candidates` that it holds.
pub fn listens_on(pid: u32) -> Vec<u16> {
    let mut ports = Vec::new();
    let links = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
    let own: Vec<String> = links
        .filter_map(|l| fs::read_link(l.path()).ok())
        .map(|l| l.to_string_lossy().into_owned())
        .filter(|l| l.starts_with("socket:["))
        .collect();
    for table in ["/proc/net/tcp", "/proc/net/tcp6"] {
        for line in fs::read_to_string(table).unwrap_or_default().lines().skip(1) {
            let fields: Vec<&str> = line.split_whitespace().collect();
            let [_, local, _, "0A", _, _, _, _, _, inode, ..] = fields.as_slice() else { continue };
            if own.contains(&format!("socket:[{inode}]")) {
                ports.extend(local.rsplit(':').next().and_then(|p| u16::from_str_radix(p, 16).ok()));
            }
        }
    }
    ports
}

/// Whether the process is there and not a zombie.
pub fn lives(pid: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // The name stands in parentheses and may hold anything; the state is behind the last one.
    stat.rsplit_once(") ").is_some_and(|(_, rest)| !rest.starts_with('Z') && !rest.starts_with('X'))
}
