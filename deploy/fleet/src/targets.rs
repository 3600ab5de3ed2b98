//! The fleet that a command asks or changes: `--fleet`, in every command.
//!
//! A fleet is named by addresses of its servers, by a run's folder, or by a job file.

use crate::{
    certs,
    ended::{EndedRun, has_end},
    failure::Failure,
    files::{JOB_FILE, SERVERS_FILE, server_log},
    run_dir::held,
    shared::Folder,
    submitted,
};
use clap::Args;
use paraft_common::{check_address, config::check_name};
use paraft_record::{
    METRICS_FILE,
    begin::{LAUNCHER_LOCK, is_held},
};
use paraft_tls::access::As;
use paraft_worker::{Job, exit};
use std::{
    env, fs,
    io::{self, ErrorKind},
    net::{SocketAddr, TcpStream},
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

/// A local process refuses or accepts a connection at once.
const CONNECT_TIMEOUT: Duration = Duration::from_millis(200);

/// Names the fleet where no flag does.
const VARIABLE: &str = "PARAFT_SERVERS";

/// The folder of the runs that commands find by themselves.
const RUNS: &str = "runs";

/// The values of `--fleet`, for help.
const FORMS: &str = "--fleet takes servers as host:port (127.0.0.1:7071), a run's folder (runs/digits-1) or a job file (job.toml)";

/// The flag of commands that ask or change a running fleet.
#[derive(Args, Clone, Debug, Default)]
pub struct FleetArg {
    /// The fleet: servers as host:port, comma-separated (one that answers is enough), a run's folder, or a job file.
    /// Default: PARAFT_SERVERS, else the newest run in runs/; for a command that changes something, the only run there
    /// that is going on.
    #[arg(long, value_name = "FLEET")]
    pub fleet: Option<String>,
}

impl FleetArg {
    /// The fleet to ask. By default the newest run, of which it tells the user.
    ///
    /// # Errors
    ///
    /// The value names no fleet; or there is neither a value nor a run.
    pub fn to_ask(&self) -> Result<FleetName, Failure> {
        self.given()?.map_or_else(|| newest(Path::new(RUNS)), Ok)
    }

    /// The fleet to change. By default the only run that is going on, of which it tells the user.
    ///
    /// # Errors
    ///
    /// The value names no fleet; or there is no value, and not exactly one such run.
    pub fn to_change(&self) -> Result<FleetName, Failure> {
        self.given()?.map_or_else(|| only_running(Path::new(RUNS)), Ok)
    }

    fn given(&self) -> Result<Option<FleetName>, Failure> {
        if let Some(fleet) = &self.fleet {
            return FleetName::read(fleet).map(Some);
        }
        let in_variable =
            |e: Failure| Failure::new(e.code(), format!("{VARIABLE}: {}", e.message())).help(FORMS);
        variable().map(|fleet| FleetName::read(&fleet).map_err(in_variable)).transpose()
    }
}

/// The flag of commands that train, where the job's own fleet is the default.
#[derive(Args, Clone, Debug, Default)]
pub struct StandingArg {
    /// Train on a running fleet, with the workers on this machine, instead of on a fleet of its own: servers as host:port,
    /// comma-separated (one that answers is enough), a run's folder, or a job file.
    #[arg(long, value_name = "FLEET")]
    pub fleet: Option<String>,
}

impl StandingArg {
    /// Servers of the fleet, if one is given.
    ///
    /// # Errors
    ///
    /// As [`FleetName::read`]'s and [`FleetName::servers`]'s.
    pub fn servers(&self) -> Result<Option<Vec<String>>, Failure> {
        self.fleet.as_deref().map(|fleet| FleetName::read(fleet)?.servers()).transpose()
    }
}

/// Reads a job's name, where a user may write a fleet's instead.
///
/// # Errors
///
/// The rule that the name breaks.
pub fn job_name(text: &str) -> Result<String, String> {
    check_name(text)
        .map(|()| text.to_string())
        .map_err(|why| format!("{why}. A run or a fleet is named by --fleet"))
}

/// The variable that names the fleet where no flag does, if it is set.
pub fn variable() -> Option<String> {
    env::var(VARIABLE).ok().filter(|fleet| !fleet.is_empty())
}

/// A fleet, as a user names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FleetName {
    /// By addresses of its servers.
    Servers(Vec<String>),
    /// By a run's folder.
    Run(PathBuf),
}

