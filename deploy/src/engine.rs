//! `paraft submit --on` and `paraft fleet`: a fleet whose processes an engine starts, places and starts again.
//!
//! What is written are the engine's own files, in the run's folder, and what is run are the user's own commands
//! (`paraft-engines`); `paraft launch --role` is what they start. The flags that say what is to be written are in `on`.

use crate::{
    on::{OnArgs, described},
    train::find_checkpoint,
};
use clap::{Args, Subcommand};
use paraft_engines::{Member, Role};
use paraft_fleet::{
    ask, certs,
    failure::Failure,
    fleet::JOB_FILE,
    launch, out,
    run_dir::RunDir,
    scale,
    shared::{Folder, JobEnd},
    submitted::{self, Submitted},
};
use paraft_tls::access::As;
use paraft_worker::{Job, exit};
use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

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
    /// Have so many workers, of what was submitted or of `paraft train` on this machine.
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
    // Without a common folder a worker that starts again would not find them.
    if with_workers && args.on.shares_folder() {
        job.checkpoint_by_default();
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
    if submitted::is(&dir) {
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
    submitted::keep(&dir, &handle)?;
    for (role, id) in &handle.parts {
        out!("{role}s  {} {id}", engine.name());
    }
    out!("run     {}", dir.display());
    Ok(exit::OK)
}

pub fn fleet(args: &FleetArgs) -> Result<i32, Failure> {
    match &args.command {
        FleetCommand::Up(a) => submit(a, false),
        FleetCommand::Down(a) => {
            let Submitted { engine, handle } = submitted::of(&a.run)?;
            engine.cancel(&handle, &a.run)?;
            Ok(exit::OK)
        }
        FleetCommand::Status(a) => status(&a.run),
        FleetCommand::Logs(a) => logs(a),
        FleetCommand::Scale(a) => {
            match submitted::is(&a.run) {
                true => submitted::scale(&a.run, a.workers)?,
                false => scale::set(&a.run, a.workers)?,
            }
            out!("workers wanted: {}", a.workers);
            Ok(exit::OK)
        }
    }
}

/// The engine's view, joined with the fleet's.
fn status(run: &Path) -> Result<i32, Failure> {
    let run_there = submitted::of(run)?;
    let folder = Folder::of(run)?;
    certs::take(run, As::Admin)?;
    let Submitted { engine, handle } = &run_there;
    let members = engine.members(handle, run)?;
    let servers = run_there.servers(run)?;
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
        Some(JobEnd::Done) => out!("the job is done"),
        Some(JobEnd::Failed { worker, node, code, said }) => {
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
    let Submitted { engine, handle } = submitted::of(&args.run)?;
    if let Some(JobEnd::Failed { worker, node, code, said }) = Folder::of(&args.run)?.ended()? {
        out!("first failure: w{worker} on {node}, with code {code}: {said}\n");
    }
    for said in engine.logs(&handle, &args.run, args.lines)? {
        said.text.lines().for_each(|line| out!("{}  {line}", said.name));
    }
    Ok(exit::OK)
}
