//! A run that was submitted to an engine (`paraft submit --on`, `paraft fleet up`), by its folder.

use crate::{
    failure::Failure,
    files::{JOB_FILE, put},
    shared::Folder,
};
use paraft_engines::{Engine, Handle, Role, named};
use paraft_worker::{Job, exit};
use std::{
    collections::BTreeMap,
    fs::{self, File},
    path::{Path, PathBuf},
};

/// The record of the submission, in the run's folder.
const FILE: &str = "engine.json";

/// A submitted run, with its engine.
pub struct Submitted {
    /// The engine.
    pub engine: Box<dyn Engine>,
    /// The submission.
    pub handle: Handle,
}

/// The record of the submission; a folder without it is not one of a submitted run.
pub(crate) fn file(dir: &Path) -> PathBuf {
    dir.join(FILE)
}

/// Whether a run was submitted from this folder.
pub fn is(dir: &Path) -> bool {
    file(dir).exists()
}

/// Records a submission.
pub fn keep(dir: &Path, handle: &Handle) -> Result<(), Failure> {
    let text = serde_json::to_string(handle).map_err(|e| Failure::new(exit::IO, e))?;
    put(&file(dir), &text).map_err(|e| Failure::write(&file(dir), e))
}

/// The submission of this folder.
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
    /// The known addresses of its servers, by number.
    pub fn servers(&self, dir: &Path) -> Result<BTreeMap<u32, String>, Failure> {
        let known = Folder::of(dir)?.servers()?;
        let mut servers: BTreeMap<u32, String> = known.into_iter().map(|(n, at)| (n, at.address)).collect();
        servers.extend((0..).zip(self.handle.servers.iter().cloned()));
        Ok(servers)
    }
}

/// The maximal number of workers of the submission in this folder; `None`: it has none, or their number
/// is fixed.
pub fn most(dir: &Path) -> Option<u32> {
    let Submitted { engine, handle } = of(dir).ok()?;
    let runs_workers = handle.parts.iter().any(|(role, _)| *role == Role::Worker);
    let job = (engine.scales() && runs_workers).then(|| Job::load(&dir.join(JOB_FILE), &[]))?;
    job.ok().map(|job| job.train.workers)
}

/// Sets the number of workers on the engine.
///
/// # Errors
///
/// The engine runs none, its command fails, or the number is not from 1 to that of the job.
pub fn scale(dir: &Path, workers: u32) -> Result<(), Failure> {
    // Concurrent calls must see each other's submissions. On file systems without locks, users must
    // take turns.
    let turn = File::open(dir).map_err(|e| Failure::write(dir, e))?;
    let _ = turn.lock();
    let Submitted { engine, handle } = of(dir)?;
    if !handle.parts.iter().any(|(role, _)| *role == Role::Worker) {
        let why = format!("{}: {} runs no worker of it", dir.display(), engine.name());
        return Err(Failure::new(exit::USAGE, why).help("`paraft submit --on` submits servers and workers"));
    }
    let most = Job::load(&dir.join(JOB_FILE), &[])?.train.workers;
    if !(1..=most).contains(&workers) {
        let why = format!("{workers} workers: the job has {most}, and one at least must train");
        return Err(Failure::new(exit::USAGE, why)
            .help("submit a job with as many workers as it may ever have, and lower the number"));
    }
    let now = engine.scale(&handle, dir, workers)?;
    keep(dir, &now).map_err(|e| {
        let has = now.parts.iter().map(|(role, id)| format!("{role} {id}")).collect::<Vec<_>>().join(", ");
        e.help(format!(
            "{} runs {has}: end what `paraft fleet down` does not know by its own command",
            engine.name()
        ))
    })
}