/// What answers a command's question.
pub enum Target {
    /// These servers.
    Servers(Vec<String>),
    /// The folder of a run that has ended, and its servers with it.
    Ended(Box<EndedRun>),
}

/// Servers, or the folder of a run that has ended.
enum Found {
    Servers(Vec<String>),
    Ended(PathBuf),
}

impl FleetName {
    /// Reads the value of `--fleet`. An existing folder or file is one; everything else is addresses.
    ///
    /// # Errors
    ///
    /// It is none of them; or a job file is unreadable, or names neither servers nor a run in `runs/`.
    pub fn read(text: &str) -> Result<Self, Failure> {
        Self::read_in(text, Path::new(RUNS))
    }

    fn read_in(text: &str, runs: &Path) -> Result<Self, Failure> {
        let path = Path::new(text);
        if path.is_dir() {
            return Ok(Self::Run(path.to_path_buf()));
        }
        if path.exists() {
            return Self::of_job(path, runs);
        }
        let missing = format!("{text}: there is no such file or folder");
        let wrong = |why: String| Failure::new(exit::CONFIG, why).help(FORMS);
        if text.contains('/') {
            return Err(wrong(missing));
        }
        let list: Vec<String> = text.split(',').map(|address| address.trim().to_string()).collect();
        match list.iter().find_map(|address| check_address(address).err()) {
            None => Ok(Self::Servers(list)),
            Some(why) => Err(wrong(format!("{missing}, and {why}"))),
        }
    }

    /// The servers that a job file names, or else the newest run of its job.
    fn of_job(file: &Path, runs: &Path) -> Result<Self, Failure> {
        let job = Job::load(file, &[])?;
        if !job.cluster.addresses.is_empty() {
            return Ok(Self::Servers(job.cluster.addresses));
        }
        let is_of_job =
            |run: &PathBuf| Job::load(&run.join(JOB_FILE), &[]).is_ok_and(|of| of.name == job.name);
        let Some(run) = newest_first(runs).into_iter().find(is_of_job) else {
            let why = format!(
                "{} names no cluster.addresses, and {}/ has no run of its job `{}`",
                file.display(),
                runs.display(),
                job.name
            );
            return Err(Failure::new(exit::CONFIG, why).help("give the run's folder: --fleet RUN"));
        };
        eprintln!("{}, the newest run of {} in {}/", run.display(), job.name, runs.display());
        Ok(Self::Run(run))
    }

    /// The run's folder, if it is named by one.
    pub fn folder(&self) -> Option<&Path> {
        match self {
            Self::Servers(_) => None,
            Self::Run(folder) => Some(folder),
        }
    }

    /// What answers for the fleet.
    ///
    /// # Errors
    ///
    /// The folder holds no run, or its servers are unknown; or the record of an ended run cannot be read.
    pub fn target(&self) -> Result<Target, Failure> {
        match self.found(As::Admin)? {
            Found::Servers(servers) => Ok(Target::Servers(servers)),
            Found::Ended(run) if run.join(METRICS_FILE).is_file() => {
                Ok(Target::Ended(Box::new(EndedRun::read(&run)?)))
            }
            // The servers of a sweep have no job of their own, and so no record.
            Found::Ended(run) if !run.join(JOB_FILE).is_file() => Err(ended(&run)),
            Found::Ended(run) => {
                let why =
                    format!("{}: that run has ended, and its record {METRICS_FILE} is gone", run.display());
                Err(Failure::new(exit::CONFIG, why).help(
                    "its weights, checkpoints and logs may be there still: `paraft evaluate` and --resume take the folder",
                ))
            }
        }
    }

