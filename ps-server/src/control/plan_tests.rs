//! Cases of the plan, one by one. `plan_properties` has histories of many steps.

use super::{
    jobs::{JobFacts, JobState, Submission},
    plan::{
        Action, AsideReport, ControlChange, Directive, Health, JobReport, LastReport, Plan, ReplicaReport,
        Report, Timeouts, View, keeps_majority, plan,
    },
    state::{Command, Outcome, Place, Shape, State},
};
use crate::raft::{Digest, Membership, ReplicaId};
use paraft_common::{Durability, JobId, JobShard, Mode, ServerId};
use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::{Duration, Instant},
};

const S0: JobShard = JobShard::from_number(0);
const FOUNDING: u64 = 7;

fn secs(n: u64) -> Duration {
    Duration::from_secs(n)
}

/// The first incarnation of a server's replica.
fn node(server: u64) -> ReplicaId {
    ReplicaId(server << 32 | 1)
}

fn address(server: u64) -> String {
    format!("s{server}:1")
}

fn nodes(servers: &[u64]) -> BTreeSet<ReplicaId> {
    servers.iter().map(|s| node(*s)).collect()
}

/// A fleet as the leader of its control group sees it.
struct FleetView {
    state: State,
    control: Membership,
    heard: BTreeMap<ServerId, LastReport>,
    now: Instant,
    since: Instant,
    timeouts: Timeouts,
    lost_since: Instant,
    control_caught_up: BTreeSet<ReplicaId>,
    /// Servers that the other servers do not reach.
    unreachable: BTreeSet<ServerId>,
    unix_ms: u64,
}

impl FleetView {
    /// Servers that all run; none hosts a shard.
    fn new(servers: u64, shards: u32, replicas: u32) -> Self {
        let mut state = State::default();
        let shape = Shape { shards, replicas, durability: Durability::QuorumMemory };
        let list = (0..servers).map(|s| (ServerId(s), address(s))).collect();
        state.apply(&Command::Found { fleet: 1, shape, servers: list });
        let now = Instant::now() + secs(1000);
        let members = (0..servers).map(|s| (node(s), address(s))).collect();
        let voters = (0..servers).take(if servers < 3 { 1 } else { 3 }).map(node).collect();
        let mut sight = Self {
            state,
            control: Membership { members, voters, changing: false, index: 0 },
            heard: BTreeMap::new(),
            now,
            since: now - secs(500),
            timeouts: Timeouts { silent: secs(1), replace: secs(30), settle: secs(5) },
            lost_since: now - secs(100),
            control_caught_up: (0..servers).map(node).collect(),
            unreachable: BTreeSet::new(),
            unix_ms: 1_000,
        };
        (0..servers).for_each(|s| sight.hear(s));
        sight
    }

    /// Servers with every shard founded on the first `replicas` servers, shard `i` led by server `leaders[i]`.
    fn serving(servers: u64, leaders: &[u64], replicas: u64) -> Self {
        let mut sight = Self::new(servers, leaders.len() as u32, replicas as u32);
        for (i, leader) in (0u32..).zip(leaders) {
            let voters: Vec<u64> = (0..replicas).collect();
            sight.founded(JobShard::from_number(i), &voters, *leader, 1000);
        }
        sight
    }

    fn founded(&mut self, shard: JobShard, on: &[u64], leader: u64, bytes: u64) {
        self.state.shards.insert(shard, Place { founding: FOUNDING, voters: nodes(on), founded: true });
        let membership = Membership {
            members: on.iter().map(|s| (node(*s), address(*s))).collect(),
            voters: nodes(on),
            changing: false,
            index: 7,
        };
        for s in on {
            let report =
                ReplicaReport { bytes, leads: *s == leader, membership: membership.clone(), ..replica(*s) };
            self.report(*s).replicas.insert(shard, report.into());
        }
    }

    /// A report without replicas, now.
    fn hear(&mut self, server: u64) {
        let asides = Some(Vec::new());
        let report = Report { address: address(server), node: node(server), asides, ..Report::default() };
        self.heard.insert(ServerId(server), LastReport { number: 0, report, at: self.now });
    }

    fn report(&mut self, server: u64) -> &mut Report {
        &mut self.heard.get_mut(&ServerId(server)).expect("heard of").report
    }

    fn replica(&mut self, server: u64, shard: JobShard) -> &mut ReplicaReport {
        Arc::make_mut(self.report(server).replicas.get_mut(&shard).expect("hosted"))
    }

    /// Changes the membership that the leader reports.
    fn membership(&mut self, leader: u64, shard: JobShard, change: impl FnOnce(&mut Membership)) {
        change(&mut self.replica(leader, shard).membership);
    }

    fn silent(&mut self, server: u64, age: Duration) {
        self.heard.get_mut(&ServerId(server)).expect("heard of").at = self.now - age;
    }

    fn drain(&mut self, server: u64, draining: bool) {
        self.state.apply(&Command::Drain { server: ServerId(server), draining });
    }

    /// The last reports, which say how far each replica has caught up.
    fn measured(&self) -> BTreeMap<ServerId, LastReport> {
        let applied: BTreeMap<(JobShard, ReplicaId), u64> = self
            .heard
            .values()
            .flat_map(|h| &h.report.replicas)
            .map(|(s, r)| ((*s, r.node), r.applied))
            .collect();
        let mut heard = self.heard.clone();
        for (shard, lead) in heard.values_mut().flat_map(|h| &mut h.report.replicas).filter(|(_, r)| r.leads)
        {
            let members = lead.membership.members.keys().copied();
            let near = |n: &ReplicaId| applied.get(&(*shard, *n)).is_some_and(|a| a + 64 >= lead.applied);
            Arc::make_mut(lead).caught_up = members.filter(near).collect();
        }
        let reached: BTreeSet<ServerId> =
            self.state.servers.keys().filter(|s| !self.unreachable.contains(s)).copied().collect();
        heard.values_mut().for_each(|h| h.report.reached = reached.clone());
        heard
    }

