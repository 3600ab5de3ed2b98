//! Resource limits of a running process: takes descriptors and memory away, and restores them.

use rustix::process::{Pid, Resource, Rlimit, prlimit};
use std::{fs, io};

/// A lowered limit. Drop restores it if the process still exists.
#[derive(Debug)]
pub struct LoweredLimit {
    pid: Pid,
    resource: Resource,
    before: Rlimit,
}

fn process(pid: u32) -> io::Result<Pid> {
    i32::try_from(pid).ok().and_then(Pid::from_raw).ok_or_else(|| io::Error::other("no process id"))
}

fn lower(pid: u32, resource: Resource, to: u64) -> io::Result<LoweredLimit> {
    let pid = process(pid)?;
    let before = rustix::process::getrlimit(resource);
    let now = Rlimit { current: Some(to), maximum: before.maximum };
    let before = prlimit(Some(pid), resource, now)?;
    Ok(LoweredLimit { pid, resource, before })
}

/// Prevents the process from opening anything more: its soft limit becomes the number of open files.
pub fn descriptors(pid: u32) -> io::Result<LoweredLimit> {
    let open = fs::read_dir(format!("/proc/{pid}/fd"))?.count() as u64;
    lower(pid, Resource::Nofile, open)
}

/// Allows the process `more` bytes of address space and no more.
pub fn memory(pid: u32, more: u64) -> io::Result<LoweredLimit> {
    let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
    let size = status
        .lines()
        .find_map(|l| l.strip_prefix("VmSize:")?.trim().strip_suffix(" kB")?.trim().parse().ok());
    let size: u64 = size.ok_or_else(|| io::Error::other("no VmSize"))?;
    lower(pid, Resource::As, size * 1024 + more)
}

impl Drop for LoweredLimit {
    fn drop(&mut self) {
        // The process may be gone.
        let _ = prlimit(Some(self.pid), self.resource, self.before);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{
        io::{Read, Write},
        process::Command,
    };

    /// The soft limit of open files, from /proc.
    fn soft(pid: u32) -> String {
        let limits = fs::read_to_string(format!("/proc/{pid}/limits")).expect("it runs");
        let line = limits.lines().find(|l| l.starts_with("Max open files")).expect("listed");
        line.split_whitespace().nth(3).expect("a number").to_string()
    }

    #[test]
    fn a_process_is_kept_from_opening_more_and_may_again() {
        let piped = || std::process::Stdio::piped();
        let mut child = Command::new("cat").stdin(piped()).stdout(piped()).spawn().expect("cat(1)");
        // Once it answers, it has opened all that it needs.
        child.stdin.as_mut().expect("a pipe").write_all(b".").expect("it reads");
        child.stdout.as_mut().expect("a pipe").read_exact(&mut [0]).expect("it writes");
        let before = soft(child.id());
        let open = || fs::read_dir(format!("/proc/{}/fd", child.id())).expect("it runs").count();
        let taken = descriptors(child.id()).expect("lowered");
        assert_eq!(soft(child.id()), open().to_string());
        drop(taken);
        assert_eq!(soft(child.id()), before);
        let taken = memory(child.id(), 1 << 20).expect("lowered");
        drop(taken);
        child.kill().and_then(|()| child.wait().map(drop)).expect("it ends");
    }
}
