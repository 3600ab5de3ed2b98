//! A task of an engine: its role and its place.

use std::{fmt, str::FromStr};

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

/// torchrun's own default.
pub(super) const DEFAULT_PORT: u16 = 29_500;

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

impl Place {
    /// A process that is the only one of its fleet on its host.
    pub(super) fn alone(engine: &'static str, id: String, rank: u32, tasks: u32) -> Self {
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
