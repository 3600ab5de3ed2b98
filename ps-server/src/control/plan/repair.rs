//! A founded shard: its lost replicas are replaced, and the others follow what the fleet has agreed on.

use super::{
    balance::Move,
    checks::compare,
    directive::{Action, Plan},
    founding::{begin, host},
    health::{Health, missing, no_majority},
    lost::is_lost,
    view::{ReplicaReport, Report, View},
    voters::vote,
};
use crate::{
    control::state::{Command, Place, Shape},
    raft::{Membership, ReplicaId},
};
use paraft_common::{JobShard, ServerId};
use std::collections::BTreeSet;

/// A founded shard: repair its replicas or, if none needs repair, make the move that balances the servers.
pub(super) fn keep(
    view: &View,
    shard: JobShard,
    place: &Place,
    shape: &Shape,
    mv: Option<Move>,
    plan: &mut Plan,
) -> (Health, String) {
    let leader = view.leader(shard, place.founding);
    let voters = leader.map_or(&place.voters, |(_, lead)| &lead.membership.voters);
    let lost = voters.iter().filter(|n| view.vanished(shard, **n)).count();
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
    let few = voters.iter().filter(|n| view.working(shard, **n).is_some()).count() * 2 <= voters.len();
    let Some((leads_at, lead)) = leader else {
        let of_founding = |n| view.working(shard, n).filter(|r| r.founding == place.founding);
        let begun = |n| of_founding(n).map(|r| r.founded);
        return match begin(shard, place, begun, view, plan) {
            true => (Health::Placing, String::new()),
            false if few => no_majority(view, shard, voters),
            false => (Health::Repairing, "no leader".into()),
        };
    };
    if few {
        return no_majority(view, shard, voters);
    }
    Led { view, shard, place, shape, leads_at, lead, now: &lead.membership }.repair(mv, plan)
}

/// A founded shard with a leader and a majority.
struct Led<'a> {
    view: &'a View<'a>,
    shard: JobShard,
    place: &'a Place,
    shape: &'a Shape,
    leads_at: ServerId,
    lead: &'a ReplicaReport,
    /// The members, as the leader reports them.
    now: &'a Membership,
}

