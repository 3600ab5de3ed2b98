//! What is to be run on an engine, without the engine: how many servers and workers, what each needs, in which folder.

use crate::{Role, certs::Certs, wrong::Wrong};
use std::path::{Path, PathBuf};

/// A fleet and its job.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Fleet {
    /// The job's name; letters, digits and `-`.
    pub name: String,
    /// The job file, as all its processes are given it.
    pub job: String,
    /// The program.
    pub program: String,
    /// The image that has the program, for engines that run images.
    pub image: Option<String>,
    /// The run's folder, which has the job file; the same path on all hosts.
    pub run_dir: PathBuf,
    /// Whose the run's folder is, as user and group.
    pub owner: Option<(u32, u32)>,
    /// The servers.
    pub servers: Part,
    /// The workers; none for a fleet that stands without a job.
    pub workers: Part,
    /// The servers end with the job.
    pub until_done: bool,
    /// Seconds that a process has to hand over what it holds.
    pub grace: u32,
    /// How often the engine starts one of them again.
    pub restarts: u32,
    /// A time limit as the engine writes it.
    pub time: Option<String>,
    /// No two servers on one host.
    pub spread: bool,
    /// A volume that follows each server wherever it is started, of so many bytes as the engine writes it; `None`: what a server has
    /// on its disk goes with its host.
    pub disk: Option<String>,
    /// What all processes see besides.
    pub mounts: Vec<Mount>,
    /// The hosts, for an engine that is only told them; the first ones have the servers.
    pub hosts: Vec<String>,
    /// The first port of the servers, where they are known by names beforehand.
    pub port: u16,
    /// By what its processes know each other.
    pub certs: Certs,
    /// Handed to the engine unread.
    pub args: Vec<String>,
}

/// Processes of one role.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Part {
    /// How many.
    pub count: u32,
    /// Processors of each.
    pub cpus: u32,
    /// GPUs of each.
    pub gpus: u32,
    /// Memory of each, as the engine writes it.
    pub memory: Option<String>,
}

/// A folder, a volume or a claim, and where processes see it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mount {
    /// As the engine names it.
    pub what: String,
    /// A path.
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

/// Where a process finds its files.
pub(crate) struct Files<'a> {
    /// The run's folder.
    pub run: &'a str,
    /// The job file.
    pub job: &'a str,
    /// A server's own folder, where it is not in the run's.
    pub data: Option<&'a str>,
    /// The folder of certificates, for an engine that tells of one.
    pub certs: &'a str,
}

impl Fleet {
    /// How many of a role, and what each needs.
    pub fn part(&self, role: Role) -> &Part {
        match role {
            Role::Server => &self.servers,
            Role::Worker => &self.workers,
        }
    }

    /// Refuses what an engine's file of lines would read as more lines: a value of its own, or one of these.
    ///
    /// # Errors
    /// Which.
    pub(crate) fn one_line<'a>(&'a self, more: impl IntoIterator<Item = &'a str>) -> Result<(), Wrong> {
        let memory = [&self.servers.memory, &self.workers.memory];
        let own = memory.into_iter().chain([&self.time, &self.image, &self.disk]).flatten();
        match more.into_iter().chain(own.map(String::as_str)).find(|v| v.contains(char::is_control)) {
            None => Ok(()),
            Some(value) => Err(Wrong::usage(format!(
                "`{}` has a line break, or another control character",
                value.escape_debug()
            ))
            .help("write it in one line")),
        }
    }

    /// The roles that it has.
    pub(crate) fn roles(&self) -> impl Iterator<Item = Role> {
        [Role::Server, Role::Worker].into_iter().filter(|role| self.part(*role).count > 0)
    }

    /// What stands behind the program's name in a process of this role. `until_done`: a server ends when the job has, and nobody
    /// starts it again then.
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

/// A word that a shell takes as it is.
pub fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "/._-+=:,@%".contains(c);
    match !word.is_empty() && word.chars().all(plain) {
        true => word.to_string(),
        false => format!("'{}'", word.replace('\'', "'\\''")),
    }
}

/// A path of the run's folder, as text.
pub(crate) fn inside(dir: &Path, name: &str) -> String {
    dir.join(name).to_string_lossy().into_owned()
}
