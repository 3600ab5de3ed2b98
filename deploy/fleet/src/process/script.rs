//! A user's script as a process of this machine: its lifeline, its input, its output.
//!
//! Standard input is the script's own (`input()`, a debugger), so its lifeline is a descriptor that it inherits: the end of
//! a pipe that this process holds open and never writes to ([`LIFELINE`]). What it says goes into a file of the run's
//! folder, and of one script to the user as it comes.
//!
//! A script has a process group of its own, unless it reads from the terminal: only the foreground group may.

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

/// The variable with the number of the descriptor that closes when the launcher ends.
pub const LIFELINE: &str = "PARAFT_LIFELINE_FD";

/// A script may want to write a checkpoint before it ends.
pub(super) const END_PATIENCE: Duration = Duration::from_secs(10);

/// What a script has said is awaited for so long after its end: something that it started may hold the pipe.
const LAST_WORDS: Duration = Duration::from_millis(500);

/// Of a script that failed so much is shown, if its last words are no traceback.
const LINES: usize = 20;
const BYTES: u64 = 8 << 10;

/// Who looks on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Audience {
    /// Nobody: what it says is kept.
    Nobody,
    /// The user: what it says is passed on as well.
    User,
    /// The user, and the terminal's input is the script's.
    Terminal,
}

/// What a script has beside other processes.
pub(super) struct Script {
    audience: Audience,
    /// Closes with this process.
    _lifeline: PipeWriter,
    /// What pass on what it says.
    passing: Vec<JoinHandle<()>>,
    /// Where in its file begins what this process says: the file may have what one before it said.
    from: u64,
}

impl Script {
    /// Waits until everything is passed on that it has said.
    pub(super) fn heard(&mut self) {
        let deadline = Instant::now() + LAST_WORDS;
        while self.passing.iter().any(|p| !p.is_finished()) && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// The end of what it has said, as far as it can be read.
    pub(super) fn last_words(&self, said: &Path) -> String {
        let read = || {
            let mut file = File::open(said)?;
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
    /// Starts a user's script; what it says is added to `NAME.out` in `run_dir`.
    pub fn script(
        name: String,
        mut command: Command,
        run_dir: &Path,
        audience: Audience,
    ) -> Result<Self, Failure> {
        let said = run_dir.join(format!("{name}.out"));
        let open = || File::options().create(true).append(true).open(&said);
        let keep = || open().map_err(|e| Failure::write(&said, e));
        let program = command.get_program().to_string_lossy().into_owned();
        let fails =
            |e: io::Error| Failure::new(exit::CONFIG, format!("{name}: `{program}` does not start: {e}"));
        let from = keep()?.metadata().map_or(0, |m| m.len());
        let (held, lifeline) = io::pipe().map_err(fails)?;
        // Inherited by whatever is started before it is closed here. That end tells nobody anything; the other, which must
        // close with this process, nobody inherits.
        fcntl_setfd(&held, FdFlags::empty()).map_err(|e| fails(e.into()))?;
        command.env(LIFELINE, held.as_raw_fd().to_string());
        match audience {
            Audience::Nobody => command.stdout(keep()?).stderr(keep()?),
            _ => command.stdout(Stdio::piped()).stderr(Stdio::piped()),
        };
        match audience {
            Audience::Terminal => command.stdin(Stdio::inherit()),
            _ => command.stdin(Stdio::null()).process_group(0),
        };
        let mut child = command.spawn().map_err(fails)?;
        let mut passing = Vec::new();
        if let Some(out) = child.stdout.take() {
            passing.extend(pass_on(out, io::stdout(), keep()?));
        }
        if let Some(err) = child.stderr.take() {
            passing.extend(pass_on(err, io::stderr(), keep()?));
        }
        let script = Script { audience, _lifeline: lifeline, passing, from };
        Ok(Self { name, child, said, ended: None, script: Some(script) })
    }

    /// The signal that ended it. A shell that runs the real program says so by its exit code.
    pub fn killed_by(&mut self) -> Option<i32> {
        let status = self.ended()?;
        let by_code = || match (status.code()?, &self.script) {
            (137, Some(_)) => Some(Signal::SIGKILL as i32),
            (exit::TERMINATED, Some(_)) => Some(Signal::SIGTERM as i32),
            _ => None,
        };
        status.signal().or_else(by_code)
    }

    /// Whether the user has seen what it said.
    pub fn is_seen(&self) -> bool {
        self.script.as_ref().is_some_and(|s| s.audience != Audience::Nobody)
    }

    /// Whether the terminal's input is its own, and with it the terminal's Ctrl-C.
    pub fn has_terminal(&self) -> bool {
        self.script.as_ref().is_some_and(|s| s.audience == Audience::Terminal)
    }

    /// Ctrl-C goes to all that it has started, as a terminal's does; others to it alone, who may want to use those yet.
    pub(super) fn ask_to_end(&self, signal: Signal) {
        match (signal, self.ended) {
            (_, Some(_)) => {}
            (Signal::SIGINT, None) if !self.has_terminal() => self.signal_all(signal),
            _ => self.signal(signal),
        }
    }
}

/// Copies what a script says to the user and into the file, on a thread that ends with it.
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
                    // A user who has gone (head) does not end the training.
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
