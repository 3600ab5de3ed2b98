//! `paraft launch`: a user's script as the workers of a fleet on this machine.
//!
//! It turns its flags into a job with the script as `cluster.script`, and runs it as `paraft train`
//! does.

use crate::{
    role::{self, RoleArgs},
    short::{assignment, only_once},
    train::{RunArgs, find_checkpoint, tell, train},
};
use clap::Args;
use paraft_common::{ModeChoice, config::MAX_NAME_CHARS, need::Bytes};
use paraft_engines::{HostContext, Place, PlaceFlags, Role, place, variables};
use paraft_fleet::{failure::Failure, fleet::JOB_FILE, launch, out, run_dir::RunDir, script, task};
use paraft_tls::access::As;
use paraft_worker::{Job, exit};
use std::{
    path::{self, Path, PathBuf},
    time::Duration,
};

#[derive(Args)]
#[command(
    after_help = "What stands behind SCRIPT, or behind the module of -m, is the script's own, whatever it looks like: flags of \
                        `paraft launch` stand before it."
)]
pub struct LaunchArgs {
    /// Processes of the script. Default: 2, or train.workers of the job file.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=65536))]
    pub workers: Option<u32>,
    /// Servers. Default: 3, or cluster.servers of the job file.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub servers: Option<u32>,
    /// Replicas of each part of the model, an odd number. Default: 3, or 1 where there are fewer than 3 servers.
    #[arg(long, value_name = "N")]
    pub replicas: Option<u32>,
    /// bsp (in lock-step), ssp:S, asp or auto. Default: bsp, or train.mode of the job file.
    #[arg(long)]
    pub mode: Option<ModeChoice>,
    /// A job file, for whatever has no flag here.
    #[arg(long, value_name = "FILE")]
    pub job: Option<PathBuf>,
    /// Sets a key of the job file, for example checkpoint.every_steps=500; may be given often.
    #[arg(long, value_name = "KEY=VALUE")]
    pub set: Vec<String>,
    /// Names the run. Default: the job file's name, or the script's.
    #[arg(long)]
    pub name: Option<String>,
    /// Go on from a checkpoint, as in `paraft train`; write --resume=PATH.
    #[arg(long, value_name = "PATH", num_args = 0..=1, require_equals = true, default_missing_value = "latest")]
    pub resume: Option<PathBuf>,
    /// What runs Python files and modules. Default: the python3 beside this program (in a virtual environment), else the PATH's.
    #[arg(long, value_name = "PROGRAM")]
    pub python: Option<String>,
    #[command(flatten)]
    pub run: RunArgs,
    /// One process of a fleet whose processes an engine starts: server or worker. SCRIPT may be the job file.
    #[arg(long, help_heading = "In an engine's task, pod or unit")]
    pub role: Option<Role>,
    /// Its number among those of its role, from 0. Default: what the engine says (`paraft env` shows it).
    #[arg(long, value_name = "N", env = "PARAFT_INDEX", help_heading = "In an engine's task, pod or unit")]
    pub index: Option<u32>,
    /// A file with a host in each line, as DeepSpeed and MPI have it: the line of this host is its number.
    #[arg(long, value_name = "FILE", help_heading = "In an engine's task, pod or unit")]
    pub hostfile: Option<PathBuf>,
    /// All servers as host:port, comma-separated, by their numbers. Default: the run's folder says where they are.
    #[arg(
        long,
        env = "PARAFT_SERVERS",
        value_delimiter = ',',
        help_heading = "In an engine's task, pod or unit"
    )]
    pub addresses: Vec<String>,
    /// A server's own folder. Default: server-N in the run's folder.
    #[arg(long, help_heading = "In an engine's task, pod or unit")]
    pub data: Option<PathBuf>,
    /// Where a server listens. Default: any port of every interface, or that of its address.
    #[arg(long, help_heading = "In an engine's task, pod or unit")]
    pub listen: Option<String>,
    /// The most memory that one job may need on a server, for example 24GiB. Default: what is free.
    #[arg(long, value_name = "SIZE", help_heading = "In an engine's task, pod or unit")]
    pub job_memory: Option<Bytes>,
    /// The host, or host:port, by which the others reach a server. Default: this host's address on the way to them.
    #[arg(long, help_heading = "In an engine's task, pod or unit")]
    pub advertise: Option<String>,
    /// A server ends when all workers have trained everything, or one has failed.
    #[arg(long, help_heading = "In an engine's task, pod or unit")]
    pub until_done: bool,
    /// A fleet that was there and does not answer is waited for so many seconds.
    #[arg(
        long,
        value_name = "SECONDS",
        default_value_t = 120,
        help_heading = "In an engine's task, pod or unit"
    )]
    pub patience: u64,
    /// After a signal: so many seconds to hand over what it holds.
    #[arg(
        long,
        value_name = "SECONDS",
        default_value_t = 20,
        help_heading = "In an engine's task, pod or unit"
    )]
    pub grace: u64,
    /// A file, or a page (http://...), that is there when this host will be taken away: as SIGTERM.
    #[arg(long, value_name = "FILE|URL", help_heading = "In an engine's task, pod or unit")]
    pub notice: Option<String>,
    /// Run a Python module, as `python -m` does, with everything behind it as its arguments.
    #[arg(short = 'm', value_names = ["MODULE", "ARGS"], num_args = 1.., allow_hyphen_values = true)]
    pub module: Vec<String>,
    /// What to run, and its arguments: a Python file, or a program.
    #[arg(value_names = ["SCRIPT", "ARGS"], trailing_var_arg = true, allow_hyphen_values = true,
        required_unless_present_any = ["module", "role"], conflicts_with = "module")]
    pub script: Vec<String>,
}

