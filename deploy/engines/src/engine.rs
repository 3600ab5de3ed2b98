//! The one small interface to an engine. What it writes are the engine's own files; what it runs are the user's own commands.

use crate::{
    Role,
    fleet::Fleet,
    wrong::{Kind, Wrong},
};
use serde::{Deserialize, Serialize};
use std::{
    path::Path,
    process::{Command, Stdio},
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
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Handle {
    /// As `--on` names it.
    pub engine: String,
    /// The engine's names of what it runs, by role; the latest last.
    pub parts: Vec<(Role, String)>,
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

/// What an engine can do.
pub trait Engine {
    /// As `--on` names it.
    fn name(&self) -> &'static str;
    /// The files that are submitted, and nothing else: pure.
    fn render(&self, fleet: &Fleet) -> Result<Vec<Artifact>, Wrong>;
    /// Submits them, which lie in this folder.
    fn submit(&self, dir: &Path) -> Result<Handle, Wrong>;
    /// What the engine knows of them.
    fn members(&self, handle: &Handle) -> Result<Vec<Member>, Wrong>;
    /// Ends them all.
    fn cancel(&self, handle: &Handle) -> Result<(), Wrong>;
    /// Files of what they said, in this folder, by role and number.
    fn logs(&self, dir: &Path) -> Result<Vec<std::path::PathBuf>, Wrong>;
    /// Has so many workers from now on.
    fn scale(&self, handle: &Handle, dir: &Path, workers: u32) -> Result<Handle, Wrong>;
}

/// Runs a command of the user's and gives what it says.
pub(crate) fn run(program: &str, args: &[&str]) -> Result<String, Wrong> {
    let out = Command::new(program).args(args).stdin(Stdio::null()).output().map_err(|e| {
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
