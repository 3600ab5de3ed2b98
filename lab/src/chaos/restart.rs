//! The restart of a killed server.

use super::target::Target;
use paraft_fleet::faults::process;
use std::{
    collections::BTreeMap,
    ffi::OsString,
    fs, io,
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
};

/// How to restart a killed server.
pub struct Restart {
    started: process::StartCommand,
    /// Its standard error, if that is a file.
    stderr: Option<PathBuf>,
}

impl Restart {
    /// How to start the server of process `pid` again, as the same member of the fleet. A server of `paraft train` holds
    /// a pipe to its launcher, which its next incarnation cannot have: flags give it its port, the servers and the
    /// launcher's number instead.
    pub fn of(pid: u32, place: u32, target: &Target) -> io::Result<Self> {
        let mut started = process::started(pid)?;
        let fd = fs::read_link(format!("/proc/{pid}/fd/2")).ok();
        let stderr = fd.filter(|p| p.is_file());
        let text = |a: &OsString| a.to_string_lossy().into_owned();
        if started.args.iter().any(|a| a == "--supervised") {
            let launcher = process::parent(pid)?;
            let port = process::listens_on(pid)
                .first()
                .copied()
                .ok_or_else(|| io::Error::other(format!("server {place} listens on no port")))?;
            let mut args = Vec::new();
            let mut old = started.args.iter().map(text);
            while let Some(a) = old.next() {
                match a.as_str() {
                    "--supervised" => {}
                    "--listen" => drop(old.next()),
                    _ => args.push(a.into()),
                }
            }
            args.extend(["--listen".into(), format!("127.0.0.1:{port}").into()]);
            args.extend(["--servers".into(), target.addresses.join(",").into()]);
            args.extend(["--until".into(), launcher.to_string().into()]);
            started.args = args;
        }
        Ok(Self { started, stderr })
    }

    /// Starts the server.
    pub fn start(&self) -> io::Result<Child> {
        let s = &self.started;
        let stderr = match &self.stderr {
            Some(path) => Stdio::from(fs::File::options().append(true).open(path)?),
            None => Stdio::null(),
        };
        let env: BTreeMap<_, _> = s.env.iter().cloned().collect();
        let mut command = Command::new(&s.exe);
        command.args(s.args.iter().skip(1)).env_clear().envs(env);
        command.current_dir(Path::new(&s.cwd));
        // Its own process group: Ctrl-C ends this program, not the restarted server.
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(stderr).process_group(0).spawn()
    }
}