impl LaunchArgs {
    /// The certificate that the command shows, where its folder has several.
    pub fn shows(&self) -> As {
        match self.role {
            Some(Role::Server) => As::Peer,
            Some(Role::Worker) => As::Worker,
            None => As::Admin,
        }
    }
}

pub fn run(args: &LaunchArgs) -> Result<i32, Failure> {
    let asked = PlaceFlags {
        workers: args.workers,
        role: args.role,
        index: args.index,
        hostfile: args.hostfile.clone(),
    };
    let mut place = place(&variables(), &asked, &HostContext::here(args.hostfile.as_deref()))?;
    if let Some(place) = place.as_mut().filter(|p| p.role.is_some()) {
        if !args.addresses.is_empty() {
            place.servers.clone_from(&args.addresses);
        }
        return as_role(args, place);
    }
    if let Some(place) = place {
        return as_task(args, &place);
    }
    let mut job = job(args, None)?;
    let dir = train("launch", &mut job, args.resume.as_deref(), &args.run)?;
    if !args.run.json {
        out!("run     {}", dir.display());
    }
    Ok(exit::OK)
}

/// Runs one process of a fleet, with its role.
fn as_role(args: &LaunchArgs, place: &Place) -> Result<i32, Failure> {
    let is_job = |script: &&String| script.ends_with(".toml");
    let given = args.job.clone().or_else(|| args.script.first().filter(is_job).map(PathBuf::from));
    let run_dir = || {
        match &args.run.run_dir {
        Some(dir) => std::fs::canonicalize(dir).map_err(|e| Failure::write(dir, e)),
        None => Err(Failure::new(exit::USAGE, "which run? Its processes need one folder")
            .help("add --run-dir FOLDER, the same for all; on a file system that they share, unless --addresses names the servers")),
    }
    };
    let run_dir = run_dir()?;
    let file = run_dir.join(JOB_FILE);
    let scripts = args.script.first().is_some_and(|s| !is_job(&s)) || !args.module.is_empty();
    let job = match (&given, scripts) {
        (None, false) => Job::load(&file, &args.set)?,
        (Some(given), false) => Job::load(given, &args.set)?,
        (_, true) => job(args, None)?,
    };
    let job = task::agree_on_job(&job, &file, place)?;
    let role = RoleArgs {
        place,
        job,
        file,
        run_dir,
        data: args.data.clone(),
        listen: args.listen.clone(),
        advertise: args.advertise.clone(),
        job_memory: args.job_memory,
        until_done: args.until_done,
        patience: Duration::from_secs(args.patience),
        grace: Duration::from_secs(args.grace),
        notice: args.notice.clone(),
    };
    role::run(&role)
}

/// Runs one of an engine's tasks, which together form one fleet.
fn as_task(args: &LaunchArgs, place: &Place) -> Result<i32, Failure> {
    let (engine, tasks) = (place.engine, place.tasks);
    let wrong = |why: String, help: &str| Err(Failure::new(exit::USAGE, why).help(help));
    if args.run.faults || args.run.trace {
        return wrong(
            format!(
                "--faults and --trace are for a fleet on one machine, and this is one of {engine}'s {tasks} tasks"
            ),
            "leave them out",
        );
    }
    let job = job(args, Some(tasks))?;
    let (servers, workers) = (job.servers(), job.train.workers);
    if workers != tasks || job.train.group_size != 1 {
        return wrong(
            format!("the job has {workers} workers, and {engine} has started {tasks} tasks"),
            "each task is one worker: leave train.workers and train.group_size out",
        );
    }
    if servers > tasks {
        return wrong(
            format!("the job has {servers} servers, and {engine} has started {tasks} tasks"),
            "each task has one server at most: add --servers, or start more tasks",
        );
    }
    eprintln!("{}", task::recognised(place, servers));
    let interrupted = launch::interrupts();
    if place.rank > 0 {
        return task::other(place, &job, &interrupted);
    }
    let resume = args.resume.as_deref();
    let begun = || {
        let resume = resume.map(|p| find_checkpoint(p, &job, args.run.run_dir.as_deref())).transpose()?;
        Ok((RunDir::of(args.run.run_dir.as_deref(), &job.name, resume.is_some())?, resume))
    };
    let (dir, resume) = task::before_all(place, begun())?;
    let record = task::first(place, &job, &dir, resume.as_deref(), &interrupted)?;
    tell(&record, &dir, args.run.json)?;
    if !args.run.json {
        out!("run     {}", dir.display());
    }
    Ok(exit::OK)
}

