//! The fleet's agreed state: its servers, the place of each shard's replicas, and the jobs that they train or
//! have trained.
//!
//! The state is small, always on disk, and changed only by `apply`, like a shard's.

use super::{
    format,
    jobs::{Difference, JobFacts, JobState, Jobs, Submission},
    orders::{Done, Order, Orders},
};
use crate::raft::{ApplyError, RawImage, ReplicaId, Replicated};
use paraft_common::{Durability, JobId, JobShard, Payload, ServerId};
use parking_lot::RwLock;
use serde::{Deserialize, Serialize};
use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    sync::Arc,
};
use tokio::sync::watch;

/// The shape of a job's groups, fixed when the job begins; and the shape of a fleet, fixed when it is
/// founded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shape {
    /// Raft groups that share the model. For a fleet: those of the job that it is founded for; 0 without one.
    pub shards: u32,
    /// Replicas of each group.
    pub replicas: u32,
    /// What an acknowledged push survives.
    pub durability: Durability,
}

impl Shape {
    /// Describes each difference to `now`.
    pub fn differences(&self, now: &Shape) -> Vec<String> {
        let all = [
            ("--shards", self.shards.to_string(), now.shards.to_string()),
            ("--replicas", self.replicas.to_string(), now.replicas.to_string()),
            ("--durability", self.durability.to_string(), now.durability.to_string()),
        ];
        let differ = all.into_iter().filter(|(_, was, is)| was != is);
        differ.map(|(what, was, is)| format!("{what} {is} (its fleet: {was})")).collect()
    }

    /// Fails with the differences, for a server that was started with `self` in a fleet that was founded with
    /// `fleets`.
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
    /// Its host:port for the other servers.
    pub address: String,
    /// It is draining: it gets no replicas and leads nothing.
    pub draining: bool,
}

/// Where a shard is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Place {
    /// Names this founding of the shard's state. A state that was lost with its replicas is founded again
    /// under another name, so that no server takes it for the old one.
    pub founding: u64,
    /// The replicas that vote, as last known.
    pub voters: BTreeSet<ReplicaId>,
    /// The group has begun: from then on only its own membership changes it.
    pub founded: bool,
}

/// The agreed state.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct State {
    /// Random id, from the founding; 0 before.
    pub fleet: u64,
    /// Counts every change of servers or placement: anything older is stale.
    pub generation: u64,
    /// `None` before the founding. The shape of job 0, if the fleet was founded for one; and the default for
    /// other jobs.
    pub shape: Option<Shape>,
    /// By id.
    pub servers: BTreeMap<ServerId, Member>,
    /// By job and shard.
    pub shards: BTreeMap<JobShard, Place>,
    /// The current and past jobs of the fleet.
    pub jobs: Jobs,
    /// Servers that will not return, as a person has decided. Their ids are not given out again.
    pub forgotten: BTreeSet<ServerId>,
    /// The last executed orders. In a snapshot they follow the state (`format`).
    #[serde(skip)]
    pub orders: Orders,
}

