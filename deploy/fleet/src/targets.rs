//! The servers that a command addresses: by a run's folder, a job file or addresses.

use crate::{certs, failure::Failure, files::SERVERS_FILE, fleet::server_log, run_dir::held, submitted};
use paraft_common::check_address;
use paraft_worker::{Job, exit};
use std::{
    io::ErrorKind,
    net::{SocketAddr, TcpStream},
    path::Path,
    time::Duration,
};

/// A local process refuses or accepts a connection at once.
const CONNECT_TIMEOUT: Duration = Duration::from_millis(200);

/// The servers of a run's folder or of a job file, or as given: in `servers`, or in `of` as host:port.
pub fn addresses(of: Option<&Path>, servers: &[String]) -> Result<Vec<String>, Failure> {
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
        return Ok(servers.to_vec());
    }
    let Some(of) = of else {
        let how = "give --servers HOST:PORT, or a run's folder or a job file: by --of, where the command takes a job's name";
        return Err(Failure::new(exit::USAGE, "which servers?").help(how));
    };
    if of.is_dir() {
        if submitted::is(of) {
            return submitted_servers(of);
        }
        let path = of.join(SERVERS_FILE);
        let list = std::fs::read_to_string(&path).map_err(|e| {
            Failure::new(exit::CONFIG, format!("{}: {e}", path.display())).help("that folder holds no run")
        })?;
        let servers: Vec<String> = list.trim().split(',').map(str::to_string).collect();
        return if has_ended(of, &servers) { Err(ended(of)) } else { Ok(servers) };
    }
    if let Some(list) = of.to_str().filter(|l| !of.exists() && are_addresses(l)) {
        return Ok(list.split(',').map(str::to_string).collect());
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
    Ok(job.cluster.addresses)
}

/// Whether a local run is over: no launcher holds it, and its servers, which end with it, are gone.
fn has_ended(run: &Path, servers: &[String]) -> bool {
    let refuses = |server: &String| {
        let address = server.parse::<SocketAddr>().ok();
        let tried = address.map(|address| TcpStream::connect_timeout(&address, CONNECT_TIMEOUT));
        tried.is_some_and(|tried| tried.is_err_and(|e| e.kind() == ErrorKind::ConnectionRefused))
    };
    server_log(run, 0).exists() && held(run).is_none() && servers.iter().all(refuses)
}

fn ended(run: &Path) -> Failure {
    let why = format!("{}: that run has ended, and its servers with it", run.display());
    Failure::new(exit::UNAVAILABLE, why).help(
        "what it left is in the folder: its record, its report, its checkpoints (`paraft checkpoint inspect FOLDER`); it goes on there \
         with --resume, and a sweep by itself",
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
