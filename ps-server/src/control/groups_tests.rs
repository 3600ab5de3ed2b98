//! Which ranks are assigned, and when.

use super::groups::*;
use paraft_common::group::{Assigned, Assignment};
use std::time::{Duration, Instant};

const TIMEOUT: Duration = Duration::from_secs(20);

fn key() -> Key {
    Key { job: "j".into(), worker: 0 }
}

/// The request of a rank that was at index `last.1` of group `last.0`, of which it knows no other member; 0:
/// of no group.
fn asks(rank: u32, token: u64, last: (u64, u32), lost: &[u32]) -> JoinRequest {
    let address = format!("127.0.0.1:{token}");
    let (generation, place) = last;
    let others = (0..place).map(|_| Assigned::default());
    let own = Assigned { rank, token, address: address.clone() };
    let ranks = if generation > 0 { others.chain([own]).collect() } else { Vec::new() };
    JoinRequest {
        size: 3,
        rank,
        token,
        address,
        last: Assignment { generation, ranks },
        lost: lost.into(),
        timeout: TIMEOUT,
        settings: String::new(),
    }
}

fn join(groups: &mut Groups, asks: JoinRequest, now: Instant) -> Answer {
    groups.join(&key(), asks, now).expect("sound")
}

/// Sends all these requests; returns the group that they are assigned in: its generation, and its ranks in
/// order.
fn assigned(groups: &mut Groups, all: &[JoinRequest], now: Instant) -> Option<(u64, Vec<u32>)> {
    for a in all {
        join(groups, a.clone(), now);
    }
    let group = |a: &JoinRequest| match join(groups, a.clone(), now) {
        Answer::Assigned(s) => Some((s.generation, s.ranks.iter().map(|r| r.rank).collect())),
        Answer::Wait { .. } | Answer::Over => None,
    };
    let mut answers = all.iter().map(group);
    let first = answers.next()?;
    assert!(answers.all(|a| a == first), "they disagree");
    first
}

#[test]
fn a_group_begins_when_all_are_there_and_says_who_is_missing() {
    let now = Instant::now();
    let mut g = Groups::default();
    assert_eq!(assigned(&mut g, &[asks(2, 12, (0, 0), &[]), asks(0, 10, (0, 0), &[])], now), None);
    assert_eq!(join(&mut g, asks(0, 10, (0, 0), &[]), now), Answer::Wait { here: 2, why: None });
    assert_eq!(assigned(&mut g, &[asks(1, 11, (0, 0), &[])], now), Some((1, vec![0, 1, 2])));
    let mut g = Groups::default();
    let two = [asks(2, 12, (0, 0), &[]), asks(1, 11, (0, 0), &[])];
    assert_eq!(assigned_after(&mut g, &two, now, TIMEOUT - Duration::from_secs(1)), None);
    assert_eq!(assigned(&mut g, &two, now + TIMEOUT - REQUEST_TIMEOUT / 2), None);
    let late = now + TIMEOUT;
    let Refused { why, then } = g.join(&key(), two[1].clone(), late).expect_err("it takes too long");
    assert!(then == Advice::GiveUp && why.contains("2 of 3 ranks") && why.contains("missing: 0"), "{why}");
}

#[test]
fn new_control_leader_learns_group_from_its_remaining_ranks() {
    let now = Instant::now();
    let mut g = Groups::default();
    let last = assignment(4, &[(0, 10), (1, 11), (2, 12)]);
    let long = Assigned { rank: 0, token: 1, address: "a".repeat(MAX_ADDRESS_BYTES + 1) };
    let unsound =
        JoinRequest { last: Assignment { generation: 4, ranks: vec![long] }, ..asks(0, 10, (0, 0), &[]) };
    join(&mut g, unsound, now);
    assert_eq!(g.overview(now)[0].assignment.generation, 0, "it is not kept");
    let asks = |rank, token| JoinRequest { last: last.clone(), ..asks(rank, token, (0, 0), &[1]) };
    assert_eq!(assigned(&mut g, &[asks(0, 10)], now), None);
    assert_eq!(assigned(&mut g, &[asks(2, 12)], now), Some((5, vec![0, 2])));
}