/// The job of the flags, over the job file if there is one; for this number of an engine's tasks.
fn job(args: &LaunchArgs, tasks: Option<u32>) -> Result<Job, Failure> {
    let words = words(args)?;
    script::check(&words)?;
    let mut set = vec![assignment("cluster.script", &words)?];
    for (flag, key, is_given) in [
        ("--workers", "train.workers", args.workers.is_some()),
        ("--servers", "cluster.servers", args.servers.is_some()),
        ("--replicas", "cluster.replicas", args.replicas.is_some()),
        ("--mode", "train.mode", args.mode.is_some()),
        ("--name", "name", args.name.is_some()),
    ] {
        if is_given {
            only_once(flag, key, &args.set)?;
        }
    }
    let mut flag = |key: &str, value: Option<String>| set.extend(value.map(|v| format!("{key}={v}")));
    flag("train.workers", args.workers.or(tasks).map(|n| n.to_string()));
    flag("train.mode", args.mode.map(|m| m.to_string()));
    // With two tasks the loss of either loses a majority; one server is as good.
    let few = tasks.filter(|n| *n < 3 && args.job.is_none()).map(|_| 1);
    let servers = args.servers.or(few);
    flag("cluster.servers", servers.map(|n| n.to_string()));
    // Fewer than three servers survive no failure, so one replica suffices.
    let one = servers.filter(|n| *n < 3).map(|_| 1);
    flag("cluster.replicas", args.replicas.or(one).map(|n| n.to_string()));
    let called = script::name(&words);
    let called = job_name(called.trim_end_matches(".py").trim_end_matches(".sh"));
    if let Some(name) = args.name.as_deref().or(args.job.is_none().then_some(&called)) {
        set.push(assignment("name", name)?);
    }
    set.extend(args.set.iter().cloned());
    Ok(match &args.job {
        Some(file) => Job::load(file, &set)?,
        None => Job::parse("", Path::new("paraft launch"), &set)?,
    })
}

/// A job's name for a script of this name, whose characters may be any.
fn job_name(script: &str) -> String {
    let legal = |c: char| if c.is_ascii_alphanumeric() || "._-".contains(c) { c } else { '-' };
    let name: String = script.chars().map(legal).take(MAX_NAME_CHARS).collect();
    match name.trim_start_matches(['.', '-']) {
        "" => "script".into(),
        name => name.into(),
    }
}

/// The command line of a worker.
fn words(args: &LaunchArgs) -> Result<Vec<String>, Failure> {
    let whole = |script: &str| {
        let whole =
            path::absolute(script).map_err(|e| Failure::new(exit::USAGE, format!("`{script}`: {e}")))?;
        Ok::<_, Failure>(whole.to_string_lossy().into_owned())
    };
    // Relative to the current folder: the job file may lie elsewhere.
    let program = |program: &str| match program.contains('/') {
        true => whole(program),
        false => Ok(program.to_string()),
    };
    let python = || program(&args.python.clone().unwrap_or_else(python));
    if !args.module.is_empty() {
        let python = [python()?, "-m".into()];
        return Ok(python.into_iter().chain(args.module.iter().cloned()).collect());
    }
    let [script, rest @ ..] = args.script.as_slice() else {
        return Err(Failure::new(exit::USAGE, "there is no script to launch"));
    };
    if script.starts_with('-') {
        return Err(Failure::new(
            exit::USAGE,
            format!("`{script}` is no flag of `paraft launch`, nor a script"),
        )
        .help("`paraft launch --help` lists its flags; those of the script stand behind it"));
    }
    let mut words = match script.ends_with(".py") {
        true => vec![python()?, whole(script)?],
        false => vec![program(script)?],
    };
    words.extend(rest.iter().cloned());
    Ok(words)
}

/// The Python of the environment of this program, which has the package of the same build.
fn python() -> String {
    let beside = std::env::current_exe().ok().map(|own| own.with_file_name("python3"));
    beside.filter(|p| p.is_file()).map_or("python3".into(), |p| p.to_string_lossy().into_owned())
}

#[cfg(test)]
mod tests {
    use super::job_name;

    #[test]
    fn a_script_of_any_name_gives_a_job_a_legal_one() {
        for (script, job) in
            [("train", "train"), ("my script \u{fc}", "my-script--"), (".x", "x"), ("\u{fc}", "script")]
        {
            assert_eq!(job_name(script), job);
        }
    }
}
