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
mod jobs;
mod view;

pub use control_group::ControlChange;
pub use jobs::JobReport;
pub use view::{AsideReport, LastReport, ReplicaReport, Report, Timeouts, View};

use super::state::{Command, Place, Shape};
use crate::raft::{Digest, ReplicaId};
#[cfg(test)]
pub use balance::is_worth_it;
use balance::{Move, spread_leaders, uneven};
use checks::compare;
use control_group::control_change;
use jobs::{end_job, note_job, remove};
use paraft_common::{Durability, JobShard, ServerId, ShardId, auto, placement};
use std::collections::{BTreeMap, BTreeSet};

/// An instruction to a server about a shard.
#[derive(Clone, Debug, PartialEq)]
pub struct Directive {
    /// The shard.
    pub shard: JobShard,
    /// The action.
    pub what: Action,
}

/// What a server should do for a shard.
#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    /// Start a new replica.
    Host {
        /// The founding it belongs to.
        founding: u64,
        /// How many shards the job has.
        shards: u32,
        /// Where its log is.
        durability: Durability,
    },
    /// Found the group.
    Found {
        /// The founding it belongs to.
        founding: u64,
        /// The first voters.
        members: BTreeMap<ReplicaId, String>,
    },
    /// Stop this replica and forget it.
    Retire {
        /// The replica.
        node: ReplicaId,
        /// The log index of a membership without this replica. A replica that knows a later membership with
        /// itself in it stays: the plan is outdated.
        index: u64,
    },
    /// Add a learner.
    Learner(ReplicaId, String),
    /// Change the set of voters.
    Voters(BTreeSet<ReplicaId>),
    /// Transfer the leadership.
    Transfer(ReplicaId),
    /// Switch the job's mode, as the rule decides.
    Switch(auto::Switch),
    /// The job was deleted, or its weights were kept for long enough: delete everything of the shard on this
    /// server.
    Remove,
    /// End the job at its current step.
    Stop,
    /// Stop this replica: its state differs from the others'.
    Diverged {
        /// The replica.
        node: ReplicaId,
        /// Its digest, and the log position of that digest.
        at: Digest,
        /// The majority's digest at that position.
        majority: u64,
    },
}

/// Everything that should happen now.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Plan {
    /// Commands for the control group's log.
    pub commands: Vec<Command>,
    /// Directives for the servers.
    pub directives: BTreeMap<ServerId, Vec<Directive>>,
    /// A change of the control group itself.
    pub control: Option<ControlChange>,
    /// The health of each shard.
    pub health: BTreeMap<JobShard, (Health, String)>,
    /// Shards of which every replica is known to be lost.
    pub all_lost: BTreeSet<JobShard>,
}

/// The health of a shard.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Health {
    /// Its replicas are being started.
    #[default]
    Placing,
    /// All is well.
    Serving,
    /// It serves, or will, with fewer replicas than configured.
    Repairing,
    /// Too few of its replicas answer to commit anything. Nothing is lost; it continues when they answer.
    NoMajority,
    /// As `NoMajority`; besides, the storage of answering replicas fails, or that of its leader's server
    /// blocks sessions. It continues when the storage serves again.
    Stopped,
    /// A majority of its replicas has lost its log: their state is gone.
    Lost,
}

impl Health {
    /// Its name in the status.
    pub fn name(self) -> &'static str {
        match self {
            Health::Placing => "placing",
            Health::Serving => "serving",
            Health::Repairing => "repairing",
            Health::NoMajority => "no-majority",
            Health::Stopped => "storage-stopped",
            Health::Lost => "lost",
        }
    }
}

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