#[test]
fn ranks_of_different_settings_make_no_group() {
    let now = Instant::now();
    let mut g = Groups::default();
    let with =
        |rank, settings: &str| JoinRequest { settings: settings.into(), ..asks(rank, 10, (0, 0), &[]) };
    join(&mut g, with(0, "group_size 3"), now);
    let refused = g.join(&key(), with(1, "group_size 2"), now).expect_err("another job");
    assert!(refused.then == Advice::Fix && refused.why.contains("rank 1 with group_size 2"), "{refused:?}");
    let waits = Answer::Wait { here: 1, why: Some(refused.why) };
    assert_eq!(join(&mut g, with(0, "group_size 3"), now), waits, "who was first hears it too");
}

/// Repeats the requests. Checks that no rank is assigned before this long has passed, and returns the
/// assignment then.
fn assigned_after(
    g: &mut Groups,
    all: &[JoinRequest],
    now: Instant,
    long: Duration,
) -> Option<(u64, Vec<u32>)> {
    for quarter in 0..4 * long.as_secs() as u32 {
        assert_eq!(assigned(g, all, now + Duration::from_millis(250) * quarter), None);
    }
    assigned(g, all, now + long)
}

fn three(now: Instant) -> Groups {
    let mut g = Groups::default();
    let all = [asks(0, 10, (0, 0), &[]), asks(1, 11, (0, 0), &[]), asks(2, 12, (0, 0), &[])];
    assert_eq!(assigned(&mut g, &all, now), Some((1, vec![0, 1, 2])));
    g
}

#[test]
fn who_is_lost_is_not_waited_for_and_the_leader_stays() {
    let now = Instant::now();
    let mut g = three(now);
    assert_eq!(assigned(&mut g, &[asks(2, 12, (1, 2), &[])], now), None, "0 and 1 may be in their step");
    assert_eq!(assigned(&mut g, &[asks(1, 11, (1, 1), &[0])], now), Some((2, vec![1, 2])));
    // The first returns as another process: it waits until the others have left their group.
    assert_eq!(assigned(&mut g, &[asks(0, 20, (0, 0), &[])], now), None);
    assert_eq!(g.hold(&key(), holds(assignment(2, &[(1, 11), (2, 12)]), false), now), Ok(1));
    let rest = [asks(1, 11, (2, 0), &[]), asks(2, 12, (2, 1), &[])];
    assert_eq!(assigned(&mut g, &rest, now), Some((3, vec![1, 2, 0])), "who led leads");
    let back = join(&mut g, asks(0, 20, (0, 0), &[]), now);
    assert!(matches!(&back, Answer::Assigned(s) if s.generation == 3), "{back:?}");
}

fn assignment(generation: u64, ranks: &[(u32, u64)]) -> Assignment {
    let assigned =
        |(rank, token): &(u32, u64)| Assigned { rank: *rank, token: *token, address: "a:1".into() };
    Assignment { generation, ranks: ranks.iter().map(assigned).collect() }
}

fn holds(assignment: Assignment, over: bool) -> Heartbeat {
    Heartbeat { assignment, over, ..Heartbeat::default() }
}

#[test]
fn a_rank_that_is_only_slow_is_left_behind_and_taken_in_again() {
    let now = Instant::now();
    let mut g = three(now);
    let two = [asks(0, 10, (1, 0), &[]), asks(1, 11, (1, 1), &[])];
    let later = now + GATHER_TIMEOUT;
    assert_eq!(assigned_after(&mut g, &two, now, GATHER_TIMEOUT), Some((2, vec![0, 1])));
    assert_eq!(assigned(&mut g, &[asks(2, 12, (1, 2), &[])], later), None, "the others are at work");
    let two = [asks(0, 10, (2, 0), &[]), asks(1, 11, (2, 1), &[])];
    assert_eq!(assigned(&mut g, &two, later), Some((3, vec![0, 1, 2])));
}

#[test]
fn a_leader_that_speaks_is_waited_for() {
    let now = Instant::now();
    let mut g = three(now);
    let two = [asks(1, 11, (1, 1), &[2]), asks(2, 12, (1, 2), &[])];
    for quarter in 0..8 * GATHER_TIMEOUT.as_secs() as u32 {
        let now = now + Duration::from_millis(250) * quarter;
        g.hold(&key(), holds(assignment(1, &[(0, 10), (1, 11), (2, 12)]), false), now).expect("sound");
        assert_eq!(assigned(&mut g, &two, now), None);
    }
    let late = now + 2 * GATHER_TIMEOUT;
    assert_eq!(assigned(&mut g, &[asks(0, 10, (1, 0), &[])], late), Some((2, vec![0, 1, 2])));
}

