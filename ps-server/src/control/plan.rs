//! What should happen next, from the agreed state and the servers' reports. A pure function: the leader of
//! the control group calls it a few times a second, and plans again what was lost in transit.
//!
//! A shard's life:
//!
//! ```text
//! placing ──all hosted──▶ placed ──agreed──▶ begins ──▶ serving ⇄ repairing (learner ▶ caught up ▶ voter)
//!    ▲                                            └──every replica lost its log──▶ lost ─┐
//!    └───────────────────────────── founded again, under another founding ─────────────────┘
//! ```

mod balance;
mod checks;
mod control_group;
mod directive;
mod founding;
mod health;
mod jobs;
mod lost;
mod view;
mod voters;

pub use directive::{Action, ControlChange, Directive, Plan};
pub(super) use founding::new_founding;
pub use health::Health;
pub use view::{AsideReport, JobReport, LastReport, ReplicaReport, Report, Timeouts, View};
#[cfg(test)]
pub(super) use voters::keeps_majority;

use super::state::{Command, Place, Shape};
use crate::raft::ReplicaId;
#[cfg(test)]
pub use balance::is_worth_it;
use balance::{Move, spread_leaders, uneven};
use checks::compare;
use control_group::control_change;
use founding::{begin, found, host, start};
use health::{missing, no_majority, unless_refused};
use jobs::{end_job, note_job, remove};
use lost::is_lost;
use paraft_common::{JobShard, ServerId};
use std::collections::BTreeSet;
use voters::vote;

/// Makes the plan.
pub fn plan(view: &View) -> Plan {
    let mut plan = Plan { control: control_change(view), ..Plan::default() };
    if view.state.fleet == 0 {
        return plan;
    }
    let mv = uneven(view);
    for (id, job) in view.state.jobs.iter().filter(|(_, j)| !j.released) {
        for shard in JobShard::all(id, job.shape.shards) {
            let mv = mv.filter(|m| m.shard == shard);
            let shape = &job.shape;
            let health = match view.state.shards.get(&shard) {
                Some(place) if place.founded => {
                    let health = keep(view, shard, place, shape, mv, &mut plan);
                    unless_refused(view, shard, place, health)
                }
                Some(place) => found(view, shard, place, shape, &mut plan),
                // The job never began, and never will.
                None if job.state.has_ended() => continue,
                None => {
                    start(view, shard, view.founding ^ u64::from(shard.number()), shape.replicas, &mut plan);
                    (Health::Placing, String::new())
                }
            };
            plan.health.insert(shard, health);
        }
        plan.commands.extend(note_job(view, id, job));
        end_job(view, id, job, &mut plan);
    }
    spread_leaders(view, &mut plan);
    remove(view, &mut plan);
    plan
}

