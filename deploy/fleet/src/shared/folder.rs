//! The folder of a run, where its processes meet. Every file is created atomically and never changes,
//! except addresses, which are replaced.

use crate::failure::Failure;
use crate::files::{put, put_once, read};
use paraft_worker::exit;
use serde::{Deserialize, Serialize};
use std::{
    collections::BTreeMap,
    fs, io,
    path::{Path, PathBuf},
};

/// The location of a process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Address {
    /// `host:port`
    pub address: String,
    /// Its host's own name: a process with another name is on another host.
    pub host: String,
    /// The engine's name for its host.
    pub node: String,
    /// How often the engine had restarted it.
    pub attempt: u32,
}

/// The end of a run's job.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum JobEnd {
    /// All steps are done.
    Done,
    /// This worker failed first, and a restart would fail alike.
    Failed {
        /// The worker.
        worker: u32,
        /// Its host.
        node: String,
        /// Its exit code.
        code: i32,
        /// Its last output.
        said: String,
    },
}

impl JobEnd {
    /// What the processes of this run have recorded; `None`: nothing, or it is no run of an engine.
    pub fn of_run(dir: &Path) -> Option<Self> {
        serde_json::from_str(&read(&dir.join(ENDED)).ok()??).ok()
    }
}

/// The file with the job's end.
const ENDED: &str = "ended";

/// A run's folder.
#[derive(Clone, Debug)]
pub struct Folder {
    dir: PathBuf,
}

impl Folder {
    /// Creates the folders that it needs.
    pub fn of(dir: &Path) -> Result<Self, Failure> {
        for name in ["addresses", "begun", "done"] {
            let path = dir.join(name);
            fs::create_dir_all(&path).map_err(|e| Failure::write(&path, e))?;
        }
        Ok(Self { dir: dir.to_path_buf() })
    }

    /// The path.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    pub(super) fn failed(&self, name: &str, e: &io::Error) -> Failure {
        Failure::new(exit::IO, format!("{}: {e}", self.dir.join(name).display()))
            .help("all processes of the fleet need this folder, writable, on a file system that they share")
    }

    pub(super) fn put(&self, name: &str, text: &str) -> Result<(), Failure> {
        put(&self.dir.join(name), text).map_err(|e| self.failed(name, &e))
    }

    pub(super) fn put_once(&self, name: &str, text: &str) -> Result<String, Failure> {
        put_once(&self.dir.join(name), text).map_err(|e| self.failed(name, &e))
    }

    pub(super) fn read(&self, name: &str) -> Result<Option<String>, Failure> {
        read(&self.dir.join(name)).map_err(|e| self.failed(name, &e))
    }

    /// Publishes the address of this process, `server-1` or `worker-0`.
    pub fn publish(&self, name: &str, at: &Address) -> Result<(), Failure> {
        let text = serde_json::to_string(at).map_err(|e| Failure::new(exit::IO, e))?;
        self.put(&format!("addresses/{name}"), &text)
    }

    /// The last address of a process.
    pub fn address(&self, name: &str) -> Result<Option<Address>, Failure> {
        let name = format!("addresses/{name}");
        let text = self.read(&name)?;
        let parse = |text: String| serde_json::from_str(&text).map_err(|e| self.failed(&name, &e.into()));
        text.map(parse).transpose()
    }

    /// The last addresses of the servers, by number.
    pub fn servers(&self) -> Result<BTreeMap<u32, Address>, Failure> {
        let name = "addresses";
        let mut all = BTreeMap::new();
        for entry in fs::read_dir(self.dir.join(name)).map_err(|e| self.failed(name, &e))?.flatten() {
            let file = entry.file_name();
            let Some(number) = file.to_str().and_then(|f| f.strip_prefix("server-")?.parse().ok()) else {
                continue;
            };
            if let Some(at) = self.address(&format!("server-{number}"))? {
                all.insert(number, at);
            }
        }
        Ok(all)
    }

    /// Records the end of the job unless another process has; returns the recorded end.
    pub fn end(&self, how: &JobEnd) -> Result<JobEnd, Failure> {
        let text = serde_json::to_string(how).map_err(|e| Failure::new(exit::IO, e))?;
        let there = self.put_once(ENDED, &text)?;
        serde_json::from_str(&there).map_err(|e| self.failed(ENDED, &e.into()))
    }

    /// The end of the job, if it has ended.
    pub fn ended(&self) -> Result<Option<JobEnd>, Failure> {
        let parse = |text: String| serde_json::from_str(&text).map_err(|e| self.failed(ENDED, &e.into()));
        self.read(ENDED)?.map(parse).transpose()
    }

    /// Records that this worker has finished.
    pub fn worker_done(&self, worker: u32) -> Result<(), Failure> {
        self.put(&format!("done/{worker}"), "")
    }

    /// Whether this worker has finished.
    pub fn is_worker_done(&self, worker: u32) -> bool {
        self.dir.join(format!("done/{worker}")).exists()
    }

    /// The number of finished workers.
    pub fn workers_done(&self) -> usize {
        let all = fs::read_dir(self.dir.join("done")).into_iter().flatten().flatten();
        all.filter(|e| !e.file_name().to_string_lossy().starts_with('.')).count()
    }

    /// The checkpoint for the job's start after the loss of the given bootstrap (0: the first start).
    /// The first worker decides for all. `None`: from the beginning.
    pub fn start_after(
        &self,
        lost: u64,
        latest: impl FnOnce() -> Option<PathBuf>,
    ) -> Result<Option<PathBuf>, Failure> {
        let name = format!("start-{lost:016x}");
        let text = match self.read(&name)? {
            Some(text) => text,
            None => {
                self.put_once(&name, &latest().map(|p| p.to_string_lossy().into_owned()).unwrap_or_default())?
            }
        };
        Ok((!text.is_empty()).then(|| text.into()))
    }
}
