//! The place of a process in an engine's job: its role, its number, the number of processes, and where
//! they meet.
//!
//! It is a pure function of the engine's variables (and of what [`HostContext`] has): it queries nothing.
//! Precedence: a flag, a `PARAFT_*` variable, then the innermost engine. An engine that runs inside
//! another is more specific. So Ray, whose nodes may be tasks of any other, precedes torchrun, torchrun
//! precedes MPI launchers, and these precede Slurm: they may run in a Slurm step, where Slurm's variables
//! would give all of their ranks the same number. Then follow
//! Slurm, Flux, an Indexed Job (JobSet's too), LeaderWorkerSet, `TF_CONFIG`, SkyPilot, dstack, and the
//! batch systems that start one process: LSF, HTCondor, arrays of PBS and Grid Engine.
//!
//! Without a role, a task is a worker that may bring a server. A single task needs no engine: it
//! launches a fleet on its machine. Several tasks must have an engine, or each would train alone.

mod batch;
mod kubernetes;
mod mpi;
mod others;
mod slurm;
#[cfg(test)]
mod tests;
mod torchrun;

use crate::error::EngineError;
use std::{
    collections::BTreeMap,
    fmt,
    path::{Path, PathBuf},
    str::FromStr,
};

/// The role of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// It hosts replicas.
    Server,
    /// It trains.
    Worker,
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Server => "server",
            Self::Worker => "worker",
        })
    }
}

impl FromStr for Role {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "server" | "ps" => Ok(Self::Server),
            "worker" | "chief" | "master" => Ok(Self::Worker),
            _ => Err(format!("`{text}` is no role: use server or worker")),
        }
    }
}

/// The place of this process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// The engine's name for people; `the command` if only flags and variables define the place.
    pub engine: &'static str,
    /// An id that the processes of one fleet share, and no others.
    pub id: String,
    /// Its role; `None`: a worker that may bring a server.
    pub role: Option<Role>,
    /// Its number among those of its role, from 0.
    pub rank: u32,
    /// The number of processes of its role; 0 if unknown.
    pub tasks: u32,
    /// How often the engine has restarted it.
    pub attempt: u32,
    /// Its number among the tasks of this host.
    pub local_rank: u32,
    /// The number of tasks on this host.
    pub local_tasks: u32,
    /// The number of this host, from 0.
    pub host: u32,
    /// The number of hosts.
    pub hosts: u32,
    /// The engine's name for this host.
    pub node: String,
    /// The host of task 0; empty without a meeting point.
    pub first: String,
    /// The port on that host where the tasks meet.
    pub port: u16,
    /// The servers' addresses, if they are given.
    pub servers: Vec<String>,
}

/// The user's flags.
#[derive(Clone, Debug, Default)]
pub struct PlaceFlags {
    /// `--role`
    pub role: Option<Role>,
    /// `--index`
    pub index: Option<u32>,
    /// `--workers`
    pub workers: Option<u32>,
    /// `--hostfile`
    pub hostfile: Option<PathBuf>,
}

/// The host's state that is read besides variables.
#[derive(Clone, Debug, Default)]
pub struct HostContext {
    /// `/etc/hosts`
    pub hosts: String,
    /// The content of the file that `--hostfile` names: `host slots=N` in each line.
    pub hostfile: String,
    /// This host's name.
    pub own: String,
    /// The content of the file in which a batch system lists the job's hosts, if it is on this host.
    pub allocation: String,
    /// The process by which hydra, an MPI launcher, has started this one and its other ranks here.
    pub proxy: Option<u32>,
}

/// The name of hydra's process on each host.
const HYDRA_PROXY: &str = "hydra_pmi_proxy";

/// The nearest process of this name above this one.
fn ancestor(name: &str) -> Option<u32> {
    let mut pid = std::os::unix::process::parent_id();
    while pid > 1 {
        // `PID (NAME) STATE PARENT ...`; a name may contain blanks and brackets.
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        let (named, rest) = stat.rsplit_once(") ")?;
        if named.split_once(" (").is_some_and(|(_, own)| own == name) {
            return Some(pid);
        }
        pid = rest.split(' ').nth(1)?.parse().ok()?;
    }
    None
}

