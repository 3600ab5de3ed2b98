//! What the fleet has agreed on: which servers there are, and where each shard's replicas are.
//!
//! Small, always on disk, and changed only by `apply`, as a shard is.

use crate::{
    header,
    raft::{Applied, Change, RawImage, ReplicaId, Replicated},
};
use paraft_common::{Durability, ServerId, ShardId};
use parking_lot::RwLock;
use serde::{Deserialize, Serialize};
use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
};

/// The same on every server of a fleet; fixed when it is founded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shape {
    /// Raft groups that share the model.
    pub shards: u32,
    /// Replicas of each.
    pub replicas: u32,
    /// What an acknowledged push survives.
    pub durability: Durability,
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "shards {}, replicas {}, durability {}", self.shards, self.replicas, self.durability)
    }
}

/// A server of the fleet.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Member {
    /// host:port, as the others reach it.
    pub address: String,
    /// It is being emptied: it gets no replicas and leads nothing.
    pub draining: bool,
}

/// Where a shard is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Place {
    /// Names this founding of the shard's state. A state that was lost with its replicas is founded anew under
    /// another name, so that nobody takes it for the one that it was.
    pub origin: u64,
    /// The replicas that vote, as last known.
    pub voters: BTreeSet<ReplicaId>,
    /// The group has begun: from then on it is changed only through its own membership.
    pub founded: bool,
}

/// The agreed state.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct State {
    /// Random, from the founding; 0 before.
    pub fleet: u64,
    /// Counts every change of servers or placement: what is older is stale.
    pub generation: u64,
    /// `None` before the founding.
    pub shape: Option<Shape>,
    /// By id.
    pub servers: BTreeMap<ServerId, Member>,
    /// By id.
    pub shards: BTreeMap<ShardId, Place>,
}

/// A change of the agreed state.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Command {
    /// The first one counts.
    Found {
        /// Random.
        fleet: u64,
        /// For good.
        shape: Shape,
        /// The first servers.
        servers: BTreeMap<ServerId, String>,
    },
    /// A server with an id of its own (it was listed, or has come back at another address).
    Admit {
        /// Which.
        server: ServerId,
        /// Where.
        address: String,
    },
    /// A new server asks for an id. The same address gets the same id again.
    Join {
        /// Where.
        address: String,
    },
    /// Begins or ends the emptying of a server.
    Drain {
        /// Which.
        server: ServerId,
        /// Begins, or ends.
        draining: bool,
    },
    /// A shard's replicas.
    Place {
        /// Which.
        shard: ShardId,
        /// Where.
        place: Place,
    },
}

/// What a command gave.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[allow(missing_docs)]
pub enum Outcome {
    Done,
    Joined(ServerId),
    Refused(String),
}

/// The replicated state, shared by the task that applies and those that read.
#[derive(Debug, Default)]
pub struct Agreed {
    state: RwLock<State>,
}

impl Agreed {
    /// A copy.
    pub fn get(&self) -> State {
        self.state.read().clone()
    }

    /// Reads; `f` must be quick.
    pub fn read<T>(&self, f: impl FnOnce(&State) -> T) -> T {
        f(&self.state.read())
    }
}

impl State {
    /// Applies one command.
    pub fn apply(&mut self, command: &Command) -> Outcome {
        let before = (self.servers.clone(), self.shards.clone(), self.shape);
        let outcome = self.change(command);
        if before != (self.servers.clone(), self.shards.clone(), self.shape) {
            self.generation += 1;
        }
        outcome
    }

    fn change(&mut self, command: &Command) -> Outcome {
        if self.fleet == 0 && !matches!(command, Command::Found { .. }) {
            return Outcome::Refused("the fleet is not founded yet".into());
        }
        match command {
            Command::Found { fleet, shape, servers } => {
                if self.fleet == 0 {
                    self.fleet = *fleet;
                    self.shape = Some(*shape);
                    let member = |a: &String| Member { address: a.clone(), draining: false };
                    self.servers = servers.iter().map(|(id, a)| (*id, member(a))).collect();
                }
                Outcome::Done
            }
            Command::Admit { server, address } => {
                if server.0 >= u64::from(u32::MAX) {
                    return Outcome::Refused(format!("{server} is no server id"));
                }
                let new = || Member { address: String::new(), draining: false };
                self.servers.entry(*server).or_insert_with(new).address = address.clone();
                Outcome::Done
            }
            Command::Join { address } => {
                if let Some((id, _)) = self.servers.iter().find(|(_, s)| s.address == *address) {
                    return Outcome::Joined(*id);
                }
                let id = ServerId(self.servers.keys().last().map_or(0, |s| s.0 + 1));
                self.servers.insert(id, Member { address: address.clone(), draining: false });
                Outcome::Joined(id)
            }
            Command::Drain { server, draining } => match self.servers.get_mut(server) {
                None => Outcome::Refused(format!("there is no {server}")),
                Some(s) => {
                    s.draining = *draining;
                    Outcome::Done
                }
            },
            Command::Place { shard, place } => {
                self.shards.insert(*shard, place.clone());
                Outcome::Done
            }
        }
    }
}

impl Replicated for Agreed {
    fn apply(&self, change: &Change) -> Applied {
        match change {
            Change::Control(c) => Applied::Control(self.state.write().apply(c)),
            Change::Shard(_) | Change::Check => Applied::None,
        }
    }

    fn image(&self) -> RawImage {
        let head = header::encode(&*self.state.read());
        RawImage { head: head.unwrap_or_default().into(), parts: Vec::new() }
    }

    fn install(&self, image: &RawImage) -> Result<(), String> {
        *self.state.write() = header::decode(&image.head).map_err(|e| e.to_string())?;
        Ok(())
    }
}