/// A change of the agreed state.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Command {
    /// Founds the fleet; the first one counts.
    Found {
        /// Random.
        fleet: u64,
        /// Fixed for ever.
        shape: Shape,
        /// The first servers.
        servers: BTreeMap<ServerId, String>,
    },
    /// A server with an id of its own (it was listed, or has returned at another address).
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
    /// Starts or ends the drain of a server.
    Drain {
        /// Which.
        server: ServerId,
        /// Whether it starts.
        draining: bool,
    },
    /// Places a shard's replicas.
    Place {
        /// Which.
        shard: JobShard,
        /// Where.
        place: Place,
    },
    /// A job, as its shards know it.
    Job {
        /// The founding of each shard that it runs in, all of one job of the fleet.
        shards: BTreeMap<JobShard, u64>,
        /// What it is.
        facts: JobFacts,
        /// Whether it still runs.
        state: JobState,
        /// When the proposer first saw it, in ms of unix time; counts for a job that begins or ends.
        seen_ms: u64,
    },
    /// A change in a job's checkpoints.
    Checkpoints {
        /// The founding of its first shard that the job runs in.
        job: u64,
        /// The change.
        difference: Difference,
    },
    /// A server will not return.
    Forget {
        /// Which.
        server: ServerId,
    },
    /// Gives a job shards of its own.
    Submit(Submission),
    /// Ends a job at its current step.
    Stop {
        /// Which.
        job: JobId,
        /// When, in ms of unix time.
        now_ms: u64,
    },
    /// The weights of an ended job were kept for long enough: deletes its shards.
    Release {
        /// Which.
        job: JobId,
    },
    /// Deletes a job with everything that the servers have of it, whether it has ended or not.
    Delete {
        /// Which.
        job: JobId,
    },
    /// A person's order; executed once, however often it arrives.
    Order {
        /// Random.
        token: u64,
        /// The order.
        order: Order,
    },
}

/// The result of a command.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[allow(missing_docs)]
pub enum Outcome {
    Done,
    Joined(ServerId),
    Refused(Refusal),
    Submitted(JobId),
    Ended(JobState),
}

/// Why a command changes nothing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[allow(missing_docs)] // the texts explain them
pub enum Refusal {
    #[error("{job} has the name `{name}` already, and is {}", state.name())]
    NameTaken { job: JobId, name: String, state: JobState },
    #[error("there is no {0}")]
    NoServer(ServerId),
    #[error("there is no {0}")]
    NoJob(JobId),
    #[error("{0}")]
    Other(String),
}

impl From<String> for Refusal {
    fn from(why: String) -> Self {
        Self::Other(why)
    }
}

/// The replicated state, shared by the task that applies and the tasks that read.
#[derive(Debug, Default)]
pub struct Agreed {
    inner: RwLock<Inner>,
    /// Publishes the generation when it has changed.
    moved: watch::Sender<u64>,
}

#[derive(Debug, Default)]
struct Inner {
    /// The state from the log since the replica was started.
    now: Arc<State>,
    /// The state when the replica was last stopped, until the log has caught up. While the replica's storage
    /// fails, its server works with this.
    before: Option<Arc<State>>,
}

impl Inner {
    fn known(&self) -> &Arc<State> {
        self.before.as_ref().unwrap_or(&self.now)
    }

    fn caught_up(&mut self) {
        self.before.take_if(|before| before.generation <= self.now.generation);
    }
}

impl Agreed {
    /// The current state, as far as this server knows it.
    pub fn get(&self) -> Arc<State> {
        self.inner.read().known().clone()
    }

    /// The generation, as it changes.
    pub fn generations(&self) -> watch::Receiver<u64> {
        self.moved.subscribe()
    }

    /// The replica starts again: it rebuilds the state from the snapshot and the log. Until then the earlier
    /// state stays readable.
    pub(super) fn learn_again(&self) {
        let mut inner = self.inner.write();
        let known = inner.known().clone();
        *inner = Inner { now: Arc::default(), before: (known.fleet != 0).then_some(known) };
    }

    /// The replica has applied everything that is agreed on: the earlier state is dropped.
    pub(super) fn is_current(&self) {
        self.inner.write().before = None;
    }

    /// Reads the state; `f` must be quick.
    pub fn read<T>(&self, f: impl FnOnce(&State) -> T) -> T {
        f(self.inner.read().known())
    }

    fn tell(&self, generation: u64) {
        self.moved.send_if_modified(|now| std::mem::replace(now, generation) != generation);
    }
}

impl State {
    /// Applies one command.
    pub fn apply(&mut self, command: &Command) -> Outcome {
        let (outcome, moved) = self.change(command);
        self.generation += u64::from(moved);
        outcome
    }