impl HostContext {
    /// The surroundings of this process; `hostfile` is read if the user names one.
    pub fn here(hostfile: Option<&Path>) -> Self {
        let read = |path: &Path| std::fs::read_to_string(path).unwrap_or_default();
        let hostfile = hostfile.map(read).unwrap_or_default();
        let own = read(Path::new("/proc/sys/kernel/hostname")).trim().to_string();
        let listed = batch::HOST_FILES.iter().find_map(std::env::var_os);
        let allocation = listed.map(|path| read(Path::new(&path))).unwrap_or_default();
        let proxy = ancestor(HYDRA_PROXY);
        Self { hosts: read(Path::new("/etc/hosts")), hostfile, own, allocation, proxy }
    }
}

/// The variables of this process that are valid text.
pub fn variables() -> BTreeMap<String, String> {
    let text = |(name, value): (std::ffi::OsString, std::ffi::OsString)| {
        Some((name.into_string().ok()?, value.into_string().ok()?))
    };
    std::env::vars_os().filter_map(text).collect()
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { engine, role, rank, tasks, attempt, first, port, servers, .. } = self;
        write!(f, "{engine}: {} {rank}", role.map_or("task".into(), |r| r.to_string()))?;
        if *tasks > 0 {
            write!(f, " of {tasks}")?;
        }
        if !self.node.is_empty() {
            write!(f, ", on {}", self.node)?;
        }
        if *attempt > 0 {
            write!(f, ", started again {attempt} times")?;
        }
        match (role, servers.is_empty()) {
            (_, false) => write!(f, ", servers {}", servers.join(",")),
            (None, true) => write!(f, ", meets the others at {first}:{port}"),
            (Some(_), true) => Ok(()),
        }
    }
}

/// torchrun's own default.
const DEFAULT_PORT: u16 = 29_500;

/// The variables that are not empty.
struct Env<'a> {
    variables: &'a BTreeMap<String, String>,
    asked: &'a PlaceFlags,
    around: &'a HostContext,
}

impl Env<'_> {
    fn text(&self, name: &str) -> Option<String> {
        self.variables.get(name).filter(|v| !v.is_empty()).cloned()
    }

    /// Whether a variable is there, even if it is empty.
    fn is_set(&self, name: &str) -> bool {
        self.variables.contains_key(name)
    }

    fn number(&self, name: &str) -> Result<Option<u32>, EngineError> {
        match self.text(name).map(|text| (text.parse::<u32>(), text)) {
            None => Ok(None),
            Some((Ok(n), _)) => Ok(Some(n)),
            Some((Err(_), text)) => {
                Err(EngineError::usage(format!("{name} is `{text}`; it is a whole number")))
            }
        }
    }

    /// A variable that this engine always sets along with those that identify it.
    fn must(&self, engine: &str, name: &str) -> Result<String, EngineError> {
        self.text(name).ok_or_else(|| needs(engine, name))
    }

    fn must_number(&self, engine: &str, name: &str) -> Result<u32, EngineError> {
        self.number(name)?.ok_or_else(|| needs(engine, name))
    }

    /// `MASTER_PORT` itself belongs to the script's processes, or to torchrun.
    fn beside_master(&self) -> Result<Option<u16>, EngineError> {
        Ok(self.number("MASTER_PORT")?.and_then(|p| u16::try_from(p.saturating_add(1)).ok()))
    }

    /// Comma-separated addresses.
    fn list(&self, name: &str) -> Vec<String> {
        let text = self.text(name).unwrap_or_default();
        text.split(',').map(str::trim).filter(|a| !a.is_empty()).map(str::to_string).collect()
    }
}

fn needs(engine: &str, name: &str) -> EngineError {
    EngineError::usage(format!("this is {engine}'s task, and {name} is not set, or empty")).help(format!(
        "set {name}, or start it without {engine}'s variables for a fleet on this machine alone"
    ))
}