#[test]
fn a_leader_of_the_control_group_that_knows_nothing_learns_it() {
    let now = Instant::now();
    let mut g = Groups::default();
    assert_eq!(g.hold(&key(), holds(assignment(7, &[(0, 10), (1, 11)]), false), now), Ok(0));
    // A newcomer waits, even if no other rank asks.
    assert_eq!(assigned(&mut g, &[asks(2, 12, (0, 0), &[])], now), None);
    let rest = [asks(0, 10, (7, 0), &[]), asks(1, 11, (7, 1), &[])];
    assert_eq!(assigned(&mut g, &rest, now), Some((8, vec![0, 1, 2])));
    // A heartbeat of an older group changes nothing.
    g.hold(&key(), holds(assignment(7, &[(0, 10)]), false), now).expect("sound");
    let new = join(&mut g, asks(2, 12, (0, 0), &[]), now);
    assert!(matches!(&new, Answer::Assigned(s) if s.generation == 8), "{new:?}");
    // A silent group is gone: the next one starts like the first.
    let long = now + GROUP_TIMEOUT;
    assert_eq!(assigned_after(&mut g, &[asks(1, 31, (0, 0), &[])], long, TIMEOUT), Some((9, vec![1])));
}

#[test]
fn new_control_leader_waits_for_groups_before_newcomers() {
    let now = Instant::now();
    let all = [asks(0, 20, (0, 0), &[]), asks(1, 21, (0, 0), &[]), asks(2, 22, (0, 0), &[])];
    let mut g = Groups::taken_over(true, now);
    assert_eq!(assigned(&mut g, &all, now), None);
    assert_eq!(g.hold(&key(), holds(assignment(4, &[(0, 10), (1, 11), (2, 12)]), false), now), Ok(0));
    let later = now + LEARN_PERIOD;
    assert_eq!(assigned(&mut g, &all, later), None, "there is a group");
    // The job is done before any of its ranks has asked this leader: the waiting ranks are told.
    g.hold(&key(), holds(assignment(4, &[(0, 10)]), true), later).expect("sound");
    assert_eq!(join(&mut g, all[1].clone(), later), Answer::Over);
    let mut g = Groups::taken_over(true, now);
    assert_eq!(assigned(&mut g, &all, now), None);
    assert_eq!(assigned(&mut g, &all, later), Some((1, vec![0, 1, 2])), "there was none");
    assert_eq!(assigned(&mut Groups::taken_over(false, now), &all, now), Some((1, vec![0, 1, 2])));
}

#[test]
fn who_comes_back_to_a_job_that_is_done_hears_so() {
    let now = Instant::now();
    let mut g = three(now);
    assert_eq!(assigned(&mut g, &[asks(1, 21, (0, 0), &[])], now), None);
    assert_eq!(g.hold(&key(), holds(assignment(1, &[(0, 10), (2, 12)]), true), now), Ok(1));
    assert_eq!(join(&mut g, asks(1, 21, (0, 0), &[]), now), Answer::Over);
    // The last heartbeat may come after that.
    g.hold(&key(), holds(assignment(1, &[(0, 10), (2, 12)]), false), now).expect("sound");
    assert_eq!(join(&mut g, asks(1, 21, (0, 0), &[]), now), Answer::Over);
    let all = [asks(0, 30, (0, 0), &[]), asks(1, 31, (0, 0), &[]), asks(2, 32, (0, 0), &[])];
    let now = now + REQUEST_TIMEOUT;
    assert_eq!(assigned(&mut g, &all, now), None);
    // Another job of the same name begins at once.
    let other = all.clone().map(|a| JoinRequest { settings: "more epochs".into(), ..a });
    assert_eq!(assigned(&mut g, &other, now), Some((1, vec![0, 1, 2])));
}

