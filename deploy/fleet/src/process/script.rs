//! A user's script as a process of this machine: its lifeline, its input and its output.
//!
//! The script keeps standard input (`input()`, a debugger), so its lifeline is an inherited descriptor:
//! the end of a pipe that this process holds open and never writes to ([`LIFELINE`]). Its output goes
//! to a file in the run's folder, and that of one script also to the user.
//!
//! A script has its own process group, unless it reads from the terminal, which only the foreground
//! group may.

use super::Process;
use crate::failure::Failure;
use nix::sys::signal::Signal;
use paraft_worker::exit;
use rustix::io::{FdFlags, fcntl_setfd};
use std::{
    fs::File,
    io::{self, PipeWriter, Read, Seek, SeekFrom, Write},
    os::{
        fd::AsRawFd,
        unix::process::{CommandExt, ExitStatusExt},
    },
    path::Path,
    process::{Command, Stdio},
    thread::JoinHandle,
    time::{Duration, Instant},
};

/// The variable with the descriptor that closes when the launcher ends.
pub const LIFELINE: &str = "PARAFT_LIFELINE_FD";

/// A script may write a checkpoint before it ends.
pub(super) const END_TIMEOUT: Duration = Duration::from_secs(10);

/// How long output is awaited after the end: a child of the script may hold the pipe open.
const OUTPUT_TIMEOUT: Duration = Duration::from_millis(500);

/// Lines to show of a failed script without a traceback.
const LINES: usize = 20;
const BYTES: u64 = 8 << 10;

/// Where a script's output goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Audience {
    /// To its file only.
    LogFile,
    /// To its file and to the user.
    User,
    /// To its file and to the user; the script also reads from the terminal.
    Terminal,
}

/// The additional state of a script's process.
pub(super) struct Script {
    audience: Audience,
    /// Closes with this process.
    _lifeline: PipeWriter,
    /// The threads that copy its output.
    copiers: Vec<JoinHandle<()>>,
    /// The start of this process's output in the file, which may hold that of a predecessor.
    from: u64,
}

impl Script {
    /// Waits until all output is copied.
    pub(super) fn finish_output(&mut self) {
        let deadline = Instant::now() + OUTPUT_TIMEOUT;
        while self.copiers.iter().any(|p| !p.is_finished()) && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// The end of its output, if it is readable.
    pub(super) fn last_words(&self, output: &Path) -> String {
        let read = || {
            let mut file = File::open(output)?;
            let from = file.metadata()?.len().saturating_sub(BYTES).max(self.from);
            let mut end = Vec::new();
            file.seek(SeekFrom::Start(from))?;
            file.take(BYTES).read_to_end(&mut end)?;
            Ok::<_, io::Error>(end)
        };
        last_lines(&String::from_utf8_lossy(&read().unwrap_or_default()))
    }
}

impl Process {
    /// Starts a user's script; appends its output to `NAME.out` in `run_dir`.
    pub fn script(
        name: String,
        mut command: Command,
        run_dir: &Path,
        audience: Audience,
    ) -> Result<Self, Failure> {
        let output = run_dir.join(format!("{name}.out"));
        let open = || File::options().create(true).append(true).open(&output);
        let keep = || open().map_err(|e| Failure::write(&output, e));
        let program = command.get_program().to_string_lossy().into_owned();
        let fails =
            |e: io::Error| Failure::new(exit::CONFIG, format!("{name}: `{program}` does not start: {e}"));
        let from = keep()?.metadata().map_or(0, |m| m.len());
        let (held, lifeline) = io::pipe().map_err(fails)?;
        // This end is inheritable by any process that starts before it is closed here, which is
        // harmless. The other end must close with this process, so it is never inherited.
        fcntl_setfd(&held, FdFlags::empty()).map_err(|e| fails(e.into()))?;
        command.env(LIFELINE, held.as_raw_fd().to_string());
        match audience {
            Audience::LogFile => command.stdout(keep()?).stderr(keep()?),
            _ => command.stdout(Stdio::piped()).stderr(Stdio::piped()),
        };
        match audience {
            Audience::Terminal => command.stdin(Stdio::inherit()),
            _ => command.stdin(Stdio::null()).process_group(0),
        };
        let mut child = command.spawn().map_err(fails)?;
        let mut copiers = Vec::new();
        if let Some(out) = child.stdout.take() {
            copiers.extend(pass_on(out, io::stdout(), keep()?));
        }
        if let Some(err) = child.stderr.take() {
            copiers.extend(pass_on(err, io::stderr(), keep()?));
        }
        let script = Script { audience, _lifeline: lifeline, copiers, from };
        Ok(Self { name, child, output, ended: None, script: Some(script) })
    }

    /// The signal that ended it. A shell wrapper reports a signal by its exit code.
    pub fn killed_by(&mut self) -> Option<i32> {
        let status = self.ended()?;
        let by_code = || match (status.code()?, &self.script) {
            (137, Some(_)) => Some(Signal::SIGKILL as i32),
            (exit::TERMINATED, Some(_)) => Some(Signal::SIGTERM as i32),
            _ => None,
        };
        status.signal().or_else(by_code)
    }

    /// Whether the user has seen its output.
    pub fn is_seen(&self) -> bool {
        self.script.as_ref().is_some_and(|s| s.audience != Audience::LogFile)
    }

    /// Whether it reads from the terminal, and so receives the terminal's Ctrl-C.
    pub fn has_terminal(&self) -> bool {
        self.script.as_ref().is_some_and(|s| s.audience == Audience::Terminal)
    }

    /// Ctrl-C goes to its whole process group, as from a terminal. Other signals go to the script
    /// alone, which may still need its children.
    pub(super) fn ask_to_end(&self, signal: Signal) {
        match (signal, self.ended) {
            (_, Some(_)) => {}
            (Signal::SIGINT, None) if !self.has_terminal() => self.signal_all(signal),
            _ => self.signal(signal),
        }
    }
}

/// Copies a script's output to the user and into the file, on a thread that ends with it.
fn pass_on(
    mut from: impl Read + Send + 'static,
    mut user: impl Write + Send + 'static,
    mut file: File,
) -> Option<JoinHandle<()>> {
    let copy = move || {
        let mut some = [0u8; 8 << 10];
        loop {
            match from.read(&mut some) {
                Ok(0) => return,
                Ok(n) => {
                    // A closed output (`head`) does not end the training.
                    let _ = user.write_all(&some[..n]).and_then(|()| user.flush());
                    let _ = file.write_all(&some[..n]);
                }
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => return,
            }
        }
    };
    std::thread::Builder::new().name("script".into()).spawn(copy).ok()
}

/// A traceback, or the last lines.
fn last_lines(text: &str) -> String {
    let text = text.trim_end();
    if let Some(at) = text.rfind("Traceback (most recent call last)") {
        return text[at..].to_string();
    }
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(LINES)..].join("\n")
}
