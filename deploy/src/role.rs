//! `paraft launch --role`: one server or worker of a fleet whose processes an engine starts and
//! restarts.
//!
//! The engine places and restarts processes. This module decides whether a server bootstraps, rejoins
//! or joins the fleet (`paraft_fleet::shared`), what a signal means for the role, and which exit code
//! tells the engine to restart it.

use crate::{
    drain,
    serve::{JoinPlan, RunningServer, ServerArgs, ServerHooks, WatchHook, serve},
};
use paraft_common::{ServerId, need::Bytes};
use paraft_engines::{Place, Role};
use paraft_fleet::{
    ask, certs,
    failure::Failure,
    launch,
    shared::{Address, Folder, JobEnd, JoinDecision, Lock, RunningFleet, Worker, own_host},
};
use paraft_proto::is_trained;
use paraft_server::server::{self, IDENTITY};
use paraft_tls::access::As;
use paraft_worker::{Job, exit};
use std::{
    net::SocketAddr,
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering::Relaxed},
    },
    thread,
    time::{Duration, Instant},
};

/// The configuration of a role.
pub struct RoleArgs<'a> {
    pub place: &'a Place,
    pub job: Job,
    /// The job file.
    pub file: PathBuf,
    pub run_dir: PathBuf,
    /// A server's own folder.
    pub data: Option<PathBuf>,
    pub listen: Option<String>,
    pub advertise: Option<String>,
    /// The most memory that one job may need on this server.
    pub job_memory: Option<Bytes>,
    /// A server ends when the job has.
    pub until_done: bool,
    pub patience: Duration,
    pub grace: Duration,
    /// A file or URL that announces the end of this host.
    pub notice: Option<String>,
}

/// Runs the role.
pub fn run(args: &RoleArgs<'_>) -> Result<i32, Failure> {
    eprintln!("{}", args.place);
    let shares = args.place.servers.is_empty();
    if shares {
        let shows = if args.place.role == Some(Role::Server) { As::Peer } else { As::Worker };
        certs::of_shared(&args.run_dir, shows)?;
    }
    let folder = shares.then(|| Folder::of(&args.run_dir)).transpose()?;
    if let Some(notice) = &args.notice {
        paraft_fleet::notice::watch(notice)?;
    }
    match args.place.role {
        Some(Role::Server) => run_server(args, folder),
        _ => {
            let interrupted = launch::interrupts();
            let worker = Worker {
                place: args.place,
                job: &args.job,
                run_dir: &args.run_dir,
                folder: folder.as_ref(),
                patience: args.patience,
                grace: args.grace,
            };
            worker.run(&interrupted)
        }
    }
}

/// Internal code, not an exit code: restart at once at the same address, with the current information.
const RESTART_IN_PLACE: i32 = -1;

/// How long the folder's previous owner may take to end.
const LOCK_TIMEOUT: Duration = Duration::from_secs(30);

fn run_server(args: &RoleArgs<'_>, folder: Option<Folder>) -> Result<i32, Failure> {
    let me = args.place.rank;
    let data = args.data.clone().unwrap_or_else(|| args.run_dir.join(format!("server-{me}")));
    let _lock = Lock::of(&data, LOCK_TIMEOUT)?;
    if let Some(ended) = folder.as_ref().map_or(Ok(None), Folder::ended)? {
        eprintln!("the job has ended: {}", end_of(&ended));
        return Ok(exit::OK);
    }
    let mut listen = match (&args.listen, args.place.servers.get(me as usize)) {
        (Some(listen), _) => listen.clone(),
        (None, None) => "0.0.0.0:0".into(),
        (None, Some(own)) => format!("0.0.0.0:{}", own.rsplit_once(':').map_or("0", |(_, port)| port)),
    };
    loop {
        let begun_with = BegunWith::default();
        let conduct = ServerHooks {
            meet: meets(args, folder.clone(), data.clone(), begun_with.clone()),
            watch: watches(args, folder.clone(), begun_with),
            grace: args.grace,
        };
        let server = ServerArgs {
            job: Some(args.file.clone()),
            id: Some(u64::from(me)),
            listen: Some(listen.clone()),
            data: Some(data.clone()),
            log_file: Some(args.run_dir.join(format!("server-{me}.log"))),
            trace_steps: paraft_trace::DEFAULT_STEPS,
            job_memory: args.job_memory,
            ..ServerArgs::default()
        };
        match serve(&server, Some(&conduct))? {
            RESTART_IN_PLACE => {
                // The other processes already know that port.
                if let Some(at) = folder.as_ref().map_or(Ok(None), |f| f.address(&format!("server-{me}")))? {
                    let port = at.address.rsplit_once(':').map_or("0", |(_, port)| port).to_string();
                    let host = listen.rsplit_once(':').map_or("0.0.0.0", |(host, _)| host);
                    listen = format!("{host}:{port}");
                }
            }
            code => return Ok(code),
        }
    }
}

