//! What is to be run on an engine, without the engine: how many servers and workers, what each needs, in which folder.

use std::path::PathBuf;

/// A fleet and its job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fleet {
    /// The job's name; letters, digits and `-`.
    pub name: String,
    /// The program.
    pub program: String,
    /// The run's folder, which has the job file; the same path on all hosts.
    pub run_dir: PathBuf,
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

/// A word that a shell takes as it is.
pub fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "/._-+=:,@%".contains(c);
    match !word.is_empty() && word.chars().all(plain) {
        true => word.to_string(),
        false => format!("'{}'", word.replace('\'', "'\\''")),
    }
}
