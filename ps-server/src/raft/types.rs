//! openraft's type configuration, and the aliases that the siblings use.

use crate::shard::{Outcome, Proposal};
use openraft::type_config::alias as of;

openraft::declare_raft_types!(
    /// Proposals in, outcomes out; node ids are server ids.
    pub Types:
        D = Proposal,
        R = Outcome,
        NodeId = u64,
);

pub type Entry = of::EntryOf<Types>;
pub type LogId = of::LogIdOf<Types>;
pub type Vote = of::VoteOf<Types>;
pub type StoredMembership = of::StoredMembershipOf<Types>;
pub type SnapshotMeta = of::SnapshotMetaOf<Types>;
pub type Snapshot = of::SnapshotOf<Types, super::machine::SnapshotData>;
pub type Raft = openraft::Raft<Types, super::machine::Machine>;