impl Place {
    /// A process that is the only one of its fleet on its host.
    fn alone(engine: &'static str, id: String, rank: u32, tasks: u32) -> Self {
        Self {
            engine,
            id,
            role: None,
            rank,
            tasks,
            attempt: 0,
            local_rank: 0,
            local_tasks: 1,
            host: rank,
            hosts: tasks,
            node: String::new(),
            first: String::new(),
            port: DEFAULT_PORT,
            servers: Vec::new(),
        }
    }
}

/// The detection of an engine: `None` if its variables are absent.
type Recognise = fn(&Env<'_>) -> Result<Option<Place>, EngineError>;

/// What a flag names, then the innermost first.
const ENGINES: [Recognise; 15] = [
    others::hostfile,
    others::ray,
    torchrun::recognise,
    mpi::open_mpi,
    mpi::hydra,
    slurm::recognise,
    batch::flux,
    kubernetes::indexed_job,
    kubernetes::leader_worker_set,
    others::tf_config,
    others::skypilot,
    others::dstack,
    batch::lsf,
    batch::htcondor,
    batch::array_element,
];

/// The place of this process; `None`: it belongs to no engine, or it is the only task.
pub fn place(
    variables: &BTreeMap<String, String>,
    asked: &PlaceFlags,
    around: &HostContext,
) -> Result<Option<Place>, EngineError> {
    let env = Env { variables, asked, around };
    let role = asked.role;
    // In a script of `paraft launch`, the engine's variables describe the launcher.
    if env.text("PARAFT_RANK").is_some() && role.is_none() {
        return Ok(None);
    }
    let mut found = None;
    for recognise in ENGINES {
        found = recognise(&env)?;
        if found.is_some() {
            break;
        }
    }
    let index = asked.index.map_or_else(|| env.number("PARAFT_INDEX"), |i| Ok(Some(i)))?;
    let mut place = match (found, role, index) {
        (Some(place), _, _) => place,
        (None, Some(_), Some(index)) => Place::alone("the command", String::new(), index, 0),
        (None, Some(role), None) => {
            return Err(EngineError::usage(format!("nothing says which {role} this is")).help(
                "add --index N or set PARAFT_INDEX, from 0; engines that `paraft env` recognises say it themselves",
            ));
        }
        (None, None, _) => return Ok(None),
    };
    place.role = role.or(place.role);
    place.rank = index.unwrap_or(place.rank);
    place.attempt = env.number("PARAFT_ATTEMPT")?.unwrap_or(place.attempt);
    place.servers = match env.list("PARAFT_SERVERS") {
        none if none.is_empty() => place.servers,
        said => said,
    };
    if place.node.is_empty() {
        place.node.clone_from(&around.own);
    }
    if place.role.is_some() {
        return match place.tasks > 0 && place.rank >= place.tasks {
            true => Err(outside(&place)),
            false => Ok(Some(place)),
        };
    }
    if place.tasks < 2 {
        return Ok(None);
    }
    if place.rank >= place.tasks {
        return Err(outside(&place));
    }
    if place.first.is_empty() {
        return Err(EngineError::usage(format!("nothing says where the tasks of {} meet", place.engine))
            .help("set MASTER_ADDR and MASTER_PORT to the host of task 0 and a port there, in every task; mpirun -x NAME=VALUE and mpiexec -genv NAME VALUE set them"));
    }
    if let Some(asked) = asked.workers.filter(|n| *n != place.tasks) {
        let why = format!("--workers {asked}, and {} has started {} tasks", place.engine, place.tasks);
        return Err(EngineError::usage(why)
            .help("each task is one worker: leave --workers out, or start as many tasks"));
    }
    Ok(Some(place))
}

fn outside(place: &Place) -> EngineError {
    let Place { engine, rank, tasks, .. } = place;
    EngineError::usage(format!("{engine} says that this is task {rank} of {tasks}, from 0"))
}
