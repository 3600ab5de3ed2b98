//! What a plan orders: a server's task for a shard, and the whole plan.

use super::health::Health;
use crate::{
    control::state::Command,
    raft::{Digest, ReplicaId},
};
use paraft_common::{Durability, JobShard, ServerId, auto};
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

/// A change of the control group's own membership.
#[derive(Clone, Debug, PartialEq)]
pub enum ControlChange {
    /// Add a learner.
    Learner(ReplicaId, String),
    /// Change the set of voters.
    Voters(BTreeSet<ReplicaId>),
    /// Remove these members, which do not vote.
    Remove(BTreeSet<ReplicaId>),
}

/// Everything that should happen now.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Plan {
    /// Commands for the control group's log.
    pub commands: Vec<Command>,
    /// Directives for the servers.
    pub directives: BTreeMap<ServerId, Vec<Directive>>,
    /// A change of the control group itself.
    pub control: Option<ControlChange>,
    /// The health of each shard.
    pub health: BTreeMap<JobShard, (Health, String)>,
    /// Shards of which every replica is known to be lost.
    pub all_lost: BTreeSet<JobShard>,
}

impl Plan {
    /// Adds a directive.
    pub(super) fn tell(&mut self, server: ServerId, shard: JobShard, what: Action) {
        self.directives.entry(server).or_default().push(Directive { shard, what });
    }
}
