//! A run that was submitted to an engine (`paraft submit --on`, `paraft fleet up`), by its folder.

use crate::{
    failure::Failure,
    files::{JOB_FILE, put},
    shared::Folder,
};
use paraft_engines::{Engine, Handle, named};
use paraft_worker::{Job, exit};
use parking_lot::Mutex;
use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

/// What was submitted, in the run's folder.
const FILE: &str = "engine.json";

/// What runs there, and on which engine.
pub struct Submitted {
    /// What speaks to it.
    pub engine: Box<dyn Engine>,
    /// What was submitted to it.
    pub handle: Handle,
}

fn file(dir: &Path) -> PathBuf {
    dir.join(FILE)
}

/// Whether one was, in this folder.
pub fn is(dir: &Path) -> bool {
    file(dir).exists()
}

/// Notes what was.
pub fn keep(dir: &Path, handle: &Handle) -> Result<(), Failure> {
    let text = serde_json::to_string(handle).map_err(|e| Failure::new(exit::IO, e))?;
    put(&file(dir), &text).map_err(|e| Failure::write(&file(dir), e))
}

/// What was, in this folder.
pub fn of(dir: &Path) -> Result<Submitted, Failure> {
    let none = |e: &dyn std::fmt::Display| {
        Failure::new(exit::CONFIG, format!("{}: {e}", file(dir).display()))
            .help("give the folder that `paraft submit` printed as `run`")
    };
    let text = fs::read_to_string(file(dir)).map_err(|e| none(&e))?;
    let handle: Handle = serde_json::from_str(&text).map_err(|e| none(&e))?;
    let engine =
        named(&handle.engine).ok_or_else(|| none(&format!("no engine is named {:?}", handle.engine)))?;
    Ok(Submitted { engine, handle })
}

impl Submitted {
    /// Where its servers are, by their numbers, as far as that is known here.
    pub fn servers(&self, dir: &Path) -> Result<BTreeMap<u32, String>, Failure> {
        let said = Folder::of(dir)?.servers()?;
        let mut servers: BTreeMap<u32, String> = said.into_iter().map(|(n, at)| (n, at.address)).collect();
        servers.extend((0..).zip(self.handle.servers.iter().cloned()));
        Ok(servers)
    }
}

/// As many workers as it can have.
pub(crate) fn most(dir: &Path) -> Option<u32> {
    Some(Job::load(&dir.join(JOB_FILE), &[]).ok()?.train.workers)
}

/// Has the engine run so many workers from now on.
pub(crate) fn scale(dir: &Path, workers: u32) -> Result<(), Failure> {
    // What two are told at once by one page.
    static ONE: Mutex<()> = Mutex::new(());
    let _one = ONE.lock();
    let Submitted { engine, handle } = of(dir)?;
    let most = Job::load(&dir.join(JOB_FILE), &[])?.train.workers;
    if workers > most {
        let why = format!("the job has {most} workers, and {workers} are asked for");
        return Err(Failure::new(exit::USAGE, why)
            .help("submit the job with as many workers as it may ever have, and scale down"));
    }
    keep(dir, &engine.scale(&handle, dir, workers)?)
}
