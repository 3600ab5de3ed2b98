//! What the logs of a server's Raft groups hold: changes of replicated state, and their outcomes.
//!
//! All of it is plain data, encoded by position ([`header`]): a log on disk and a message between servers of another
//! release have this layout, so add variants at the end, and change or remove none. The states that apply the changes
//! are in `paraft-server`; `paraft-raft` replicates them.
//!
//! - [`shard`]: commands of a shard's log. [`delta`]: their state deltas.
//! - [`control`]: commands of the control group's log; [`job`], [`order`], [`shape`]: what they hold.
//! - [`replica_id`]: names of replicas.

pub mod control;
pub mod delta;
pub mod header;
pub mod job;
pub mod order;
pub mod replica_id;
pub mod shape;
pub mod shard;

pub use replica_id::ReplicaId;

use paraft_common::Payload;
use serde::{Deserialize, Serialize};
use std::fmt;

/// An entry of a log. Its layout is that of logs on disk and of messages between servers.
#[derive(Clone, PartialEq, Serialize, Deserialize)]
#[allow(missing_docs)]
pub enum Change {
    Shard(shard::Proposal),
    Control(control::Command),
    /// Changes nothing: every replica hashes its state here.
    Check,
}

impl Change {
    /// The bulk, which is sent and stored beside the rest: serde omits it.
    pub fn payload(&self) -> &Payload {
        static NONE: Payload = Payload::EMPTY;
        match self {
            Change::Shard(p) => &p.payload,
            Change::Control(_) | Change::Check => &NONE,
        }
    }

    /// Sets the bulk.
    pub fn attach(&mut self, payload: Payload) {
        if let Change::Shard(p) = self {
            p.payload = payload;
        }
    }

    /// Whether it is a check.
    pub fn is_check(&self) -> bool {
        matches!(self, Change::Check)
    }
}

impl fmt::Debug for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Change::Shard(p) => p.fmt(f),
            Change::Control(c) => c.fmt(f),
            Change::Check => f.write_str("Check"),
        }
    }
}

impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

/// The result of applying a change; only the leader that proposed it reads this.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[allow(missing_docs)]
pub enum Applied {
    /// A blank or membership entry, or an entry of another kind of group.
    #[default]
    None,
    Shard(shard::Outcome),
    Control(control::Outcome),
}
