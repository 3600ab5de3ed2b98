//! The interface to an engine. Its implementations write the engine's own files and run the user's own
//! commands.

use crate::{
    error::{EngineError, Kind},
    fleet::Fleet,
    place::Role,
};
use serde::{Deserialize, Serialize};
use std::{
    fs,
    io::Write,
    path::Path,
    process::{Command, Output, Stdio},
};

/// A file for the engine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Artifact {
    /// Its name in the run's folder.
    pub name: String,
    /// Its content.
    pub text: String,
}

/// The submitted job: `engine.json` in the run's folder.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Handle {
    /// The name in `--on`.
    pub engine: String,
    /// The engine's names of its parts, by role; the latest last.
    pub parts: Vec<(Role, String)>,
    /// The program for the engine's commands.
    #[serde(default)]
    pub args: Vec<String>,
    /// The servers' addresses, by number, if they are known in advance and reachable from here.
    #[serde(default)]
    pub servers: Vec<String>,
}

/// A process from the view of its engine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    /// Its role.
    pub role: Role,
    /// Its number; `None`: a pending array that has not been split yet.
    pub index: Option<u32>,
    /// The engine's state: `RUNNING`, `PENDING`.
    pub state: String,
    /// Its host.
    pub node: String,
    /// Why it waits, or since when it runs.
    pub why: String,
}

/// The last output of a process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProcessOutput {
    /// Its name: `server-1`.
    pub name: String,
    /// Its lines.
    pub text: String,
}

/// The operations of an engine.
pub trait Engine {
    /// The name in `--on`.
    fn name(&self) -> &'static str;
    /// The files to submit. Pure.
    fn render(&self, fleet: &Fleet) -> Result<Vec<Artifact>, EngineError>;
    /// Submits the files, which are in the run's folder.
    fn submit(&self, fleet: &Fleet) -> Result<Handle, EngineError>;
    /// The processes and their states.
    fn members(&self, handle: &Handle, dir: &Path) -> Result<Vec<Member>, EngineError>;
    /// Ends all processes.
    fn cancel(&self, handle: &Handle, dir: &Path) -> Result<(), EngineError>;
    /// The last `lines` lines of each process, by role and number.
    fn logs(&self, handle: &Handle, dir: &Path, lines: usize) -> Result<Vec<ProcessOutput>, EngineError>;
    /// Whether [`Engine::scale`] is supported.
    fn scales(&self) -> bool {
        true
    }
    /// Sets the number of workers.
    fn scale(&self, handle: &Handle, dir: &Path, workers: u32) -> Result<Handle, EngineError>;
}

/// Runs a user's command and returns its output.
pub(crate) fn run(program: &str, args: &[&str]) -> Result<String, EngineError> {
    run_with_input(program, args, "")
}

/// Runs a user's command with this input and returns its output.
pub(crate) fn run_with_input(program: &str, args: &[&str], input: &str) -> Result<String, EngineError> {
    let out = output(program, args, input).map_err(|e| {
        EngineError::new(Kind::Unavailable, format!("`{program}` does not start: {e}"))
            .help(format!("run this where `{program}` works, for example on a login node"))
    })?;
    let said = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_string();
    match out.status.success() {
        true => Ok(said(&out.stdout)),
        false => Err(EngineError::new(
            Kind::Refused,
            format!("{program} {}: {}", args.join(" "), said(&out.stderr)),
        )),
    }
}

/// Runs a user's command and returns its output on both streams.
pub(crate) fn all_said(program: &str, args: &[&str]) -> Result<String, EngineError> {
    let out = output(program, args, "")
        .map_err(|e| EngineError::new(Kind::Unavailable, format!("`{program}` does not start: {e}")))?;
    Ok(String::from_utf8_lossy(&[out.stdout, out.stderr].concat()).trim_end().to_string())
}

fn output(program: &str, args: &[&str], input: &str) -> std::io::Result<Output> {
    let mut command = Command::new(program);
    command.args(args).stdout(Stdio::piped()).stderr(Stdio::piped());
    command.stdin(if input.is_empty() { Stdio::null() } else { Stdio::piped() });
    let mut child = command.spawn()?;
    if let Some(mut stdin) = child.stdin.take() {
        // A command that does not read its input has reported an error.
        let _ = stdin.write_all(input.as_bytes());
    }
    child.wait_with_output()
}

/// The output of processes, for engines that redirect it to `ROLE-N.said` in the run's folder.
pub(crate) fn said_in(dir: &Path, lines: usize) -> Result<Vec<ProcessOutput>, EngineError> {
    let files =
        fs::read_dir(dir).map_err(|e| EngineError::new(Kind::Io, format!("{}: {e}", dir.display())))?;
    let one = |path: &Path| {
        let name = path.file_name()?.to_str()?.strip_suffix(".said")?;
        let text = fs::read(path).map(|b| String::from_utf8_lossy(&b).into_owned()).unwrap_or_default();
        let is_one = name.starts_with("server-") || name.starts_with("worker-");
        is_one.then(|| ProcessOutput { name: name.into(), text: tail(&text, lines) })
    };
    let mut all: Vec<_> = files.flatten().filter_map(|e| one(&e.path())).collect();
    all.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(all)
}

/// The last `lines` lines.
pub(crate) fn tail(text: &str, lines: usize) -> String {
    let all: Vec<_> = text.lines().collect();
    all[all.len().saturating_sub(lines)..].join("\n")
}