    /// Its servers, or some of them.
    ///
    /// # Errors
    ///
    /// As [`Self::target`]'s; or the run has ended.
    pub fn servers(&self) -> Result<Vec<String>, Failure> {
        self.servers_for(As::Admin)
    }

    /// As [`Self::servers`], for a process with this certificate of the run's folder.
    ///
    /// # Errors
    ///
    /// As [`Self::servers`]'s.
    pub fn servers_for(&self, shows: As) -> Result<Vec<String>, Failure> {
        match self.found(shows)? {
            Found::Servers(servers) => Ok(servers),
            Found::Ended(run) => Err(ended(&run)),
        }
    }

    fn found(&self, shows: As) -> Result<Found, Failure> {
        match self {
            Self::Servers(servers) => Ok(Found::Servers(servers.clone())),
            Self::Run(folder) => found_in(folder, shows),
        }
    }
}

fn found_in(folder: &Path, shows: As) -> Result<Found, Failure> {
    // A sweep has its own fleet.
    let is_sweep = !folder.join(SERVERS_FILE).exists() && !submitted::is(folder);
    let inner = Some(folder.join("fleet")).filter(|inner| is_sweep && inner.join(SERVERS_FILE).exists());
    let run = inner.as_deref().unwrap_or(folder);
    certs::take(run, shows)?;
    if submitted::is(run) {
        return submitted_servers(run).map(Found::Servers);
    }
    let path = run.join(SERVERS_FILE);
    let list = match fs::read_to_string(&path) {
        // Its launcher ended before the servers stood, or it had none: a simulation.
        Err(e) if e.kind() == ErrorKind::NotFound && has_ended_without_servers(run) => {
            return Ok(Found::Ended(run.to_path_buf()));
        }
        Err(e) if e.kind() == ErrorKind::NotFound && held(run).is_some() => {
            let why = format!("{}: that run has no servers yet", run.display());
            return Err(Failure::new(exit::UNAVAILABLE, why)
                .help("it is starting, or it is a simulation: ask again in a moment"));
        }
        list => list.map_err(|e| no_run(folder, &path, &e))?,
    };
    let servers: Vec<String> = list.trim().split(',').map(str::to_string).collect();
    Ok(match has_ended(run, &servers) {
        true => Found::Ended(run.to_path_buf()),
        false => Found::Servers(servers),
    })
}

/// A folder without the list of servers: those of a comparison and of a demo hold several runs.
fn no_run(folder: &Path, list: &Path, e: &io::Error) -> Failure {
    let runs: Vec<_> = newest_first(folder).iter().map(|run| run.display().to_string()).collect();
    if runs.is_empty() || e.kind() != ErrorKind::NotFound {
        let why = format!("{}: {e}", list.display());
        return Failure::new(exit::CONFIG, why).help("that folder holds no run");
    }
    let why = format!("{}: that folder is no run, but holds some", folder.display());
    Failure::new(exit::CONFIG, why).help(format!("name one: {}", runs.join(", ")))
}

/// The default of a command that asks.
fn newest(runs: &Path) -> Result<FleetName, Failure> {
    let Some(run) = newest_first(runs).into_iter().next() else {
        let why = format!("which fleet? There is no run in {}/", runs.display());
        return Err(Failure::new(exit::USAGE, why).help(FORMS));
    };
    eprintln!("{}, the newest run in {}/", run.display(), runs.display());
    Ok(FleetName::Run(run))
}

/// The default of a command that changes something.
fn only_running(runs: &Path) -> Result<FleetName, Failure> {
    let running: Vec<PathBuf> = newest_first(runs).into_iter().filter(|run| is_running(run)).collect();
    match &running[..] {
        [run] => {
            eprintln!("{}, the only run in {}/ that is going on", run.display(), runs.display());
            Ok(FleetName::Run(run.clone()))
        }
        [] => {
            let why = format!("which fleet? No run in {}/ is going on", runs.display());
            Err(Failure::new(exit::USAGE, why).help(FORMS))
        }
        [first, ..] => {
            let all: Vec<String> = running.iter().map(|run| run.display().to_string()).collect();
            let why = format!("which fleet? {} are going on", all.join(", "));
            Err(Failure::new(exit::USAGE, why)
                .help(format!("give one of them, as --fleet {}", first.display())))
        }
    }
}