    fn plan(&self) -> Plan {
        // Every shard was seen for a long time, unless a test says otherwise.
        let lost_since = (0..64).map(|s| (JobShard::from_number(s), self.lost_since)).collect();
        plan(&View {
            state: &self.state,
            control: &self.control,
            control_caught_up: &self.control_caught_up,
            lost_since: &lost_since,
            heard: &self.measured(),
            now: self.now,
            since: self.since,
            timeouts: self.timeouts,
            founding: 99,
            unix_ms: self.unix_ms,
        })
    }

    /// All directives about shards, as (server, action).
    fn told(&self) -> Vec<(u64, Action)> {
        let told = self.plan().directives.into_iter();
        told.flat_map(|(s, list)| list.into_iter().map(move |d: Directive| (s.0, without_shards(d.what))))
            .collect()
    }
}

/// The action that starts a replica; the number of shards differs from test to test.
fn host(founding: u64) -> Action {
    Action::Host { founding, shards: 0, durability: Durability::QuorumMemory }
}

fn without_shards(action: Action) -> Action {
    match action {
        Action::Host { founding, durability, .. } => Action::Host { founding, shards: 0, durability },
        other => other,
    }
}

fn replica(server: u64) -> ReplicaReport {
    ReplicaReport {
        node: node(server),
        founding: FOUNDING,
        founded: true,
        leads: false,
        term: 3,
        applied: 1000,
        bytes: 0,
        ..ReplicaReport::default()
    }
}

/// A replica that has started and belongs to no group yet.
fn fresh(server: u64, founding: u64) -> ReplicaReport {
    ReplicaReport { founding, founded: false, term: 0, applied: 0, ..replica(server) }
}

#[test]
fn nothing_is_planned_before_the_fleet_is_founded() {
    let mut sight = FleetView::new(3, 1, 3);
    sight.state = State::default();
    assert_eq!(sight.plan(), Plan::default());
}

#[test]
fn a_shard_is_named_then_hosted_then_agreed_on_then_founded() {
    let mut sight = FleetView::new(3, 1, 3);
    let plan = sight.plan();
    let [Command::Place { place, .. }] = &plan.commands[..] else { panic!("{plan:?}") };
    assert_eq!((place.founded, place.voters.len()), (false, 0));
    let founding = place.founding;
    sight.state.apply(&plan.commands[0]);

    let hosts = |s| (s, host(founding));
    assert_eq!(sight.told(), [hosts(0), hosts(1), hosts(2)]);
    for s in 0..2 {
        sight.report(s).replicas.insert(S0, fresh(s, founding).into());
    }
    assert_eq!(
        (sight.told(), sight.plan().commands),
        (vec![hosts(2)], vec![]),
        "not before the last one is there"
    );
    sight.report(2).replicas.insert(S0, fresh(2, founding).into());
    let plan = sight.plan();
    let named = Place { founding, voters: nodes(&[0, 1, 2]), founded: false };
    assert_eq!(plan.commands, [Command::Place { shard: S0, place: named.clone() }]);
    sight.state.apply(&plan.commands[0]);

    let place = Place { founded: true, ..named };
    let plan = sight.plan();
    assert_eq!(
        (&plan.commands[..], sight.told()),
        (&[Command::Place { shard: S0, place }][..], vec![]),
        "nobody begins before it is agreed on"
    );
    sight.state.apply(&plan.commands[0]);

    let told = sight.told();
    let [(0, Action::Found { founding: o, members })] = &told[..] else { panic!("{told:?}") };
    assert_eq!((*o, members.keys().copied().collect()), (founding, nodes(&[0, 1, 2])));
    assert_eq!(sight.told(), told, "told again until it is done");
    sight.replica(0, S0).founded = true;
    assert_eq!((sight.plan().commands, sight.told()), (vec![], vec![]), "it has begun");
}

#[test]
fn shard_ordered_to_begin_is_never_founded_again() {
    let mut sight = FleetView::new(5, 1, 3);
    sight.state.shards.insert(S0, Place { founding: 5, voters: nodes(&[0, 1, 2]), founded: true });
    for s in 0..3 {
        sight.report(s).replicas.insert(S0, fresh(s, 5).into());
    }
    let Some((0, Action::Found { .. })) = sight.told().pop() else { panic!("{:?}", sight.told()) };
    // The group may have begun with the second replica and acknowledged pushes: no server on this side knows.
    sight.silent(0, secs(300));
    sight.silent(1, secs(300));
    assert_eq!((sight.plan().commands, sight.told()), (vec![], vec![]));
    // With one of the two there is a majority that knows.
    sight.silent(1, secs(0));
    let told = sight.told();
    let [(_, Action::Found { founding: 5, members })] = &told[..] else { panic!("{told:?}") };
    assert_eq!(members.keys().copied().collect::<BTreeSet<_>>(), nodes(&[0, 1, 2]), "the same beginning");
}

#[test]
fn a_replica_of_another_founding_is_none_of_this_one() {
    let mut sight = FleetView::new(3, 1, 3);
    sight.state.shards.insert(S0, Place { founding: 5, voters: BTreeSet::new(), founded: false });
    for s in 0..3 {
        sight.report(s).replicas.insert(S0, fresh(s, if s == 1 { 4 } else { 5 }).into());
    }
    assert_eq!(sight.told(), [(1, host(5))]);
}

#[test]
fn majority_begins_without_late_servers_after_a_wait() {
    let mut sight = FleetView::new(3, 1, 3);
    sight.heard.remove(&ServerId(2));
    sight.since = sight.now - secs(1);
    assert_eq!(sight.plan().commands, [], "the third may come any moment");
    sight.since = sight.now - secs(60);
    assert_eq!(sight.plan().commands.len(), 1);
    sight.heard.remove(&ServerId(1));
    assert_eq!(sight.plan().commands, [], "one of three is no majority");
}

