//! `paraft server`.

use crate::{disk_faults as disk, drain, memory, page};
use folder::{closed_to_others, meant, without_colons};
use hooks::{CONTINUES, watched};
use paraft_common::ServerId;
use paraft_dashboard::LocalControl;
use paraft_fleet::{failure::Failure, faults::process, targets};
use paraft_host::{lifeline, logs, raise_descriptor_limit, socket_path, sweep_sockets};
use paraft_server::{
    Server, ServerError, ServerOptions, Shape, Timeouts,
    server::{Ending, IDENTITY, Place},
    settings,
};
use paraft_store::RealDisk;
use paraft_tls::{Access, Need, access::As};
use paraft_worker::{Job, exit, job::TransportConfig};
use port::{bind, taken};
use std::{
    fs,
    io::BufRead,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicI32, Ordering::Relaxed},
    },
    time::Duration,
};
use tokio::net::TcpListener;

mod args;
mod folder;
mod hooks;
mod port;

pub use args::ServerArgs;
pub use hooks::{JoinHook, JoinPlan, RunningServer, ServerHooks, WatchHook};

/// A silent server's replicas are replaced after this time. It is longer than a process restart, so
/// copies are made only if the server stays away.
const REPLACE_AFTER: Duration = Duration::from_secs(10);

/// The replicas of a shard are compared at this interval: it finds a difference soon, at a cost of at
/// most a twentieth of the time.
const CHECK_INTERVAL: Duration = Duration::from_secs(5);

pub fn run(args: &ServerArgs) -> Result<i32, Failure> {
    if !args.join && args.fleet.fleet.is_some() {
        return Err(Failure::new(
            exit::USAGE,
            "--fleet names the fleet that a new server joins: it needs --join",
        )
        .help("--servers lists the servers of the fleet that this one belongs to"));
    }
    let mut args = args.clone();
    // Not clap's: a server that joins takes the variable for its fleet.
    if !args.join && args.servers.is_empty() {
        let all = targets::variable();
        args.servers.extend(all.iter().flat_map(|all| all.split(',')).map(|a| a.trim().to_string()));
    }
    serve(&args, None)
}

