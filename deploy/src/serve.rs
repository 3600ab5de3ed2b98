//! `paraft server`.

use crate::{disk_faults as disk, drain, memory, page};
use clap::Args;
use paraft_common::{Durability, ServerId, need::Bytes};
use paraft_dashboard::LocalControl;
use paraft_fleet::{failure::Failure, faults::process};
use paraft_host::{lifeline, logs, raise_descriptor_limit, socket_path, sweep_sockets};
use paraft_server::{
    Server, ServerError, ServerOptions, Shape, Timeouts,
    server::{Ending, IDENTITY, Place},
    settings,
};
use paraft_store::RealDisk;
use paraft_tls::{Access, Need, access::As};
use paraft_trace::{DEFAULT_STEPS, MAX_STEPS};
use paraft_worker::{
    Job, exit,
    job::{TransportConfig, line_of},
};
use std::{
    fs,
    io::BufRead,
    net::SocketAddr,
    os::unix::fs::{DirBuilderExt, PermissionsExt},
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicI32, Ordering::Relaxed},
    },
    time::Duration,
};
use tokio::net::TcpListener;

#[derive(Args, Clone, Default)]
pub struct ServerArgs {
    /// The job file; gives addresses, shards and replicas where the flags do not.
    pub job: Option<PathBuf>,
    /// This server's place in the list of servers, from 0.
    #[arg(long, required_unless_present = "join")]
    pub id: Option<u64>,
    /// Join a running fleet as a new server: addresses of servers of it, comma-separated. Needs --listen.
    #[arg(long, value_delimiter = ',', requires = "listen", conflicts_with_all = ["id", "servers", "job"])]
    pub join: Vec<String>,
    /// Where to listen. Default: its own address of the list. Port 0: any.
    #[arg(long)]
    pub listen: Option<String>,
    /// host:port by which the others reach this server, where that is not --listen.
    #[arg(long)]
    pub advertise: Option<String>,
    /// Folder for what must survive this process: who it is, the fleet's agreements and, with `quorum-disk`, the
    /// log. Default: paraft-data/HOST-PORT.
    #[arg(long)]
    pub data: Option<PathBuf>,
    /// All servers as host:port, comma-separated, in the order of their ids. Default: cluster.addresses.
    #[arg(long, env = "PARAFT_SERVERS", value_delimiter = ',')]
    pub servers: Vec<String>,
    /// Raft groups that share the model, the same number on each server.
    #[arg(long)]
    pub shards: Option<u32>,
    /// Replicas of each shard, an odd number, the same on each server.
    #[arg(long)]
    pub replicas: Option<u32>,
    /// What an acknowledged push survives, the same on each server: quorum-disk, quorum-memory or leader.
    #[arg(long)]
    pub durability: Option<Durability>,
    /// A follower that hears nothing for three to four times so many milliseconds stands for election; the same on
    /// each server, 50 to 60000.
    #[arg(long, value_parser = clap::value_parser!(u64).range(50..=60_000))]
    pub election_ms: Option<u64>,
    /// The most memory that one job may need on this server, for example 24GiB. Default: what is free.
    #[arg(long, value_name = "SIZE")]
    pub job_memory: Option<Bytes>,
    /// Overrides a key of the job file; may be given often.
    #[arg(long, value_name = "KEY=VALUE")]
    pub set: Vec<String>,
    /// Serve Prometheus' /metrics here, for example 127.0.0.1:9100 (port 0: any).
    #[arg(long)]
    pub metrics: Option<SocketAddr>,
    /// Serve the fleet's live page here, for example 127.0.0.1:8080 (port 0: any). Who has the token in its address may act there; it is
    /// in PARAFT_DASHBOARD_TOKEN, the same on all servers, or else in the data folder.
    #[arg(long, value_name = "ADDR")]
    pub dashboard: Option<SocketAddr>,
    /// The runs in this folder can be compared on the page.
    #[arg(long, value_name = "FOLDER", requires = "dashboard")]
    pub runs: Option<PathBuf>,
    /// Record the stages of gradients on this server in this folder, as server-ID.jsonl; `paraft trace` merges what the
    /// processes of a job have recorded.
    #[arg(long, value_name = "FOLDER")]
    pub trace: Option<PathBuf>,
    /// With --trace: so many steps, from the first.
    #[arg(long, value_name = "N", default_value_t = DEFAULT_STEPS, requires = "trace",
        value_parser = clap::value_parser!(u64).range(1..=MAX_STEPS))]
    pub trace_steps: u64,
    /// Log as JSON lines into this file. Default: to standard error.
    #[arg(long)]
    pub log_file: Option<PathBuf>,
    /// Have fault points: follow this file, which `paraft chaos` or a person writes. Never in
    /// production.
    #[arg(long, value_name = "FILE")]
    pub faults: Option<PathBuf>,
    /// With --join and --faults: by which number the file names this server.
    #[arg(long, hide = true)]
    pub place: Option<u32>,
    /// The process to end with, where that is not the one that holds standard input; set by `paraft chaos`.
    #[arg(long, value_name = "PID", hide = true)]
    pub until: Option<u32>,
    /// Say the address on standard output, read the list of servers from standard input, and end when that
    /// ends; set by the launcher.
    #[arg(long, hide = true)]
    pub supervised: bool,
}

