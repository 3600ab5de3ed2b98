//! openraft's type configuration, and aliases for this module.

use super::{image::RawImage, replicated::LogChange};
use openraft::{BasicNode, EntryPayload, OptionalSend, RaftTypeConfig, impls, vote::RaftLeaderId};
use std::{cmp::Ordering, fmt, marker::PhantomData, sync::Arc};

/// The log holds changes, and applying returns their outcomes. Node ids are [`super::ReplicaId`]s. A term has one
/// leader (openraft's default allows several), so a proposer may use the term to identify a leader.
pub struct Types<C>(PhantomData<fn() -> C>);

impl<C: LogChange> RaftTypeConfig for Types<C> {
    type D = C;
    type R = C::Outcome;
    type NodeId = u64;
    type Node = BasicNode;
    type Term = u64;
    type LeaderId = LeaderId;
    type Vote = Vote;
    type Payload = EntryPayload<C, u64, BasicNode>;
    type Entry = Entry<C>;
    type AsyncRuntime = impls::TokioRuntime;
    type Responder<T>
        = impls::ProgressResponder<Self, T>
    where
        T: OptionalSend + 'static;
    type Batch<T>
        = impls::InlineBatch<T>
    where
        T: OptionalSend + 'static;
    type ErrorSource = impls::BoxedErrorSource;
}

type LeaderId = impls::leader_id_std::LeaderId<u64, u64>;
/// The leader of an entry as far as logs compare it: the term.
pub type Committed = <LeaderId as RaftLeaderId>::Committed;

pub type Entry<C> = impls::Entry<Committed, EntryPayload<C, u64, BasicNode>>;
pub type LogId = openraft::LogId<Committed>;
pub type Vote = impls::Vote<LeaderId>;
pub type StoredMembership = openraft::StoredMembership<Committed, u64, BasicNode>;
pub type SnapshotMeta = openraft::storage::SnapshotMeta<Committed, u64, BasicNode>;
/// A snapshot shares its bulk with the live state until the state changes.
pub type SnapshotData = Arc<RawImage>;
pub type Snapshot = openraft::storage::Snapshot<Committed, u64, BasicNode, SnapshotData>;

// Implemented by hand: derives would require of `C` what openraft requires of the configuration, which has no
// value.

impl<C> Clone for Types<C> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<C> Copy for Types<C> {}

impl<C> Default for Types<C> {
    fn default() -> Self {
        Self(PhantomData)
    }
}

impl<C> fmt::Debug for Types<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Types")
    }
}

impl<C> PartialEq for Types<C> {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl<C> Eq for Types<C> {}

impl<C> PartialOrd for Types<C> {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl<C> Ord for Types<C> {
    fn cmp(&self, _: &Self) -> Ordering {
        Ordering::Equal
    }
}
