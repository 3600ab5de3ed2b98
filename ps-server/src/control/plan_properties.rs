//! Histories of a fleet: servers crash, return, join and drain; reports and directives are lost; the
//! leadership of the control group moves. After every step the invariants are checked. At the end no more
//! faults occur, and the fleet must reach its target state.
//!
//! Raft is modelled by its promises: a group works while a majority of its voters has its log and runs, and a
//! leader's log holds everything that was committed. A server is modelled by what `Agent` does with a
//! directive.

use super::{
    jobs::Submission,
    plan::{
        Action, ControlChange, Directive, Health, LastReport, Plan, ReplicaReport, Report, Timeouts, View,
        is_worth_it, plan,
    },
    state::{Command, Shape, State},
};
use crate::raft::{Membership, ReplicaId};
use paraft_common::{Durability, JobId, JobShard, ServerId};
use proptest::prelude::*;
use std::{
    collections::{BTreeMap, BTreeSet},
    time::{Duration, Instant},
};

const TICK: Duration = Duration::from_millis(250);
const TIMEOUTS: Timeouts = Timeouts {
    silent: Duration::from_secs(1),
    replace: Duration::from_secs(10),
    settle: Duration::from_secs(3),
};

#[derive(Clone, Debug)]
enum Op {
    /// Every running server reports; each bit is a server whose report, or whose directives, are lost.
    Ticks {
        count: u8,
        reports_lost: u8,
        directives_lost: u8,
    },
    Crash(u64),
    Restart(u64),
    /// The storage of a server's replicas stops, or serves again.
    Storage(u64, bool),
    /// The other servers lose the way to a server, or reach it again.
    Reach(u64, bool),
    Drain(u64, bool),
    Join,
    /// Entries for a shard's log.
    Write(u32, u64),
    /// A job with this many shards is submitted.
    Submit(u32),
    /// A submitted job is deleted.
    Delete(u32),
    /// Another server becomes leader of the control group.
    ControlMoves,
    /// Only ticks, for this many seconds.
    Wait(u8),
}

fn an_op() -> impl Strategy<Value = Op> {
    prop_oneof![
        6 => (1u8..8, any::<u8>(), any::<u8>(), any::<bool>()).prop_map(|(count, r, d, calm)| {
            let lost = if calm { 0 } else { 0xff };
            Op::Ticks { count, reports_lost: r & lost, directives_lost: d & lost }
        }),
        2 => (0u64..7).prop_map(Op::Crash),
        3 => (0u64..7).prop_map(Op::Restart),
        1 => (0u64..7, any::<bool>()).prop_map(|(s, d)| Op::Drain(s, d)),
        1 => (0u64..7, any::<bool>()).prop_map(|(s, stops)| Op::Storage(s, stops)),
        1 => (0u64..7, any::<bool>()).prop_map(|(s, lost)| Op::Reach(s, lost)),
        1 => Just(Op::Join),
        2 => (0u32..3, 1u64..300).prop_map(|(s, n)| Op::Write(s, n)),
        1 => (1u32..3).prop_map(Op::Submit),
        1 => (1u32..4).prop_map(Op::Delete),
        1 => Just(Op::ControlMoves),
        2 => (1u8..15).prop_map(Op::Wait),
    ]
}

struct Machine {
    up: bool,
    /// Its replica of the control group, which is always on disk.
    node: ReplicaId,
    hosted: BTreeMap<JobShard, Hosted>,
    /// The latest generation in a directive.
    generation: u64,
    /// Since when its replicas wait for their storage.
    stopped: Option<Instant>,
    /// It reports, but no server reaches it.
    unreachable: bool,
}

impl Machine {
    fn new(node: ReplicaId) -> Self {
        Self { up: true, node, hosted: BTreeMap::new(), generation: 0, stopped: None, unreachable: false }
    }

    /// Its replicas take part in their groups.
    fn works(&self) -> bool {
        self.up && self.stopped.is_none() && !self.unreachable
    }
}

#[derive(Clone)]
struct Hosted {
    node: ReplicaId,
    founding: u64,
    applied: u64,
    founded: bool,
}