#[test]
fn founding_that_lost_a_replica_restarts_under_new_name() {
    let mut sight = FleetView::new(3, 1, 3);
    sight.state.shards.insert(S0, Place { founding: 5, voters: nodes(&[0, 1, 2]), founded: false });
    for s in 0..2 {
        sight.report(s).replicas.insert(S0, fresh(s, 5).into());
    }
    let plan = sight.plan();
    let [Command::Place { place, .. }] = &plan.commands[..] else { panic!("{plan:?}") };
    assert_ne!(place.founding, 5);
    assert!(place.voters.is_empty() && !place.founded);
    // Once the fleet has agreed that the group begins, the group is kept, with two of three.
    let place = Place { founding: 5, voters: nodes(&[0, 1, 2]), founded: true };
    sight.state.shards.insert(S0, place);
    let Some((0, Action::Found { .. })) = sight.told().pop() else { panic!("{:?}", sight.told()) };
    assert_eq!(sight.plan().commands, []);
}

#[test]
fn nothing_is_planned_for_a_fleet_that_is_well() {
    let sight = FleetView::serving(3, &[0, 1, 2], 3);
    let plan = sight.plan();
    assert_eq!((plan.commands, plan.directives, plan.control), (vec![], BTreeMap::new(), None));
    assert!(plan.health.values().all(|h| h.0 == Health::Serving));
}

#[test]
fn silent_server_is_replaced_after_timeout_not_before() {
    let mut sight = FleetView::serving(4, &[0], 3);
    sight.silent(2, secs(29));
    assert_eq!(sight.told(), [], "it may come back");
    assert_eq!(sight.plan().health[&S0].0, Health::Repairing);
    sight.silent(2, secs(31));
    assert_eq!(sight.told(), [(3, host(FOUNDING))]);
    // A new leader of the control group has received no reports for long: that proves nothing.
    sight.since = sight.now - secs(29);
    assert_eq!(sight.told(), []);
}

#[test]
fn a_replacement_learns_first_and_votes_when_it_has_caught_up() {
    let mut sight = FleetView::serving(4, &[0], 3);
    sight.silent(2, secs(31));
    sight.report(3).replicas.insert(S0, fresh(3, FOUNDING).into());
    assert_eq!(sight.told(), [(0, Action::Learner(node(3), address(3)))]);
    sight.membership(0, S0, |m| _ = m.members.insert(node(3), address(3)));
    sight.replica(3, S0).applied = 900;
    assert_eq!(sight.told(), [], "100 entries behind: it learns");
    sight.replica(3, S0).applied = 990;
    assert_eq!(sight.told(), [(0, Action::Voters(nodes(&[0, 1, 3])))], "three vote, before and after");
    sight.membership(0, S0, |m| m.changing = true);
    assert_eq!(sight.told(), [], "one change at a time");
}

#[test]
fn server_back_before_its_replacement_votes_stays() {
    let mut sight = FleetView::serving(4, &[0], 3);
    sight.report(3).replicas.insert(S0, fresh(3, FOUNDING).into());
    sight.membership(0, S0, |m| _ = m.members.insert(node(3), address(3)));
    assert_eq!(sight.told(), [(0, Action::Voters(nodes(&[0, 1, 2])))], "first out of the group");
    sight.membership(0, S0, |m| _ = m.members.remove(&node(3)));
    assert_eq!(sight.told(), [(3, Action::Retire { node: node(3), index: 7 })], "then off the server");
}

#[test]
fn replica_without_log_is_replaced_at_once_on_its_server() {
    let mut sight = FleetView::serving(4, &[0], 3);
    sight.report(2).replicas.clear();
    assert_eq!(sight.told(), [(2, host(FOUNDING))]);
    let again = ReplicaId(2 << 32 | 9);
    sight.report(2).replicas.insert(S0, (ReplicaReport { node: again, ..fresh(2, FOUNDING) }).into());
    assert_eq!(sight.told(), [(0, Action::Learner(again, address(2)))]);
    sight.membership(0, S0, |m| _ = m.members.insert(again, address(2)));
    sight.replica(2, S0).applied = 1000;
    let voters = BTreeSet::from([node(0), node(1), again]);
    assert_eq!(sight.told(), [(0, Action::Voters(voters))], "the old name leaves as the new one enters");
}

#[test]
fn a_replica_that_has_diverged_is_replaced() {
    let mut sight = FleetView::serving(3, &[0], 3);
    sight.replica(2, S0).trouble = "it has diverged".into();
    assert_eq!(sight.told(), [(2, host(FOUNDING))]);
}

#[test]
fn replica_with_failing_storage_is_replaced_after_timeout() {
    let stop = |sight: &mut FleetView, server, waits| {
        let r = sight.replica(server, S0);
        (r.trouble, r.stopped) = ("ENOSPC: No space left on device".into(), Some(waits));
    };
    let mut sight = FleetView::serving(4, &[0], 3);
    stop(&mut sight, 2, secs(29));
    assert_eq!(sight.told(), [], "it comes back");
    let (health, why) = sight.plan().health[&S0].clone();
    assert!(health == Health::Repairing && why.contains("ENOSPC"), "{why}");
    stop(&mut sight, 2, secs(31));
    assert_eq!(sight.told(), [(3, host(FOUNDING))], "not on its own server");
    // Without another server it keeps waiting.
    let mut sight = FleetView::serving(3, &[0], 3);
    stop(&mut sight, 2, secs(300));
    assert_eq!(sight.told(), []);
    // Two of three replicas stop, then all three: nothing is lost, so nothing is planned.
    for stopped in [&[1, 2][..], &[0, 1, 2]] {
        let mut sight = FleetView::serving(4, &[0], 3);
        stopped.iter().for_each(|s| stop(&mut sight, *s, secs(300)));
        let plan = sight.plan();
        let (health, why) = plan.health[&S0].clone();
        assert!(health == Health::Stopped && why.contains("ENOSPC"), "{health:?}: {why}");
        assert!(plan.commands.is_empty() && plan.directives.is_empty(), "{plan:?}");
    }
    // Even its name could not be read: it may be the replica that votes there.
    let mut sight = FleetView::serving(3, &[0], 3);
    for s in 0..3 {
        stop(&mut sight, s, secs(300));
        (sight.replica(s, S0).node, sight.replica(s, S0).founding) = (ReplicaId(0), 0);
    }
    let plan = sight.plan();
    assert_eq!(
        (plan.health[&S0].0, plan.commands, plan.directives),
        (Health::Stopped, vec![], BTreeMap::new())
    );
}