/// How the job has ended, for people.
fn end_of(ended: &JobEnd) -> String {
    match ended {
        JobEnd::Done => "it is done".into(),
        JobEnd::Failed { worker, node, code, said } => {
            format!("worker w{worker} on {node} has failed, with code {code}: {said}")
        }
    }
}

/// The list that a server has started with, for comparison with the current addresses.
type BegunWith = Arc<parking_lot::Mutex<Option<Vec<String>>>>;

/// Publishes the server's address, and finds its place in the fleet.
fn meets(
    args: &RoleArgs<'_>,
    folder: Option<Folder>,
    data: PathBuf,
    begun_with: BegunWith,
) -> crate::serve::JoinHook {
    let (place, servers) = (args.place.clone(), args.job.servers());
    let (advertise, patience) = (args.advertise.clone(), args.patience);
    let me = place.rank;
    Box::new(move |at: SocketAddr| {
        let Some(folder) = &folder else {
            let list = place.servers.clone();
            let Some(own) = list.get(me as usize) else {
                let address = advertised(advertise.as_deref(), at, list.first().map(String::as_str));
                return Ok(JoinPlan { place: server::Place::Joins(list), address, servers: Vec::new() });
            };
            return Ok(JoinPlan {
                place: server::Place::Listed(ServerId(me.into())),
                address: own.clone(),
                servers: list,
            });
        };
        let others = folder.servers()?;
        let peer = others.iter().find(|(n, _)| **n != me).map(|(_, at)| at.address.clone());
        let own = Address::here(advertised(advertise.as_deref(), at, peer.as_deref()), &place);
        folder.publish(&format!("server-{me}"), &own)?;
        let (mut since, mut logged) = (Instant::now(), String::new());
        loop {
            folder.can_meet(&own)?;
            if let Some(ended) = folder.ended()? {
                return Err(Failure::new(exit::OK, format!("the job has ended: {}", end_of(&ended))));
            }
            let identity = data.join(IDENTITY).exists();
            let why = match folder.way(me, servers, &data, identity, answering)? {
                JoinDecision::Listed(list) => {
                    *begun_with.lock() = Some(list.clone());
                    let place = server::Place::Listed(ServerId(me.into()));
                    return Ok(JoinPlan { place, address: own.address, servers: list });
                }
                JoinDecision::Joins(list) => {
                    *begun_with.lock() = Some(list.clone());
                    let place = server::Place::Joins(list);
                    return Ok(JoinPlan { place, address: own.address, servers: Vec::new() });
                }
                JoinDecision::Missed(why) => why,
                JoinDecision::Wait(why) => {
                    since = Instant::now();
                    why
                }
            };
            if since.elapsed() > patience {
                return Err(Failure::new(exit::UNAVAILABLE, format!("s{me}: {why}"))
                    .help("start the servers that are down, each with its own data folder; where these are lost, begin a new run with --resume"));
            }
            if why != logged {
                eprintln!("s{me} waits: {why}");
                logged = why;
            }
            thread::sleep(Duration::from_millis(50));
        }
    })
}