/// Whether a run has not ended, as far as this machine knows.
fn is_running(run: &Path) -> bool {
    if submitted::is(run) {
        return Folder::of(run).and_then(|folder| folder.ended()).is_ok_and(|end| end.is_none());
    }
    let has_servers =
        [run.join(SERVERS_FILE), run.join("fleet").join(SERVERS_FILE)].iter().any(|f| f.exists());
    has_servers && held(run).is_some() && !has_end(run)
}

/// The runs in this folder, directly or as parts of a comparison; the one that was written last is the first.
fn newest_first(runs: &Path) -> Vec<PathBuf> {
    let folders = |of: &Path| {
        let all = fs::read_dir(of).into_iter().flatten().flatten().map(|e| e.path());
        all.filter(|path| path.is_dir()).collect::<Vec<_>>()
    };
    let of = |run: PathBuf| match written(&run) {
        Some(at) => vec![(at, run)],
        None => folders(&run).into_iter().filter_map(|part| Some((written(&part)?, part))).collect(),
    };
    let mut all: Vec<(SystemTime, PathBuf)> = folders(runs).into_iter().flat_map(of).collect();
    all.sort_by(|a, b| b.cmp(a));
    all.into_iter().map(|(_, run)| run).collect()
}

/// When a run's record was last written; `None`: it is no folder of a run.
fn written(run: &Path) -> Option<SystemTime> {
    let (servers, of_sweep) = (run.join(SERVERS_FILE), run.join("fleet").join(SERVERS_FILE));
    let files = [run.join(METRICS_FILE), servers, of_sweep, submitted::file(run)];
    files.iter().find_map(|file| fs::metadata(file).ok()?.modified().ok())
}

/// Whether a run is over, and its servers with it. Those of a launcher end with it; those of a standing fleet
/// count only if the run has recorded its end.
fn has_ended(run: &Path, servers: &[String]) -> bool {
    let refuses = |server: &String| {
        let address = server.parse::<SocketAddr>().ok();
        let tried = address.map(|address| TcpStream::connect_timeout(&address, CONNECT_TIMEOUT));
        tried.is_some_and(|tried| tried.is_err_and(|e| e.kind() == ErrorKind::ConnectionRefused))
    };
    let (are_its_own, has_end) = (server_log(run, 0).exists(), has_end(run));
    // Another fleet may listen on the ports of a run that ended long ago.
    // The lock of a comparison is not that of its parts, of which some may be over.
    !is_held(run) && are_its_own && has_end
        || held(run).is_none() && (are_its_own || has_end) && servers.iter().all(refuses)
}

/// Likewise for a run without a list of servers.
fn has_ended_without_servers(run: &Path) -> bool {
    let had_launcher = run.join(LAUNCHER_LOCK).exists() && run.join(METRICS_FILE).exists();
    !is_held(run) && has_end(run) || held(run).is_none() && had_launcher
}

fn ended(run: &Path) -> Failure {
    let why = format!("{}: that run has ended, and its servers with it", run.display());
    Failure::new(exit::UNAVAILABLE, why).help(
        "`paraft status --fleet FOLDER` shows what it left; --resume continues it in that folder, and a sweep continues \
         without a flag",
    )
}

/// An engine may have moved them since.
fn submitted_servers(run: &Path) -> Result<Vec<String>, Failure> {
    let servers: Vec<String> = submitted::of(run)?.servers(run)?.into_values().collect();
    if servers.is_empty() {
        let what = format!("{}: no server has said yet where it is", run.display());
        return Err(Failure::new(exit::UNAVAILABLE, what).help(
            "`paraft fleet status` says what the engine does with them; pods and hosts of --on ssh are reached by \
             --fleet host:port, with --certs",
        ));
    }
    Ok(servers)
}

#[cfg(test)]
#[path = "targets_tests.rs"]
mod tests;
