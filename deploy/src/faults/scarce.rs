//! What a running process may have: descriptors and memory, taken away and given back through its resource limits.

use rustix::process::{Pid, Resource, Rlimit, prlimit};
use std::{fs, io};

/// A limit that was lowered. Given back when this is dropped, if the process is still there.
#[derive(Debug)]
pub struct Taken {
    pid: Pid,
    resource: Resource,
    before: Rlimit,
}

fn process(pid: u32) -> io::Result<Pid> {
    i32::try_from(pid).ok().and_then(Pid::from_raw).ok_or_else(|| io::Error::other("no process id"))
}

fn lower(pid: u32, resource: Resource, to: u64) -> io::Result<Taken> {
    let pid = process(pid)?;
    let before = rustix::process::getrlimit(resource);
    let now = Rlimit { current: Some(to), maximum: before.maximum };
    let before = prlimit(Some(pid), resource, now)?;
    Ok(Taken { pid, resource, before })
}

/// The process opens nothing more from now on: its soft limit is what it has open.
pub fn descriptors(pid: u32) -> io::Result<Taken> {
    let open = fs::read_dir(format!("/proc/{pid}/fd"))?.count() as u64;
    lower(pid, Resource::Nofile, open)
}

/// The process gets `more` bytes of address space from now on, and nothing beyond.
pub fn memory(pid: u32, more: u64) -> io::Result<Taken> {
    let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
    let size = status
        .lines()
        .find_map(|l| l.strip_prefix("VmSize:")?.trim().strip_suffix(" kB")?.trim().parse().ok());
    let size: u64 = size.ok_or_else(|| io::Error::other("no VmSize"))?;
    lower(pid, Resource::As, size * 1024 + more)
}

impl Drop for Taken {
    fn drop(&mut self) {
        // It may be gone.
        let _ = prlimit(Some(self.pid), self.resource, self.before.clone());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    #[test]
    fn a_process_is_kept_from_opening_more_and_may_again() {
        // A shell whose child opens a file each time it is asked, and that says whether it could: limits are inherited.
        let script = "while read x; do if cat /dev/null; then echo yes; else echo no; fi; done";
        let mut child = Command::new("sh")
            .args(["-c", script])
            .stdin(std::process::Stdio::piped())
            .stdout(std::process::Stdio::piped())
            .stderr(std::process::Stdio::null())
            .spawn()
            .expect("sh");
        let (mut to, from) = (child.stdin.take().expect("piped"), child.stdout.take().expect("piped"));
        let mut from = io::BufReader::new(from);
        let mut ask = || {
            use std::io::{BufRead, Write};
            let mut said = String::new();
            to.write_all(b"x\n").and_then(|()| from.read_line(&mut said)).expect("it answers");
            said.trim().to_string()
        };
        assert_eq!(ask(), "yes");
        let taken = descriptors(child.id()).expect("lowered");
        assert_eq!(ask(), "no");
        drop(taken);
        assert_eq!(ask(), "yes");
        child.kill().and_then(|()| child.wait()).expect("it ends");
    }
}