/// How an engine's server joins its fleet, when it ends by itself, and how long it may hand over its
/// leaders. `crate::role` builds one.
pub struct ServerHooks {
    /// Maps the address that the server listens on to its place in the fleet and its public address.
    pub meet: JoinHook,
    /// Polled while the server runs: returns the exit code if the server must end now.
    pub watch: WatchHook,
    /// After a signal, the time to hand over leaders and replicas.
    pub grace: Duration,
}

/// How a server finds the other servers.
pub type JoinHook = Box<dyn Fn(SocketAddr) -> Result<JoinPlan, Failure>>;

/// Polled while a server runs.
pub type WatchHook = Arc<dyn Fn(&RunningServer) -> Option<i32> + Send + Sync>;

/// The place of a server in its fleet.
pub struct JoinPlan {
    /// How it joins its fleet.
    pub place: Place,
    /// The address for other servers and for workers.
    pub address: String,
    /// The founding servers, if it is one of them.
    pub servers: Vec<String>,
}

/// A running server.
pub struct RunningServer {
    /// Its id.
    pub id: ServerId,
    /// Its fleet; 0 before it has joined one.
    pub fleet: u64,
    /// The address for other servers and for workers.
    pub address: String,
}

/// The poll interval of [`ServerHooks::watch`].
const WATCH_INTERVAL: Duration = Duration::from_millis(200);

/// A silent server's replicas are replaced after this time. It is longer than a process restart, so
/// copies are made only if the server stays away.
const REPLACE_AFTER: Duration = Duration::from_secs(10);

/// The replicas of a shard are compared at this interval: it finds a difference soon, at a cost of at
/// most a twentieth of the time.
const CHECK_INTERVAL: Duration = Duration::from_secs(5);

pub fn run(args: &ServerArgs) -> Result<i32, Failure> {
    serve(args, None)
}

/// Logs and snapshots contain the weights, so only their owner (and the group of a volume) may read
/// them.
fn closed_to_others(data: &Path) -> Result<(), Failure> {
    let failed = |e: std::io::Error| Failure::new(exit::IO, format!("{}: {e}", data.display()));
    if !data.exists() {
        return fs::DirBuilder::new().recursive(true).mode(0o700).create(data).map_err(failed);
    }
    let mode = fs::metadata(data).map_err(failed)?.permissions().mode();
    if mode & 0o007 != 0
        && let Err(error) = fs::set_permissions(data, fs::Permissions::from_mode(mode & 0o770))
    {
        tracing::warn!(folder = %data.display(), %error, "other users may read this server's files");
    }
    Ok(())
}