impl Led<'_> {
    /// Makes the most urgent change, if any; one at a time.
    fn repair(&self, mv: Option<Move>, plan: &mut Plan) -> (Health, String) {
        let Self { view, shard, place, now, .. } = *self;
        let divided = compare(view, shard, place.founding, now, plan);
        if now.changing {
            return (Health::Repairing, "its membership is changing".into());
        }
        if now.voters != place.voters {
            let place = Place { voters: now.voters.clone(), ..place.clone() };
            plan.commands.push(Command::Place { shard, place });
            // The agreed membership is at most one change behind the true one. Otherwise the plan could take
            // a shard for lost because of replicas that it had long ago.
            return (Health::Repairing, "its membership has changed".into());
        }
        if let Some((n, address)) = self.moved() {
            let why = format!("{} is at another address", n.server());
            plan.tell(self.leads_at, shard, Action::Learner(n, address));
            return (Health::Repairing, why);
        }
        let replicas = self.shape.replicas as usize;
        if now.voters.len() > replicas {
            return self.spare_one(plan);
        }
        let too_few = now.voters.len() < replicas;
        let add = || too_few.then(|| self.free_server().map(|s| (None, s))).flatten();
        let even_out = || mv.map(|m| (Some(m.from), m.to));
        if let Some((bad, target)) = self.replacement().or_else(add).or_else(even_out) {
            self.exchange(bad, target, plan);
            let why = match bad {
                Some(bad) if mv.is_some() => format!("{bad} is being moved to {target}, which holds less"),
                Some(bad) => format!("{bad} is being replaced on {target}"),
                None => format!("a replica is being added on {target}"),
            };
            return (Health::Repairing, why);
        }
        self.clean_up(plan);
        match now.voters.iter().find(|n| view.working(shard, **n).is_none()) {
            None if too_few => {
                (Health::Repairing, format!("{} of {replicas} replicas: too few servers", now.voters.len()))
            }
            None => (Health::Serving, divided.unwrap_or_default()),
            Some(n) => (Health::Repairing, missing(view, shard, *n)),
        }
    }

    /// A member whose server is at another address than the group knows, and that address.
    fn moved(&self) -> Option<(ReplicaId, String)> {
        self.now.members.iter().find_map(|(n, address)| {
            let report = self.view.live(n.server())?;
            let here = report.replicas.get(&self.shard).is_some_and(|r| r.node == *n);
            let moved = here && report.address != *address && self.view.reached(n.server());
            moved.then(|| (*n, report.address.clone()))
        })
    }

    /// Whether its server is silent, or its storage fails, for so long that it is replaced.
    fn silent_long(&self, n: ReplicaId) -> bool {
        let waits = self.view.stopped(self.shard, n).and_then(|r| r.stopped).unwrap_or_default();
        self.view.age(n.server()).max(waits) > self.view.timeouts.replace
    }

    /// The server for one more replica.
    fn free_server(&self) -> Option<ServerId> {
        let (view, shard) = (self.view, self.shard);
        let used: BTreeSet<ServerId> = self.now.voters.iter().map(|n| n.server()).collect();
        let waits = |r: &Report| r.replicas.get(&shard).is_some_and(|r| r.stopped.is_some());
        let may = |s: ServerId, r: &Report| !waits(r) && view.no_room(s, shard).is_none();
        let free = view.usable().filter(|(s, r)| !used.contains(s) && may(*s, r));
        free.min_by_key(|(s, _)| (view.bytes(*s), *s)).map(|(s, _)| s)
    }

    /// Takes the vote of one replica too many: of the worst.
    fn spare_one(&self, plan: &mut Plan) -> (Health, String) {
        let (view, voters) = (self.view, &self.now.voters);
        let worst = |n: &ReplicaId| {
            let (vanished, silent) = (view.vanished(self.shard, *n), self.silent_long(*n));
            (vanished, silent, view.draining(n.server()), view.bytes(n.server()), *n)
        };
        let Some(spared) = voters.iter().copied().max_by_key(worst) else { return Default::default() };
        let voters = voters.iter().copied().filter(|n| *n != spared).collect();
        vote(view, self.shard, (self.leads_at, self.lead), voters, plan);
        (Health::Repairing, format!("{spared} has been moved"))
    }

    /// The first replica that must be replaced, and the server for the new one.
    fn replacement(&self) -> Option<(Option<ReplicaId>, ServerId)> {
        let (view, shard) = (self.view, self.shard);
        self.now.voters.iter().copied().find_map(|n| {
            let server = n.server();
            // A draining server keeps a replica that no other server can take, even if the server returned
            // without it.
            let keeps = || {
                let answers = view.live(server).is_some() && view.reached(server);
                view.draining(server) && answers && self.free_server().is_none()
            };
            let usable = || view.usable().any(|(s, _)| s == server);
            let may_host = || (usable() || keeps()) && view.no_room(server, shard).is_none();
            let vanished = view.vanished(shard, n);
            if vanished && may_host() {
                return Some((Some(n), server));
            }
            let leave = vanished || self.silent_long(n) || view.draining(server) || view.forgotten(server);
            leave.then(|| self.free_server().map(|s| (Some(n), s))).flatten()
        })
    }

    /// The next step of a new replica on `target`, which takes the place of `bad`.
    fn exchange(&self, bad: Option<ReplicaId>, target: ServerId, plan: &mut Plan) {
        let Self { view, shard, place, now, .. } = *self;
        let hosted = view.live(target).and_then(|r| r.replicas.get(&shard));
        match hosted.filter(|r| r.founding == place.founding && r.trouble.is_empty()) {
            None => plan.tell(target, shard, host(place, self.shape)),
            Some(new) if !now.members.contains_key(&new.node) => {
                let address = view.live(target).map(|r| r.address.clone()).unwrap_or_default();
                plan.tell(self.leads_at, shard, Action::Learner(new.node, address));
            }
            Some(new) if self.lead.caught_up.contains(&new.node) => {
                let mut voters = now.voters.clone();
                // A group of one always has a voter: the new replica votes first, then the old one is
                // removed.
                voters.retain(|n| Some(*n) != bad || now.voters.len() == 1);
                voters.insert(new.node);
                vote(view, shard, (self.leads_at, self.lead), voters, plan);
            }
            Some(_) => {} // it learns
        }
    }

    /// Removes learners without a purpose, left over from a replacement that was cancelled, and replicas that
    /// are no members.
    fn clean_up(&self, plan: &mut Plan) {
        let Self { view, shard, now, .. } = *self;
        if now.members.keys().any(|n| !now.voters.contains(n)) {
            plan.tell(self.leads_at, shard, Action::Voters(now.voters.clone()));
        }
        for (server, report) in view.all_live() {
            if let Some(r) = report.replicas.get(&shard).filter(|r| !now.members.contains_key(&r.node)) {
                plan.tell(server, shard, Action::Retire { node: r.node, index: now.index });
            }
        }
    }
}
