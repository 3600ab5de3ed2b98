//! The state machines of a server's Raft groups: shards, and the fleet's agreed state.
//!
//! `raft` knows neither, and a state knows only its own changes. This module joins them: one log format for
//! all groups, and one compiled Raft for both kinds of state.

pub use crate::raft::Group;
pub use paraft_changes::{Applied, Change};

use crate::{
    control::{self, Agreed},
    raft::{self, ApplyError, GroupName, OutdatedMemory, ProposeError, RawImage, Replicated},
    shard::{
        ObservedShard, Outcome, Proposal, Shard,
        leader::{GroupStatus, OutcomeFuture, Replication},
    },
};
use futures::{FutureExt, future::BoxFuture};
use paraft_common::{JobShard, Payload};
use std::{fmt, sync::Arc};
use tokio::sync::watch;

/// A Raft group of the fleet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum GroupId {
    /// Servers, placement, generation.
    Control,
    /// Weights and optimizer state.
    Shard(JobShard),
}

impl GroupId {
    /// Its number on the wire.
    pub fn to_wire(self) -> u32 {
        match self {
            GroupId::Control => u32::MAX,
            GroupId::Shard(s) => s.number(),
        }
    }

    /// From its number on the wire.
    pub fn from_wire(n: u32) -> Self {
        if n == u32::MAX { GroupId::Control } else { GroupId::Shard(JobShard::from_number(n)) }
    }
}

impl fmt::Display for GroupId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            GroupId::Control => f.write_str("the control group"),
            GroupId::Shard(s) => s.fmt(f),
        }
    }
}

impl From<GroupId> for GroupName {
    fn from(id: GroupId) -> Self {
        // Workers wake a shard; nothing would wake the control group.
        let watched = id == GroupId::Control;
        GroupName { number: id.to_wire(), text: id.to_string().into(), watched }
    }
}

/// A state that one kind of group replicates.
pub trait Kind: Replicated {
    /// The change, if the entry is of this kind of group.
    fn of(change: &Change) -> Option<&Self::Change>;
    /// Converts an outcome to the common type.
    fn applied(outcome: Self::Outcome) -> Applied;
}

impl Kind for Shard {
    fn of(change: &Change) -> Option<&Proposal> {
        match change {
            Change::Shard(proposal) => Some(proposal),
            Change::Control(_) | Change::Check => None,
        }
    }

    fn applied(outcome: Outcome) -> Applied {
        Applied::Shard(outcome)
    }
}

impl Kind for ObservedShard {
    fn of(change: &Change) -> Option<&Proposal> {
        Shard::of(change)
    }

    fn applied(outcome: Outcome) -> Applied {
        Shard::applied(outcome)
    }
}

impl Kind for Agreed {
    fn of(change: &Change) -> Option<&control::Command> {
        match change {
            Change::Control(command) => Some(command),
            Change::Shard(_) | Change::Check => None,
        }
    }

    fn applied(outcome: control::Outcome) -> Applied {
        Applied::Control(outcome)
    }
}

/// A state, as a group of this server hosts it: entries of another kind of group change nothing.
pub struct Hosted<S>(pub Arc<S>);

impl<S: Kind> Replicated for Hosted<S> {
    type Change = Change;
    type Outcome = Applied;

    fn apply(&self, change: &Change) -> Result<Applied, ApplyError> {
        match S::of(change) {
            Some(change) => self.0.apply(change).map(S::applied),
            None => Ok(Applied::None),
        }
    }

    fn apply_run(&self, changes: &[&Change]) -> Result<Vec<Applied>, ApplyError> {
        let own: Option<Vec<_>> = changes.iter().map(|c| S::of(c)).collect();
        match own {
            Some(own) => Ok(self.0.apply_run(&own)?.into_iter().map(S::applied).collect()),
            None => changes.iter().map(|c| self.apply(c)).collect(),
        }
    }

    fn touched(&self, change: &Change) -> u64 {
        S::of(change).map_or(0, |change| self.0.touched(change))
    }

    fn share(&self) -> u32 {
        self.0.share()
    }

    fn in_term(&self, term: u64) {
        self.0.in_term(term);
    }

    fn image(&self) -> RawImage {
        self.0.image()
    }

    fn install_parts(
        &self,
        head: &[u8],
        parts: &mut dyn Iterator<Item = Result<Payload, String>>,
    ) -> Result<(), ApplyError> {
        self.0.install_parts(head, parts)
    }

    fn room_for(&self, head: &[u8]) -> Result<(), ApplyError> {
        self.0.room_for(head)
    }

    fn bytes(&self) -> u64 {
        self.0.bytes()
    }

    fn order(&self) -> Vec<u32> {
        self.0.order()
    }

    fn outdated(&self, beyond: u64) -> OutdatedMemory {
        self.0.outdated(beyond)
    }
}

impl GroupStatus for Group {
    fn leads(&self) -> bool {
        Group::leadership(self).borrow().leads
    }

    fn leader_address(&self) -> Option<String> {
        Group::leader_address(self)
    }

    fn is_asleep(&self) -> bool {
        Group::is_asleep(self)
    }

    fn has_slept(&self) -> bool {
        Group::has_slept(self)
    }
}

impl Replication for Group {
    fn propose(&self, proposal: Proposal) -> BoxFuture<'_, Result<OutcomeFuture, ProposeError>> {
        let outcome = |applied| match applied {
            Applied::Shard(outcome) => outcome,
            Applied::None | Applied::Control(_) => Outcome::None,
        };
        async move {
            let waits = Group::propose(self, Change::Shard(proposal)).await?;
            Ok(waits.map(move |applied| applied.map(outcome)).boxed())
        }
        .boxed()
    }

    fn barrier(&self) -> BoxFuture<'static, Result<(), ProposeError>> {
        let group = self.clone();
        async move { Group::barrier(&group).await }.boxed()
    }

    fn leadership(&self) -> watch::Receiver<raft::Leadership> {
        Group::leadership(self)
    }

    fn sleep(&self) -> BoxFuture<'static, bool> {
        let group = self.clone();
        async move { Group::sleep(&group).await }.boxed()
    }

    fn ensure_awake(&self) -> BoxFuture<'static, Result<(), ProposeError>> {
        let group = self.clone();
        async move { Group::ensure_awake(&group).await }.boxed()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::room::Room;
    use paraft_common::JobId;

    #[test]
    fn a_hosted_shard_works_in_its_jobs_share() {
        let shard = Shard::within(Room::unlimited(), JobShard::first(JobId(7)), 1);
        assert_eq!(Hosted(Arc::new(shard)).share(), 7);
        assert_eq!(Hosted(Arc::new(Agreed::default())).share(), u32::MAX);
    }
}