/// The address for others of a server that listens on `at`.
fn advertised(said: Option<&str>, at: SocketAddr, peer: Option<&str>) -> String {
    match said {
        Some(whole) if whole.rsplit_once(':').is_some_and(|(_, port)| port.parse::<u16>().is_ok()) => {
            whole.into()
        }
        Some(host) => format!("{host}:{}", at.port()),
        None if at.ip().is_unspecified() => SocketAddr::new(own_host(peer), at.port()).to_string(),
        None => at.to_string(),
    }
}

/// A fleet at one of these addresses.
fn answering(known: &[String]) -> Option<RunningFleet> {
    let fleet = ask::describe(known).filter(|d| d.fleet != 0)?;
    Some(RunningFleet { fleet: fleet.fleet, servers: fleet.servers.into_iter().map(|s| s.address).collect() })
}

/// Polls between checks for the end of the job.
const END_CHECK_POLLS: u32 = 5;

/// Finished workers may still write their last files.
const LAST_FILES_TIME: Duration = Duration::from_secs(10);

/// Polls without a leader after which a server searches for the others again.
const LEADERLESS_POLLS: u32 = 15;

/// The server's poll function: records its fleet, restarts when the others have moved, ends with the
/// job.
fn watches(args: &RoleArgs<'_>, folder: Option<Folder>, begun_with: BegunWith) -> WatchHook {
    let (until_done, workers) = (args.until_done, args.job.train.workers as usize);
    let job = args.job.name.clone();
    let (looks, alone, back) = (AtomicU32::new(0), AtomicU32::new(0), AtomicU32::new(0));
    let finished = parking_lot::Mutex::new(None::<Instant>);
    Arc::new(move |now: &RunningServer| {
        let look = looks.fetch_add(1, Relaxed);
        let failed = |e: Failure| {
            tracing::warn!(why = e.message(), "the run's folder");
            None
        };
        if let Some(folder) = &folder {
            match folder.ended() {
                Ok(None) => {}
                Ok(Some(ended)) => {
                    let all = folder.workers_done() >= workers;
                    let since = *finished.lock().get_or_insert_with(Instant::now);
                    if matches!(ended, JobEnd::Failed { .. }) || all || since.elapsed() > LAST_FILES_TIME {
                        eprintln!("the job has ended: {}", end_of(&ended));
                        return Some(exit::OK);
                    }
                    return None;
                }
                Err(e) => return failed(e),
            }
            let others = match folder.servers() {
                Ok(servers) => servers.into_values().map(|at| at.address),
                Err(e) => return failed(e),
            };
            let mut elsewhere = others.filter(|address| *address != now.address);
            let moved = begun_with.lock().as_ref().is_some_and(|list| elsewhere.any(|a| !list.contains(&a)));
            if now.fleet != 0
                && back.load(Relaxed) == 0
                && let Err(e) = folder.belongs(now.fleet)
            {
                eprintln!("error: {}", e.message());
                return Some(e.code());
            }
            // In a fleet with a leader, all servers learn new addresses from it.
            let leads =
                |a: &str| ask::describe(std::slice::from_ref(&a.to_string())).is_some_and(|d| d.can_agree());
            match moved && (now.fleet == 0 || !leads(&now.address)) {
                false => alone.store(0, Relaxed),
                true if alone.fetch_add(1, Relaxed) + 1 >= LEADERLESS_POLLS => return Some(RESTART_IN_PLACE),
                true => {}
            }
        }
        if now.fleet != 0
            && back.load(Relaxed) == 0
            && drain::take_back(std::slice::from_ref(&now.address), now.id)
        {
            back.store(1, Relaxed);
        }
        if until_done && look % END_CHECK_POLLS == END_CHECK_POLLS - 1 && is_finished(&now.address, &job) {
            match &folder {
                Some(folder) => _ = folder.end(&JobEnd::Done).map_err(failed),
                None if finished.lock().get_or_insert_with(Instant::now).elapsed() > LAST_FILES_TIME => {
                    return Some(exit::OK);
                }
                None => {}
            }
        }
        None
    })
}

fn is_finished(address: &str, job: &str) -> bool {
    is_trained(&ask::jobs(&[address.to_string()]).unwrap_or_default(), job)
}