    /// The shape of a job, if it exists and has shards.
    pub fn shape_of(&self, job: JobId) -> Option<Shape> {
        self.jobs.get(job).filter(|j| !j.released).map(|j| j.shape)
    }

    /// The outcome, and whether servers or placement have changed.
    fn change(&mut self, command: &Command) -> (Outcome, bool) {
        fn refused(why: impl Into<Refusal>) -> (Outcome, bool) {
            (Outcome::Refused(why.into()), false)
        }
        if self.fleet == 0 && !matches!(command, Command::Found { .. }) {
            return refused("the fleet is not founded yet".to_string());
        }
        match command {
            Command::Found { fleet, shape, servers } => {
                let first = self.fleet == 0;
                if first {
                    self.fleet = *fleet;
                    self.shape = Some(*shape);
                    let member = |a: &String| Member { address: a.clone(), draining: false };
                    self.servers = servers.iter().map(|(id, a)| (*id, member(a))).collect();
                    if shape.shards > 0 {
                        self.jobs.found_for_job(*shape);
                    }
                }
                (Outcome::Done, first)
            }
            Command::Admit { server, address } => {
                if server.0 >= u64::from(u32::MAX) {
                    return refused(format!("{server} is no server id"));
                }
                if self.forgotten.contains(server) {
                    return refused(format!("{server} was forgotten"));
                }
                let new = || Member { address: String::new(), draining: false };
                let known = &mut self.servers.entry(*server).or_insert_with(new).address;
                let moved = known != address;
                known.clone_from(address);
                (Outcome::Done, moved)
            }
            Command::Join { address } => {
                if let Some((id, _)) = self.servers.iter().find(|(_, s)| s.address == *address) {
                    return (Outcome::Joined(*id), false);
                }
                let used = self.servers.keys().chain(&self.forgotten).max();
                let id = ServerId(used.map_or(0, |s| s.0 + 1));
                self.servers.insert(id, Member { address: address.clone(), draining: false });
                (Outcome::Joined(id), true)
            }
            Command::Drain { server, draining } => match self.servers.get_mut(server) {
                None => refused(Refusal::NoServer(*server)),
                Some(s) => (Outcome::Done, std::mem::replace(&mut s.draining, *draining) != *draining),
            },
            Command::Place { shard, place } => {
                // A job that was deleted meanwhile is not placed any more.
                if self.shape_of(shard.job()).is_none() {
                    return refused(format!("{shard} is of no job that has shards"));
                }
                self.jobs.restart_shard(*shard, place.founding);
                let before = self.shards.insert(*shard, place.clone());
                (Outcome::Done, before.as_ref() != Some(place))
            }
            Command::Job { shards, facts, state, seen_ms } => {
                self.jobs.note(shards, facts, *state, *seen_ms);
                (Outcome::Done, false)
            }
            Command::Checkpoints { job, difference } => match self.jobs.note_checkpoints(*job, difference) {
                true => (Outcome::Done, false),
                false => refused(UNKNOWN_JOB.to_string()),
            },
            Command::Forget { server } => match self.servers.remove(server) {
                None => refused(Refusal::NoServer(*server)),
                Some(_) => {
                    self.forgotten.insert(*server);
                    (Outcome::Done, true)
                }
            },
            Command::Submit(submission) => match self.jobs.submit(submission) {
                Ok((job, new)) => (Outcome::Submitted(job), new),
                Err(why) => refused(why),
            },
            Command::Stop { job, now_ms } => match self.jobs.stop(*job, *now_ms) {
                Ok(before) => (Outcome::Ended(before), false),
                Err(why) => refused(why),
            },
            Command::Release { job } => match self.jobs.release(*job) {
                Ok(()) => (Outcome::Done, self.remove_places(*job)),
                Err(why) => refused(why),
            },
            Command::Delete { job } => match self.jobs.delete(*job) {
                Ok(before) => (Outcome::Ended(before), self.remove_places(*job)),
                Err(why) => refused(why),
            },
            Command::Order { token, order } => {
                if let Some(done) = self.orders.of(*token) {
                    return (done.into(), false);
                }
                let (outcome, moved) = self.change(&order.into());
                // A refused order may be executed when it is sent again.
                match outcome {
                    Outcome::Done => self.orders.keep(*token, Done::Done),
                    Outcome::Submitted(job) => self.orders.keep(*token, Done::Submitted(job)),
                    Outcome::Ended(before) => self.orders.keep(*token, Done::Ended(before)),
                    Outcome::Joined(_) | Outcome::Refused(_) => {}
                }
                (outcome, moved)
            }
        }
    }

