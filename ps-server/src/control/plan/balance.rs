//! Balances replicas and leaders over the servers.

use super::{
    directive::{Action, Plan},
    health::Health,
    view::{ReplicaReport, View},
    voters::can_lead,
};
use crate::{control::state::Place, raft::ReplicaId};
use paraft_common::{JobShard, ServerId};
use std::collections::BTreeMap;

/// A replica's move to a better server.
#[derive(Clone, Copy)]
pub(super) struct Move {
    pub shard: JobShard,
    pub from: ReplicaId,
    pub to: ServerId,
}

/// Whether a server with `full` gains enough by reducing its difference to another by `gain`. A small gain is
/// not worth a move's cost: with jobs that come and go there would be moves all the time.
pub fn is_worth_it(gain: u64, full: u64) -> bool {
    gain > full / 8
}

/// The move that balances the servers' bytes most, if any does: from the fullest to the emptiest, of a
/// replica smaller than the difference. So every move reduces the sum of the squares, and the moves end. Only
/// voters count, so the choice stays the same while a move is in progress. Only a whole fleet without recent
/// changes is balanced.
pub(super) fn uneven(view: &View) -> Option<Move> {
    if view.now.saturating_duration_since(view.since) <= view.timeouts.settle {
        return None;
    }
    let mut load: BTreeMap<ServerId, u64> = view.usable().map(|(s, _)| (s, 0)).collect();
    if load.len() != view.state.servers.values().filter(|s| !s.draining).count() {
        return None; // one is silent: it may come back, or it will be replaced
    }
    let mut all = Vec::new();
    // A group that has not begun holds nothing.
    for (shard, place) in view.state.shards.iter().filter(|(_, p)| p.founded) {
        let replicas = view.state.shape_of(shard.job())?.replicas;
        let (_, lead) = view.leader(*shard, place.founding)?;
        let now = &lead.membership;
        let bytes = lead.bytes.max(1); // an empty model's shards count too
        let well = |n: &ReplicaId| view.working(*shard, *n).is_some();
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
                let full = *load.get(&from.server())?;
                let gain = full.checked_sub(*load.get(to)?)?.checked_sub(*bytes)?;
                is_worth_it(gain, full).then_some((gain, Move { shard: *shard, from: *from, to: *to }))
            })
        })
    });
    moves.max_by_key(|(gain, m)| (*gain, std::cmp::Reverse((m.shard, m.from, m.to)))).map(|(_, m)| m)
}

/// Moves leaders to servers that lead few bytes, and away from draining servers. One at a time: the move that
/// balances the servers most, of a shard smaller than the difference, so that the moves end.
pub(super) fn spread_leaders(view: &View, plan: &mut Plan) {
    let led_now = |(shard, place): (&JobShard, &Place)| {
        let (at, lead) = view.leader(*shard, place.founding).filter(|_| place.founded)?;
        // An empty model still counts its shards.
        Some((*shard, at, lead, lead.bytes.max(1)))
    };
    let leaders: Vec<_> = view.state.shards.iter().filter_map(led_now).collect();
    let mut led = BTreeMap::<ServerId, u64>::new();
    for (_, at, _, bytes) in &leaders {
        *led.entry(*at).or_default() += bytes;
    }
    let load = |server: ServerId| led.get(&server).copied().unwrap_or(0);
    let settled = view.now.saturating_duration_since(view.since) > view.timeouts.settle;
    let may_move = |shard: JobShard, at: ServerId, lead: &ReplicaReport| {
        let busy =
            lead.membership.changing || plan.health.get(&shard).is_some_and(|h| h.0 != Health::Serving);
        // One change of a shard at a time.
        let told = plan.directives.get(&at).is_some_and(|list| list.iter().any(|d| d.shard == shard));
        !told && (view.draining(at) || settled && !busy)
    };
    let moves = leaders.iter().filter(|(shard, at, lead, _)| may_move(*shard, *at, lead));
    let moves = moves.flat_map(|(shard, at, lead, bytes)| {
        let able = |n: &&ReplicaId| lead.caught_up.contains(n) && can_lead(view, *shard, **n);
        let others = lead.membership.voters.iter().filter(able).filter(|n| n.server() != *at);
        others.filter_map(|to| {
            let gain = load(*at).saturating_sub(load(to.server())).saturating_sub(*bytes);
            let leaves = view.draining(*at);
            (leaves || is_worth_it(gain, load(*at))).then_some(((leaves, gain), (*at, *shard, *to)))
        })
    });
    let best = moves.max_by_key(|(gain, (_, shard, to))| (*gain, std::cmp::Reverse((*shard, to.server()))));
    if let Some((_, (at, shard, to))) = best {
        plan.tell(at, shard, Action::Transfer(to));
    }
}