impl Plan {
    fn tell(&mut self, server: ServerId, shard: JobShard, what: Action) {
        self.directives.entry(server).or_default().push(Directive { shard, what });
    }
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

fn host(place: &Place, shape: &Shape) -> Action {
    Action::Host { founding: place.founding, shards: shape.shards, durability: shape.durability }
}

/// No place is agreed on yet: name the founding, so that servers can host the shard.
fn start(view: &View, shard: JobShard, founding: u64, replicas: u32, plan: &mut Plan) {
    if choose(view, shard, replicas).is_some() {
        let place = Place { founding, voters: BTreeSet::new(), founded: false };
        plan.commands.push(Command::Place { shard, place });
    }
}

/// Named, but not founded: start replicas, agree on them, agree that they begin. Only then does one get the
/// directive to begin. So a group that has begun, and may have acknowledged something, never counts as one
/// that has not.
fn found(view: &View, shard: JobShard, place: &Place, shape: &Shape, plan: &mut Plan) -> (Health, String) {
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
fn begin(
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

/// A shard whose leader refuses its sessions serves no worker, even with all replicas.
fn unless_refused(view: &View, shard: JobShard, place: &Place, health: (Health, String)) -> (Health, String) {
    let leader = view.leader(shard, place.founding).filter(|(_, lead)| lead.stopped.is_some());
    match (health.0, leader) {
        (Health::Serving | Health::Repairing, Some((at, lead))) => {
            (Health::Stopped, format!("its leader {at} cannot serve its sessions: {}", lead.trouble))
        }
        _ => health,
    }
}

/// Why a replica does not take part in its group.
fn missing(view: &View, shard: JobShard, n: ReplicaId) -> String {
    match (view.stopped(shard, n), view.no_room(n.server(), shard)) {
        (Some(r), _) => format!("the replica on {} waits: {}", n.server(), r.trouble),
        (None, Some(why)) => format!("{} has no room for a replica: {why}", n.server()),
        (None, None) if view.forgotten(n.server()) => format!("{} was forgotten", n.server()),
        (None, None) if view.live(n.server()).is_some() => {
            format!("{} is up, and holds no replica of it", n.server())
        }
        (None, None) => format!("{} is silent", n.server()),
    }
}

/// A majority has lost its log. The shard restarts by itself only if all have lost it for good: a replica
/// that still holds part (`still`), or a quarantined folder, might be the last copy.
fn is_lost(
    view: &View,
    shard: JobShard,
    place: &Place,
    all: bool,
    still: &[String],
    plan: &mut Plan,
) -> (Health, String) {
    let asides = view.readable_asides(shard, place.founding);
    if let Some((server, name)) = asides.iter().flatten().next() {
        return (
            Health::Lost,
            format!(
                "a majority of its replicas is gone, and `{name}` of {server} can be read: `paraft data restore` brings it back"
            ),
        );
    }
    if !all || asides.is_none() {
        return (
            Health::Lost,
            format!(
                "a majority of its replicas has lost its log{}. Bring back the servers that are away, with their data; put copies \
                 of damaged files back, and `paraft data restore` them. Where there are none, `paraft data abandon {}` says what \
                 would be given up",
                match still {
                    [] => String::new(),
                    all => format!("; {} still has it", all.join(", ")),
                },
                shard.name()
            ),
        );
    }
    plan.all_lost.insert(shard);
    let seen = view.lost_since.get(&shard).map(|since| view.now.saturating_duration_since(*since));
    if seen.is_some_and(|seen| seen >= view.timeouts.silent) {
        tracing::error!(%shard, "every replica has lost its log: the shard begins anew; resume from a checkpoint");
        let place = new_founding(shard, view.founding);
        plan.commands.push(Command::Place { shard, place });
    }
    (Health::Lost, "every replica has lost its log".into())
}

/// Names a shard's next founding: the old state is given up.
pub(super) fn new_founding(shard: JobShard, founding: u64) -> Place {
    Place { founding: founding ^ u64::from(shard.number()), voters: BTreeSet::new(), founded: false }
}

/// Too few replicas answer, and nothing is known to be lost.
fn no_majority<'a>(
    view: &View,
    shard: JobShard,
    voters: &BTreeSet<ReplicaId>,
    here: &impl Fn(ReplicaId) -> Option<&'a ReplicaReport>,
) -> (Health, String) {
    let away = || voters.iter().copied().filter(|n| here(*n).is_none());
    let why: Vec<String> = away().map(|n| missing(view, shard, n)).collect();
    let health = match away().any(|n| view.stopped(shard, n).is_some()) {
        true => Health::Stopped,
        false => Health::NoMajority,
    };
    (health, format!("{} of {} replicas answer: {}", voters.len() - why.len(), voters.len(), why.join("; ")))
}

/// Whether a change of voters keeps what a group survives: of the new voters, at least as many work and are
/// caught up as of the old ones, or all; and they are a majority.
pub(super) fn keeps_majority(
    now: &BTreeSet<ReplicaId>,
    then: &BTreeSet<ReplicaId>,
    works: impl Fn(&ReplicaId) -> bool,
) -> bool {
    let count = |voters: &BTreeSet<ReplicaId>| voters.iter().filter(|n| works(n)).count();
    count(then) >= count(now).min(then.len()) && count(then) * 2 > then.len()
}

/// Changes the set of voters. A leader keeps its vote while another replica can take over: otherwise its
/// workers would wait for an election.
fn vote(
    view: &View,
    shard: JobShard,
    (leads_at, lead): (ServerId, &ReplicaReport),
    voters: BTreeSet<ReplicaId>,
    plan: &mut Plan,
) {
    let leaves = !voters.contains(&lead.node);
    let works = |n: &ReplicaId| {
        let there = view.live(n.server()).and_then(|r| r.replicas.get(&shard));
        lead.caught_up.contains(n) && there.is_some_and(|r| r.node == *n && r.trouble.is_empty())
    };
    match successor(view, shard, lead).filter(|_| leaves) {
        Some(successor) => plan.tell(leads_at, shard, Action::Transfer(successor)),
        None if keeps_majority(&lead.membership.voters, &voters, works) => {
            plan.tell(leads_at, shard, Action::Voters(voters));
        }
        None => {} // until the others have caught up
    }
}

/// Whether this voter could lead, as far as is known.
fn can_lead(view: &View, shard: JobShard, n: ReplicaId) -> bool {
    let there = view.live(n.server()).and_then(|r| r.replicas.get(&shard));
    there.is_some_and(|r| r.node == n && r.trouble.is_empty() && !view.draining(n.server()))
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