#[test]
fn shard_whose_leader_cannot_serve_is_not_serving() {
    let refuses = |sight: &mut FleetView, server| {
        let replica = sight.replica(server, S0);
        (replica.trouble, replica.stopped) = ("it does not know its fleet's jobs".into(), Some(secs(1)));
    };
    let mut sight = FleetView::serving(4, &[0], 3);
    assert_eq!(sight.plan().health[&S0].0, Health::Serving);
    refuses(&mut sight, 0);
    let (health, why) = sight.plan().health[&S0].clone();
    assert_eq!(health, Health::Stopped);
    assert!(why.contains("s0 cannot serve its sessions: it does not know"), "{why}");
    // A repair is still planned.
    sight.drain(1, true);
    assert_eq!(sight.told(), [(3, host(FOUNDING))]);
    // A replica that cannot serve gets no leadership.
    let mut sight = FleetView::serving(3, &[0], 3);
    refuses(&mut sight, 1);
    sight.drain(0, true);
    assert_eq!(sight.told(), [(0, Action::Transfer(node(2)))]);
}

#[test]
fn replica_without_room_is_hosted_again_once_there_is() {
    let lacks = |sight: &mut FleetView, server| {
        let r = sight.replica(server, S0);
        (r.trouble, r.no_room) = ("shard 0 needs 96.0 GiB, 4.0 GiB free".into(), true);
    };
    let mut sight = FleetView::serving(3, &[0], 3);
    lacks(&mut sight, 2);
    assert_eq!(sight.told(), [], "it would find no room again");
    let (health, why) = sight.plan().health[&S0].clone();
    assert!(health == Health::Repairing && why.contains("no room") && why.contains("96.0 GiB"), "{why}");
    // There is room again: the server no longer reports a lack of it.
    sight.report(2).replicas.clear();
    assert_eq!(sight.told(), [(2, host(FOUNDING))]);
    // Another server takes the replica if it can, but not one that reports that it cannot.
    let mut sight = FleetView::serving(5, &[0], 3);
    lacks(&mut sight, 2);
    let left_over = sight.replica(2, S0).clone();
    sight.report(3).replicas.insert(S0, (ReplicaReport { node: node(3), ..left_over }).into());
    assert_eq!(
        sight.told().into_iter().filter(|(_, what)| matches!(what, Action::Host { .. })).collect::<Vec<_>>(),
        [(4, host(FOUNDING))]
    );
}

#[test]
fn too_few_that_answer_is_not_taken_for_a_loss() {
    let mut sight = FleetView::serving(3, &[0], 3);
    sight.silent(1, secs(100));
    sight.silent(2, secs(100));
    let plan = sight.plan();
    assert_eq!((plan.health[&S0].0, plan.commands), (Health::NoMajority, vec![]));
}

#[test]
fn shard_with_readable_quarantine_is_not_founded_again() {
    let lost = || {
        let mut sight = FleetView::serving(3, &[0], 3);
        (0..3).for_each(|s| sight.report(s).replicas.clear());
        sight
    };
    let begins_anew = |sight: &FleetView| !sight.plan().commands.is_empty();
    assert!(begins_anew(&lost()));
    let mut sight = lost();
    let aside = AsideReport { shard: S0, founding: FOUNDING, name: "shard-0.aside-1".into(), readable: true };
    sight.report(1).asides = Some(vec![aside.clone()]);
    assert!(!begins_anew(&sight));
    let (health, why) = sight.plan().health[&S0].clone();
    assert!(health == Health::Lost && why.contains("shard-0.aside-1") && why.contains("restore"), "{why}");
    sight.report(1).asides = Some(vec![AsideReport { readable: false, ..aside.clone() }]);
    assert!(begins_anew(&sight));
    sight.report(1).asides = Some(vec![AsideReport { founding: FOUNDING + 1, ..aside }]);
    assert!(begins_anew(&sight), "of another founding");
    sight.report(1).asides = None;
    assert!(!begins_anew(&sight), "it is still being read");
    // The shard was seen only a moment ago.
    let mut sight = lost();
    sight.lost_since = sight.now - Duration::from_millis(900);
    assert!(!begins_anew(&sight));
    assert!(sight.plan().all_lost.contains(&S0));
}

#[test]
fn unreached_or_lagging_replica_gets_no_vote() {
    // In the control group.
    let mut sight = FleetView::serving(5, &[0], 3);
    sight.unreachable = [3, 4].map(ServerId).into();
    assert_eq!(sight.plan().control, None);
    sight.control.members.remove(&node(3));
    assert_eq!(sight.plan().control, None, "it is not even told what is agreed");
    let mut sight = FleetView::serving(5, &[0], 3);
    sight.control_caught_up.remove(&node(3));
    assert_eq!(sight.plan().control, None, "four able ones: three vote");
    let sight = FleetView::serving(5, &[0], 3);
    assert_eq!(sight.plan().control, Some(ControlChange::Voters(nodes(&[0, 1, 2, 3, 4]))));
    // In a shard.
    let mut sight = FleetView::serving(4, &[0], 3);
    sight.unreachable = [ServerId(3)].into();
    sight.silent(2, secs(100));
    assert_eq!(sight.told(), [], "it gets nothing");
}