/// Runs a server until a signal, its launcher or its `ServerHooks` ends it.
pub fn serve(args: &ServerArgs, conduct: Option<&ServerHooks>) -> Result<i32, Failure> {
    logs::start(args.log_file.as_deref())
        .map_err(|e| Failure::new(exit::IO, format!("the log file: {e}")))?;
    raise_descriptor_limit();
    memory::enough_to_start()?;
    match Access::ours() {
        Access::Certificates(ours) => ours.must_be_for(Need::Peer).map_err(|why| {
            Failure::new(exit::CONFIG, format!("--certs: {why}"))
                .help("a server takes the folder `peer` of what `paraft certs new` has made")
        })?,
        Access::Insecure => tracing::warn!(
            "--insecure: this server speaks plain text, and does whatever anybody asks who reaches its port"
        ),
        Access::Closed => {
            return Err(Failure::new(exit::USAGE, "a server needs a certificate (--certs)").help(
                "`paraft certs new certs` makes an authority with one for servers: --certs certs. Or, on a network where nobody \
                 else is: --insecure",
            ));
        }
    }
    if let Some(pid) = args.until {
        end_with(pid)?;
    }
    let job = args.job.as_deref().map(|p| Job::load(p, &args.set)).transpose()?;
    let cluster = job.as_ref().map(|j| j.cluster.clone()).unwrap_or_default();
    let listed = if args.servers.is_empty() { cluster.addresses.clone() } else { args.servers.clone() };
    if listed.is_empty() && !args.supervised && args.join.is_empty() && conduct.is_none() {
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
    if let Some(own) =
        own.as_deref().filter(|_| args.join.is_empty() && !args.supervised && conduct.is_none())
    {
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
        let listener = bind(&listen).await.map_err(|e| taken(args, &listen, &e))?;
        let at = listener.local_addr().map_err(|e| Failure::new(exit::IO, e))?;
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
            None => {
                let address = match args.join.is_empty() {
                    true => servers.get(id as usize).cloned().unwrap_or_else(|| bound.clone()),
                    false => args.advertise.clone().unwrap_or_else(|| bound.clone()),
                };
                if !args.join.is_empty() && address.starts_with("0.0.0.0") {
                    return Err(Failure::new(exit::USAGE, "the others cannot reach a server at 0.0.0.0")
                        .help("add --advertise host:port"));
                }
                let place = match args.join.is_empty() {
                    true => Place::Listed(ServerId(id)),
                    false => Place::Joins(args.join.clone()),
                };
                JoinPlan { place, address, servers }
            }
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
        // A launcher puts its servers' data into the run's folder.
        let launched = args.supervised || args.until.is_some();
        // The administrator's certificate, if it lies beside the server's own: in the folder of a
        // launched fleet.
        let acts = match Access::ours() {
            Access::Certificates(ours) => ours.folder().map(Path::to_path_buf),
            _ => None,
        };
        let acts = acts.filter(|certs| certs.join(As::Admin.name()).is_dir());
        let here = LocalControl {
            acts: acts.and_then(|certs| Access::of(Some(&certs), false, As::Admin).ok()),
            faults: args.faults.clone(),
            run: data.parent().filter(|_| launched).map(Path::to_path_buf),
            engine: None,
            runs: args.runs.as_ref().map(|runs| fs::canonicalize(runs).unwrap_or_else(|_| runs.clone())),
        };
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
        if let Some(page) = page {
            page.serve(address.clone(), here);
        }
        let signal = Arc::new(AtomicI32::new(0));
        let noted = signal.clone();
        // If the launcher ends the whole fleet, no server remains to take over.
        let ending = if args.supervised { Ending::AtOnce } else { Ending::HandOver };
        let over = Arc::new(AtomicI32::new(CONTINUES));
        let watched = watched(conduct, &server, &address, over.clone());
        let grace = conduct.map(|c| c.grace);
        let stop = async move {
            tokio::select! {
                number = lifeline::terminated() => noted.store(number, Relaxed),
                () = watched => return ending,
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

/// No exit code: the server continues.
const CONTINUES: i32 = i32::MIN;

/// Resolves when `ServerHooks::watch` requests the end, with the exit code in `over`.
fn watched(
    conduct: Option<&ServerHooks>,
    server: &Server,
    address: &str,
    over: Arc<AtomicI32>,
) -> impl Future<Output = ()> + use<> {
    let watch = conduct.map(|c| c.watch.clone());
    let (id, fleet, address) = (server.id(), server.fleet(), address.to_string());
    async move {
        let Some(watch) = watch else { return std::future::pending().await };
        loop {
            tokio::time::sleep(WATCH_INTERVAL).await;
            let (watch, now) =
                (watch.clone(), RunningServer { id, fleet: fleet(), address: address.clone() });
            // The check may block, so it does not run on a thread that serves.
            if let Ok(Some(code)) = tokio::task::spawn_blocking(move || watch(&now)).await {
                over.store(code, Relaxed);
                return;
            }
        }
    }
}

/// Network threads: at least two, so that one blocked thread does not block all connections.
fn threads() -> usize {
    std::thread::available_parallelism().map_or(2, |n| n.get().max(2))
}

/// The folder name of an address.
fn without_colons(address: &str) -> String {
    address.replace(':', "-")
}

/// The existing data folder that differs from the new `data` only in the escape of colons. A start in
/// the new folder would create a second incarnation without the promises of the first.
fn meant(data: &Path) -> Option<PathBuf> {
    let name = data.file_name()?.to_str()?;
    let own = data.with_file_name(without_colons(name));
    (own != data && !data.join(IDENTITY).exists() && own.join(IDENTITY).exists()).then_some(own)
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
        ServerError::Options(_) | ServerError::Data(_) | ServerError::Settings(_) => Failure::new(exit::CONFIG, e),
        ServerError::Storage(_) => Failure::new(exit::IO, e),
        ServerError::Join(_) => Failure::new(exit::UNAVAILABLE, e)
            .help("name servers of a running fleet with --join; `paraft status --servers ...` shows whether they answer"),
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

/// A client that dials an absent server of this host may briefly get that server's port as its own
/// source port.
const PORT_TIMEOUT: Duration = Duration::from_secs(2);

async fn bind(address: &str) -> std::io::Result<TcpListener> {
    let began = std::time::Instant::now();
    loop {
        match TcpListener::bind(address).await {
            Err(e) if e.kind() == std::io::ErrorKind::AddrInUse && began.elapsed() < PORT_TIMEOUT => {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            bound => return bound,
        }
    }
}

/// The error for a port in use: which port, where it is configured, and what to do.
fn taken(args: &ServerArgs, address: &str, e: &std::io::Error) -> Failure {
    let line =
        args.job.as_ref().filter(|_| args.listen.is_none() && args.servers.is_empty()).and_then(|path| {
            let text = std::fs::read_to_string(path).ok()?;
            Some(format!("{}:{}: ", path.display(), line_of(&text, "cluster.addresses")?))
        });
    let line = line.unwrap_or_default();
    match e.kind() {
        std::io::ErrorKind::AddrInUse => Failure::new(exit::CONFIG, format!("{line}{address} is in use by another process"))
            .help("stop that process (ss -ltnp shows it), or choose another port on every host"),
        std::io::ErrorKind::AddrNotAvailable => {
            Failure::new(exit::CONFIG, format!("{line}{address} is no address of this host"))
                .help("--listen 0.0.0.0:PORT listens on every interface; the list of servers keeps the address that others use")
        }
        _ => Failure::new(exit::CONFIG, format!("{line}cannot listen on {address}: {e}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_new_folder_beside_that_of_the_same_server_is_not_taken() {
        let scratch = tempfile::tempdir().expect("scratch");
        let at = |name: &str| scratch.path().join(name);
        assert_eq!(meant(&at("h:1")), None);
        std::fs::create_dir(at("h-1")).expect("folder");
        assert_eq!(meant(&at("h:1")), None, "nobody has been in it");
        std::fs::write(at("h-1").join(IDENTITY), []).expect("file");
        assert_eq!(meant(&at("h:1")), Some(at("h-1")));
        assert_eq!(meant(&at("h-1")), None);
        std::fs::create_dir(at("h:1")).expect("folder");
        std::fs::write(at("h:1").join(IDENTITY), []).expect("file");
        assert_eq!(meant(&at("h:1")), None, "it has been there before");
    }
}
