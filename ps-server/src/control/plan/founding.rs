//! The founding of a shard: from the choice of its servers to the directive that its group begins.

use super::{
    directive::{Action, Plan},
    health::Health,
    view::View,
};
use crate::{
    control::state::{Command, Place, Shape},
    raft::ReplicaId,
};
use paraft_common::{JobShard, ServerId, ShardId, placement};
use std::collections::BTreeSet;

/// Names a shard's next founding: the old state is given up.
pub(in crate::control) fn new_founding(shard: JobShard, founding: u64) -> Place {
    Place { founding: founding ^ u64::from(shard.number()), voters: BTreeSet::new(), founded: false }
}

/// The preferred first server: jobs rotate over the servers as the shards of a job do.
fn turn(shard: JobShard) -> ShardId {
    ShardId(shard.job().0.wrapping_add(shard.shard().0))
}

/// The servers for a new shard: the rule that spreads shards, over the servers that can take one. If some are
/// late, a majority begins; the others are added when they arrive.
fn choose(view: &View, shard: JobShard, replicas: u32) -> Option<Vec<ServerId>> {
    let usable: Vec<ServerId> = view.usable().map(|(s, _)| s).collect();
    let waited = view.now.saturating_duration_since(view.since) > view.timeouts.settle;
    let enough = usable.len() >= replicas as usize || waited && usable.len() * 2 > replicas as usize;
    let places = placement::replicas_of(turn(shard), usable.len() as u32, replicas);
    enough.then(|| places.into_iter().filter_map(|p| usable.get(p.0 as usize).copied()).collect())
}

pub(super) fn host(place: &Place, shape: &Shape) -> Action {
    Action::Host { founding: place.founding, shards: shape.shards, durability: shape.durability }
}

/// No place is agreed on yet: name the founding, so that servers can host the shard.
pub(super) fn start(view: &View, shard: JobShard, founding: u64, replicas: u32, plan: &mut Plan) {
    if choose(view, shard, replicas).is_some() {
        let place = Place { founding, voters: BTreeSet::new(), founded: false };
        plan.commands.push(Command::Place { shard, place });
    }
}

/// Named, but not founded: start replicas, agree on them, agree that they begin. Only then does one get the
/// directive to begin. So a group that has begun, and may have acknowledged something, never counts as one
/// that has not.
pub(super) fn found(
    view: &View,
    shard: JobShard,
    place: &Place,
    shape: &Shape,
    plan: &mut Plan,
) -> (Health, String) {
    let replicas = shape.replicas;
    let hosts = |s: ServerId| {
        view.live(s).and_then(|r| r.replicas.get(&shard)).filter(|r| r.founding == place.founding)
    };
    if place.voters.is_empty() {
        let Some(servers) = choose(view, shard, replicas) else {
            return (Health::Placing, format!("waiting for {replicas} servers"));
        };
        let mut nodes = BTreeSet::new();
        let chosen = servers.len();
        for s in servers {
            match hosts(s) {
                Some(r) => _ = nodes.insert(r.node),
                None => plan.tell(s, shard, host(place, shape)),
            }
        }
        if nodes.len() == chosen {
            let place = Place { voters: nodes, ..place.clone() };
            plan.commands.push(Command::Place { shard, place });
        }
        return (Health::Placing, String::new());
    }
    let all_there = place.voters.iter().all(|n| hosts(n.server()).is_some_and(|r| r.node == *n));
    let gone = |n: &ReplicaId| match view.live(n.server()) {
        Some(r) => r.replicas.get(&shard).is_none_or(|r| r.node != *n),
        None => view.age(n.server()) > view.timeouts.replace,
    };
    if all_there {
        plan.commands.push(Command::Place { shard, place: Place { founded: true, ..place.clone() } });
    } else if place.voters.iter().any(gone) {
        // A replica was lost before the group began.
        start(view, shard, view.founding ^ u64::from(shard.number()), replicas, plan);
    }
    (Health::Placing, String::new())
}

/// The fleet has agreed that the group begins, and a majority of its voters reports that it has not: one of
/// them has to begin it. With fewer such reports, a silent voter may know that the group has begun, perhaps
/// with other first voters.
pub(super) fn begin(
    shard: JobShard,
    place: &Place,
    here: impl Fn(ReplicaId) -> Option<bool>,
    view: &View,
    plan: &mut Plan,
) -> bool {
    let fresh = place.voters.iter().filter(|n| here(**n) == Some(false)).count();
    if fresh * 2 <= place.voters.len() || place.voters.iter().any(|n| here(*n) == Some(true)) {
        return false;
    }
    // Preferred leaders rotate over the servers.
    let count = place.voters.len();
    let from_preferred = place.voters.iter().cycle().skip(turn(shard).0 as usize % count.max(1)).take(count);
    let Some(first) = from_preferred.copied().find(|n| here(*n).is_some()) else { return false };
    let address = |n: &ReplicaId| Some((*n, view.state.servers.get(&n.server())?.address.clone()));
    let members = place.voters.iter().filter_map(address).collect();
    plan.tell(first.server(), shard, Action::Found { founding: place.founding, members });
    true
}