#[test]
fn a_change_of_voters_takes_no_working_voter_away() {
    let works = |n: &ReplicaId| [node(0), node(1), node(2)].contains(n);
    let now = nodes(&[0, 1, 2]);
    assert!(!keeps_majority(&now, &nodes(&[0, 1, 3]), works), "one that works for one that does not");
    assert!(!keeps_majority(&now, &nodes(&[0, 3, 4]), works));
    assert!(keeps_majority(&nodes(&[0, 1, 3]), &now, works));
    assert!(keeps_majority(&nodes(&[0, 1, 2, 3]), &now, works));
    assert!(!keeps_majority(&nodes(&[0, 1, 2, 3]), &nodes(&[0, 1, 3]), works));
    assert!(keeps_majority(&now, &nodes(&[0]), works), "all of one");
}

#[test]
fn forgotten_server_is_replaced_and_leaves_control_group() {
    let mut sight = FleetView::serving(4, &[0], 3);
    sight.silent(2, secs(3));
    assert_eq!(sight.told(), []);
    sight.state.apply(&Command::Forget { server: ServerId(2) });
    assert_eq!(sight.told(), [(3, host(FOUNDING))]);
    assert_eq!(sight.plan().control, Some(ControlChange::Voters(nodes(&[0, 1, 3]))));
    sight.control.voters = nodes(&[0, 1, 3]);
    assert_eq!(sight.plan().control, Some(ControlChange::Remove(nodes(&[2]))));
    // Its id is not given out again, and the server is not admitted under it.
    let Outcome::Joined(id) = sight.state.apply(&Command::Join { address: "new:1".into() }) else { panic!() };
    assert_eq!(id, ServerId(4));
    let admit = Command::Admit { server: ServerId(2), address: address(2) };
    assert!(matches!(sight.state.apply(&admit), Outcome::Refused(_)));
}

#[test]
fn drain_is_one_change_at_a_time_never_below_three_voters() {
    let mut sight = FleetView::serving(4, &[0], 3);
    sight.drain(0, true);
    let told = sight.told();
    assert!(told.contains(&(3, host(FOUNDING))), "{told:?}");
    assert!(told.contains(&(0, Action::Transfer(node(1)))), "the leadership goes first: {told:?}");
    sight.report(3).replicas.insert(S0, (ReplicaReport { applied: 1000, ..fresh(3, FOUNDING) }).into());
    sight.membership(0, S0, |m| _ = m.members.insert(node(3), address(3)));
    let told = sight.told();
    assert_eq!(told, [(0, Action::Transfer(node(1)))], "a leader is not voted out, it hands over");
    let kept = sight.replica(0, S0).membership.clone();
    *sight.replica(1, S0) = ReplicaReport { leads: true, term: 4, membership: kept, ..replica(1) };
    sight.replica(0, S0).leads = false;
    assert_eq!(sight.told(), [(1, Action::Voters(nodes(&[1, 2, 3])))]);
}

#[test]
fn leader_transfers_before_it_loses_its_vote() {
    let mut sight = FleetView::serving(4, &[0], 3);
    sight.drain(0, true);
    sight.report(3).replicas.insert(S0, (ReplicaReport { applied: 990, ..fresh(3, FOUNDING) }).into());
    sight.membership(0, S0, |m| _ = m.members.insert(node(3), address(3)));
    sight.replica(1, S0).applied = 700;
    sight.replica(2, S0).applied = 800;
    assert_eq!(sight.told(), [(0, Action::Transfer(node(1)))]);
    sight.replica(2, S0).applied = 990;
    assert_eq!(sight.told(), [(0, Action::Transfer(node(2)))]);
}

#[test]
fn drain_without_another_server_waits_and_can_be_undone() {
    let mut sight = FleetView::serving(3, &[1], 3);
    sight.drain(2, true);
    assert_eq!(sight.told(), [], "nobody can take its replica");
    sight.drain(1, true);
    assert_eq!(sight.told(), [(1, Action::Transfer(node(0)))], "but it need not lead");
    sight.drain(1, false);
    sight.drain(2, false);
    assert_eq!(sight.told(), []);
    // The drain is undone while the replacement learns: the replacement is removed.
    let mut sight = FleetView::serving(4, &[0], 3);
    sight.drain(2, true);
    sight.report(3).replicas.insert(S0, fresh(3, FOUNDING).into());
    sight.membership(0, S0, |m| _ = m.members.insert(node(3), address(3)));
    sight.drain(2, false);
    assert_eq!(sight.told(), [(0, Action::Voters(nodes(&[0, 1, 2])))]);
}

#[test]
fn drained_server_hosts_again_only_what_no_other_can() {
    let mut sight = FleetView::serving(3, &[0], 3);
    sight.drain(2, true);
    sight.report(2).replicas.clear();
    assert!(matches!(sight.told()[..], [(2, Action::Host { .. })]), "{:?}", sight.told());
    let mut sight = FleetView::serving(4, &[0], 3);
    sight.drain(2, true);
    sight.report(2).replicas.clear();
    assert!(matches!(sight.told()[..], [(3, Action::Host { .. })]), "{:?}", sight.told());
}

#[test]
fn nothing_new_goes_to_a_server_that_is_silent_or_being_drained() {
    let mut sight = FleetView::serving(6, &[0], 3);
    sight.silent(2, secs(31));
    sight.silent(3, secs(2));
    sight.drain(4, true);
    assert_eq!(sight.told(), [(5, host(FOUNDING))]);
    sight.drain(5, true);
    assert_eq!(sight.told(), []);
}

#[test]
fn a_replacement_goes_where_the_fewest_bytes_are() {
    let mut sight = FleetView::serving(5, &[0], 3);
    sight.founded(JobShard::from_number(1), &[3], 3, 5000);
    sight.founded(JobShard::from_number(2), &[4], 4, 4000);
    sight.silent(2, secs(31));
    assert!(sight.told().contains(&(4, host(FOUNDING))), "{:?}", sight.told());
}

#[test]
fn without_a_leader_a_shard_is_left_alone() {
    let mut sight = FleetView::serving(4, &[0], 3);
    sight.replica(0, S0).leads = false;
    sight.silent(2, secs(31));
    assert_eq!((sight.told(), sight.plan().commands), (vec![], vec![]));
    assert_eq!(sight.plan().health[&S0].0, Health::Repairing);
}