/// The true state of a Raft group.
struct Group {
    /// Its first voters.
    founders: BTreeSet<ReplicaId>,
    membership: Membership,
    leader: Option<ReplicaId>,
    term: u64,
    committed: u64,
}

struct Fleet {
    state: State,
    control: Membership,
    heard: BTreeMap<ServerId, LastReport>,
    now: Instant,
    since: Instant,
    machines: BTreeMap<ServerId, Machine>,
    groups: BTreeMap<(JobShard, u64), Group>,
    /// Number of names given out: incarnations of replicas, foundings.
    names: u64,
    lost_since: BTreeMap<JobShard, Instant>,
    on_disk: bool,
    bytes: Vec<u64>,
}

fn address(server: ServerId) -> String {
    format!("{server}:1")
}

impl Fleet {
    fn new(servers: u64, shards: u32, replicas: u32, on_disk: bool, bytes: Vec<u64>) -> Self {
        let now = Instant::now();
        let durability = if on_disk { Durability::QuorumDisk } else { Durability::QuorumMemory };
        let shape = Shape { shards, replicas, durability };
        let mut fleet = Self {
            state: State::default(),
            control: Membership::default(),
            heard: BTreeMap::new(),
            now,
            since: now,
            machines: BTreeMap::new(),
            groups: BTreeMap::new(),
            names: 0,
            lost_since: BTreeMap::new(),
            on_disk,
            bytes,
        };
        let list = (0..servers).map(|s| (ServerId(s), address(ServerId(s)))).collect();
        fleet.state.apply(&Command::Found { fleet: 1, shape, servers: list });
        for s in (0..servers).map(ServerId) {
            let node = fleet.new_incarnation(s);
            fleet.control.members.insert(node, address(s));
            fleet.control.voters.insert(node);
            fleet.machines.insert(s, Machine::new(node));
        }
        fleet
    }

    fn new_incarnation(&mut self, server: ServerId) -> ReplicaId {
        self.names += 1;
        ReplicaId(server.0 << 32 | self.names)
    }

    fn shape(&self) -> Shape {
        self.state.shape.expect("founded")
    }

    /// Bytes of the shard's weights and optimizer state.
    fn bytes(&self, shard: JobShard) -> u64 {
        match shard.job() {
            JobId(0) => self.bytes[shard.number() as usize],
            _ => 100,
        }
    }

    /// The shards of every job that has some.
    fn shards(&self) -> Vec<JobShard> {
        let held = self.state.jobs.iter().filter(|(_, j)| !j.released);
        held.flat_map(|(id, j)| JobShard::all(id, j.shape.shards)).collect()
    }

    fn holds(&self, shard: JobShard, n: ReplicaId) -> bool {
        let hosted = self.machines.get(&n.server()).and_then(|m| m.hosted.get(&shard));
        hosted.is_some_and(|h| h.node == n)
    }

    fn runs(&self, shard: JobShard, n: ReplicaId) -> bool {
        self.holds(shard, n) && self.machines[&n.server()].works()
    }

    /// Whether a majority of `voters` has the shard's log and, if `up`, runs.
    fn majority(&self, shard: JobShard, voters: &BTreeSet<ReplicaId>, up: bool) -> bool {
        let count =
            voters.iter().filter(|n| if up { self.runs(shard, **n) } else { self.holds(shard, **n) }).count();
        count * 2 > voters.len()
    }

    fn view(&mut self) -> Plan {
        self.names += 1;
        let able =
            |n: &ReplicaId| self.machines[&n.server()].works() && self.machines[&n.server()].node == *n;
        let control_caught_up = self.control.members.keys().copied().filter(able).collect();
        let plan = plan(&View {
            state: &self.state,
            control: &self.control,
            control_caught_up: &control_caught_up,
            lost_since: &self.lost_since,
            heard: &self.heard,
            now: self.now,
            since: self.since,
            timeouts: TIMEOUTS,
            founding: self.names << 8,
            unix_ms: 0,
        });
        self.lost_since.retain(|shard, _| plan.all_lost.contains(shard));
        for shard in &plan.all_lost {
            self.lost_since.entry(*shard).or_insert(self.now);
        }
        plan
    }

