//! Names of replicas.

use paraft_common::ServerId;
use serde::{Deserialize, Serialize};
use std::fmt;

/// A replica of a group: a server and its incarnation. A replica that loses its log is dead. Under its old name, a
/// server that returns with an empty log could vote for a leader that lacks acknowledged entries. So a new
/// incarnation gets a new name, and joins as a learner.
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ReplicaId(pub u64);

impl ReplicaId {
    /// A name that this server has not used before (as certain as 32 random bits).
    pub fn new_incarnation(server: ServerId) -> Self {
        ReplicaId((server.0 << 32) | u64::from(rand::random_range(1..=u32::MAX)))
    }

    /// The server that it is on.
    pub fn server(self) -> ServerId {
        ServerId(self.0 >> 32)
    }
}

impl fmt::Display for ReplicaId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{:08x}", self.server(), self.0 as u32)
    }
}

impl fmt::Debug for ReplicaId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}
