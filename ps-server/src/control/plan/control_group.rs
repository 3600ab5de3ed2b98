//! The control group's own membership.

use super::{directive::ControlChange, view::View, voters::keeps_majority};
use crate::raft::ReplicaId;
use paraft_common::{ServerId, placement};
use std::collections::BTreeSet;

/// The control group: an odd number of voters, at most five, on live servers; the others are learners.
pub(super) fn control_change(view: &View) -> Option<ControlChange> {
    if view.control.changing || view.state.fleet == 0 {
        return None;
    }
    let members = &view.control.members;
    // Unreachable for ever: its server was forgotten, or has lost its disk and has another name.
    let former = |n: &&ReplicaId| {
        let renamed = view.live(n.server()).is_some_and(|r| r.node != **n);
        !view.control.voters.contains(n) && (view.forgotten(n.server()) || renamed)
    };
    let former: BTreeSet<ReplicaId> = members.keys().filter(former).copied().collect();
    if !former.is_empty() {
        return Some(ControlChange::Remove(former));
    }
    for (_, report) in view.all_live().filter(|(s, _)| view.reached(*s)) {
        if members.get(&report.node) != Some(&report.address) {
            return Some(ControlChange::Learner(report.node, report.address.clone()));
        }
    }
    // A voter keeps its vote; of the voters, silent ones lose it first.
    let votes = |n: &ReplicaId| view.control.voters.contains(n);
    // A learner gets a vote once it was reached and has the leader's log.
    let may_vote = |s: ServerId, n: &ReplicaId| {
        votes(n) || members.contains_key(n) && view.reached(s) && view.control_caught_up.contains(n)
    };
    let mut able: Vec<(bool, bool, ReplicaId)> = view
        .all_live()
        .filter(|(s, r)| !view.draining(*s) && may_vote(*s, &r.node))
        .map(|(_, r)| (!view.control.voters.contains(&r.node), false, r.node))
        .collect();
    // A silent server keeps its vote until its replacement is due.
    let kept = view.control.voters.iter().filter(|n| {
        let server = n.server();
        !view.forgotten(server) && view.live(server).is_none() && view.age(server) <= view.timeouts.replace
    });
    able.extend(kept.map(|n| (false, true, *n)));
    able.sort();
    let count = placement::control_voters(able.len());
    // Rather keep one dead voter too many than a group that depends on one server; three are as good as five
    // of which two are gone.
    if count < 3 && count < view.control.voters.len() && able.len() < view.control.voters.len() {
        let vanished =
            view.control.voters.iter().any(|n| view.live(n.server()).is_some_and(|r| r.node != *n));
        if !vanished {
            return None;
        }
    }
    let voters: BTreeSet<ReplicaId> = able.iter().take(count).map(|(_, _, n)| *n).collect();
    // A change that its own voters cannot commit would block every later one.
    let works = |n: &ReplicaId| {
        let there = view.live(n.server()).is_some_and(|r| r.node == *n && r.control_trouble.is_empty());
        there && view.control_caught_up.contains(n)
    };
    let safe = keeps_majority(&view.control.voters, &voters, works);
    (safe && voters != view.control.voters).then_some(ControlChange::Voters(voters))
}