    /// The group's members that have nearly all entries.
    fn caught_up(&self, shard: JobShard, group: &Group) -> BTreeSet<ReplicaId> {
        let near = |n: &ReplicaId| {
            let hosted = self.machines.get(&n.server()).and_then(|m| m.hosted.get(&shard));
            let reached = self.machines[&n.server()].works();
            reached && hosted.is_some_and(|h| h.node == *n && h.applied + 64 >= group.committed)
        };
        group.membership.members.keys().copied().filter(near).collect()
    }

    fn report(&self, server: ServerId) -> Report {
        let m = &self.machines[&server];
        let replicas = m.hosted.iter().map(|(shard, h)| {
            let group = self.groups.get(&(*shard, h.founding)).filter(|_| h.founded);
            let leads = m.works() && group.is_some_and(|g| g.leader == Some(h.node));
            let report = ReplicaReport {
                node: h.node,
                founding: h.founding,
                founded: h.founded,
                leads,
                term: group.map_or(0, |g| g.term),
                applied: h.applied,
                bytes: if h.founded { self.bytes(*shard) } else { 0 },
                membership: group.map(|g| g.membership.clone()).unwrap_or_default(),
                trouble: if m.stopped.is_some() { "ENOSPC".into() } else { String::new() },
                stopped: m.stopped.map(|since| self.now - since),
                no_room: false,
                digests: Vec::new(),
                caught_up: group.filter(|_| leads).map(|g| self.caught_up(*shard, g)).unwrap_or_default(),
                job: None,
            };
            (*shard, report)
        });
        Report {
            address: address(server),
            node: m.node,
            replicas: replicas.map(|(shard, r)| (shard, r.into())).collect(),
            reached: self.machines.iter().filter(|(_, m)| m.up && !m.unreachable).map(|(s, _)| *s).collect(),
            asides: Some(Vec::new()),
            ..Report::default()
        }
    }

    /// Advances a quarter of a second. Returns whether the plan had any action.
    fn tick(&mut self, reports_lost: u8, directives_lost: u8) -> bool {
        self.now += TICK;
        let mut busy = false;
        let control = self.control.voters.iter().filter(|n| self.machines[&n.server()].works()).count();
        if control * 2 > self.control.voters.len() {
            for server in self.state.servers.keys().copied().collect::<Vec<_>>() {
                if !self.machines[&server].up || reports_lost >> (server.0 % 8) & 1 == 1 {
                    continue;
                }
                let report = self.report(server);
                self.heard.insert(server, LastReport { number: 0, report, at: self.now });
                let mut plan = self.view();
                self.one_change_at_a_time(&plan);
                let told = plan.directives.remove(&server).unwrap_or_default();
                busy |= !told.is_empty();
                let machine = self.machines.get_mut(&server).expect("it reports");
                assert!(machine.generation <= self.state.generation, "the generation never goes back");
                machine.generation = self.state.generation;
                if directives_lost >> (server.0 % 8) & 1 == 0 {
                    // As in the agent: one directive for a shard at a time.
                    let mut shards = BTreeSet::new();
                    for d in told.into_iter().filter(|d| shards.insert(d.shard)) {
                        self.carry_out(server, d);
                    }
                }
            }
            let plan = self.view();
            busy |= !plan.commands.is_empty() || plan.control.is_some();
            for command in plan.commands {
                self.agree(&command);
            }
            self.change_control(plan.control);
        }
        self.run_groups();
        busy
    }

