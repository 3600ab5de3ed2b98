//! A process of this machine that ends with this one.
//!
//! Every child ends with this process, even after SIGKILL: its standard input is a pipe whose other end
//! is here (see `paraft_host::lifeline`). Children have their own process groups, so Ctrl-C reaches
//! only the launcher, which ends them in order. A user's script is such a process with another
//! lifeline, and with output for the user (`script`).

mod script;

use crate::failure::Failure;
use nix::{
    sys::{
        signal::{Signal, kill, killpg},
        wait::{Id, WaitPidFlag, WaitStatus, waitid},
    },
    unistd::Pid,
};
use paraft_worker::exit;
pub use script::Audience;
use script::Script;
use std::{
    fs::File,
    io::{BufRead, BufReader, Write},
    os::unix::process::{CommandExt, ExitStatusExt},
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    sync::atomic::{AtomicBool, Ordering::Relaxed},
    time::{Duration, Instant},
};

/// The user has sent a second interrupt.
static HURRY: AtomicBool = AtomicBool::new(false);

/// From now on, processes are killed without a grace period.
pub fn hurry() {
    HURRY.store(true, Relaxed);
}

/// Whether the user has sent a second interrupt.
pub(crate) fn hurries() -> bool {
    HURRY.load(Relaxed)
}

/// The grace period of a process.
const END_TIMEOUT: Duration = Duration::from_secs(3);

/// A process and its lifeline.
pub struct Process {
    /// The name in messages and file names: `server-0`, `worker-1`.
    pub name: String,
    child: Child,
    /// The file with its output.
    output: PathBuf,
    ended: Option<ExitStatus>,
    /// Set for a user's script.
    script: Option<Script>,
}

impl Process {
    /// Starts it; its standard error is appended to a file in `run_dir`.
    pub fn start(name: String, mut command: Command, run_dir: &Path) -> Result<Self, Failure> {
        let output = run_dir.join(format!("{name}.stderr"));
        let file = File::options().create(true).append(true).open(&output);
        let file = file.map_err(|e| Failure::write(&output, e))?;
        let program = command.get_program().to_string_lossy().into_owned();
        let child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(file)
            .process_group(0)
            .spawn()
            .map_err(|e| Failure::new(exit::CONFIG, format!("{name}: `{program}` does not start: {e}")))?;
        Ok(Self { name, child, output, ended: None, script: None })
    }

    /// The file with its output.
    pub fn output(&self) -> &Path {
        &self.output
    }

    /// Its process id.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// The exit status, once there is one.
    pub fn ended(&mut self) -> Option<ExitStatus> {
        if self.ended.is_none() {
            // A killed script's children (data loaders) are killed too, while the process id is still
            // reserved.
            let flags = WaitPidFlag::WEXITED | WaitPidFlag::WNOHANG | WaitPidFlag::WNOWAIT;
            if let Ok(WaitStatus::Signaled(..)) = waitid(Id::Pid(self.pid()), flags) {
                self.signal_all(Signal::SIGKILL);
            }
            self.ended = self.child.try_wait().ok().flatten();
            if let Some(script) = self.script.as_mut().filter(|_| self.ended.is_some()) {
                script.finish_output();
            }
        }
        self.ended
    }

    /// Its process id. After its end another process may have it.
    pub fn pid(&self) -> Pid {
        Pid::from_raw(self.child.id() as i32)
    }

    /// The first line of a supervised server: its address.
    pub fn first_line(&mut self) -> Result<String, Failure> {
        let mut line = String::new();
        let out = self.child.stdout.take();
        let read = out.map(|o| BufReader::new(o).read_line(&mut line));
        if line.trim().is_empty() {
            self.ended = self.child.wait().ok();
            let end = self.end();
            let mut what = format!("{} {end}", self.name);
            if let Some(Err(e)) = read {
                what += &format!(" ({e})");
            }
            return Err(Failure::new(exit::FAILED, what));
        }
        Ok(line.trim().to_string())
    }

    /// Writes one line to its standard input, which stays open.
    pub fn tell(&mut self, line: &str) -> Result<(), Failure> {
        let Some(stdin) = &mut self.child.stdin else { return Ok(()) };
        writeln!(stdin, "{line}").map_err(|e| Failure::new(exit::FAILED, format!("{}: {e}", self.name)))
    }

    /// Kills it with SIGKILL and waits until it is gone.
    pub fn kill(&mut self) {
        if self.ended().is_none() {
            self.signal_all(Signal::SIGKILL);
            let _ = self.child.kill();
            self.ended = self.child.wait().ok();
        }
    }

    /// Sends a signal if it is alive.
    pub fn signal(&self, signal: Signal) {
        if self.ended.is_none() {
            let _ = kill(self.pid(), signal);
        }
    }

    /// Sends a signal to the process, and to its process group if it has its own.
    fn signal_all(&self, signal: Signal) {
        if !self.has_terminal() {
            let _ = killpg(self.pid(), signal);
        }
    }

    /// The last line of its output.
    pub fn last_words(&self) -> String {
        if let Some(script) = &self.script {
            return script.last_words(&self.output);
        }
        let text = std::fs::read_to_string(&self.output).unwrap_or_default();
        let from = text.rfind("error: ").map_or(text.len().saturating_sub(400), |at| at + "error: ".len());
        text.get(from..).unwrap_or("").trim().to_string()
    }

    /// Why it ended: the last line of its output, or else what its exit code means.
    pub fn reason(&mut self) -> Option<String> {
        let words = Some(self.last_words()).filter(|words| !words.is_empty());
        words.or_else(|| {
            let code = self.ended().filter(|_| self.script.is_none())?.code()?;
            exit::meaning(code).map(str::to_string)
        })
    }

    /// How it ended, and why.
    pub fn end(&mut self) -> String {
        let how = self.obituary();
        self.reason().map_or_else(|| how.clone(), |why| format!("{how}: {why}"))
    }

    /// Whether a signal ended it.
    pub fn was_killed(&mut self) -> bool {
        self.killed_by().is_some()
    }

    /// How it ended, for people.
    pub fn obituary(&mut self) -> String {
        match self.ended() {
            None => "is running".into(),
            Some(s) => match (s.signal(), s.code()) {
                (Some(n), _) => {
                    let name = Signal::try_from(n).map_or(n.to_string(), |s| s.to_string());
                    format!("was ended by {name}")
                }
                (_, Some(code)) => format!("ended with exit code {code}"),
                _ => "ended".into(),
            },
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Ends all of these that still run: first with SIGTERM (scripts with the user's signal), then with
/// SIGKILL.
pub(crate) fn end(processes: &mut [Process], scripts: Signal) {
    for p in processes.iter_mut() {
        p.ended();
        match &p.script {
            Some(_) => p.ask_to_end(scripts),
            None => p.signal(Signal::SIGTERM),
        }
    }
    let script_timeout = processes.iter().any(|p| p.script.is_some()).then_some(script::END_TIMEOUT);
    let deadline = Instant::now() + script_timeout.unwrap_or(END_TIMEOUT);
    let some_run = |p: &mut [Process]| p.iter_mut().any(|p| p.ended().is_none()) && !HURRY.load(Relaxed);
    while some_run(processes) && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(5));
    }
    processes.iter_mut().for_each(Process::kill);
}

#[cfg(test)]
#[path = "process_tests.rs"]
mod tests;
