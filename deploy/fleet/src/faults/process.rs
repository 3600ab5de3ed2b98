//! Processes of this machine from /proc: which one is a server, which one owns a connection, how a
//! server was started.

use std::{
    ffi::OsString,
    fs, io,
    os::unix::ffi::OsStringExt,
    path::{Path, PathBuf},
};

/// How a process was started, to restart it.
#[derive(Clone, Debug)]
pub struct StartCommand {
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

/// Reads how `pid` was started.
pub fn started(pid: u32) -> io::Result<StartCommand> {
    let of = |what: &str| format!("/proc/{pid}/{what}");
    let env = strings(&fs::read(of("environ"))?).into_iter().filter_map(|s| {
        let text = s.to_str()?;
        let (k, v) = text.split_once('=')?;
        Some((k.into(), v.into()))
    });
    let exe = fs::read_link(of("exe"))?;
    Ok(StartCommand {
        args: strings(&fs::read(of("cmdline"))?),
        env: env.collect(),
        cwd: fs::read_link(of("cwd"))?,
        // A program that was replaced on disk restarts from the new file.
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

/// The value of a flag on a command line.
fn value_of<'a>(args: &'a [String], flag: &str) -> Option<&'a Path> {
    args.iter().position(|a| a == flag).and_then(|i| args.get(i + 1)).map(Path::new)
}

/// Servers and workers of the run in `run_dir`, found by their log files: name (`server-0`, `worker-1`)
/// and process id.
pub fn parts_of(run_dir: &Path) -> Vec<(String, u32)> {
    let run_dir = fs::canonicalize(run_dir).unwrap_or_else(|_| run_dir.to_path_buf());
    let name = |pid: u32| {
        let args = arguments(pid)?;
        let log = value_of(&args, "--log-file").filter(|l| l.parent() == Some(&run_dir))?;
        Some((log.file_stem()?.to_str()?.to_string(), pid))
    };
    let mut found: Vec<_> = pids().filter_map(name).collect();
    found.sort();
    found
}

/// Servers of the run in `run_dir`, found by their data folder `server-N`: place in the list, and
/// process id.
pub fn servers_of(run_dir: &Path) -> Vec<(u32, u32)> {
    let place = |pid: u32| {
        let args = arguments(pid)?;
        let server = args.get(1).is_some_and(|a| a == "server");
        let name = value_of(&args, "--data")?.strip_prefix(run_dir).ok()?.to_str()?;
        let place = name.strip_prefix("server-")?.parse().ok()?;
        server.then_some((place, pid))
    };
    let mut found: Vec<_> = pids().filter_map(place).collect();
    found.sort_unstable();
    found
}

/// TCP sockets of this machine that satisfy `wanted(local port, listening)`: inode (as /proc names it
/// in links) and local port.
fn sockets(wanted: impl Fn(u16, bool) -> bool) -> Vec<(String, u16)> {
    let mut found = Vec::new();
    for table in ["/proc/net/tcp", "/proc/net/tcp6"] {
        for line in fs::read_to_string(table).unwrap_or_default().lines().skip(1) {
            let fields: Vec<&str> = line.split_whitespace().collect();
            let [_, local, _, state, _, _, _, _, _, inode, ..] = fields.as_slice() else { continue };
            let port = local.rsplit(':').next().and_then(|p| u16::from_str_radix(p, 16).ok());
            if let Some(port) = port.filter(|p| wanted(*p, *state == LISTENS)) {
                found.push((format!("socket:[{inode}]"), port));
            }
        }
    }
    found
}

/// The kernel's TCP_LISTEN.
const LISTENS: &str = "0A";

/// The open files of a process.
fn open_files(pid: u32) -> Vec<String> {
    let links = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
    links.filter_map(|l| fs::read_link(l.path()).ok()).map(|l| l.to_string_lossy().into_owned()).collect()
}

fn holds(pid: u32, sockets: &[(String, u16)]) -> bool {
    let open = open_files(pid);
    sockets.iter().any(|(s, _)| open.contains(s))
}

/// The server, of these (place and process id), with a connection from this local port; `None`: none of
/// them.
pub fn owner_of(servers: &[(u32, u32)], port: u16) -> Option<u32> {
    let sockets = sockets(|p, listens| p == port && !listens);
    servers.iter().find(|(_, pid)| holds(*pid, &sockets)).map(|(place, _)| *place)
}

/// The process that listens on this port, if this user may inspect it.
pub fn listener(port: u16) -> Option<u32> {
    let sockets = sockets(|p, listens| p == port && listens);
    if sockets.is_empty() {
        return None;
    }
    pids().find(|pid| holds(*pid, &sockets))
}

/// The ports on which a process listens, in the order of their creation: the kernel numbers sockets in
/// that order.
pub fn listens_on(pid: u32) -> Vec<u16> {
    let open = open_files(pid);
    let number = |s: &str| s.trim_matches(|c: char| !c.is_ascii_digit()).parse::<u64>().unwrap_or(u64::MAX);
    let mut own = sockets(|_, listens| listens);
    own.retain(|(s, _)| open.contains(s));
    own.sort_by_key(|(s, _)| number(s));
    own.into_iter().map(|(_, port)| port).collect()
}

/// The current parent of a process.
pub fn parent(pid: u32) -> io::Result<u32> {
    let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
    let line = status.lines().find_map(|l| l.strip_prefix("PPid:"));
    line.and_then(|l| l.trim().parse().ok()).ok_or_else(|| io::Error::other("no PPid"))
}

/// Whether the process exists and is not a zombie.
pub fn lives(pid: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // The name is in parentheses and may contain anything; the state follows the last one.
    stat.rsplit_once(") ").is_some_and(|(_, rest)| !rest.starts_with('Z') && !rest.starts_with('X'))
}

#[cfg(test)]
#[path = "process_tests.rs"]
mod tests;
