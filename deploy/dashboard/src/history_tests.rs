//! The events and points that snapshots of a fleet give.

use super::*;
use crate::facts::Member;

fn facts(at: u64, leader: u64, state: &str, clocks: [u64; 2], samples: u64) -> Facts {
    let server = |id| Server { id, address: format!("h{id}"), state: "up".into(), ..Server::default() };
    let member = |(worker, clock)| Member { worker, clock, ..Member::default() };
    let members = [(0, clocks[0]), (1, clocks[1])].map(member).to_vec();
    Facts {
        simulated: false,
        at,
        leader: Some(0),
        servers: vec![server(0), Server { state: state.into(), ..server(1) }],
        shards: vec![Shard { leader: Some(leader), term: 1 + leader, ..Shard::default() }],
        jobs: vec![Job { name: "t".into(), state: "running".into(), members, samples, ..Job::default() }],
        faults: None,
        heard: ["h0".to_string()].into(),
    }
}

#[test]
fn a_job_without_a_first_leader_keeps_its_last_observation() {
    let mut history = History::default();
    let mut first = facts(1000, 0, "up", [5, 4], 10);
    (first.jobs[0].mode, first.shards[0].voters) = ("ssp:4".into(), vec![0, 1]);
    history.see(first.clone());
    let mut lost = facts(2000, 0, "up", [0, 0], 0);
    lost.jobs[0] = Job { stale: true, mode: "bsp".into(), members: Vec::new(), ..lost.jobs[0].clone() };
    let news = history.see(lost);
    assert!(news.events.is_empty() && news.points.is_empty(), "{news:?}");
    let job = &history.last().jobs[0];
    assert_eq!((&*job.mode, job.members[0].clock, job.samples, job.stale), ("ssp:4", 5, 10, true));
    assert_eq!(history.last().shards[0].voters, [0, 1]);
    first.at = 3000;
    assert!(history.see(first).events.is_empty() && !history.last().jobs[0].stale);
}

#[test]
fn what_changes_is_said_once_and_rates_are_between_two_looks() {
    let mut history = History::default();
    assert!(history.see(facts(1000, 0, "up", [1, 1], 10)).events.is_empty(), "as it was found");
    let news = history.see(facts(3000, 1, "silent", [9, 7], 50));
    let said: Vec<&str> = news.events.iter().map(|e| e.what.as_str()).collect();
    assert_eq!(said, ["s1 is silent, and was up", "s1 leads shard 0 of t, in term 2"]);
    let point = &news.points[&0];
    assert_eq!(
        (point.step, point.ahead, point.samples),
        (9, 1, None),
        "another leads; it began a step ahead"
    );
    let mut ended = facts(3250, 1, "silent", [9, 7], 55);
    ended.jobs[0].members.iter_mut().for_each(|m| m.finished = true);
    assert_eq!(history.see(ended).points[&0].ahead, 0, "no worker is behind");
    history.see(facts(3500, 1, "silent", [9, 8], 60));
    let news = history.see(facts(3750, 1, "silent", [9, 9], 70));
    assert_eq!(news.points[&0].samples, Some(40.0));
    // Another leader's counters start at zero, so they give no rates.
    let news = history.see(facts(4000, 1, "silent", [10, 10], 3));
    assert_eq!((news.events.len(), news.points[&0].samples), (0, None));
    // The same holds if a former leader's counters have grown in the meantime.
    let news = history.see(facts(5000, 0, "silent", [11, 11], 9000));
    assert_eq!((news.points[&0].step, news.points[&0].samples), (11, None));
    // A moment without a leader of the control group removes no server from the fleet.
    let unled = Facts { at: 6000, heard: ["h0".to_string()].into(), ..Facts::default() };
    let said: Vec<String> = history.see(unled).events.into_iter().map(|e| e.what).collect();
    assert_eq!(said, ["the control group has no leader that can agree"]);
    assert_eq!(history.last().servers.len(), 2);
    assert_eq!(history.events.iter().map(|e| e.number).collect::<Vec<_>>(), [1, 2, 3, 4]);
    // A server that was silent is back in its place as soon as it answers.
    let leads = |history: &History| history.last().shards[0].leader;
    let mut leaders = Vec::new();
    for heard in [vec![], vec!["h0".to_string(), "h1".to_string()]] {
        history.see(Facts { at: 6500, heard: heard.into_iter().collect(), ..Facts::default() });
        leaders.push(leads(&history));
    }
    assert_eq!(leaders, [None, Some(0)]);
}

