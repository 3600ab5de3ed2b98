//! Replicas and leaders, evenly over the servers.

use super::{Action, Health, Plan, View, can_lead};
use crate::raft::ReplicaId;
use paraft_common::{JobShard, ServerId};
use std::collections::BTreeMap;

/// A replica that would be better elsewhere.
#[derive(Clone, Copy)]
pub(super) struct Move {
    pub shard: JobShard,
    pub from: ReplicaId,
    pub to: ServerId,
}

/// The move that evens out the servers' bytes most, if any does: from the fullest to the emptiest, of a replica that
/// is smaller than the difference. So every move makes the sum of the squares smaller, and they end. Only what votes
/// counts, so that the choice stays the same while a move is under way; and only a fleet that is whole and has
/// settled is evened out.
pub(super) fn uneven(view: &View) -> Option<Move> {
    if view.now.saturating_duration_since(view.since) <= view.timeouts.settle {
        return None;
    }
    let mut load: BTreeMap<ServerId, u64> = view.usable().map(|(s, _)| (s, 0)).collect();
    if load.len() != view.state.servers.values().filter(|s| !s.draining).count() {
        return None; // one is silent: it may come back, or it will be replaced
    }
    let mut all = Vec::new();
    // One that has yet to begin holds nothing.
    for (shard, place) in view.state.shards.iter().filter(|(_, p)| p.founded) {
        let replicas = view.state.shape_of(shard.job())?.replicas;
        let (_, lead) = view.leader(*shard, place.founding)?;
        let now = &lead.membership;
        let bytes = lead.bytes.max(1); // an empty model's shards count too
        let well = |n: &ReplicaId| {
            let here = view.live(n.server()).and_then(|r| r.replicas.get(shard));
            here.is_some_and(|r| r.node == *n && r.trouble.is_empty())
        };
        if now.changing || now.voters.len() < replicas as usize || !now.voters.iter().all(well) {
            return None;
        }
        for n in &now.voters {
            *load.get_mut(&n.server())? += bytes; // a draining server's replicas come first
        }
        all.push((*shard, now, bytes));
    }
    let load = &load;
    let moves = all.iter().flat_map(|(shard, now, bytes)| {
        let free = load.keys().filter(|s| now.voters.iter().all(|n| n.server() != **s));
        free.flat_map(move |to| {
            now.voters.iter().filter_map(move |from| {
                let gain = load.get(&from.server())?.checked_sub(*load.get(to)?)?.checked_sub(*bytes)?;
                (gain > 0).then_some((gain, Move { shard: *shard, from: *from, to: *to }))
            })
        })
    });
    moves.max_by_key(|(gain, m)| (*gain, std::cmp::Reverse((m.shard, m.from, m.to)))).map(|(_, m)| m)
}

/// Leaders go where few are, by bytes; away from servers that are being emptied. One at a time.
pub(super) fn spread_leaders(view: &View, plan: &mut Plan) {
    let mut led = BTreeMap::<ServerId, u64>::new();
    let mut moves = Vec::new();
    let settled = view.now.saturating_duration_since(view.since) > view.timeouts.settle;
    for (shard, place) in view.state.shards.iter().filter(|(_, p)| p.founded) {
        let Some((at, lead)) = view.leader(*shard, place.founding) else { continue };
        let able = |n: &&ReplicaId| lead.caught_up.contains(n) && can_lead(view, *shard, **n);
        let fewest =
            |n: &&ReplicaId| (led.get(&n.server()).copied().unwrap_or(0), n.server() != at, n.server());
        let Some(best) = lead.membership.voters.iter().filter(able).min_by_key(fewest).copied() else {
            continue;
        };
        // Equal loads stay as they are; an empty model still counts its shards.
        *led.entry(best.server()).or_default() += lead.bytes.max(1);
        let busy = lead.membership.changing || plan.health.get(shard).is_some_and(|h| h.0 != Health::Serving);
        // One change of a shard at a time.
        let told = plan.directives.get(&at).is_some_and(|list| list.iter().any(|d| d.shard == *shard));
        if best.server() != at && !told && (view.draining(at) || settled && !busy) {
            moves.push((at, *shard, best));
        }
    }
    if let Some((at, shard, to)) = moves.into_iter().next() {
        plan.tell(at, shard, Action::Transfer(to));
    }
}
