//! The commands that change the fleet's agreed state, and their outcomes.

use crate::{
    job::{Difference, JobFacts, JobState, Submission},
    order::{Done, Order},
    replica_id::ReplicaId,
    shape::Shape,
};
use paraft_common::{JobId, JobShard, ServerId};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

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

impl From<Done> for Outcome {
    fn from(done: Done) -> Self {
        match done {
            Done::Done => Self::Done,
            Done::Submitted(job) => Self::Submitted(job),
            Done::Ended(before) => Self::Ended(before),
        }
    }
}