/// Runs a server until a signal, its launcher or its `ServerHooks` ends it.
pub fn serve(args: &ServerArgs, conduct: Option<&ServerHooks>) -> Result<i32, Failure> {
    logs::start(args.log_file.as_deref())
        .map_err(|e| Failure::new(exit::IO, format!("the log file: {e}")))?;
    raise_descriptor_limit();
    paraft_host::allocator::spare_huge_pages();
    memory::enough_to_start()?;
    // A run's folder has certificates too.
    let fleet = match args.join {
        true => args.fleet.to_change()?.servers_for(As::Peer)?,
        false => Vec::new(),
    };
    certified()?;
    if let Some(pid) = args.until {
        end_with(pid)?;
    }
    let job = args.job.as_deref().map(|p| Job::load(p, &args.set)).transpose()?;
    let cluster = job.as_ref().map(|j| j.cluster.clone()).unwrap_or_default();
    let listed = if args.servers.is_empty() { cluster.addresses.clone() } else { args.servers.clone() };
    if listed.is_empty() && !args.supervised && !args.join && conduct.is_none() {
        return Err(Failure::new(exit::USAGE, "no servers are named")
            .help("give --servers host:port,host:port,host:port, or a job file with cluster.addresses"));
    }
    let id = args.id.unwrap_or_default();
    let own = listed.get(id as usize).cloned();
    let listen = args.listen.clone().or(own.clone()).ok_or_else(|| {
        Failure::new(exit::USAGE, format!("--id {id} names no server: {} are listed", listed.len()))
            .help("ids are the places in the list, from 0")
    })?;
    let stages = job.as_ref().map_or(1, |j| j.parallel.pipeline);
    let shape = |servers: usize| Shape {
        shards: args.shards.or(cluster.shards).unwrap_or((servers as u32).min(8).max(stages)),
        replicas: args.replicas.unwrap_or(cluster.replicas),
        durability: args.durability.unwrap_or(cluster.durability),
    };
    let folder = |address: &str| {
        let usual = || PathBuf::from("paraft-data").join(without_colons(address));
        args.data.clone().unwrap_or_else(usual)
    };
    if let Some(own) = own.as_deref().filter(|_| !args.join && !args.supervised && conduct.is_none()) {
        // Check before binding the port: in a list of another order, this port belongs to another
        // server.
        settings::compare(&folder(own), ServerId(id), &listed, shape(listed.len())).map_err(failure)?;
    }
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(threads())
        .thread_name("paraft-server")
        .enable_all()
        .build()
        .map_err(|e| Failure::new(exit::IO, format!("no runtime: {e}")))?;
    runtime.block_on(async {
        let own_folder = args.data.clone().or_else(|| own.as_deref().map(folder));
        let returns = conduct.is_none() && own_folder.is_some_and(|data| data.join(IDENTITY).exists());
        let port = bind(&listen, returns).await.map_err(|e| taken(args, &listen, &e))?;
        let at = port.address().map_err(|e| Failure::new(exit::IO, e))?;
        let bound = at.to_string();
        // `meet` waits and blocks with its own runtime.
        let met = conduct.map(|c| tokio::task::block_in_place(|| (c.meet)(at))).transpose()?;
        let servers: Vec<String> = if args.supervised {
            println!("{bound}");
            let mut line = String::new();
            std::io::stdin().lock().read_line(&mut line).map_err(|e| Failure::new(exit::IO, e))?;
            lifeline::end_with_launcher();
            line.trim().split(',').map(str::to_string).collect()
        } else {
            listed
        };
        let JoinPlan { place, address, servers } = match met {
            Some(met) => met,
            None => plan(args, id, bound, servers, fleet)?,
        };
        let shape = shape(servers.len());
        let election = Duration::from_millis(args.election_ms.unwrap_or(cluster.election_ms));
        let joins = matches!(place, Place::Joins(_));
        let data = folder(&address);
        if let Some(own) = meant(&data) {
            let what = format!("no server has been in {}, but one in {}", data.display(), own.display());
            return Err(Failure::new(exit::CONFIG, what).help(format!(
                "by default a server's folder is named by its address with `-` for `:`; start it with --data {}, or \
                 take a folder without colons for a new server",
                own.display()
            )));
        }
        closed_to_others(&data)?;
        let page = match args.dashboard {
            None => None,
            Some(at) => Some(page::bind(at, &address, &data).await.map_err(|e| match e {
                Ok(e) => taken(args, &at.to_string(), &e),
                Err(failure) => failure,
            })?),
        };
        let here = local_control(args, &data);
        let options = ServerOptions {
            place,
            page: page.as_ref().map(|p| p.address.clone()).unwrap_or_default(),
            shape,
            election,
            // Ten election timeouts: a server that is only slow must not lose its replicas.
            timeouts: Timeouts::new(election, REPLACE_AFTER.max(10 * election)),
            check_every: Some(CHECK_INTERVAL),
            data,
            disk: match &args.faults {
                None => Arc::new(RealDisk),
                Some(file) => disk::follow(file.clone(), args.place.unwrap_or(id as u32))
                    .map_err(|e| Failure::new(exit::IO, format!("no thread for --faults: {e}")))?,
            },
            socket: (cluster.transport == TransportConfig::Auto).then(|| socket_path(&address)).flatten(),
            job_memory: args.job_memory.map(|b| b.0),
            access: Access::ours(),
            address: address.clone(),
            servers,
        };
        sweep_sockets();
        let metrics = match args.metrics {
            None => None,
            Some(at) => Some(TcpListener::bind(at).await.map_err(|e| taken(args, &at.to_string(), &e))?),
        };
        let server = start(options).await.map_err(failure)?;
        let listener = port.listen().map_err(|e| taken(args, &listen, &e))?;
        let id = server.id();
        tracing::info!(%id, %address, %shape, "serving");
        if let Some(at) = metrics.as_ref().and_then(|m| m.local_addr().ok()) {
            tracing::info!(%at, "serving /metrics");
        }
        if !args.supervised {
            match joins {
                false => eprintln!("{id} serves on {address}: {shape}"),
                true => eprintln!("{id} serves on {address}; it has joined the fleet"),
            }
            if let Some(m) = metrics.as_ref().and_then(|m| m.local_addr().ok()) {
                let scheme = if matches!(Access::ours(), Access::Certificates(_)) { "https" } else { "http" };
                eprintln!("{id} metrics on {scheme}://{m}/metrics");
            }
            if let Some(page) = &page {
                eprintln!("{id} page on {}", page.link());
            }
        }
        let page = page.map(|page| page.serve(address.clone(), here));
        let signal = Arc::new(AtomicI32::new(0));
        let noted = signal.clone();
        // If the launcher ends the whole fleet, no server remains to take over.
        let ending = if args.supervised { Ending::AtOnce } else { Ending::HandOver };
        let over = Arc::new(AtomicI32::new(CONTINUES));
        let watched = watched(conduct, &server, &address, over.clone());
        let grace = conduct.map(|c| c.grace);
        let is_supervised = args.supervised;
        let stop = async move {
            tokio::select! {
                number = lifeline::terminated() => noted.store(number, Relaxed),
                () = watched => return ending,
            }
            // The launcher has completed the record. Another server hands its shards over first.
            if let Some(page) = page.filter(|_| is_supervised) {
                page.end().await;
            }
            if let Some(grace) = grace {
                let empty = tokio::task::spawn_blocking(move || drain::empty(&[address], id, grace));
                tokio::select! {
                    how = empty => eprintln!("{}", how.unwrap_or_else(|e| e.to_string())),
                    // The second signal ends the process at once.
                    _ = lifeline::terminated() => {}
                }
            }
            ending
        };
        let stages = server.stages();
        if let Some(folder) = &args.trace {
            let begun = stages.trace(folder, &format!("server-{}", id.0), args.trace_steps);
            begun.map_err(|e| Failure::new(exit::IO, format!("--trace {}: {e}", folder.display())))?;
        }
        let ran = server.run(listener, metrics, stop).await;
        stages.flush();
        ran.map_err(failure)?;
        Ok(match (over.load(Relaxed), signal.load(Relaxed)) {
            (CONTINUES, 0) => exit::OK,
            (CONTINUES, number) => 128 + number,
            (code, _) => code,
        })
    })
}

