//! The description of a fleet for any engine: how many servers and workers, what each needs, and the
//! folder.

use crate::{certs::Certs, error::EngineError, place::Role};
use std::path::{Path, PathBuf};

/// A fleet and its job.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Fleet {
    /// The job's name; letters, digits and `-`.
    pub name: String,
    /// The job file, for all processes.
    pub job: String,
    /// The program.
    pub program: String,
    /// The image with the program, for engines that run images.
    pub image: Option<String>,
    /// The run's folder with the job file; the same path on all hosts.
    pub run_dir: PathBuf,
    /// The owner of the run's folder, as user and group.
    pub owner: Option<(u32, u32)>,
    /// The servers.
    pub servers: Part,
    /// The workers; none for a fleet that runs without a job.
    pub workers: Part,
    /// The servers end with the job.
    pub until_done: bool,
    /// Seconds that a process may use to hand over its leaders and replicas.
    pub grace: u32,
    /// How often the engine restarts each process.
    pub restarts: u32,
    /// A time limit in the engine's notation.
    pub time: Option<String>,
    /// No two servers on one host.
    pub spread: bool,
    /// The size, in the engine's notation, of a volume that follows each server between hosts; `None`:
    /// a server's disk stays with its host.
    pub disk: Option<String>,
    /// Further mounts of all processes.
    pub mounts: Vec<Mount>,
    /// The hosts, for an engine without a scheduler; the first ones run the servers.
    pub hosts: Vec<String>,
    /// The first port of the servers, if their names are known in advance.
    pub port: u16,
    /// The certificates of its processes.
    pub certs: Certs,
    /// Arguments that are passed to the engine unread.
    pub args: Vec<String>,
}

/// Processes of one role.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Part {
    /// The number of processes.
    pub count: u32,
    /// CPUs of each.
    pub cpus: u32,
    /// GPUs of each.
    pub gpus: u32,
    /// Memory of each, in the engine's notation.
    pub memory: Option<String>,
}

/// A folder, a volume or a claim, with its mount path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mount {
    /// The engine's name for it.
    pub what: String,
    /// The mount path.
    pub at: String,
}

impl std::str::FromStr for Mount {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.rsplit_once(':') {
            Some((what, at)) if !what.is_empty() && at.starts_with('/') => {
                Ok(Self { what: what.into(), at: at.into() })
            }
            _ => Err(format!("`{text}`: write WHAT:/PATH, for example claim:/data")),
        }
    }
}

/// The paths that a process receives.
pub(crate) struct Files<'a> {
    /// The run's folder.
    pub run: &'a str,
    /// The job file.
    pub job: &'a str,
    /// A server's own folder, if it is not in the run's folder.
    pub data: Option<&'a str>,
    /// The folder of certificates, for an engine that passes it.
    pub certs: &'a str,
}

impl Fleet {
    /// The processes of a role.
    pub fn part(&self, role: Role) -> &Part {
        match role {
            Role::Server => &self.servers,
            Role::Worker => &self.workers,
        }
    }

    /// Refuses values with line breaks: a line-based file of an engine would read them as further
    /// lines. Checks its own values and `more`.
    ///
    /// # Errors
    ///
    /// The value.
    pub(crate) fn refuse_line_breaks<'a>(
        &'a self,
        more: impl IntoIterator<Item = &'a str>,
    ) -> Result<(), EngineError> {
        let memory = [&self.servers.memory, &self.workers.memory];
        let own = memory.into_iter().chain([&self.time, &self.image, &self.disk]).flatten();
        match more.into_iter().chain(own.map(String::as_str)).find(|v| v.contains(char::is_control)) {
            None => Ok(()),
            Some(value) => Err(EngineError::usage(format!(
                "`{}` has a line break, or another control character",
                value.escape_debug()
            ))
            .help("write it in one line")),
        }
    }

    /// Its roles.
    pub(crate) fn roles(&self) -> impl Iterator<Item = Role> {
        [Role::Server, Role::Worker].into_iter().filter(|role| self.part(*role).count > 0)
    }

    /// The arguments of the program for a process of this role. `until_done`: a server ends with the
    /// job and is not restarted then.
    pub(crate) fn words(&self, role: Role, files: &Files<'_>, until_done: bool) -> Vec<String> {
        let mut words: Vec<String> = ["launch", "--role", &role.to_string(), "--run-dir", files.run]
            .into_iter()
            .map(str::to_string)
            .collect();
        words.extend(["--grace".into(), self.grace.to_string()]);
        if role == Role::Server {
            words.extend(files.data.iter().flat_map(|data| ["--data".to_string(), data.to_string()]));
            words.extend((until_done && self.until_done).then(|| "--until-done".to_string()));
        }
        words.extend(self.certs.words(files.certs));
        words.push(files.job.into());
        words
    }
}

/// A word, quoted for a shell.
pub fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "/._-+=:,@%".contains(c);
    match !word.is_empty() && word.chars().all(plain) {
        true => word.to_string(),
        false => format!("'{}'", word.replace('\'', "'\\''")),
    }
}

/// A path in the run's folder, as text.
pub(crate) fn inside(dir: &Path, name: &str) -> String {
    dir.join(name).to_string_lossy().into_owned()
}
