//! `paraft submit --on` and `paraft fleet`: a fleet whose processes an engine starts, places and starts again.
//!
//! What is written are the engine's own files, in the run's folder, and what is run are the user's own commands
//! (`paraft-engines`); `paraft launch --role` is what they start.

use crate::train::find_checkpoint;
use clap::{Args, Subcommand, ValueEnum};
use paraft_engines::{
    Engine, Fleet, Handle, Member, Mount, Part, Role, kubernetes::Kubernetes, slurm::Slurm,
};
use paraft_fleet::{
    ask,
    failure::Failure,
    fleet::JOB_FILE,
    launch, out,
    run_dir::RunDir,
    shared::{Ended, Folder},
};
use paraft_worker::{Job, exit};
use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

/// What was submitted, in the run's folder.
const HANDLE: &str = "engine.json";

/// What is to run on an engine, and how.
#[derive(Args)]
pub struct OnArgs {
    /// The job file.
    pub job: PathBuf,
    /// The engine.
    #[arg(long)]
    pub on: On,
    /// The run's folder, on a file system that all hosts share. Default: runs/NAME-N, the first N that is free.
    #[arg(long)]
    pub run_dir: Option<PathBuf>,
    /// Overrides a key of the job file; may be given often.
    #[arg(long, value_name = "KEY=VALUE")]
    pub set: Vec<String>,
    /// Begin from a checkpoint, as in `paraft train`.
    #[arg(long, value_name = "PATH", num_args = 0..=1, default_missing_value = "latest")]
    pub resume: Option<PathBuf>,
    #[command(flatten)]
    pub engine: EngineArgs,
}

/// What the engine is asked for.
#[derive(Args, Clone)]
#[command(next_help_heading = "On an engine")]
pub struct EngineArgs {
    /// Print what would be submitted, and do nothing.
    #[arg(long)]
    pub dry_run: bool,
    /// The image, for engines that run images; it has `paraft` and what the job needs.
    #[arg(long, value_name = "NAME")]
    pub image: Option<String>,
    /// What all processes see besides, and where: WHAT:/PATH. On Kubernetes a PersistentVolumeClaim. May be given often.
    #[arg(long, value_name = "WHAT:/PATH")]
    pub mount: Vec<Mount>,
    /// A volume of so many bytes, as the engine writes it, that follows each server wherever it is started. Default: what is on a
    /// server's disk goes with its host.
    #[arg(long, value_name = "SIZE")]
    pub server_disk: Option<String>,
    /// Processors of each server.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    pub server_cpus: u32,
    /// Memory of each server, as the engine writes it.
    #[arg(long, value_name = "SIZE")]
    pub server_memory: Option<String>,
    /// Processors of each worker.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    pub worker_cpus: u32,
    /// Memory of each worker, as the engine writes it.
    #[arg(long, value_name = "SIZE")]
    pub worker_memory: Option<String>,
    /// GPUs of each worker.
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub worker_gpus: u32,
    /// A time limit, as the engine writes it. Shortly before it all hand over, and go on in a new one.
    #[arg(long)]
    pub time: Option<String>,
    /// Let several servers share a host: one lost host may then end the job.
    #[arg(long)]
    pub together: bool,
    /// Seconds that a process has to hand over what it holds when its host is taken away.
    #[arg(long, value_name = "SECONDS", default_value_t = 20)]
    pub grace: u32,
    /// How often the engine starts each of them again.
    #[arg(long, value_name = "N", default_value_t = 100)]
    pub restarts: u32,
    /// Handed to the engine unread, for example --arg=--partition=batch; may be given often.
    #[arg(long, value_name = "ARG", allow_hyphen_values = true)]
    pub arg: Vec<String>,
    /// The program on the engine's hosts, or in the image. Default: this one's path; in an image `paraft`.
    #[arg(long, value_name = "PATH")]
    pub program: Option<String>,
}

/// An engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum On {
    /// Slurm, by sbatch, squeue and scancel.
    Slurm,
    /// Kubernetes, by kubectl: servers as a StatefulSet, workers as an Indexed Job.
    Kubernetes,
    /// Kubernetes with JobSet, 0.12 or later: all as one JobSet.
    Jobset,
    /// Kubernetes with Kubeflow Trainer: a ClusterTrainingRuntime and a TrainJob.
    Trainer,
}

impl On {
    fn engine(self) -> Box<dyn Engine> {
        match self {
            Self::Slurm => Box::new(Slurm),
            Self::Kubernetes => Box::new(Kubernetes::Sets),
            Self::Jobset => Box::new(Kubernetes::JobSet),
            Self::Trainer => Box::new(Kubernetes::Trainer),
        }
    }

    /// Its processes see the files of this machine, at the same paths.
    fn shares_files(self) -> bool {
        !matches!(self, Self::Kubernetes | Self::Jobset | Self::Trainer)
    }

