//! The one small interface to an engine. What it writes are the engine's own files; what it runs are the user's own commands.

use crate::{
    Role,
    fleet::Fleet,
    wrong::{Kind, Wrong},
};
use serde::{Deserialize, Serialize};
use std::{
    fs,
    io::Write,
    path::Path,
    process::{Command, Output, Stdio},
};

/// A file of the engine's, and its name in the run's folder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Artifact {
    /// Its name.
    pub name: String,
    /// What it has.
    pub text: String,
}

/// What was submitted: in the run's folder as `engine.json`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Handle {
    /// As `--on` names it.
    pub engine: String,
    /// The engine's names of what it runs, by role; the latest last.
    pub parts: Vec<(Role, String)>,
    /// With what the engine's commands are run.
    #[serde(default)]
    pub args: Vec<String>,
    /// Where its servers are, by their numbers, where that was known beforehand and can be reached from here.
    #[serde(default)]
    pub servers: Vec<String>,
}

/// A process as its engine knows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    /// Its role.
    pub role: Role,
    /// Its number; `None`: not started yet, of an array that is still one.
    pub index: Option<u32>,
    /// As the engine says: `RUNNING`, `PENDING`.
    pub state: String,
    /// On which host.
    pub node: String,
    /// What the engine waits for, or since when it runs.
    pub why: String,
}

/// What a process has said last.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Said {
    /// Which: `server-1`.
    pub name: String,
    /// Its lines.
    pub text: String,
}

/// What an engine can do.
pub trait Engine {
    /// As `--on` names it.
    fn name(&self) -> &'static str;
    /// The files that are submitted, and nothing else: pure.
    fn render(&self, fleet: &Fleet) -> Result<Vec<Artifact>, Wrong>;
    /// Submits them, which lie in the run's folder.
    fn submit(&self, fleet: &Fleet) -> Result<Handle, Wrong>;
    /// What the engine knows of them.
    fn members(&self, handle: &Handle, dir: &Path) -> Result<Vec<Member>, Wrong>;
    /// Ends them all.
    fn cancel(&self, handle: &Handle, dir: &Path) -> Result<(), Wrong>;
    /// So many last lines of each, by role and number.
    fn logs(&self, handle: &Handle, dir: &Path, lines: usize) -> Result<Vec<Said>, Wrong>;
    /// Whether [`Engine::scale`] can be asked for.
    fn scales(&self) -> bool {
        true
    }
    /// Has so many workers from now on.
    fn scale(&self, handle: &Handle, dir: &Path, workers: u32) -> Result<Handle, Wrong>;
}

/// Runs a command of the user's and gives what it says.
pub(crate) fn run(program: &str, args: &[&str]) -> Result<String, Wrong> {
    told(program, args, "")
}

/// Runs a command of the user's, with this for it to read, and gives what it says.
pub(crate) fn told(program: &str, args: &[&str], input: &str) -> Result<String, Wrong> {
    let out = output(program, args, input).map_err(|e| {
        Wrong::new(Kind::Unavailable, format!("`{program}` does not start: {e}"))
            .help(format!("run this where `{program}` works, for example on a login node"))
    })?;
    let said = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_string();
    match out.status.success() {
        true => Ok(said(&out.stdout)),
        false => {
            Err(Wrong::new(Kind::Refused, format!("{program} {}: {}", args.join(" "), said(&out.stderr))))
        }
    }
}

/// Runs a command of the user's and gives what it says, on both streams.
pub(crate) fn all_said(program: &str, args: &[&str]) -> Result<String, Wrong> {
    let out = output(program, args, "")
        .map_err(|e| Wrong::new(Kind::Unavailable, format!("`{program}` does not start: {e}")))?;
    Ok(String::from_utf8_lossy(&[out.stdout, out.stderr].concat()).trim_end().to_string())
}

fn output(program: &str, args: &[&str], input: &str) -> std::io::Result<Output> {
    let mut command = Command::new(program);
    command.args(args).stdout(Stdio::piped()).stderr(Stdio::piped());
    command.stdin(if input.is_empty() { Stdio::null() } else { Stdio::piped() });
    let mut child = command.spawn()?;
    if let Some(mut stdin) = child.stdin.take() {
        // One that does not read has said why.
        let _ = stdin.write_all(input.as_bytes());
    }
    child.wait_with_output()
}

/// What processes said, of engines that write it into the run's folder as `ROLE-N.said`.
pub(crate) fn said_in(dir: &Path, lines: usize) -> Result<Vec<Said>, Wrong> {
    let files = fs::read_dir(dir).map_err(|e| Wrong::new(Kind::Io, format!("{}: {e}", dir.display())))?;
    let one = |path: &Path| {
        let name = path.file_name()?.to_str()?.strip_suffix(".said")?;
        let text = fs::read(path).map(|b| String::from_utf8_lossy(&b).into_owned()).unwrap_or_default();
        let is_one = name.starts_with("server-") || name.starts_with("worker-");
        is_one.then(|| Said { name: name.into(), text: tail(&text, lines) })
    };
    let mut all: Vec<_> = files.flatten().filter_map(|e| one(&e.path())).collect();
    all.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(all)
}

/// So many last lines.
pub(crate) fn tail(text: &str, lines: usize) -> String {
    let all: Vec<_> = text.lines().collect();
    all[all.len().saturating_sub(lines)..].join("\n")
}