/// A founded shard: repair its replicas or, if none needs repair, make the move that balances the servers.
fn keep(
    view: &View,
    shard: JobShard,
    place: &Place,
    shape: &Shape,
    mv: Option<Move>,
    plan: &mut Plan,
) -> (Health, String) {
    let replicas = shape.replicas;
    let here = |n: ReplicaId| {
        view.live(n.server())
            .and_then(|r| Some(&**r.replicas.get(&shard)?))
            .filter(|r| r.node == n && r.trouble.is_empty())
    };
    // Its server runs, but the replica is missing: it has lost its log. A replica that waits for its storage
    // still has it.
    let vanished = |n: ReplicaId| {
        let answers = view.live(n.server()).is_some() || view.forgotten(n.server());
        answers && here(n).is_none() && view.stopped(shard, n).is_none()
    };
    let leader = view.leader(shard, place.founding);
    let voters = leader.map_or(&place.voters, |(_, lead)| &lead.membership.voters);
    let lost = voters.iter().filter(|n| vanished(**n)).count();
    // The members may have changed since they were last agreed on: every server that holds part of the shard
    // counts.
    let holds = |s: &ServerId| {
        let r = view.live(*s).and_then(|r| r.replicas.get(&shard));
        r.is_some_and(|r| {
            let ours = r.founding == place.founding && r.founded;
            ours && r.trouble.is_empty() || r.stopped.is_some() && (ours || r.founding == 0)
        })
    };
    if (voters.len() - lost) * 2 <= voters.len() {
        // This includes a replica that still claims to lead: it can commit nothing any more, least of all a
        // change of members.
        let still: Vec<String> =
            view.state.servers.keys().filter(|s| holds(s)).map(|s| s.to_string()).collect();
        let all = lost == voters.len() && still.is_empty();
        return is_lost(view, shard, place, all, &still, plan);
    }
    let few = voters.iter().filter(|n| here(**n).is_some()).count() * 2 <= voters.len();
    let Some((leads_at, lead)) = leader else {
        let begun = |n| here(n).filter(|r| r.founding == place.founding).map(|r| r.founded);
        return match begin(shard, place, begun, view, plan) {
            true => (Health::Placing, String::new()),
            false if few => no_majority(view, shard, voters, &here),
            false => (Health::Repairing, "no leader".into()),
        };
    };
    if few {
        return no_majority(view, shard, voters, &here);
    }
    let now = &lead.membership;
    let divided = compare(view, shard, place.founding, now, plan);
    if now.changing {
        return (Health::Repairing, "its membership is changing".into());
    }
    if now.voters != place.voters {
        let place = Place { voters: now.voters.clone(), ..place.clone() };
        plan.commands.push(Command::Place { shard, place });
        // The agreed membership is at most one change behind the true one. Otherwise the plan could take a
        // shard for lost because of replicas that it had long ago.
        return (Health::Repairing, "its membership has changed".into());
    }
    let moved = now.members.iter().find_map(|(n, address)| {
        let report = view.live(n.server())?;
        let here = report.replicas.get(&shard).is_some_and(|r| r.node == *n);
        (here && report.address != *address && view.reached(n.server())).then(|| (*n, report.address.clone()))
    });
    if let Some((n, address)) = moved {
        let why = format!("{} is at another address", n.server());
        plan.tell(leads_at, shard, Action::Learner(n, address));
        return (Health::Repairing, why);
    }
    let silent_long = |n: ReplicaId| {
        let waits = view.stopped(shard, n).and_then(|r| r.stopped).unwrap_or_default();
        view.age(n.server()).max(waits) > view.timeouts.replace
    };
    let spare = || {
        let used: BTreeSet<ServerId> = now.voters.iter().map(|n| n.server()).collect();
        let waits = |r: &Report| r.replicas.get(&shard).is_some_and(|r| r.stopped.is_some());
        let may = |s: ServerId, r: &Report| !waits(r) && view.no_room(s, shard).is_none();
        let free = view.usable().filter(|(s, r)| !used.contains(s) && may(*s, r));
        free.min_by_key(|(s, _)| (view.bytes(*s), *s)).map(|(s, _)| s)
    };
    if now.voters.len() > replicas as usize {
        let worst = |n: &ReplicaId| {
            (vanished(*n), silent_long(*n), view.draining(n.server()), view.bytes(n.server()), *n)
        };
        let Some(spared) = now.voters.iter().copied().max_by_key(worst) else { return Default::default() };
        let voters = now.voters.iter().copied().filter(|n| *n != spared).collect();
        vote(view, shard, (leads_at, lead), voters, plan);
        return (Health::Repairing, format!("{spared} has been moved"));
    }
    // The worst replica first; one change at a time.
    let replace = now.voters.iter().copied().find_map(|n| {
        let server = n.server();
        // A draining server keeps a replica that no other server can take, even if the server returned
        // without it.
        let keeps = || {
            view.draining(server) && view.live(server).is_some() && view.reached(server) && spare().is_none()
        };
        let usable = || view.usable().any(|(s, _)| s == server);
        let may_host = || (usable() || keeps()) && view.no_room(server, shard).is_none();
        if vanished(n) && may_host() {
            return Some((Some(n), server));
        }
        let leave = vanished(n) || silent_long(n) || view.draining(server) || view.forgotten(server);
        leave.then(|| spare().map(|s| (Some(n), s))).flatten()
    });
    let too_few = now.voters.len() < replicas as usize;
    let add = || too_few.then(|| spare().map(|s| (None, s))).flatten();
    let even_out = || mv.map(|m| (Some(m.from), m.to));
    if let Some((bad, target)) = replace.or_else(add).or_else(even_out) {
        let hosted = view.live(target).and_then(|r| r.replicas.get(&shard));
        match hosted.filter(|r| r.founding == place.founding && r.trouble.is_empty()) {
            None => plan.tell(target, shard, host(place, shape)),
            Some(new) if !now.members.contains_key(&new.node) => {
                let address = view.live(target).map(|r| r.address.clone()).unwrap_or_default();
                plan.tell(leads_at, shard, Action::Learner(new.node, address));
            }
            Some(new) if lead.caught_up.contains(&new.node) => {
                let mut voters = now.voters.clone();
                // A group of one always has a voter: the new replica votes first, then the old one is
                // removed.
                voters.retain(|n| Some(*n) != bad || now.voters.len() == 1);
                voters.insert(new.node);
                vote(view, shard, (leads_at, lead), voters, plan);
            }
            Some(_) => {} // it learns
        }
        let why = match bad {
            Some(bad) if mv.is_some() => format!("{bad} is being moved to {target}, which holds less"),
            Some(bad) => format!("{bad} is being replaced on {target}"),
            None => format!("a replica is being added on {target}"),
        };
        return (Health::Repairing, why);
    }
    // Learners without a purpose, left over from a replacement that was cancelled.
    if now.members.keys().any(|n| !now.voters.contains(n)) {
        plan.tell(leads_at, shard, Action::Voters(now.voters.clone()));
    }
    for (server, report) in view.state.servers.keys().filter_map(|s| Some((*s, view.live(*s)?))) {
        if let Some(r) = report.replicas.get(&shard).filter(|r| !now.members.contains_key(&r.node)) {
            plan.tell(server, shard, Action::Retire { node: r.node, index: now.index });
        }
    }
    match now.voters.iter().find(|n| here(**n).is_none()) {
        None if too_few => {
            (Health::Repairing, format!("{} of {replicas} replicas: too few servers", now.voters.len()))
        }
        None => (Health::Serving, divided.unwrap_or_default()),
        Some(n) => (Health::Repairing, missing(view, shard, *n)),
    }
}