    /// It runs images.
    fn runs_images(self) -> bool {
        matches!(self, Self::Kubernetes | Self::Jobset | Self::Trainer)
    }
}

#[derive(Args)]
pub struct FleetArgs {
    #[command(subcommand)]
    command: FleetCommand,
}

#[derive(Subcommand)]
enum FleetCommand {
    /// Start the servers of a job file without its workers; `paraft fleet down` ends them.
    Up(Box<OnArgs>),
    /// End all of a run's processes.
    Down(RunOf),
    /// What the engine and the fleet know of a run's processes.
    Status(RunOf),
    /// What a run's processes have said, the first failure first.
    Logs(LogArgs),
    /// Have so many workers.
    Scale(ScaleArgs),
}

#[derive(Args)]
struct RunOf {
    /// The run's folder.
    run: PathBuf,
}

#[derive(Args)]
struct LogArgs {
    /// The run's folder.
    run: PathBuf,
    /// The last lines of each.
    #[arg(long, value_name = "N", default_value_t = 10)]
    lines: usize,
}

#[derive(Args)]
struct ScaleArgs {
    /// The run's folder.
    run: PathBuf,
    /// How many workers.
    #[arg(long, value_name = "N")]
    workers: u32,
}

/// Submits the job's servers and, if wanted, its workers.
pub fn submit(args: &OnArgs, with_workers: bool) -> Result<i32, Failure> {
    let engine = args.on.engine();
    let mut job = Job::load(&args.job, &args.set)?;
    if !job.cluster.addresses.is_empty() {
        return Err(Failure::new(
            exit::CONFIG,
            "the job names servers that are started by hand (cluster.addresses)",
        )
        .help("take the key out: the engine decides where servers are"));
    }
    if args.on.shares_files() {
        launch::absolute_paths(&mut job)?;
    } else if args.resume.is_some() {
        let why = format!(
            "--resume names a checkpoint of this machine, which processes on {} do not see",
            engine.name()
        );
        return Err(Failure::new(exit::USAGE, why)
            .help("begin from its weights: --set train.init=PATH, where PATH is what processes see there"));
    }
    let resume =
        args.resume.as_deref().map(|p| find_checkpoint(p, &job, args.run_dir.as_deref())).transpose()?;
    if args.engine.dry_run {
        let dir =
            args.run_dir.clone().unwrap_or_else(|| PathBuf::from("runs").join(format!("{}-N", job.name)));
        let dir = std::path::absolute(&dir).map_err(|e| Failure::write(&dir, e))?;
        for file in engine.render(&described(args, &job, &dir, with_workers)?)? {
            out!("# {}", dir.join(&file.name).display());
            out!("{}", file.text);
        }
        return Ok(exit::OK);
    }
    let dir = RunDir::new(args.run_dir.as_deref(), &job.name)?;
    let dir = fs::canonicalize(&*dir).map_err(|e| Failure::write(&dir, e))?;
    if dir.join(HANDLE).exists() {
        return Err(Failure::new(exit::CONFIG, format!("{} has been submitted already", dir.display()))
            .help("choose another --run-dir, or end that one: paraft fleet down"));
    }
    let fleet = described(args, &job, &dir, with_workers)?;
    let files = engine.render(&fleet)?;
    // Whole before anything can start.
    let write = |name: &str, text: &str| {
        let path = dir.join(name);
        fs::write(&path, text).map_err(|e| Failure::write(&path, e))
    };
    write(JOB_FILE, &job.to_toml())?;
    Folder::of(&dir)?.start_after(0, || resume)?;
    files.iter().try_for_each(|f| write(&f.name, &f.text))?;
    let handle = engine.submit(&fleet)?;
    keep(&dir, &handle)?;
    for (role, id) in &handle.parts {
        out!("{role}s  {} {id}", engine.name());
    }
    out!("run     {}", dir.display());
    Ok(exit::OK)
}

/// The job on its engine.
fn described(args: &OnArgs, job: &Job, dir: &Path, with_workers: bool) -> Result<Fleet, Failure> {
    let (on, args) = (args.on, &args.engine);
    let own = || match on.runs_images() {
        true => Ok("paraft".into()),
        false => std::env::current_exe().map(|p| p.to_string_lossy().into_owned()),
    };
    let whole = |p: String| match p.contains('/') && !on.runs_images() {
        true => std::path::absolute(&p).map(|p| p.to_string_lossy().into_owned()),
        false => Ok(p),
    };
    let program = args.program.clone().map_or_else(own, whole);
    let name: String = job.name.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '-' }).collect();
    let count = if with_workers { job.train.workers } else { 0 };
    Ok(Fleet {
        name,
        job: job.to_toml(),
        image: args.image.clone(),
        disk: args.server_disk.clone(),
        mounts: args.mount.clone(),
        program: program.map_err(|e| Failure::new(exit::IO, e).help("name it with --program"))?,
        run_dir: dir.to_path_buf(),
        servers: Part {
            count: job.servers(),
            cpus: args.server_cpus,
            gpus: 0,
            memory: args.server_memory.clone(),
        },
        workers: Part {
            count,
            cpus: args.worker_cpus,
            gpus: args.worker_gpus,
            memory: args.worker_memory.clone(),
        },
        until_done: with_workers,
        grace: args.grace,
        restarts: args.restarts,
        time: args.time.clone(),
        spread: !args.together,
        args: args.arg.clone(),
        ..Fleet::default()
    })
}

