//! `paraft submit --on` and `paraft fleet`: a fleet whose processes an engine starts, places and starts again.
//!
//! What is written are the engine's own files, in the run's folder, and what is run are the user's own commands
//! (`paraft-engines`); `paraft launch --role` is what they start. The flags that say what is to be written are in `on`.

use crate::{
    on::{On, OnArgs, described},
    train::find_checkpoint,
};
use clap::{Args, Subcommand, ValueEnum};
use paraft_engines::{Engine, Handle, Member, Role};
use paraft_fleet::{
    ask, certs,
    failure::Failure,
    fleet::JOB_FILE,
    launch, out,
    run_dir::RunDir,
    scale,
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
    /// Have so many workers, of a run on Kubernetes or of `paraft train` on this machine.
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
    // In pods, paths are those of the image.
    if !args.on.is_kubernetes() {
        launch::absolute_paths(&mut job)?;
    }
    if args.resume.is_some() && !args.on.shares_folder() {
        let why = format!("--resume: processes on {} share no folder that names a checkpoint", engine.name());
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
    certs::make_shared(&dir)?;
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
        // A run of `paraft train`, whose launcher is here.
        FleetCommand::Scale(a) if !a.run.join(HANDLE).exists() => {
            scale::set(&a.run, a.workers)?;
            out!("workers wanted: {}", a.workers);
            Ok(exit::OK)
        }
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
    certs::take(run)?;
    let members = engine.members(&handle, run)?;
    let mut servers: BTreeMap<u32, String> =
        folder.servers()?.into_iter().map(|(n, at)| (n, at.address)).collect();
    servers.extend((0..).zip(handle.servers.iter().cloned()));
    let known: Vec<String> = servers.values().cloned().collect();
    let seen = if known.is_empty() { None } else { ask::describe(&known) };
    let states: BTreeMap<&str, &str> =
        seen.iter().flat_map(|d| &d.servers).map(|s| (&*s.address, &*s.state)).collect();
    for member in &members {
        let at = member.index.and_then(|n| servers.get(&n)).filter(|_| member.role == Role::Server);
        let fleet = at.map_or("", |at| states.get(&**at).copied().unwrap_or("not in the fleet"));
        out!("{}", line(engine.name(), member, fleet, at.map_or("", |at| at)));
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
