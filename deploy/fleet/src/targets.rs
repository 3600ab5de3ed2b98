//! The servers that a command addresses: by a run's folder, a job file or addresses.

use crate::{
    certs,
    ended::{EndedRun, has_end},
    failure::Failure,
    files::SERVERS_FILE,
    fleet::server_log,
    run_dir::held,
    submitted,
};
use paraft_common::check_address;
use paraft_record::{
    METRICS_FILE,
    begin::{LAUNCHER_LOCK, is_held},
};
use paraft_worker::{Job, exit};
use std::{
    fs,
    io::ErrorKind,
    net::{SocketAddr, TcpStream},
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

/// A local process refuses or accepts a connection at once.
const CONNECT_TIMEOUT: Duration = Duration::from_millis(200);

/// What answers a command's question.
pub enum Target {
    /// These servers.
    Servers(Vec<String>),
    /// The folder of a run that has ended, and its servers with it.
    Ended(Box<EndedRun>),
}

/// As [`addresses`], for a command that the folder of an ended run can answer too.
///
/// # Errors
///
/// As [`addresses`]'s; or the record of an ended run cannot be read.
pub fn target(of: Option<&Path>, servers: &[String]) -> Result<Target, Failure> {
    match find(of, servers)? {
        Found::Servers(servers) => Ok(Target::Servers(servers)),
        // A sweep's fleet has no record of its own.
        Found::Ended(run) if run.join(METRICS_FILE).is_file() => {
            Ok(Target::Ended(Box::new(EndedRun::read(&run)?)))
        }
        Found::Ended(run) => Err(ended(&run)),
    }
}

/// The servers of a run's folder or of a job file, or as given: in `servers`, or in `of` as host:port.
pub fn addresses(of: Option<&Path>, servers: &[String]) -> Result<Vec<String>, Failure> {
    match find(of, servers)? {
        Found::Servers(servers) => Ok(servers),
        Found::Ended(run) => Err(ended(&run)),
    }
}

/// Servers, or the folder of a run that has ended.
enum Found {
    Servers(Vec<String>),
    Ended(PathBuf),
}

fn find(of: Option<&Path>, servers: &[String]) -> Result<Found, Failure> {
    // A sweep has its own fleet.
    let without = of.filter(|of| !of.join(SERVERS_FILE).exists() && !submitted::is(of));
    let inner = without.map(|of| of.join("fleet")).filter(|inner| inner.join(SERVERS_FILE).exists());
    let of = of.map(|of| inner.as_deref().unwrap_or(of));
    if let Some(folder) = of.filter(|of| of.is_dir()) {
        certs::take(folder)?;
    }
    if !servers.is_empty() {
        for server in servers {
            check_address(server).map_err(|why| Failure::new(exit::USAGE, format!("--servers: {why}")))?;
        }
        return Ok(Found::Servers(servers.to_vec()));
    }
    let Some(of) = of else {
        let how = "give --servers HOST:PORT, or a run's folder or a job file: by --of, where the command takes a job's name";
        return Err(Failure::new(exit::USAGE, "which servers?").help(how));
    };
    if of.is_dir() {
        if submitted::is(of) {
            return submitted_servers(of).map(Found::Servers);
        }
        let path = of.join(SERVERS_FILE);
        let list = match fs::read_to_string(&path) {
            // Its launcher ended before the servers stood, or it had none: a simulation.
            Err(e) if e.kind() == ErrorKind::NotFound && has_ended_without_servers(of) => {
                return Ok(Found::Ended(of.to_path_buf()));
            }
            Err(e) if e.kind() == ErrorKind::NotFound && held(of).is_some() => {
                let why = format!("{}: that run has no servers yet", of.display());
                return Err(Failure::new(exit::UNAVAILABLE, why)
                    .help("it is starting, or it is a simulation: ask again in a moment"));
            }
            list => list.map_err(|e| {
                Failure::new(exit::CONFIG, format!("{}: {e}", path.display()))
                    .help("that folder holds no run")
            })?,
        };
        let servers: Vec<String> = list.trim().split(',').map(str::to_string).collect();
        return Ok(match has_ended(of, &servers) {
            true => Found::Ended(of.to_path_buf()),
            false => Found::Servers(servers),
        });
    }
    if let Some(list) = of.to_str().filter(|l| !of.exists() && are_addresses(l)) {
        return Ok(Found::Servers(list.split(',').map(str::to_string).collect()));
    }
    if !of.exists() {
        let why = format!("{}: there is no such file or folder, and it is no address", of.display());
        let wrong = of.to_string_lossy().split(',').find_map(|a| check_address(a).err());
        let hint =
            wrong.filter(|_| !of.to_string_lossy().contains('/')).map_or(String::new(), |w| format!("; {w}"));
        return Err(Failure::new(exit::CONFIG, why)
            .help(format!("give a run's folder, a job file, or servers as host:port{hint}")));
    }
    let job = Job::load(of, &[])?;
    if job.cluster.addresses.is_empty() {
        return Err(Failure::new(exit::CONFIG, format!("{} names no cluster.addresses", of.display()))
            .help("the launcher picks ports; give the run's folder instead"));
    }
    Ok(Found::Servers(job.cluster.addresses))
}

/// What a command addresses that is told nothing: the newest run in `runs/`, if there is one.
pub fn or_newest(of: Option<&Path>, servers: &[String]) -> Option<PathBuf> {
    if of.is_some() || !servers.is_empty() {
        return of.map(Path::to_path_buf);
    }
    let newest = newest_run(Path::new("runs"))?;
    eprintln!("{}, the newest run in runs/", newest.display());
    Some(newest)
}

/// The run that was written last, directly in this folder or as a part of a comparison in it.
fn newest_run(runs: &Path) -> Option<PathBuf> {
    let folders = |of: &Path| {
        let all = fs::read_dir(of).into_iter().flatten().flatten().map(|e| e.path());
        all.filter(|path| path.is_dir()).collect::<Vec<_>>()
    };
    let of = |run: PathBuf| match written(&run) {
        Some(at) => vec![(at, run)],
        None => folders(&run).into_iter().filter_map(|part| Some((written(&part)?, part))).collect(),
    };
    folders(runs).into_iter().flat_map(of).max().map(|(_, run)| run)
}

/// When a run's record was last written; `None`: it is no folder of a run.
fn written(run: &Path) -> Option<SystemTime> {
    let files = [run.join(METRICS_FILE), run.join(SERVERS_FILE), run.join("fleet").join(SERVERS_FILE)];
    files.iter().find_map(|file| fs::metadata(file).ok()?.modified().ok())
}

/// Whether a folder holds a run, a sweep or a submission.
pub fn is_run(folder: &Path) -> bool {
    written(folder).is_some() || submitted::is(folder)
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
        "what it left is in the folder, and `paraft status FOLDER` shows it; it goes on there with --resume, and a sweep by \
         itself",
    )
}

/// An engine may have moved them since.
fn submitted_servers(run: &Path) -> Result<Vec<String>, Failure> {
    let servers: Vec<String> = submitted::of(run)?.servers(run)?.into_values().collect();
    if servers.is_empty() {
        let what = format!("{}: no server has said yet where it is", run.display());
        return Err(Failure::new(exit::UNAVAILABLE, what).help(
            "`paraft fleet status` says what the engine does with them; pods and hosts of \
             --on ssh are reached by --servers host:port beside this folder",
        ));
    }
    Ok(servers)
}

/// Whether a word addresses servers, as [`addresses`] parses it.
pub fn names_a_fleet(word: &Path) -> bool {
    word.exists() || word.to_str().is_some_and(are_addresses)
}

/// host:port, or several separated by commas.
fn are_addresses(list: &str) -> bool {
    list.split(',').all(|a| !a.contains('/') && check_address(a).is_ok())
}