#[test]
fn only_a_shard_that_lost_all_logs_is_founded_again() {
    let mut sight = FleetView::serving(3, &[0], 3);
    sight.report(0).replicas.clear();
    sight.report(1).replicas.clear();
    let plan = sight.plan();
    assert_eq!(
        (plan.commands, plan.health[&S0].0),
        (vec![], Health::Lost),
        "the third holds what a person may want"
    );
    // A replica that still claims to lead changes nothing: it is alone.
    sight.replica(2, S0).leads = true;
    assert_eq!((sight.told(), sight.plan().health[&S0].0), (vec![], Health::Lost));
    sight.replica(2, S0).leads = false;
    sight.silent(2, secs(300));
    assert_eq!(sight.plan().commands, [], "silent is not lost");
    sight.hear(2);
    let plan = sight.plan();
    let [Command::Place { place, .. }] = &plan.commands[..] else { panic!("{plan:?}") };
    assert!(!place.founded && place.founding != FOUNDING);
}

#[test]
fn log_on_unadmitted_server_prevents_a_new_founding() {
    let mut sight = FleetView::serving(4, &[0], 3);
    for s in 0..3 {
        sight.report(s).replicas.clear();
    }
    sight.report(3).replicas.insert(S0, replica(3).into());
    let plan = sight.plan();
    assert_eq!((plan.commands, plan.health[&S0].0), (vec![], Health::Lost));
}

#[test]
fn of_two_that_say_they_lead_the_later_term_counts() {
    let mut sight = FleetView::serving(4, &[0], 3);
    let membership = Membership { voters: nodes(&[1, 2, 3]), ..sight.replica(0, S0).membership.clone() };
    *sight.replica(1, S0) = ReplicaReport { leads: true, term: 4, membership, ..replica(1) };
    let place = Place { founding: FOUNDING, voters: nodes(&[1, 2, 3]), founded: true };
    assert!(sight.plan().commands.contains(&Command::Place { shard: S0, place }));
}

#[test]
fn leaders_are_balanced_by_bytes_one_move_at_a_time() {
    let mut sight = FleetView::serving(3, &[0, 0, 0], 3);
    let moves = |sight: &FleetView| -> Vec<(u64, Action)> { sight.told() };
    assert_eq!(moves(&sight), [(0, Action::Transfer(node(1)))]);
    sight.since = sight.now - secs(1);
    assert_eq!(moves(&sight), [], "not yet settled");
    sight.since = sight.now - secs(60);
    // A big shard alone outweighs two small ones.
    let mut sight = FleetView::new(2, 3, 2);
    sight.founded(JobShard::from_number(0), &[0, 1], 0, 10_000);
    sight.founded(JobShard::from_number(1), &[0, 1], 1, 100);
    sight.founded(JobShard::from_number(2), &[0, 1], 1, 100);
    assert_eq!(sight.told(), []);
    sight.founded(JobShard::from_number(2), &[0, 1], 0, 100);
    assert_eq!(sight.told(), [(0, Action::Transfer(node(1)))]);
}

#[test]
fn a_leader_is_not_moved_to_a_replica_that_is_behind() {
    let mut sight = FleetView::serving(3, &[0, 0, 0], 3);
    for shard in (0..3).map(JobShard::from_number) {
        sight.replica(1, shard).applied = 10;
    }
    assert_eq!(sight.told(), [(0, Action::Transfer(node(2)))]);
}

#[test]
fn a_new_server_takes_its_share_one_replica_at_a_time() {
    let mut sight = FleetView::serving(4, &[0, 1, 2], 3);
    let told = sight.told();
    let [(3, Action::Host { .. })] = &told[..] else { panic!("{told:?}") };
    sight.since = sight.now - secs(1);
    assert_eq!(sight.told(), [], "not before the fleet has settled");
    sight.since = sight.now - secs(60);
    sight.silent(2, secs(2));
    assert_eq!(sight.told(), [], "nor while a replica is missing");
    // With one shard, a move would only change who is empty.
    assert_eq!(FleetView::serving(4, &[0], 3).told(), []);
}

#[test]
fn replicas_are_not_moved_back_and_forth() {
    // Loads of 3, 2, 2 and 2 shards: as even as it gets.
    let mut sight = FleetView::new(4, 3, 3);
    for (shard, on) in [(0, [0, 1, 2]), (1, [0, 1, 3]), (2, [0, 2, 3])] {
        sight.founded(JobShard::from_number(shard), &on, on[shard as usize], 1000);
    }
    assert_eq!(sight.told(), []);
}

#[test]
fn every_change_of_servers_or_placement_is_a_new_generation() {
    let mut state = FleetView::new(3, 1, 3).state;
    let place = |founded| Place { founding: 5, voters: BTreeSet::new(), founded };
    let mut last = state.generation;
    for (command, changes) in [
        (Command::Admit { server: ServerId(3), address: address(3) }, true),
        (Command::Admit { server: ServerId(3), address: address(3) }, false),
        (Command::Join { address: address(4) }, true),
        (Command::Join { address: address(4) }, false),
        (Command::Drain { server: ServerId(1), draining: true }, true),
        (Command::Drain { server: ServerId(77), draining: true }, false),
        (Command::Place { shard: S0, place: place(false) }, true),
        (Command::Place { shard: S0, place: place(false) }, false),
        (Command::Place { shard: S0, place: place(true) }, true),
    ] {
        state.apply(&command);
        assert_eq!(state.generation, last + u64::from(changes), "{command:?}");
        last = state.generation;
    }
}

