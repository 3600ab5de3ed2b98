//! Which server gets which switch of the mode, and what is lost with a leader of the control group.

use super::{
    auto::AutoRules,
    jobs::JobFacts,
    plan::{Action, Directive, JobReport, LastReport, ReplicaReport, Report, Timeouts, View},
    state::{Command, Place, Shape, State},
};
use crate::raft::Membership;
use paraft_common::{
    AutoConfig, Durability, JobShard, Mode, ModeChoice, ServerId,
    auto::{self, Counted, Switch, WINDOW},
};
use std::{
    collections::{BTreeMap, BTreeSet},
    time::{Duration, Instant},
};

const SHARD: JobShard = JobShard::from_number(0);
const FOUNDING: u64 = 7;
const WORKERS: u32 = 4;

/// Three servers, one shard, and a job with the automatic bound: the shard leader's view, and its report.
struct Fleet {
    state: State,
    leader: u64,
    report: auto::Report,
    /// Whether the rule chooses the mode.
    on: bool,
}

impl Fleet {
    fn new() -> Self {
        let mut state = State::default();
        let shape = Shape { shards: 1, replicas: 3, durability: Durability::QuorumMemory };
        let servers = (0..3).map(|s| (ServerId(s), format!("s{s}:1"))).collect();
        state.apply(&Command::Found { fleet: 1, shape, servers });
        let rule = AutoConfig::default();
        let report = auto::Report {
            term: 1,
            rule,
            number: 0,
            mode: rule.first(),
            loosest: Mode::Asp,
            members: WORKERS,
            counted: Counted::default(),
        };
        let mut fleet = Self { state, leader: 0, report, on: true };
        fleet.founded(FOUNDING);
        fleet
    }

    fn founded(&mut self, founding: u64) {
        let place = Place { founding, voters: BTreeSet::new(), founded: true };
        self.state.shards.insert(SHARD, place);
    }

    /// Each worker makes this many steps in which it waits for half of the time, at a loss that no longer
    /// decreases.
    fn trains(&mut self, steps: u32) {
        let c = &mut self.report.counted;
        let (time, pulls) = (Duration::from_millis(10) * steps, u64::from(steps * WORKERS));
        c.pulls += pulls;
        c.lasted += time;
        c.waited += time * WORKERS / 2;
        c.losses = (c.losses.0 + pulls as f64, c.losses.1 + pulls);
    }

    /// The shard moves to another leader, which has counted nothing yet.
    fn move_leader(&mut self, leader: u64) {
        self.leader = leader;
        self.report = auto::Report { term: self.report.term + 1, counted: Counted::default(), ..self.report };
    }

    /// The directive of the control group's leader.
    fn steer(&self, follows: &mut AutoRules) -> Option<(ServerId, Switch)> {
        let now = Instant::now();
        let heard: BTreeMap<_, _> = (0..3)
            .map(|s| {
                let facts = JobFacts {
                    name: "a".into(),
                    mode: ModeChoice::Auto,
                    workers: WORKERS,
                    durability: Durability::QuorumMemory,
                };
                let auto = self.on.then_some(self.report);
                let leads = s == self.leader;
                let replica = ReplicaReport {
                    founding: self.state.shards[&SHARD].founding,
                    leads,
                    term: self.report.term,
                    job: leads.then_some(JobReport { facts, shards: 1, finished: false, auto }),
                    ..ReplicaReport::default()
                };
                let report =
                    Report { replicas: BTreeMap::from([(SHARD, replica.into())]), ..Report::default() };
                (ServerId(s), LastReport { number: 0, report, at: now })
            })
            .collect();
        let (none, control) = (BTreeSet::new(), Membership::default());
        let second = Duration::from_secs(1);
        let told = follows.steer(&View {
            state: &self.state,
            control: &control,
            heard: &heard,
            now,
            since: now,
            control_caught_up: &none,
            lost_since: &BTreeMap::new(),
            timeouts: Timeouts { silent: second, replace: second, settle: second },
            founding: 1,
            unix_ms: 0,
        });
        told.into_iter().next().map(|(server, Directive { shard, what })| {
            let Action::Switch(switch) = what else { panic!("{what:?}") };
            assert_eq!(shard, SHARD);
            (server, switch)
        })
    }

    /// The shard's leader follows the directive, as `Switching` does: an outdated one changes nothing.
    fn takes(&mut self, switch: Switch) {
        let Switch { number, mode, loosest } = switch;
        if number > self.report.number {
            self.report = auto::Report { number, mode, loosest, counted: Counted::default(), ..self.report };
        }
    }
}

#[test]
fn the_leader_of_the_shard_is_told_until_the_switch_is_in_force() {
    let (mut fleet, mut follows) = (Fleet::new(), AutoRules::default());
    assert_eq!(fleet.steer(&mut follows), None);
    fleet.trains(WINDOW);
    let (server, switch) = fleet.steer(&mut follows).expect("stragglers dominate");
    assert_eq!((server, switch), (ServerId(0), Switch { number: 1, mode: Mode::Asp, loosest: Mode::Asp }));
    fleet.move_leader(2);
    assert_eq!(fleet.steer(&mut follows), Some((ServerId(2), switch)), "who leads now may not have heard");
    fleet.takes(switch);
    assert_eq!(fleet.steer(&mut follows), None);
    // An operator ends the rule: `paraft mode JOB asp`.
    fleet.trains(10 * WINDOW);
    fleet.on = false;
    assert_eq!(fleet.steer(&mut follows), None);
    fleet.on = true;
    assert_eq!(fleet.steer(&mut follows), None, "it begins with a window of its own");
}

#[test]
fn a_shard_that_was_founded_anew_has_another_job() {
    let (mut fleet, mut follows) = (Fleet::new(), AutoRules::default());
    fleet.trains(WINDOW);
    assert_eq!(fleet.steer(&mut follows), None, "whose window that was is not known");
    fleet.trains(WINDOW);
    assert!(fleet.steer(&mut follows).is_some());
    fleet.founded(FOUNDING + 1);
    assert_eq!(fleet.steer(&mut follows), None);
}

/// The job takes the same course, a window or two later, and never looser than decided before.
#[test]
fn whoever_leads_the_control_group_next_goes_on_with_the_job() {
    for dies_every in [usize::MAX, 9, 7, 6] {
        let (mut fleet, mut follows) = (Fleet::new(), AutoRules::default());
        let mut modes = Vec::new();
        for i in 1..120 {
            fleet.trains(WINDOW);
            let told = fleet.steer(&mut follows);
            if i % dies_every == 0 {
                // Its decisions that were not sent are lost with it.
                follows = AutoRules::default();
            } else if let Some((_, switch)) = told {
                fleet.takes(switch);
                modes.push(switch.mode);
            }
        }
        let expected = match dies_every {
            // No leader lasts long enough to see that the loss stops decreasing.
            6 => vec![Mode::Asp],
            _ => [vec![Mode::Asp], [16, 8, 4, 2, 1, 0].map(Mode::Ssp).to_vec()].concat(),
        };
        assert_eq!(modes, expected, "a leader of the control group dies after every {dies_every} windows");
    }
}