    fn one_change_at_a_time(&self, plan: &Plan) {
        let mut changes = BTreeSet::new();
        for (server, d) in plan.directives.iter().flat_map(|(s, list)| list.iter().map(move |d| (s, d))) {
            if matches!(
                d.what,
                Action::Learner(..) | Action::Voters(_) | Action::Found { .. } | Action::Transfer(_)
            ) {
                assert!(changes.insert(d.shard), "two changes of {} at once: {:?}", d.shard, plan.directives);
            }
            if matches!(d.what, Action::Host { .. }) {
                let heard = self.heard.get(server).expect("told something");
                assert!(self.now - heard.at <= TIMEOUTS.silent, "a silent server is given a replica");
                let lost_its_own = self.state.shards.get(&d.shard).is_some_and(|p| {
                    p.voters.iter().any(|n| n.server() == *server && !self.holds(d.shard, *n))
                });
                let draining = self.state.servers[server].draining;
                assert!(!draining || lost_its_own, "{server} is drained and given a replica");
            }
        }
    }

    fn agree(&mut self, command: &Command) {
        if let Command::Place { shard, place } = command
            && let Some(old) = self.state.shards.get(shard)
            && old.founded
            && old.founding != place.founding
        {
            let begun = self.groups.get(&(*shard, old.founding));
            let voters = begun.map_or(&old.voters, |g| &g.membership.voters);
            assert!(
                begun.is_none() || !self.majority(*shard, voters, false),
                "{shard} is founded anew though a majority has its log"
            );
            let heard = voters.iter().any(|n| {
                let heard = self.heard.get(&n.server());
                self.holds(*shard, *n) && heard.is_some_and(|h| self.now - h.at <= TIMEOUTS.silent)
            });
            assert!(!heard, "{shard} is founded anew though a server reports that it has its log");
        }
        let before = self.state.generation;
        self.state.apply(command);
        assert!(self.state.generation > before, "agreed on nothing new: {command:?}");
    }

    fn change_control(&mut self, change: Option<ControlChange>) {
        let up = |fleet: &Self, v: &BTreeSet<ReplicaId>| {
            v.iter().filter(|n| fleet.machines[&n.server()].works()).count() * 2 > v.len()
        };
        match change {
            Some(ControlChange::Learner(n, a)) => _ = self.control.members.insert(n, a),
            Some(ControlChange::Voters(v)) => {
                assert!(v.iter().all(|n| self.control.members.contains_key(n)), "{v:?} are no members");
                assert!(v.len() <= 5, "{v:?}");
                let new = v.difference(&self.control.voters);
                assert!(
                    new.clone().all(|n| self.machines[&n.server()].works()),
                    "{v:?}: one that nobody reaches"
                );
                let heard = |n: &ReplicaId| {
                    let heard = self.heard.get(&n.server());
                    heard.is_some_and(|h| self.now - h.at <= TIMEOUTS.silent)
                };
                let there = v.iter().filter(|n| heard(n)).count();
                assert!(there * 2 > v.len(), "{v:?} would leave the control group without a majority");
                // The new voters survive no fewer failures than the old ones, as far as the leader can know.
                let works = |v: &BTreeSet<ReplicaId>| {
                    v.iter().filter(|n| heard(n) && self.machines[&n.server()].works()).count()
                };
                assert!(
                    works(&v) >= works(&self.control.voters).min(v.len()),
                    "{v:?} for {:?}",
                    self.control.voters
                );
                // As with shards: a change that its voters cannot commit does not happen.
                if up(self, &v) {
                    self.control.voters = v;
                }
            }
            Some(ControlChange::Remove(gone)) => self.control.members.retain(|n, _| !gone.contains(n)),
            None => {}
        }
    }