#[test]
fn control_group_admits_all_servers_with_odd_voter_count() {
    let mut sight = FleetView::serving(4, &[0], 3);
    sight.control.members.remove(&node(3));
    assert_eq!(sight.plan().control, Some(ControlChange::Learner(node(3), address(3))));
    let sight = FleetView::serving(4, &[0], 3);
    assert_eq!(sight.plan().control, None, "four are there, three vote");
    let sight = FleetView::serving(7, &[0], 3);
    let Some(ControlChange::Voters(voters)) = sight.plan().control else { panic!("five may vote") };
    assert_eq!(voters.len(), 5);
    assert!(voters.is_superset(&sight.control.voters), "who votes goes on voting");
    // One change at a time.
    let mut sight = FleetView::serving(7, &[0], 3);
    sight.control.changing = true;
    assert_eq!(sight.plan().control, None);
}

#[test]
fn draining_or_silent_control_voter_is_replaced() {
    let mut sight = FleetView::serving(4, &[0], 3);
    sight.silent(2, secs(29));
    assert_eq!(sight.plan().control, None);
    sight.silent(2, secs(31));
    assert_eq!(sight.plan().control, Some(ControlChange::Voters(nodes(&[0, 1, 3]))));
    let mut sight = FleetView::serving(4, &[0], 3);
    sight.drain(0, true);
    assert_eq!(sight.plan().control, Some(ControlChange::Voters(nodes(&[1, 2, 3]))));
    // No server can take its place: three replicas of which one is dead are better than two.
    let mut sight = FleetView::serving(3, &[0], 3);
    sight.silent(2, secs(31));
    assert_eq!(sight.plan().control, None);
}

#[test]
fn a_group_of_one_moves_by_way_of_two() {
    let mut sight = FleetView::serving(2, &[0], 1);
    sight.drain(0, true);
    sight.report(1).replicas.insert(S0, (ReplicaReport { applied: 1000, ..fresh(1, FOUNDING) }).into());
    sight.membership(0, S0, |m| _ = m.members.insert(node(1), address(1)));
    assert_eq!(sight.told(), [(0, Action::Voters(nodes(&[0, 1])))]);
    sight.membership(0, S0, |m| m.voters = nodes(&[0, 1]));
    let place = Place { founding: FOUNDING, voters: nodes(&[0, 1]), founded: true };
    let agree = Command::Place { shard: S0, place };
    assert_eq!(sight.plan().commands, std::slice::from_ref(&agree), "first it is agreed on");
    sight.state.apply(&agree);
    assert_eq!(
        sight.told(),
        [(0, Action::Transfer(node(1)))],
        "then the leadership goes over, then the old one"
    );
}

/// Three replicas of shard 0 report these digests of the same check. Gives the servers whose replicas are
/// stopped.
fn diverged(digests: [Option<u64>; 3]) -> (Vec<u64>, String) {
    let mut w = FleetView::serving(3, &[0], 3);
    for (server, digest) in (0..).zip(digests) {
        let of_check = |digest| Digest { index: 500, digest };
        w.replica(server, JobShard::from_number(0)).digests = digest.map(of_check).into_iter().collect();
    }
    let plan = w.plan();
    let stopped = |(s, list): (&ServerId, &Vec<Directive>)| {
        list.iter()
            .any(|d| matches!(d.what, Action::Diverged { node, .. } if node.server() == *s))
            .then_some(s.0)
    };
    (plan.directives.iter().filter_map(stopped).collect(), plan.health[&JobShard::from_number(0)].1.clone())
}

#[test]
fn replica_differing_from_majority_is_stopped_even_leader() {
    assert_eq!(diverged([Some(7), Some(7), Some(7)]), (vec![], String::new()));
    assert_eq!(diverged([Some(7), Some(7), None]), (vec![], String::new()));
    assert_eq!(diverged([Some(7), Some(8), Some(7)]), (vec![1], String::new()));
    assert_eq!(diverged([Some(9), Some(7), Some(7)]), (vec![0], String::new()));
    let (stopped, said) = diverged([Some(7), Some(8), None]);
    assert!(stopped.is_empty() && said.contains("log index 500"), "{said}");
    let (stopped, said) = diverged([Some(7), Some(8), Some(9)]);
    assert!(stopped.is_empty() && said.contains("no majority agrees"), "{said}");
}

#[test]
fn drained_and_gone_servers_lose_their_control_votes() {
    let mut sight = FleetView::serving(5, &[2], 3);
    sight.control.voters = nodes(&[0, 1, 2, 3, 4]);
    for gone in [0, 1] {
        sight.drain(gone, true);
        sight.silent(gone, secs(3600));
    }
    let three = nodes(&[2, 3, 4]);
    assert_eq!(sight.plan().control, Some(ControlChange::Voters(three)), "three vote, and one more may go");
}

fn a_job(name: &str, finished: bool) -> JobReport {
    let durability = Durability::QuorumMemory;
    let facts = JobFacts { name: name.into(), mode: Mode::Asp.into(), workers: 2, durability };
    JobReport { facts, shards: 3, finished, auto: None }
}

/// Applies the planned commands, and returns them.
fn agreed(sight: &mut FleetView) -> Vec<Command> {
    let commands = sight.plan().commands;
    commands.iter().for_each(|c| _ = sight.state.apply(c));
    commands
}

#[test]
fn a_job_is_agreed_on_once_and_again_when_it_has_finished() {
    let mut sight = FleetView::serving(3, &[0, 1, 2], 3);
    let tell = |sight: &mut FleetView, shard: u32, finished| {
        sight.replica(u64::from(shard), JobShard::from_number(shard)).job = Some(a_job("a", finished));
    };
    tell(&mut sight, 0, false);
    tell(&mut sight, 1, false);
    assert_eq!(agreed(&mut sight), [], "the third shard has not heard of it");
    tell(&mut sight, 2, false);
    let shards: BTreeMap<_, _> = (0..3).map(|s| (JobShard::from_number(s), FOUNDING)).collect();
    let told = |state| Command::Job {
        shards: shards.clone(),
        facts: a_job("a", false).facts,
        state,
        seen_ms: 1_000,
    };
    assert_eq!(agreed(&mut sight), [told(JobState::Running)]);
    assert_eq!(agreed(&mut sight), [], "it is agreed on");
    tell(&mut sight, 0, true);
    tell(&mut sight, 1, true);
    assert_eq!(agreed(&mut sight), [], "it has not finished everywhere");
    tell(&mut sight, 2, true);
    assert_eq!(agreed(&mut sight), [told(JobState::Finished)]);
    assert_eq!(agreed(&mut sight), []);
    // While a shard has no leader, its agreed placement stays.
    sight.replica(2, JobShard::from_number(2)).leads = false;
    assert!(!agreed(&mut sight).iter().any(|c| matches!(c, Command::Job { .. })));
}