#[test]
fn events_of_many_shards_merge_and_rare_ones_outlast_others() {
    let mut history = History::default();
    let many = |at, shards: u32, leader, state: &str, epoch| {
        let shard = |shard| Shard { shard, leader, state: state.into(), term: 1, ..Shard::default() };
        let evaluated = Some(Evaluated { epoch, loss: 1.0, accuracy: 0.5 });
        let mut facts = facts(at, 0, "up", [1, 1], 1);
        facts.shards = (0..shards).map(shard).collect();
        facts.jobs[0].evaluated = evaluated;
        facts
    };
    let mut said = |facts| history.see(facts).events.into_iter().map(|e| e.what).collect::<Vec<_>>();
    said(many(1000, 6, Some(0), "serving", 0));
    let news = said(many(2000, 6, None, "no-majority", 0));
    let six = [
        "6 shards of t have no leader: 0, 1, 2, 3, 4, 5",
        "6 shards of t are no-majority, and were serving: 0, 1, 2, 3, 4, 5",
    ];
    assert_eq!(news, six);
    assert_eq!(said(many(3000, 6, Some(1), "no-majority", 0)), ["s1 leads 6 shards of t: 0, 1, 2, 3, 4, 5"]);
    said(many(4000, 2, Some(1), "serving", 0));
    let two = ["s0 leads shard 0 of t, in term 1", "s0 leads shard 1 of t, in term 1"];
    assert_eq!(said(many(5000, 2, Some(0), "serving", 0)), two);
    (1..2 * MAX_EVENTS as u64).for_each(|epoch| _ = said(many(5000 + epoch, 2, Some(0), "serving", epoch)));
    assert_eq!(history.events.len(), MAX_EVENTS);
    let rare = history.events.iter().filter(|e| e.kind == "election").count();
    assert_eq!(rare, 4, "{:?}", history.events.iter().take(9).collect::<Vec<_>>());
}

#[test]
fn no_line_spans_an_unobserved_time() {
    let mut history = History::default();
    let mut see = |at, stale| {
        let mut facts = facts(at, 0, "up", [at, at], at);
        facts.jobs[0].stale = stale;
        let news = history.see(facts);
        news.points.get(&0).map(|p| (p.apart, p.samples.is_some()))
    };
    assert_eq!(see(1000, false), None);
    assert_eq!(see(2000, false), Some((false, true)));
    // The page's server was paused.
    assert_eq!(see(62_000, false), Some((true, true)));
    assert_eq!(see(63_000, false), Some((false, true)));
    // The job was not reachable: its progress in between is not a rate of the last second.
    (64..80).for_each(|at| assert_eq!(see(at * 1000, true), None));
    assert_eq!(see(80_000, false), Some((true, false)));
    assert_eq!(see(81_000, false), Some((false, true)));
    // The first point stays while others are removed.
    (82..20 * MAX_POINTS as u64).for_each(|at| _ = see(at * 1000, false));
    assert!(history.curves[&0].points.iter().any(|p| p.apart));
}

#[test]
fn of_a_long_training_the_older_points_are_further_apart() {
    let mut history = History::default();
    for at in 1..5 * MAX_POINTS as u64 {
        history.see(facts(at * 1000, 0, "up", [at, at], at));
    }
    let at: Vec<u64> = history.curves[&0].points.iter().map(|p| p.at).collect();
    assert!(at.len() <= MAX_POINTS && at.is_sorted());
    let (first, last) = (at[1] - at[0], at[at.len() - 1] - at[at.len() - 2]);
    assert!(first > last && at[0] < 60_000, "{first} {last} {}", at[0]);
}

#[test]
fn a_page_that_opens_on_many_jobs_receives_a_bounded_history() {
    let mut history = History::default();
    let jobs = |at: u64| {
        let mut facts = facts(at * 1000, 0, "up", [at, at], at);
        let one = facts.jobs.remove(0);
        facts.jobs = (0..10).map(|id| Job { id, ..one.clone() }).collect();
        facts
    };
    (1..2 * MAX_POINTS as u64).for_each(|at| _ = history.see(jobs(at)));
    let shown = history.shown_curves();
    let lengths: Vec<usize> = shown.values().map(|c| c.points.len()).collect();
    assert!(lengths.len() == 10 && lengths.iter().all(|n| (120..=242).contains(n)), "{lengths:?}");
    let ends = |c: &Curves| (c.points.front().map(|p| p.at), c.points.back().map(|p| p.at));
    assert_eq!(ends(&shown[&3]), ends(&history.curves[&3]));
}