    /// Does what a server does with a directive.
    fn carry_out(&mut self, server: ServerId, d: Directive) {
        let shard = d.shard;
        let agreed = self.state.shards.get(&shard).map(|p| p.founding);
        let mine = self.machines[&server].hosted.get(&shard).cloned();
        match d.what {
            Action::Host { founding, .. } => {
                if let Some(old) = mine {
                    if old.founding == founding {
                        return;
                    }
                    assert_ne!(Some(old.founding), agreed, "a replica of what is agreed on is dropped");
                }
                let node = self.new_incarnation(server);
                let new = Hosted { node, founding, applied: 0, founded: false };
                self.machines.get_mut(&server).expect("there").hosted.insert(shard, new);
            }
            Action::Found { founding, members } => {
                if mine.is_none_or(|h| h.founding != founding || h.founded) {
                    return;
                }
                let voters: BTreeSet<_> = members.keys().copied().collect();
                let group = self.groups.entry((shard, founding)).or_insert_with(|| Group {
                    founders: voters.clone(),
                    membership: Membership { members, voters: voters.clone(), changing: false, index: 0 },
                    leader: None,
                    term: 0,
                    committed: 1,
                });
                assert_eq!(group.founders, voters, "one name, two foundings of {shard}");
            }
            Action::Diverged { .. } => unreachable!("no replica of the model reports a digest"),
            Action::Retire { node, .. } => {
                let Some(mine) = mine.filter(|h| h.node == node) else { return };
                if let Some(group) =
                    self.groups.get(&(shard, mine.founding)).filter(|_| agreed == Some(mine.founding))
                {
                    assert!(!group.membership.voters.contains(&node), "{node} votes and is retired");
                }
                self.machines.get_mut(&server).expect("there").hosted.remove(&shard);
            }
            Action::Learner(node, address) => {
                if let Some(group) = self.led_by(shard, mine) {
                    group.membership.members.insert(node, address);
                }
            }
            Action::Voters(new) => {
                let replicas = self.shape().replicas as usize;
                let Some(group) = self.led_by(shard, mine) else { return };
                let old = group.membership.voters.clone();
                assert!(!new.is_disjoint(&old), "{old:?} would become {new:?}");
                assert!(new.iter().all(|n| group.membership.members.contains_key(n)), "{new:?} do not learn");
                assert!(new.len() >= old.len().min(replicas), "{old:?} would become {new:?}");
                assert!(new.difference(&old).count() <= 1, "{old:?} would become {new:?}");
                let joins = new.difference(&old).next().copied();
                let has = |n: ReplicaId| {
                    self.machines[&n.server()]
                        .hosted
                        .get(&shard)
                        .is_some_and(|h| h.node != n || h.applied > 0)
                };
                assert!(joins.is_none_or(has), "{joins:?} votes and was never reached");

                // A change that its new voters cannot commit (one crashed since its report) does not happen
                // in the model; Raft would keep it open.
                if self.majority(shard, &new, true) {
                    let agreed = &self.state.shards[&shard].voters;
                    assert_eq!(agreed, &old, "a second change before the first is agreed on");
                    let group = self.led_by(shard, self.machines[&server].hosted.get(&shard).cloned());
                    let group = group.expect("as above");
                    group.membership.members.retain(|n, _| new.contains(n));
                    group.membership.voters = new;
                }
            }
            Action::Remove => {
                assert!(self.state.jobs.is_gone(shard.job()), "{shard} is of a job that has shards");
                self.machines.get_mut(&server).expect("there").hosted.remove(&shard);
            }
            Action::Switch(_) | Action::Stop => unreachable!("nobody plans it here"),
            Action::Transfer(to) => {
                let runs = self.runs(shard, to);
                if let Some(group) =
                    self.led_by(shard, mine).filter(|g| runs && g.membership.voters.contains(&to))
                {
                    group.leader = Some(to);
                    group.term += 1;
                }
            }
        }
    }

    /// The group, if this replica leads it and can commit.
    fn led_by(&mut self, shard: JobShard, replica: Option<Hosted>) -> Option<&mut Group> {
        let replica = replica?;
        let group = self.groups.get(&(shard, replica.founding))?;
        let leads =
            group.leader == Some(replica.node) && self.majority(shard, &group.membership.voters, true);
        if leads { self.groups.get_mut(&(shard, replica.founding)) } else { None }
    }

