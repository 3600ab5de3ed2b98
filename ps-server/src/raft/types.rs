//! openraft's type configuration, and the aliases that the siblings use.

use super::replicated::{Applied, Change, SnapshotData};
use openraft::type_config::alias as of;

openraft::declare_raft_types!(
    /// Changes in, what they gave out. Node ids are [`super::ReplicaId`]s. A term has one leader (openraft's default lets
    /// a term have several): shards take a term for the name of a leader, in state deltas for one.
    pub Types:
        D = Change,
        R = Applied,
        NodeId = u64,
        LeaderId = openraft::impls::leader_id_std::LeaderId<u64, u64>,
);

pub type Entry = of::EntryOf<Types>;
pub type LogId = of::LogIdOf<Types>;
pub type Vote = of::VoteOf<Types>;
pub type StoredMembership = of::StoredMembershipOf<Types>;
pub type SnapshotMeta = of::SnapshotMetaOf<Types>;
pub type Snapshot = of::SnapshotOf<Types, SnapshotData>;