    /// Removes the places of the job's shards; returns whether there were any.
    fn remove_places(&mut self, job: JobId) -> bool {
        let before = self.shards.len();
        self.shards.retain(|shard, _| shard.job() != job);
        self.shards.len() != before
    }
}

impl From<Done> for Outcome {
    fn from(done: Done) -> Self {
        match done {
            Done::Done => Self::Done,
            Done::Submitted(job) => Self::Submitted(job),
            Done::Ended(before) => Self::Ended(before),
        }
    }
}

/// The refusal of checkpoints of a job that is not agreed on, or not yet.
pub const UNKNOWN_JOB: &str = "the control group does not know this job";

impl Replicated for Agreed {
    type Change = Command;
    type Outcome = Outcome;

    fn apply(&self, command: &Command) -> Result<Outcome, ApplyError> {
        let (outcome, generation) = {
            let mut inner = self.inner.write();
            let state = Arc::make_mut(&mut inner.now);
            let applied = (state.apply(command), state.generation);
            inner.caught_up();
            applied
        };
        self.tell(generation);
        Ok(outcome)
    }

    fn touched(&self, _: &Command) -> u64 {
        0
    }

    fn image(&self) -> RawImage {
        let now = self.inner.read().now.clone();
        RawImage { head: format::write(&now).unwrap_or_default().into(), parts: Vec::new() }
    }

    fn install_parts(
        &self,
        head: &[u8],
        _parts: &mut dyn Iterator<Item = Result<Payload, String>>,
    ) -> Result<(), ApplyError> {
        let state = format::read(head)?;
        let generation = state.generation;
        let mut inner = self.inner.write();
        inner.now = Arc::new(state);
        inner.caught_up();
        drop(inner);
        self.tell(generation);
        Ok(())
    }

    fn bytes(&self) -> u64 {
        0 // no bulk
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(agreed: &Agreed) {
        let shape = Shape { shards: 1, replicas: 1, durability: Durability::QuorumDisk };
        let servers = BTreeMap::from([(ServerId(0), "a:1".to_string())]);
        agreed.apply(&Command::Found { fleet: 7, shape, servers }).expect("it is new");
    }

    fn join(agreed: &Agreed, address: &str) {
        agreed.apply(&Command::Join { address: address.into() }).expect("applied");
    }

    #[test]
    fn agreed_state_stays_readable_while_it_is_learned_again() {
        let agreed = Agreed::default();
        found(&agreed);
        join(&agreed, "b:1");
        let servers = |agreed: &Agreed| agreed.read(|s| s.servers.len());
        for _ in 0..2 {
            agreed.learn_again(); // each failed start of the replica
            assert_eq!((servers(&agreed), agreed.get().fleet), (2, 7));
        }
        found(&agreed);
        assert_eq!(servers(&agreed), 2, "the log has not brought as much yet");
        assert_eq!(
            format::read(&agreed.image().head).expect("its own").servers.len(),
            1,
            "a snapshot has what is applied"
        );
        join(&agreed, "b:1");
        join(&agreed, "c:1");
        assert_eq!(servers(&agreed), 3);
        // A leader has applied everything.
        agreed.learn_again();
        found(&agreed);
        agreed.is_current();
        assert_eq!(servers(&agreed), 1);
    }
}
