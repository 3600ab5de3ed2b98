//! The fleet's agreed state: its servers, the place of each shard's replicas, and the jobs that they train or
//! have trained.
//!
//! The state is small, always on disk, and changed only by `apply`, like a shard's.

mod agreed;

pub use agreed::Agreed;
pub use paraft_changes::{
    control::{Command, Outcome, Place, Refusal},
    shape::Shape,
};

use super::{
    jobs::Jobs,
    orders::{Done, Orders},
};
use paraft_common::{JobId, JobShard, ServerId};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// A server of the fleet.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Member {
    /// Its host:port for the other servers.
    pub address: String,
    /// It is draining: it gets no replicas and leads nothing.
    pub draining: bool,
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

impl State {
    /// Applies one command.
    pub fn apply(&mut self, command: &Command) -> Outcome {
        match self.change(command) {
            Ok((outcome, moved)) => {
                self.generation += u64::from(moved);
                outcome
            }
            Err(why) => Outcome::Refused(why),
        }
    }

    /// The shape of a job, if it exists and has shards.
    pub fn shape_of(&self, job: JobId) -> Option<Shape> {
        self.jobs.get(job).filter(|j| !j.released).map(|j| j.shape)
    }

    /// The outcome, and whether servers or placement have changed.
    fn change(&mut self, command: &Command) -> Result<(Outcome, bool), Refusal> {
        if self.fleet == 0 && !matches!(command, Command::Found { .. }) {
            return Err("the fleet is not founded yet".to_string().into());
        }
        Ok(match command {
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
                    return Err(format!("{server} is no server id").into());
                }
                if self.forgotten.contains(server) {
                    return Err(format!("{server} was forgotten").into());
                }
                let new = || Member { address: String::new(), draining: false };
                let known = &mut self.servers.entry(*server).or_insert_with(new).address;
                let moved = known != address;
                known.clone_from(address);
                (Outcome::Done, moved)
            }
            Command::Join { address } => {
                if let Some((id, _)) = self.servers.iter().find(|(_, s)| s.address == *address) {
                    return Ok((Outcome::Joined(*id), false));
                }
                let used = self.servers.keys().chain(&self.forgotten).max();
                let id = ServerId(used.map_or(0, |s| s.0 + 1));
                self.servers.insert(id, Member { address: address.clone(), draining: false });
                (Outcome::Joined(id), true)
            }
            Command::Drain { server, draining } => {
                let member = self.servers.get_mut(server).ok_or(Refusal::NoServer(*server))?;
                (Outcome::Done, std::mem::replace(&mut member.draining, *draining) != *draining)
            }
            Command::Place { shard, place } => {
                // A job that was deleted meanwhile is not placed any more.
                if self.shape_of(shard.job()).is_none() {
                    return Err(format!("{shard} is of no job that has shards").into());
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
                false => return Err(UNKNOWN_JOB.to_string().into()),
            },
            Command::Forget { server } => {
                self.servers.remove(server).ok_or(Refusal::NoServer(*server))?;
                self.forgotten.insert(*server);
                (Outcome::Done, true)
            }
            Command::Submit(submission) => {
                let (job, new) = self.jobs.submit(submission)?;
                (Outcome::Submitted(job), new)
            }
            Command::Stop { job, now_ms } => (Outcome::Ended(self.jobs.stop(*job, *now_ms)?), false),
            Command::Release { job } => {
                self.jobs.release(*job)?;
                (Outcome::Done, self.remove_places(*job))
            }
            Command::Delete { job } => {
                let before = self.jobs.delete(*job)?;
                (Outcome::Ended(before), self.remove_places(*job))
            }
            Command::Order { token, order } => {
                if let Some(done) = self.orders.of(*token) {
                    return Ok((done.into(), false));
                }
                // A refused order may be executed when it is sent again.
                let (outcome, moved) = self.change(&order.into())?;
                match outcome {
                    Outcome::Done => self.orders.keep(*token, Done::Done),
                    Outcome::Submitted(job) => self.orders.keep(*token, Done::Submitted(job)),
                    Outcome::Ended(before) => self.orders.keep(*token, Done::Ended(before)),
                    Outcome::Joined(_) | Outcome::Refused(_) => {}
                }
                (outcome, moved)
            }
        })
    }

    /// Removes the places of the job's shards; returns whether there were any.
    fn remove_places(&mut self, job: JobId) -> bool {
        let before = self.shards.len();
        self.shards.retain(|shard, _| shard.job() != job);
        self.shards.len() != before
    }
}

/// The refusal of checkpoints of a job that is not agreed on, or not yet.
pub const UNKNOWN_JOB: &str = "the control group does not know this job";