fn keep(dir: &Path, handle: &Handle) -> Result<(), Failure> {
    let path = dir.join(HANDLE);
    let text = serde_json::to_string(handle).map_err(|e| Failure::new(exit::IO, e))?;
    fs::write(&path, text).map_err(|e| Failure::write(&path, e))
}

/// What was submitted in this folder.
fn submitted(dir: &Path) -> Result<(Box<dyn Engine>, Handle), Failure> {
    let path = dir.join(HANDLE);
    let none = |e: &dyn std::fmt::Display| {
        Failure::new(exit::CONFIG, format!("{}: {e}", path.display()))
            .help("give the folder that `paraft submit` printed as `run`")
    };
    let text = fs::read_to_string(&path).map_err(|e| none(&e))?;
    let handle: Handle = serde_json::from_str(&text).map_err(|e| none(&e))?;
    let on = On::from_str(&handle.engine, true).map_err(|e| none(&e))?;
    Ok((on.engine(), handle))
}

pub fn fleet(args: &FleetArgs) -> Result<i32, Failure> {
    match &args.command {
        FleetCommand::Up(a) => submit(a, false),
        FleetCommand::Down(a) => {
            let (engine, handle) = submitted(&a.run)?;
            engine.cancel(&handle, &a.run)?;
            Ok(exit::OK)
        }
        FleetCommand::Status(a) => status(&a.run),
        FleetCommand::Logs(a) => logs(a),
        FleetCommand::Scale(a) => {
            let (engine, handle) = submitted(&a.run)?;
            let job = Job::load(&a.run.join(JOB_FILE), &[])?;
            if a.workers > job.train.workers {
                let why =
                    format!("the job has {} workers, and {} are asked for", job.train.workers, a.workers);
                return Err(Failure::new(exit::USAGE, why)
                    .help("submit the job with as many workers as it may ever have, and scale down"));
            }
            keep(&a.run, &engine.scale(&handle, &a.run, a.workers)?)?;
            Ok(exit::OK)
        }
    }
}

/// The engine's view, joined with the fleet's.
fn status(run: &Path) -> Result<i32, Failure> {
    let (engine, handle) = submitted(run)?;
    let folder = Folder::of(run)?;
    let members = engine.members(&handle, run)?;
    let servers = folder.servers()?;
    let known: Vec<String> = servers.values().map(|at| at.address.clone()).collect();
    let seen = if known.is_empty() { None } else { ask::describe(&known) };
    let states: BTreeMap<&str, &str> =
        seen.iter().flat_map(|d| &d.servers).map(|s| (&*s.address, &*s.state)).collect();
    for member in &members {
        let at = member.index.and_then(|n| servers.get(&n)).filter(|_| member.role == Role::Server);
        let fleet = at.map_or("", |at| states.get(&*at.address).copied().unwrap_or("not in the fleet"));
        out!("{}", line(engine.name(), member, fleet, at.map_or("", |at| &at.address)));
    }
    for job in seen.iter().flat_map(|d| &d.jobs) {
        out!("job {}: {}", job.name, job.state);
    }
    match folder.ended()? {
        Some(Ended::Done) => out!("the job is done"),
        Some(Ended::Failed { worker, node, code, said }) => {
            out!("first failure: w{worker} on {node}, with code {code}: {said}");
        }
        None if members.is_empty() => {
            out!("{} knows none of its processes any more, and the job has not ended", engine.name())
        }
        None => {}
    }
    Ok(exit::OK)
}

fn line(engine: &str, member: &Member, fleet: &str, address: &str) -> String {
    let Member { role, index, state, node, why } = member;
    let number = index.map_or("?".into(), |n| n.to_string());
    let on = if node.is_empty() { String::new() } else { format!(" on {node}") };
    let fleet = if fleet.is_empty() { String::new() } else { format!("{fleet} at {address}; ") };
    format!("{role} {number}: {fleet}{engine}: {state}{on}, {why}")
}

fn logs(args: &LogArgs) -> Result<i32, Failure> {
    let (engine, handle) = submitted(&args.run)?;
    if let Some(Ended::Failed { worker, node, code, said }) = Folder::of(&args.run)?.ended()? {
        out!("first failure: w{worker} on {node}, with code {code}: {said}\n");
    }
    for said in engine.logs(&handle, &args.run, args.lines)? {
        said.text.lines().for_each(|line| out!("{}  {line}", said.name));
    }
    Ok(exit::OK)
}
