//! What a process is among those that an engine has started: its role, its number, how many there are, where they meet.
//!
//! It is a pure function of the variables that the engine sets (and of two files that it is given): nothing is asked. Precedence:
//! a flag, a variable `PARAFT_*`, then the engine that is nearest to the process. What runs inside another is nearer, so torchrun
//! goes before Slurm, in whose step it may run and where its workers would otherwise share one number. Then Slurm, an Indexed Job
//! (JobSet's too), LeaderWorkerSet, `TF_CONFIG`, SkyPilot, dstack, a file of hosts.
//!
//! Without a role, a task is a worker that may bring a server, and one task alone is no engine's: it launches a fleet on its machine
//! as anywhere. Of several none may, or each would train for itself.

mod kubernetes;
mod others;
mod slurm;
#[cfg(test)]
mod tests;
mod torchrun;

use crate::wrong::Wrong;
use std::{collections::BTreeMap, fmt, str::FromStr};

/// What a process is for.
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

/// What this process is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// As people call it; where flags and variables alone say it, `the command`.
    pub engine: &'static str,
    /// What the processes of one fleet have in common, and those of no other.
    pub id: String,
    /// What it is for; `None`: a worker that may bring a server.
    pub role: Option<Role>,
    /// Its number among those of its role, from 0.
    pub rank: u32,
    /// How many of its role there are; 0 where that is not known.
    pub tasks: u32,
    /// How often the engine has started it again.
    pub attempt: u32,
    /// Among the tasks of this host.
    pub local_rank: u32,
    /// Tasks of this host.
    pub local_tasks: u32,
    /// Which host, from 0.
    pub host: u32,
    /// How many hosts there are.
    pub hosts: u32,
    /// What the engine calls this host.
    pub node: String,
    /// The host of task 0; empty where there is none to meet at.
    pub first: String,
    /// Where on that host the tasks meet.
    pub port: u16,
    /// Where the servers are, where somebody has said it.
    pub servers: Vec<String>,
}

/// What the user has said by flags.
#[derive(Clone, Debug, Default)]
pub struct Asked {
    /// `--role`
    pub role: Option<Role>,
    /// `--index`
    pub index: Option<u32>,
    /// `--workers`
    pub workers: Option<u32>,
}

/// What is read of this host beside variables.
#[derive(Clone, Debug, Default)]
pub struct Surroundings {
    /// `/etc/hosts`
    pub hosts: String,
    /// What the file has that `PARAFT_HOSTFILE` names: `host slots=N` in each line.
    pub hostfile: String,
    /// This host's name.
    pub own: String,
}

impl Surroundings {
    /// Those of this process.
    pub fn here() -> Self {
        let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
        let hostfile = std::env::var("PARAFT_HOSTFILE").map(|path| read(&path)).unwrap_or_default();
        let own = read("/proc/sys/kernel/hostname").trim().to_string();
        Self { hosts: read("/etc/hosts"), hostfile, own }
    }
}

/// The variables of this process, of those that are text.
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

/// Torch's own, where nobody has said another.
const USUAL_PORT: u16 = 29_500;

/// The variables, without those that are empty.
struct Env<'a> {
    variables: &'a BTreeMap<String, String>,
    asked: &'a Asked,
    around: &'a Surroundings,
}

impl Env<'_> {
    fn text(&self, name: &str) -> Option<String> {
        self.variables.get(name).filter(|v| !v.is_empty()).cloned()
    }

    fn number(&self, name: &str) -> Result<Option<u32>, Wrong> {
        match self.text(name).map(|text| (text.parse::<u32>(), text)) {
            None => Ok(None),
            Some((Ok(n), _)) => Ok(Some(n)),
            Some((Err(_), text)) => Err(Wrong::usage(format!("{name} is `{text}`; it is a whole number"))),
        }
    }

    /// A variable that this engine sets whenever it sets those by which it is recognised.
    fn must(&self, engine: &str, name: &str) -> Result<String, Wrong> {
        self.text(name).ok_or_else(|| needs(engine, name))
    }

    fn must_number(&self, engine: &str, name: &str) -> Result<u32, Wrong> {
        self.number(name)?.ok_or_else(|| needs(engine, name))
    }

    /// The script's own processes open `MASTER_PORT`, or torchrun has.
    fn beside_master(&self) -> Result<Option<u16>, Wrong> {
        Ok(self.number("MASTER_PORT")?.and_then(|p| u16::try_from(p.saturating_add(1)).ok()))
    }

    /// Addresses with commas between them.
    fn list(&self, name: &str) -> Vec<String> {
        let text = self.text(name).unwrap_or_default();
        text.split(',').map(str::trim).filter(|a| !a.is_empty()).map(str::to_string).collect()
    }

    fn role(&self) -> Result<Option<Role>, Wrong> {
        let said = self.text("PARAFT_ROLE").map(|text| text.parse::<Role>().map_err(Wrong::usage));
        self.asked.role.map_or_else(|| said.transpose(), |role| Ok(Some(role)))
    }
}

fn needs(engine: &str, name: &str) -> Wrong {
    Wrong::usage(format!("this is {engine}'s task, and {name} is not set")).help(format!(
        "set {name}, or start it without {engine}'s variables for a fleet on this machine alone"
    ))
}

impl Place {
    /// Of one process of its host, which is the only one of its fleet there.
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
            port: USUAL_PORT,
            servers: Vec::new(),
        }
    }
}

/// An engine's part: `None` where the variables are not its own.
type Recognise = fn(&Env<'_>) -> Result<Option<Place>, Wrong>;

/// The nearest first.
const ENGINES: [Recognise; 8] = [
    torchrun::recognise,
    slurm::recognise,
    kubernetes::indexed_job,
    kubernetes::leader_worker_set,
    others::tf_config,
    others::skypilot,
    others::dstack,
    others::hostfile,
];

/// What this process is; `None`: nobody's task, or the only one.
pub fn place(
    variables: &BTreeMap<String, String>,
    asked: &Asked,
    around: &Surroundings,
) -> Result<Option<Place>, Wrong> {
    let env = Env { variables, asked, around };
    let role = env.role()?;
    // In a script of `paraft launch` the variables of engines are of the launcher's surroundings.
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
            return Err(Wrong::usage(format!("nothing says which {role} this is")).help(
                "add --index N or set PARAFT_INDEX, from 0; engines that `paraft env` recognises say it themselves",
            ));
        }
        (None, None, _) => return Ok(None),
    };
    place.role = role.or(place.role);
    place.rank = index.unwrap_or(place.rank);
    place.tasks = env.number("PARAFT_TASKS")?.unwrap_or(place.tasks);
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
        return Err(Wrong::usage(format!("nothing says where the tasks of {} meet", place.engine))
            .help("set MASTER_ADDR and MASTER_PORT to the host of task 0 and a port there, in every task"));
    }
    if let Some(asked) = asked.workers.filter(|n| *n != place.tasks) {
        let why = format!("--workers {asked}, and {} has started {} tasks", place.engine, place.tasks);
        return Err(
            Wrong::usage(why).help("each task is one worker: leave --workers out, or start as many tasks")
        );
    }
    Ok(Some(place))
}

fn outside(place: &Place) -> Wrong {
    let Place { engine, rank, tasks, .. } = place;
    Wrong::usage(format!("{engine} says that this is task {rank} of {tasks}, from 0"))
}
