//! openraft's type configuration, and aliases for this module.

use super::image::RawImage;
use openraft::{BasicNode, EntryPayload, OptionalSend, RaftTypeConfig, impls, vote::RaftLeaderId};
use paraft_changes::{Applied, Change};

/// The log holds changes, and applying returns their outcomes. Node ids are [`super::ReplicaId`]s. A term has one
/// leader (openraft's default allows several), so a proposer may use the term to identify a leader.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Types;

impl RaftTypeConfig for Types {
    type D = Change;
    type R = Applied;
    type NodeId = u64;
    type Node = BasicNode;
    type Term = u64;
    type LeaderId = LeaderId;
    type Vote = Vote;
    type Payload = EntryPayload<Change, u64, BasicNode>;
    type Entry = Entry;
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

pub type Entry = impls::Entry<Committed, EntryPayload<Change, u64, BasicNode>>;
pub type LogId = openraft::LogId<Committed>;
pub type Vote = impls::Vote<LeaderId>;
pub type StoredMembership = openraft::StoredMembership<Committed, u64, BasicNode>;
pub type SnapshotMeta = openraft::storage::SnapshotMeta<Committed, u64, BasicNode>;
/// A snapshot shares its bulk with the live state until the state changes.
pub type Snapshot = openraft::storage::Snapshot<Committed, u64, BasicNode, RawImage>;