    /// Elections and replication.
    fn run_groups(&mut self) {
        for (shard, founding) in self.groups.keys().copied().collect::<Vec<_>>() {
            let group = &self.groups[&(shard, founding)];
            let now = group.membership.clone();
            let works = self.majority(shard, &now.voters, true);
            let leader = group.leader.filter(|n| self.runs(shard, *n) && (now.voters.contains(n) || !works));
            let committed = group.committed;
            // In a majority at least one replica has every entry; it wins.
            let elected = || {
                let able = now.voters.iter().filter(|n| self.runs(shard, **n));
                able.copied().max_by_key(|n| {
                    (self.machines[&n.server()].hosted[&shard].applied, std::cmp::Reverse(*n))
                })
            };
            let leader = leader.or_else(|| works.then(elected).flatten());
            let group = self.groups.get_mut(&(shard, founding)).expect("from its keys");
            if leader != group.leader {
                group.term += 1;
                group.leader = leader;
            }
            if !works {
                continue;
            }
            for n in now.members.keys() {
                let votes = now.voters.contains(n);
                let Some(m) = self.machines.get_mut(&n.server()).filter(|m| m.works()) else { continue };
                let Some(h) = m.hosted.get_mut(&shard).filter(|h| h.node == *n) else { continue };
                h.founded = true;
                // A learner catches up slowly.
                h.applied = if votes { committed } else { committed.min(h.applied + 200) };
            }
        }
    }

    fn play(&mut self, op: &Op) {
        match *op {
            Op::Ticks { count, reports_lost, directives_lost } => {
                (0..count).for_each(|_| _ = self.tick(reports_lost, directives_lost));
            }
            Op::Wait(seconds) => (0..u32::from(seconds) * 4).for_each(|_| _ = self.tick(0, 0)),
            Op::Crash(s) => {
                if let Some(m) = self.machines.get_mut(&ServerId(s)) {
                    m.up = false;
                    if !self.on_disk {
                        m.hosted.clear();
                    }
                }
            }
            Op::Restart(s) => {
                if let Some(m) = self.machines.get_mut(&ServerId(s)) {
                    m.up = true;
                }
            }
            Op::Storage(s, stops) => {
                let now = self.now;
                if let Some(m) = self.machines.get_mut(&ServerId(s)) {
                    m.stopped = stops.then_some(now);
                }
            }
            Op::Reach(s, lost) => {
                if let Some(m) = self.machines.get_mut(&ServerId(s)) {
                    m.unreachable = lost;
                }
            }
            Op::Drain(s, draining) => {
                self.state.apply(&Command::Drain { server: ServerId(s), draining });
            }
            Op::Join => {
                let server = ServerId(self.machines.len() as u64);
                if server.0 < 7 {
                    self.state.apply(&Command::Join { address: address(server) });
                    let node = self.new_incarnation(server);
                    self.machines.insert(server, Machine::new(node));
                }
            }
            Op::Write(shard, n) => {
                for ((s, _), g) in &mut self.groups {
                    g.committed += if s.number() == shard { n } else { 0 };
                }
            }
            Op::Submit(shards) => {
                self.names += 1;
                let shape = Shape { shards, ..self.shape() };
                let (name, token) = (self.names.to_string(), self.names);
                let run = String::new();
                let submission = Submission { name, token, shape, keep_ms: None, seen_ms: 1, run };
                self.state.apply(&Command::Submit(submission));
            }
            Op::Delete(job) => {
                self.state.apply(&Command::Delete { job: JobId(job) });
                self.groups.retain(|(shard, _), _| shard.job() != JobId(job));
            }
            Op::ControlMoves => {
                self.heard.clear();
                self.since = self.now;
            }
        }
    }

    /// Whether a majority of a founded shard's replicas has lost its log: no plan repairs that.
    fn lost(&self, shard: JobShard) -> bool {
        let Some(place) = self.state.shards.get(&shard).filter(|p| p.founded) else { return false };
        let begun = self.groups.get(&(shard, place.founding));
        !self.majority(shard, begun.map_or(&place.voters, |g| &g.membership.voters), false)
    }

