//! What a server is told to do for a shard.

use crate::raft::{Digest, ReplicaId};
use paraft_common::{Durability, JobShard, auto};
use std::collections::{BTreeMap, BTreeSet};

/// An instruction to a server about a shard.
#[derive(Clone, Debug, PartialEq)]
pub struct Directive {
    /// The shard.
    pub shard: JobShard,
    /// The action.
    pub what: Action,
}

/// What a server should do for a shard.
#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    /// Start a new replica.
    Host {
        /// The founding it belongs to.
        founding: u64,
        /// How many shards the job has.
        shards: u32,
        /// Where its log is.
        durability: Durability,
    },
    /// Found the group.
    Found {
        /// The founding it belongs to.
        founding: u64,
        /// The first voters.
        members: BTreeMap<ReplicaId, String>,
    },
    /// Stop this replica and forget it.
    Retire {
        /// The replica.
        node: ReplicaId,
        /// The log index of a membership without this replica. A replica that knows a later membership with
        /// itself in it stays: the plan is outdated.
        index: u64,
    },
    /// Add a learner.
    Learner(ReplicaId, String),
    /// Change the set of voters.
    Voters(BTreeSet<ReplicaId>),
    /// Transfer the leadership.
    Transfer(ReplicaId),
    /// Switch the job's mode, as the rule decides.
    Switch(auto::Switch),
    /// The job was deleted, or its weights were kept for long enough: delete everything of the shard on this
    /// server.
    Remove,
    /// End the job at its current step.
    Stop,
    /// Stop this replica: its state differs from the others'.
    Diverged {
        /// The replica.
        node: ReplicaId,
        /// Its digest, and the log position of that digest.
        at: Digest,
        /// The majority's digest at that position.
        majority: u64,
    },
}