/// Refuses to start without a certificate of a server, unless the user asks for plain text.
pub fn certified() -> Result<(), Failure> {
    match Access::ours() {
        Access::Certificates(ours) => ours.must_be_for(Need::Peer).map_err(|why| {
            Failure::new(exit::CONFIG, format!("--certs: {why}"))
                .help("servers and relays take the folder `peer` of what `paraft certs new` has made")
        })?,
        Access::Insecure => tracing::warn!(
            "--insecure: this process speaks plain text, and obeys every client that reaches its port"
        ),
        Access::Closed => {
            return Err(Failure::new(exit::USAGE, "servers and relays need a certificate (--certs)").help(
                "`paraft certs new certs` makes an authority with one for servers: --certs certs. Or, on a network \
                 that no one else can reach: --insecure",
            ));
        }
    }
    Ok(())
}

/// How a server joins its fleet, by its flags; it listens on `bound`.
fn plan(
    args: &ServerArgs,
    id: u64,
    bound: String,
    servers: Vec<String>,
    fleet: Vec<String>,
) -> Result<JoinPlan, Failure> {
    if !args.join {
        let address = servers.get(id as usize).cloned().unwrap_or(bound);
        return Ok(JoinPlan { place: Place::Listed(ServerId(id)), address, servers });
    }
    let address = args.advertise.clone().unwrap_or(bound);
    if address.starts_with("0.0.0.0") {
        return Err(Failure::new(exit::USAGE, "the others cannot reach a server at 0.0.0.0")
            .help("add --advertise host:port"));
    }
    Ok(JoinPlan { place: Place::Joins(fleet), address, servers })
}

/// What the page may do with this host's files.
fn local_control(args: &ServerArgs, data: &Path) -> LocalControl {
    // A launcher puts its servers' data into the run's folder.
    let launched = args.supervised || args.until.is_some();
    // The administrator's certificate, if it lies beside the server's own: in the folder of a
    // launched fleet.
    let acts = match Access::ours() {
        Access::Certificates(ours) => ours.folder().map(Path::to_path_buf),
        _ => None,
    };
    let acts = acts.filter(|certs| certs.join(As::Admin.name()).is_dir());
    LocalControl {
        acts: acts.and_then(|certs| Access::of(Some(&certs), false, As::Admin).ok()),
        faults: args.faults.clone(),
        run: data.parent().filter(|_| launched).map(Path::to_path_buf),
        engine: None,
        runs: args.runs.as_ref().map(|runs| fs::canonicalize(runs).unwrap_or_else(|_| runs.clone())),
    }
}

/// Network threads: at least two, so that one blocked thread does not block all connections.
fn threads() -> usize {
    std::thread::available_parallelism().map_or(2, |n| n.get().max(2))
}

/// Ends this process when the process `pid` ends: no pipe connects the two.
fn end_with(pid: u32) -> Result<(), Failure> {
    let watch = move || {
        while process::lives(pid) {
            std::thread::sleep(Duration::from_millis(100));
        }
        std::process::exit(lifeline::ORPHANED);
    };
    let started = std::thread::Builder::new().name("lifeline".into()).spawn(watch);
    started.map(drop).map_err(|e| Failure::new(exit::IO, format!("no lifeline thread: {e}")))
}

fn failure(e: ServerError) -> Failure {
    match e {
        ServerError::Options(_) | ServerError::Data(_) | ServerError::Settings(_) => {
            Failure::new(exit::CONFIG, e)
        }
        ServerError::Storage(_) => Failure::new(exit::IO, e),
        ServerError::Join(_) => Failure::new(exit::UNAVAILABLE, e).help(
            "name the fleet with --fleet; `paraft status --fleet FLEET` shows whether its servers answer",
        ),
        _ => Failure::new(exit::FAILED, e),
    }
}

/// Retries with back-off while the disk of an existing server fails, or while its killed predecessor
/// still holds the log. A new server fails at once.
async fn start(options: ServerOptions) -> Result<Server, ServerError> {
    let known = options.data.join(IDENTITY);
    let mut pause = Duration::from_millis(100);
    loop {
        match Server::start(options.clone()).await {
            Err(ServerError::Storage(why)) if known.exists() => {
                tracing::warn!(%why, again_in = ?pause, "the server cannot start on its storage, retrying");
                tokio::time::sleep(pause).await;
                pause = (pause * 2).min(Duration::from_secs(5));
            }
            other => return other,
        }
    }
}
