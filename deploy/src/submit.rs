//! `paraft submit`: submits a job to an existing fleet or to an engine, and returns without waiting.
//!
//! `engine` implements `--on`. `--fleet` starts `paraft train --fleet` in the background, which launches the
//! workers on this machine and holds the run's folder.

use crate::{
    engine,
    on::{EngineArgs, EngineKind, OnArgs},
    short::ShortArgs,
};
use clap::Args;
use paraft_fleet::{
    certs::Certs,
    existing::KeepTime,
    failure::Failure,
    fleet::JOB_FILE,
    launcher_log::LAUNCHER_LOG,
    out,
    run_dir::RunDir,
    targets::{self, StandingArg},
};
use paraft_worker::{Job, checkpoints::CHECKPOINTS, exit};
use std::{
    fs::{self, File},
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Duration,
};

#[derive(Args)]
#[command(group = clap::ArgGroup::new("where").args(["fleet", "on"]))]
pub struct SubmitArgs {
    /// The job file.
    pub job: PathBuf,
    #[command(flatten)]
    pub short: ShortArgs,
    #[command(flatten)]
    pub standing: StandingArg,
    /// An engine, which starts servers and workers. Without --on and --fleet: PARAFT_SERVERS names the fleet.
    #[arg(long)]
    pub on: Option<EngineKind>,
    /// Overrides a key of the job file, for example train.mode=asp; may be given often.
    #[arg(long, value_name = "KEY=VALUE")]
    pub set: Vec<String>,
    /// On a running fleet: so long after the job's end the servers keep its weights, as 90s, 30min, 12h, 7d or forever.
    #[arg(long, value_name = "TIME", default_value = "1h", conflicts_with = "on")]
    pub keep: KeepTime,
    /// Go on from a checkpoint, as in `paraft train`.
    #[arg(long, value_name = "PATH", num_args = 0..=1, default_missing_value = "latest")]
    pub resume: Option<PathBuf>,
    /// Where the run's files go; on Slurm on a file system that all hosts share. Default: runs/NAME-N, the first N that is
    /// free.
    #[arg(long)]
    pub run_dir: Option<PathBuf>,
    #[command(flatten)]
    pub engine: EngineArgs,
}

/// In the run's folder: exists while [`submit_to`] waits for the launcher, which hands over a failure in it.
const FAILURE_FILE: &str = "launcher-failure.json";

pub fn run(args: &SubmitArgs) -> Result<i32, Failure> {
    let set = args.short.with(&args.set)?;
    let (job, run_dir, resume) = (args.job.clone(), args.run_dir.clone(), args.resume.clone());
    if let Some(on) = args.on {
        let engine = args.engine.clone();
        return engine::submit(&OnArgs { job, on, run_dir, set, resume, engine }, true);
    }
    // The servers of a run end with it: none is the default.
    let fleet = args.standing.fleet.clone().or_else(targets::variable);
    let none = || Failure::new(exit::USAGE, "where to? Give --fleet FLEET or --on ENGINE");
    submit_to(args, &fleet.ok_or_else(none)?, &set)
}

fn submit_to(args: &SubmitArgs, fleet: &str, set: &[String]) -> Result<i32, Failure> {
    Certs::can_be_told()?;
    let job = Job::load(&args.job, set)?;
    let held = RunDir::for_another(args.run_dir.as_deref(), &job.name, args.resume.is_some())?;
    let dir = held.to_path_buf();
    let log = dir.join(LAUNCHER_LOG);
    let written = |e| Failure::write(&log, e);
    let said = File::create(&log).map_err(written)?;
    let failure = FailureFile::new(dir.join(FAILURE_FILE))?;
    drop(held); // the launcher locks it
    // The job file of the earlier run, if this one resumes: it changes only when this one starts.
    let file = dir.join(JOB_FILE);
    let before = identity(&file);
    let own = std::env::current_exe().map_err(|e| Failure::new(exit::IO, format!("own program: {e}")))?;
    let mut command = Command::new(own);
    command.arg("train").arg(&args.job).arg("--detached").arg(&failure.0).arg("--fleet").arg(fleet);
    command.arg("--keep").arg(args.keep.to_string()).arg("--run-dir").arg(&dir);
    set.iter().for_each(|set| _ = command.args(["--set", set]));
    if let Some(path) = &args.resume {
        command.arg("--resume").arg(path);
    }
    Certs::Ours.tell(&mut command);
    command.stdin(Stdio::null()).stdout(said.try_clone().map_err(written)?).stderr(said);
    let mut launcher =
        command.spawn().map_err(|e| Failure::new(exit::IO, format!("no process for the launcher: {e}")))?;
    loop {
        // The launcher writes it after the fleet has accepted the job.
        if identity(&file) != before
            && let Some(name) = name_in(&file)
        {
            out!("job {name} is submitted; its record and its logs are in {}", dir.display());
            return Ok(exit::OK);
        }
        if let Some(status) = launcher.try_wait().map_err(|e| Failure::new(exit::IO, e))? {
            let refused = Failure::handed_over(&failure.0);
            if refused.is_some() && args.run_dir.is_none() {
                remove_unused(&dir);
            }
            return Err(refused.unwrap_or_else(|| {
                let why = format!("the launcher has ended: {status}");
                let code = status.code().unwrap_or(exit::FAILED);
                Failure::new(code, why).help(format!("its log is {}", log.display()))
            }));
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// A file for the failure of the launcher. Drop removes it.
struct FailureFile(PathBuf);

impl FailureFile {
    fn new(path: PathBuf) -> Result<Self, Failure> {
        File::create(&path).map_err(|e| Failure::write(&path, e))?;
        Ok(Self(path))
    }
}

impl Drop for FailureFile {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

/// Removes the folder of a run that never began: it holds nothing but the launcher's own files.
fn remove_unused(dir: &Path) {
    let _ = fs::remove_dir(dir.join(CHECKPOINTS)); // if it is empty
    let own = |e: &fs::DirEntry| e.file_name().to_string_lossy().starts_with("launcher");
    if fs::read_dir(dir).is_ok_and(|mut all| all.all(|e| e.as_ref().is_ok_and(own))) {
        let _ = fs::remove_dir_all(dir);
    }
}

/// An identity that differs for each file written there.
fn identity(file: &Path) -> Option<(u64, i64, i64)> {
    fs::metadata(file).ok().map(|m| (m.ino(), m.mtime(), m.mtime_nsec()))
}

/// The job's name, once its file is complete.
fn name_in(file: &Path) -> Option<String> {
    Job::load(file, &[]).ok().map(|job| job.name)
}
