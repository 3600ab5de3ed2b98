//! What the fleet has agreed on: which servers there are, where each shard's replicas are, and which jobs they train
//! or have trained.
//!
//! Small, always on disk, and changed only by `apply`, as a shard is.

use super::jobs::{Difference, JobFacts, JobState, Jobs};
use crate::{
    header,
    raft::{RawImage, ReplicaId, Replicated, Unable},
};
use paraft_common::{Durability, Payload, ServerId, ShardId};
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

impl Shape {
    /// What is not the same in `now`, in words.
    pub fn differences(&self, now: &Shape) -> Vec<String> {
        let all = [
            ("--shards", self.shards.to_string(), now.shards.to_string()),
            ("--replicas", self.replicas.to_string(), now.replicas.to_string()),
            ("--durability", self.durability.to_string(), now.durability.to_string()),
        ];
        let differ = all.into_iter().filter(|(_, was, is)| was != is);
        differ.map(|(what, was, is)| format!("{what} {is} (its fleet: {was})")).collect()
    }

    /// Fails with what differs, for a server that was started with this in a fleet that was founded with `fleets`.
    pub fn must_be(&self, fleets: Shape) -> Result<(), String> {
        match fleets.differences(self)[..] {
            [] => Ok(()),
            ref all => Err(format!(
                "this server's fleet was founded with other settings: {}. Start it as the others run",
                all.join("; ")
            )),
        }
    }
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
    pub founding: u64,
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
    /// What the shards train, or have trained. No part of the generation: nothing is routed by it.
    pub jobs: Jobs,
    /// Servers that will not come back, as a person has said. Their ids are not given out again.
    pub forgotten: BTreeSet<ServerId>,
}

/// As it was in format 2.
#[derive(Deserialize)]
struct StateV2 {
    fleet: u64,
    generation: u64,
    shape: Option<Shape>,
    servers: BTreeMap<ServerId, Member>,
    shards: BTreeMap<ShardId, Place>,
    jobs: Jobs,
}

impl From<StateV2> for State {
    fn from(old: StateV2) -> Self {
        let StateV2 { fleet, generation, shape, servers, shards, jobs } = old;
        State { fleet, generation, shape, servers, shards, jobs, forgotten: BTreeSet::new() }
    }
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
    /// A job, as its shards know it.
    Job {
        /// The founding of each shard that it runs in; shard 0's names the job.
        shards: BTreeMap<ShardId, u64>,
        /// What it is.
        facts: JobFacts,
        /// Whether it goes on.
        state: JobState,
        /// When the proposer heard of it, in ms of unix time; counts for a job that is new.
        seen_ms: u64,
    },
    /// What has changed of a job's checkpoints.
    Checkpoints {
        /// The founding of shard 0 that the job runs in.
        job: u64,
        /// What.
        difference: Difference,
    },
    /// A server will not come back.
    Forget {
        /// Which.
        server: ServerId,
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

    /// Forgets everything, before it is learned again from the log.
    pub(super) fn reset(&self) {
        *self.state.write() = State::default();
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
                if self.forgotten.contains(server) {
                    return Outcome::Refused(format!("{server} was forgotten"));
                }
                let new = || Member { address: String::new(), draining: false };
                self.servers.entry(*server).or_insert_with(new).address = address.clone();
                Outcome::Done
            }
            Command::Join { address } => {
                if let Some((id, _)) = self.servers.iter().find(|(_, s)| s.address == *address) {
                    return Outcome::Joined(*id);
                }
                let used = self.servers.keys().chain(&self.forgotten).max();
                let id = ServerId(used.map_or(0, |s| s.0 + 1));
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
                self.jobs.begun_anew(*shard, place.founding);
                self.shards.insert(*shard, place.clone());
                Outcome::Done
            }
            Command::Job { shards, facts, state, seen_ms } => {
                self.jobs.note(shards, facts, *state, *seen_ms);
                Outcome::Done
            }
            Command::Checkpoints { job, difference } => match self.jobs.note_checkpoints(*job, difference) {
                true => Outcome::Done,
                false => Outcome::Refused(UNKNOWN_JOB.into()),
            },
            Command::Forget { server } => match self.servers.remove(server) {
                None => Outcome::Refused(format!("there is no {server}")),
                Some(_) => {
                    self.forgotten.insert(*server);
                    Outcome::Done
                }
            },
        }
    }
}

/// Said of checkpoints of a job that is not agreed on, or not yet.
pub const UNKNOWN_JOB: &str = "the control group does not know this job";

/// The layout of [`State`] in a snapshot, which says it first: one of another build is refused by name, not misread.
/// Whoever changes the layout raises this.
const FORMAT: u16 = 3;
/// Still read.
const FORMAT_2: u16 = 2;

impl Replicated for Agreed {
    type Change = Command;
    type Outcome = Outcome;

    fn apply(&self, command: &Command) -> Result<Outcome, Unable> {
        Ok(self.state.write().apply(command))
    }

    fn touched(&self, _: &Command) -> u64 {
        0
    }

    fn image(&self) -> RawImage {
        let state = header::encode(&*self.state.read());
        let head = state.and_then(|state| header::encode(&(FORMAT, state)));
        RawImage { head: head.unwrap_or_default().into(), parts: Vec::new() }
    }

    fn install_parts(
        &self,
        head: &[u8],
        _parts: &mut dyn Iterator<Item = Result<Payload, String>>,
    ) -> Result<(), Unable> {
        let bad = |e: header::HeaderError| Unable::Damaged(format!("a snapshot of the control group: {e}"));
        let (format, state): (u16, Vec<u8>) = header::decode(head).map_err(bad)?;
        *self.state.write() = match format {
            FORMAT => header::decode(&state).map_err(bad)?,
            FORMAT_2 => header::decode::<StateV2>(&state).map_err(bad)?.into(),
            _ => {
                return Err(Unable::Newer(format!(
                    "this snapshot of the control group has format {format}, this build reads up to {FORMAT}: use the \
                     build that wrote it"
                )));
            }
        };
        Ok(())
    }

    fn bytes(&self) -> u64 {
        0 // no bulk
    }
}