    /// From now on no fault occurs. The fleet must reach a stable, correct state.
    fn settle(&mut self) {
        for m in self.machines.values_mut() {
            (m.up, m.stopped, m.unreachable) = (true, None, false);
        }
        let replicas = self.shape().replicas;
        let draining: Vec<_> =
            self.state.servers.iter().filter(|(_, s)| s.draining).map(|(s, _)| *s).collect();
        let mut usable = self.state.servers.len() - draining.len();
        for server in draining {
            if usable < replicas as usize {
                self.state.apply(&Command::Drain { server, draining: false });
                usable += 1;
            }
        }
        let mut quiet = 0;
        for _ in 0..1200 {
            quiet = if self.tick(0, 0) { 0 } else { quiet + 1 };
            if quiet > 60 {
                break;
            }
        }
        let plan = self.view();
        assert!(quiet > 60, "no rest after 5 minutes: {plan:?}");
        for (server, m) in &self.machines {
            let of_nobody = m.hosted.keys().find(|s| self.state.shape_of(s.job()).is_none());
            assert_eq!(of_nobody, None, "{server} holds a shard of a job that was deleted");
        }
        let mut voters_on: BTreeMap<ServerId, u64> = BTreeMap::new();
        let mut any_lost = false;
        for shard in self.shards() {
            if self.lost(shard) {
                any_lost = true;
                // "No leader" is allowed if the members changed since they were last agreed on.
                assert!(
                    matches!(plan.health[&shard].0, Health::Lost | Health::Repairing | Health::NoMajority),
                    "{shard}"
                );
                continue;
            }
            assert_eq!(plan.health[&shard], (Health::Serving, String::new()), "{shard}");
            let place = &self.state.shards[&shard];
            let group = &self.groups[&(shard, place.founding)];
            assert_eq!(group.membership.voters, place.voters, "{shard}: what is agreed is what is");
            assert_eq!(group.membership.voters.len(), replicas as usize, "{shard}");
            assert!(
                group.membership.members.keys().eq(group.membership.voters.iter()),
                "{shard}: nobody learns"
            );
            let on: BTreeSet<ServerId> = place.voters.iter().map(|n| n.server()).collect();
            assert_eq!(on.len(), replicas as usize, "{shard}: one replica on a server");
            for server in &on {
                *voters_on.entry(*server).or_default() += self.bytes(shard);
                assert!(!self.state.servers[server].draining, "{server} is drained and holds {shard}");
            }
            for (server, m) in &self.machines {
                assert_eq!(m.hosted.contains_key(&shard), on.contains(server), "{server} and {shard}");
            }
        }
        if any_lost {
            return;
        }
        // As even as single moves make it.
        let load = |s: ServerId| voters_on.get(&s).copied().unwrap_or_default();
        for shard in self.shards() {
            let place = &self.state.shards[&shard];
            let bytes = self.bytes(shard);
            for from in place.voters.iter().map(|n| n.server()) {
                for (to, s) in &self.state.servers {
                    let free = !s.draining && place.voters.iter().all(|n| n.server() != *to);
                    assert!(
                        !free || !is_worth_it(load(from).saturating_sub(load(*to) + bytes), load(from)),
                        "{shard} on {from} would be better on {to}"
                    );
                }
            }
        }
    }
}

proptest! {
    // Set PARAFT_SCHEDULES=20000 for a long run.
    #![proptest_config(ProptestConfig::with_cases(
        std::env::var("PARAFT_SCHEDULES").ok().and_then(|n| n.parse().ok()).unwrap_or(500)
    ))]

    #[test]
    fn random_history_drops_no_needed_replica_and_settles(
        servers in 1u64..6, replicas in prop::sample::select(vec![1u32, 3]), on_disk in any::<bool>(),
        bytes in prop::collection::vec(prop::sample::select(vec![0u64, 100, 100, 250]), 1..4),
        begin in 0u8..20, ops in prop::collection::vec(an_op(), 0..60),
    ) {
        let replicas = if servers < 3 { 1 } else { replicas };
        let bytes: Vec<u64> = bytes.into_iter().map(|b| b.max(1)).collect();
        let mut fleet = Fleet::new(servers, bytes.len() as u32, replicas, on_disk, bytes);
        fleet.play(&Op::Wait(begin));
        for op in &ops {
            fleet.play(op);
        }
        fleet.settle();
    }
}