#[test]
fn shards_that_tell_of_two_jobs_are_waited_for() {
    let mut sight = FleetView::serving(3, &[0, 1, 2], 3);
    for (shard, name) in [(0, "a"), (1, "b"), (2, "a")] {
        sight.replica(shard, JobShard::from_number(shard as u32)).job = Some(a_job(name, false));
    }
    assert_eq!(agreed(&mut sight), []);
    // A job with fewer shards than the fleet does not need reports of the other shards.
    sight.replica(0, JobShard::from_number(0)).job = Some(JobReport { shards: 1, ..a_job("a", false) });
    let commands = agreed(&mut sight);
    assert!(
        matches!(&commands[..], [Command::Job { shards, .. }] if shards.keys().eq([&JobShard::from_number(0)])),
        "{commands:?}"
    );
}

#[test]
fn job_with_refounded_shard_is_lost_until_it_restarts() {
    let mut sight = FleetView::serving(3, &[0], 3);
    let job = JobReport { shards: 1, ..a_job("a", false) };
    sight.replica(0, S0).job = Some(job.clone());
    assert_eq!(agreed(&mut sight).len(), 1);
    let place = Place { founding: FOUNDING + 1, voters: nodes(&[0, 1, 2]), founded: true };
    sight.state.apply(&Command::Place { shard: S0, place });
    assert!(
        !agreed(&mut sight).iter().any(|c| matches!(c, Command::Job { .. })),
        "what a replica of the earlier founding tells is of the past"
    );
    let state = |sight: &FleetView| sight.state.jobs.iter().map(|(_, j)| j.state).collect::<Vec<_>>();
    assert_eq!(state(&sight), [JobState::Lost]);
    (0..3).for_each(|s| sight.replica(s, S0).founding = FOUNDING + 1);
    assert!(agreed(&mut sight).iter().any(|c| matches!(c, Command::Job { .. })));
    let states: Vec<_> = sight.state.jobs.iter().map(|(_, j)| (j.founding(), j.state)).collect();
    assert_eq!(states, [(FOUNDING + 1, JobState::Running)]);
}

/// A second job on the servers, with one shard.
fn submitted(sight: &mut FleetView, replicas: u32) -> JobId {
    let shape = Shape { shards: 1, replicas, durability: Durability::QuorumDisk };
    let (name, run) = ("b".to_string(), String::new());
    let submission = Submission { name, token: 1, shape, keep_ms: Some(5_000), seen_ms: 1, run };
    match sight.state.apply(&Command::Submit(submission)) {
        Outcome::Submitted(job) => job,
        other => panic!("{other:?}"),
    }
}

#[test]
fn submitted_job_gets_own_shards_beside_other_jobs() {
    let mut sight = FleetView::serving(3, &[0, 1, 2], 3);
    let job = submitted(&mut sight, 1);
    let commands = agreed(&mut sight);
    let first = JobShard::first(job);
    assert!(matches!(&commands[..], [Command::Place { shard, .. }] if *shard == first), "{commands:?}");
    let founding = sight.state.shards[&first].founding;
    let told = sight.plan().directives;
    let [(server, list)] = &told.into_iter().collect::<Vec<_>>()[..] else { panic!("one replica") };
    let host = Action::Host { founding, shards: 1, durability: Durability::QuorumDisk };
    assert_eq!(list[..], [Directive { shard: first, what: host }]);
    assert_eq!(*server, ServerId(1), "the turn of the next one: the first has the first job's first shard");
}

#[test]
fn replicas_of_deleted_job_are_removed_of_unknown_job_stay() {
    let mut sight = FleetView::serving(3, &[0, 1, 2], 3);
    let first = JobShard::first(JobId(1));
    sight.report(2).replicas.insert(first, fresh(2, 9).into());
    assert_eq!(sight.told(), [], "a leader of the past has not heard of it");
    let job = submitted(&mut sight, 1);
    sight.state.apply(&Command::Delete { job });
    assert_eq!(sight.told(), [(2, Action::Remove)]);
    sight.report(2).replicas.remove(&first);
    assert_eq!(sight.told(), []);
}

#[test]
fn stop_directive_repeats_until_job_stops_then_it_expires() {
    let mut sight = FleetView::serving(3, &[0, 1, 2], 3);
    let job = submitted(&mut sight, 3);
    let first = JobShard::first(job);
    sight.founded(first, &[0, 1, 2], 1, 100);
    let report = |finished| JobReport { shards: 1, ..a_job("b", finished) };
    sight.replica(1, first).job = Some(report(false));
    agreed(&mut sight);
    assert_eq!(sight.told(), []);
    sight.state.apply(&Command::Stop { job, now_ms: 1 });
    assert_eq!(sight.told(), [(1, Action::Stop)]);
    sight.replica(1, first).job = Some(report(true));
    assert_eq!(sight.told(), []);
    agreed(&mut sight);
    let state = |sight: &FleetView| sight.state.jobs.get(job).map(|j| (j.state, j.released));
    assert_eq!(state(&sight), Some((JobState::Stopped, false)));
    // It ended at 1 s of the plan's clock, which does not advance.
    assert_eq!(agreed(&mut sight), [], "its weights are kept for 5 s");
    sight.unix_ms = 6_000;
    assert_eq!(agreed(&mut sight), [Command::Release { job }]);
    assert_eq!(state(&sight), Some((JobState::Stopped, true)));
    assert_eq!(sight.told(), [(0, Action::Remove), (1, Action::Remove), (2, Action::Remove)]);
}