#[test]
fn a_second_process_of_a_rank_waits_until_the_first_is_gone() {
    let now = Instant::now();
    let mut g = three(now);
    assert_eq!(assigned(&mut g, &[asks(1, 21, (0, 0), &[])], now), None);
    let all = [(0, 10), (1, 11), (2, 12)];
    assert_eq!(
        g.hold(&key(), holds(assignment(1, &all), false), now),
        Ok(0),
        "nobody is to make room for it"
    );
    match join(&mut g, asks(1, 21, (0, 0), &[]), now) {
        Answer::Wait { why: Some(why), .. } => {
            assert!(why.contains("two processes") && why.contains("a:1"), "{why}");
        }
        other => panic!("the first is there: {other:?}"),
    }
    assert!(matches!(join(&mut g, asks(1, 11, (0, 0), &[]), now), Answer::Assigned(_)));
    // Another rank is lost: the members of the group stay.
    let two = [asks(0, 10, (1, 0), &[2]), asks(1, 11, (1, 1), &[])];
    assert_eq!(assigned(&mut g, &two, now), Some((2, vec![0, 1])));
    join(&mut g, asks(1, 21, (0, 0), &[]), now);
    // Now it is gone.
    assert_eq!(assigned(&mut g, &[asks(0, 10, (2, 0), &[1])], now), Some((3, vec![0, 1])));
    assert!(matches!(join(&mut g, asks(1, 21, (0, 0), &[]), now), Answer::Assigned(_)));
}

#[test]
fn people_see_who_is_in_a_group() {
    let now = Instant::now();
    let mut g = Groups::default();
    assert_eq!(assigned(&mut g, &[asks(2, 12, (0, 0), &[])], now), None);
    let state = |g: &Groups, now| g.overview(now).iter().map(|o| (o.state, o.waiting)).collect::<Vec<_>>();
    assert_eq!(state(&g, now), [("forming", 1)]);
    let mut g = three(now);
    assert_eq!(state(&g, now), [("training", 0)]);
    assert_eq!(g.overview(now)[0].assignment.ranks.len(), 3);
    assert_eq!(state(&g, now + GROUP_TIMEOUT), [("silent", 0)]);
    g.hold(&key(), holds(assignment(1, &[(0, 10)]), true), now).expect("sound");
    assert_eq!(state(&g, now), [("done", 0)]);
}

#[test]
fn all_have_died_and_come_back_as_others() {
    let now = Instant::now();
    let mut g = three(now);
    let all = [asks(0, 20, (0, 0), &[]), asks(1, 21, (0, 0), &[]), asks(2, 22, (0, 0), &[])];
    assert_eq!(assigned(&mut g, &all, now), None, "the first ones may be there");
    let now = now + LEADER_TIMEOUT;
    assert_eq!(assigned(&mut g, &all, now), Some((2, vec![0, 1, 2])));
    let old = join(&mut g, asks(0, 10, (1, 0), &[]), now);
    assert!(matches!(old, Answer::Wait { here: 1, why: Some(_) }), "an old process is in no group: {old:?}");
}

#[test]
fn nonsense_is_refused_and_who_hangs_up_is_forgotten() {
    let now = Instant::now();
    let mut g = Groups::default();
    assert!(g.join(&key(), JoinRequest { size: 0, ..asks(0, 1, (0, 0), &[]) }, now).is_err());
    assert!(g.join(&key(), asks(3, 1, (0, 0), &[]), now).is_err());
    assert!(g.join(&key(), JoinRequest { address: "x".into(), ..asks(0, 1, (0, 0), &[]) }, now).is_err());
    g.join(&key(), asks(0, 1, (0, 0), &[]), now).expect("sound");
    let twice = g.join(&key(), asks(0, 2, (0, 0), &[]), now).expect_err("another process");
    assert!(twice.why.contains("two processes") && twice.then == Advice::Again, "{twice:?}");
    let now = now + REQUEST_TIMEOUT;
    g.join(&key(), asks(0, 2, (0, 0), &[]), now).expect("the first has hung up");
    let now = now + REQUEST_TIMEOUT;
    let other = join(&mut g, asks(1, 3, (0, 0), &[]), now);
    assert_eq!(other, Answer::Wait { here: 1, why: None }, "the second has, too");
    for worker in 0..MAX_GROUPS as u32 {
        g.hold(&Key { job: "j".into(), worker }, holds(assignment(1, &[(0, 1)]), false), now).expect("sound");
    }
    let one_more = Key { job: "k".into(), worker: 0 };
    assert!(g.join(&one_more, asks(0, 1, (0, 0), &[]), now).is_err());
    g.join(&one_more, asks(0, 1, (0, 0), &[]), now + GROUP_TIMEOUT).expect("the others are over");
}
