//! The folder of a run as the place where its processes meet. Every file is put there in one piece, and none is ever changed but
//! addresses, which are replaced.

use crate::failure::Failure;
use crate::files::{put, put_once, read};
use paraft_worker::exit;
use serde::{Deserialize, Serialize};
use std::{
    collections::BTreeMap,
    fs, io,
    path::{Path, PathBuf},
};

/// Where a process is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Address {
    /// `host:port`
    pub address: String,
    /// Its host's own name: who has another is elsewhere.
    pub host: String,
    /// What the engine calls its host.
    pub node: String,
    /// How often the engine had started it again.
    pub attempt: u32,
}

/// How the job of a run has ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Ended {
    /// All has been trained.
    Done,
    /// This worker failed first, and the same would happen again.
    Failed {
        /// Which.
        worker: u32,
        /// Where.
        node: String,
        /// With what.
        code: i32,
        /// What it said last.
        said: String,
    },
}

/// A run's folder.
#[derive(Clone, Debug)]
pub struct Folder {
    dir: PathBuf,
}

impl Folder {
    /// With the folders that it needs.
    pub fn of(dir: &Path) -> Result<Self, Failure> {
        for name in ["addresses", "begun", "done"] {
            let path = dir.join(name);
            fs::create_dir_all(&path).map_err(|e| Failure::write(&path, e))?;
        }
        Ok(Self { dir: dir.to_path_buf() })
    }

    /// Where it is.
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

    /// This process, `server-1` or `worker-0`, is there from now on.
    pub fn publish(&self, name: &str, at: &Address) -> Result<(), Failure> {
        let text = serde_json::to_string(at).map_err(|e| Failure::new(exit::IO, e))?;
        self.put(&format!("addresses/{name}"), &text)
    }

    /// Where a process was last.
    pub fn address(&self, name: &str) -> Result<Option<Address>, Failure> {
        let name = format!("addresses/{name}");
        let text = self.read(&name)?;
        let parse = |text: String| serde_json::from_str(&text).map_err(|e| self.failed(&name, &e.into()));
        text.map(parse).transpose()
    }

    /// Where the servers were last, by their numbers.
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

    /// Says how the job has ended, unless somebody has; how it has.
    pub fn end(&self, how: &Ended) -> Result<Ended, Failure> {
        let text = serde_json::to_string(how).map_err(|e| Failure::new(exit::IO, e))?;
        let there = self.put_once("ended", &text)?;
        serde_json::from_str(&there).map_err(|e| self.failed("ended", &e.into()))
    }

    /// How the job has ended, if it has.
    pub fn ended(&self) -> Result<Option<Ended>, Failure> {
        let parse = |text: String| serde_json::from_str(&text).map_err(|e| self.failed("ended", &e.into()));
        self.read("ended")?.map(parse).transpose()
    }

    /// This worker has ended well.
    pub fn worker_done(&self, worker: u32) -> Result<(), Failure> {
        self.put(&format!("done/{worker}"), "")
    }

    /// Whether it has.
    pub fn is_worker_done(&self, worker: u32) -> bool {
        self.dir.join(format!("done/{worker}")).exists()
    }

    /// How many workers have.
    pub fn workers_done(&self) -> usize {
        let all = fs::read_dir(self.dir.join("done")).into_iter().flatten().flatten();
        all.filter(|e| !e.file_name().to_string_lossy().starts_with('.')).count()
    }

    /// From which checkpoint a job begins after the loss of the one with this founding (0: the first one): the same for all workers,
    /// whichever comes first. `None`: anew.
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
