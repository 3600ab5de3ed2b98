//! What the entries of a state delta hold. A leader at the level `leader` writes its working copies' changes to the
//! log as deltas.

use paraft_common::{BucketId, Seq, SessionId, Step, Version, WorkerId, histogram::DelayHistogram};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Identifies a delta. Ordered: a later leader's deltas are greater, and so are the later ones of one leader.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct DeltaId {
    /// The Raft term of its leader.
    pub term: u64,
    /// Counts the deltas of that leader's process.
    pub number: u64,
}

/// A changed bucket, as a marker lists it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct DeltaBucket {
    /// The bucket.
    pub bucket: BucketId,
    /// The replicated version that the leader's working copy started from.
    pub base: Version,
    /// The version of the image.
    pub version: Version,
    /// The schedule's clock of the image.
    pub clock: f64,
}

/// The pushes of one member in a delta.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct DeltaMember {
    /// The session.
    pub session: SessionId,
    /// The highest sequence number.
    pub last_seq: Seq,
    /// The last step of each bucket that it pushed. Without them a retry after a failover would be applied twice.
    pub steps: BTreeMap<BucketId, Step>,
}

/// The changes of a delta to the small part of the state.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct DeltaRecord {
    /// By worker.
    pub members: BTreeMap<WorkerId, DeltaMember>,
    /// Delays of the pushes.
    pub delays: DelayHistogram,
    /// Pushes applied.
    pub pushes: u64,
    /// Their payload, in bytes.
    pub bytes: u64,
    /// Acknowledged pushes of an earlier leader that were found lost since the last delta (only at the level
    /// `leader`).
    pub lost: u64,
}

/// A vector of a bucket: 0 for the weights, from 1 for the optimizer's slots.
pub type VectorId = (BucketId, u32);
