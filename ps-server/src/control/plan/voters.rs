//! The voters of a shard's group: when they change, and who leads next.

use super::{
    directive::{Action, Plan},
    view::{ReplicaReport, View},
};
use crate::raft::ReplicaId;
use paraft_common::{JobShard, ServerId};
use std::collections::BTreeSet;

/// Whether a change of voters keeps what a group survives: of the new voters, at least as many work and are
/// caught up as of the old ones, or all; and they are a majority.
pub(in crate::control) fn keeps_majority(
    now: &BTreeSet<ReplicaId>,
    then: &BTreeSet<ReplicaId>,
    works: impl Fn(&ReplicaId) -> bool,
) -> bool {
    let count = |voters: &BTreeSet<ReplicaId>| voters.iter().filter(|n| works(n)).count();
    count(then) >= count(now).min(then.len()) && count(then) * 2 > then.len()
}

/// Changes the set of voters. A leader keeps its vote while another replica can take over: otherwise its
/// workers would wait for an election.
pub(super) fn vote(
    view: &View,
    shard: JobShard,
    (leads_at, lead): (ServerId, &ReplicaReport),
    voters: BTreeSet<ReplicaId>,
    plan: &mut Plan,
) {
    let leaves = !voters.contains(&lead.node);
    let works = |n: &ReplicaId| lead.caught_up.contains(n) && view.working(shard, *n).is_some();
    match successor(view, shard, lead).filter(|_| leaves) {
        Some(successor) => plan.tell(leads_at, shard, Action::Transfer(successor)),
        None if keeps_majority(&lead.membership.voters, &voters, works) => {
            plan.tell(leads_at, shard, Action::Voters(voters));
        }
        None => {} // until the others have caught up
    }
}

/// Whether this voter could lead, as far as is known.
pub(super) fn can_lead(view: &View, shard: JobShard, n: ReplicaId) -> bool {
    view.working(shard, n).is_some() && !view.draining(n.server())
}

/// The successor of a leader that has to leave: of the replicas that can lead, one that has caught up, on the
/// server that leads least. Catching up is no condition: if none has, one must still take over.
fn successor(view: &View, shard: JobShard, lead: &ReplicaReport) -> Option<ReplicaId> {
    let key = |n: &ReplicaId| {
        let led = view.live(n.server()).map(|r| r.replicas.values().filter(|r| r.leads).count());
        (!lead.caught_up.contains(n), led, n.server())
    };
    let others = lead.membership.voters.iter().copied().filter(|n| *n != lead.node);
    others.filter(|n| can_lead(view, shard, *n)).min_by_key(key)
}
