//! What a leader needs of its Raft group, and all that it knows of Raft.

use crate::{
    raft::{Leadership, ProposeError},
    shard::command::{Outcome, Proposal},
};
use futures::future::BoxFuture;
use tokio::sync::watch;

/// The status of the Raft group, available without waiting.
pub trait GroupStatus {
    /// Whether this replica leads, to its knowledge.
    fn leads(&self) -> bool;
    /// The leader's address, if one is known and it is not this replica.
    fn leader_address(&self) -> Option<String>;
    /// Whether this replica sleeps.
    fn is_asleep(&self) -> bool;
    /// Whether it has slept since the last call: a leader may be deposed in its sleep without its knowledge.
    fn has_slept(&self) -> bool;
}

/// A replica's group.
pub trait Replication: GroupStatus + Send + Sync + 'static {
    /// Proposes an entry. Entries are applied in the order of the proposals. The inner future returns the outcome
    /// once the entry is applied here.
    fn propose(&self, proposal: Proposal) -> BoxFuture<'_, Result<OutcomeFuture, ProposeError>>;
    /// Returns when this replica leads and has applied everything that was committed before the call.
    fn barrier(&self) -> BoxFuture<'static, Result<(), ProposeError>>;
    /// Watches the leadership; closes when the replica shuts down.
    fn leadership(&self) -> watch::Receiver<Leadership>;
    /// Puts the group to sleep if it is idle; returns whether it sleeps.
    fn sleep(&self) -> BoxFuture<'static, bool>;
    /// Returns when this replica may act.
    fn ensure_awake(&self) -> BoxFuture<'static, Result<(), ProposeError>>;
}

/// A proposal's outcome, once it is known.
pub type OutcomeFuture = BoxFuture<'static, Result<Outcome, ProposeError>>;
