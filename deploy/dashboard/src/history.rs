//! The history of a fleet: points of each job's curves, and events, both bounded.

use crate::facts::{Evaluated, Facts, Job, Server, Shard};
use serde::Serialize;
use std::collections::{BTreeMap, VecDeque};

/// Maximal points of a job. Beyond it, the point that is closest to its neighbours relative to its age
/// is removed.
const MAX_POINTS: usize = 1200;
/// Jobs whose curves are kept: the latest ones.
const MAX_JOBS: usize = 100;
/// Maximal number of events.
const MAX_EVENTS: usize = 500;
/// Maximal evaluations of a job.
const MAX_EVALUATIONS: usize = 1000;
/// After this many milliseconds without an observation, the job's progress in between is unknown.
const UNSEEN_AFTER_MS: u64 = 15_000;

/// One point of a job's curves. Rates are since the previous point.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Point {
    /// Unix milliseconds.
    pub at: u64,
    /// Steps of the fastest worker.
    pub step: u64,
    /// Steps between the fastest and the slowest worker.
    pub ahead: u64,
    /// Samples per second.
    pub samples: Option<f64>,
    /// Mean training loss.
    pub loss: Option<f64>,
    /// Mean delay of the pushes, in versions.
    pub delay: Option<f64>,
    /// Pushed payload bytes per second.
    pub pushed: Option<f64>,
    /// Pulled payload bytes per second.
    pub pulled: Option<f64>,
    /// The mean share of the time that workers waited for other workers.
    pub waited: Option<f64>,
    /// The job was not observed for a while before: no line leads here.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub apart: bool,
}

/// An evaluation, with the time of its first observation.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct EvaluationPoint {
    /// Unix milliseconds.
    pub at: u64,
    /// Steps of the fastest worker.
    pub step: u64,
    /// The result.
    #[serde(flatten)]
    pub evaluated: Evaluated,
}

/// An event of the fleet.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct FleetEvent {
    /// The number of the event.
    pub number: u64,
    /// Unix milliseconds.
    pub at: u64,
    /// server, election, repair, job, mode, worker, evaluation, checkpoint, action.
    pub kind: &'static str,
    /// The job of the event, if any.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub job: Option<u32>,
    /// The text of the event.
    pub what: String,
}

/// The curves of a job.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Curves {
    /// The oldest first.
    pub points: VecDeque<Point>,
    /// The oldest first.
    pub evaluations: VecDeque<EvaluationPoint>,
    /// Time of the last observation of the job; 0: never.
    #[serde(skip)]
    seen: u64,
    /// The number of the next point.
    #[serde(skip)]
    apart: bool,
}

/// The last snapshot of a fleet, its curves and its events.
#[derive(Debug, Default)]
pub struct History {
    last: Facts,
    /// Servers and shards in the last reply of the control group's leader.
    told: (Vec<Server>, Vec<Shard>),
    /// By job number.
    pub curves: BTreeMap<u32, Curves>,
    /// The oldest first.
    pub events: VecDeque<FleetEvent>,
    number: u64,
    /// Actions on this page since the last poll.
    unsaid: Vec<FleetEvent>,
}

/// The changes since the previous poll.
#[derive(Debug, Default, Serialize)]
pub struct Changes {
    /// By job number.
    pub points: BTreeMap<u32, Point>,
    /// By job number.
    pub evaluations: BTreeMap<u32, EvaluationPoint>,
    /// In their order.
    pub events: Vec<FleetEvent>,
}

impl History {
    /// Fills in the last known state where no majority can report it.
    fn remember(&self, facts: &mut Facts) {
        for shard in facts.shards.iter_mut().filter(|s| s.voters.is_empty() && s.learners.is_empty()) {
            let old = self.last.shards.iter().find(|o| (o.job, o.shard) == (shard.job, shard.shard));
            if let Some(old) = old {
                (shard.voters, shard.learners) = (old.voters.clone(), old.learners.clone());
            }
        }
        for job in facts.jobs.iter_mut().filter(|j| j.stale) {
            if let Some(old) = self.last.jobs.iter().find(|o| o.id == job.id && !o.members.is_empty()) {
                let (state, stopping, checkpoint) = (job.state.clone(), job.stopping, job.checkpoint);
                *job = Job { state, stopping, checkpoint, stale: true, ..old.clone() };
            }
        }
    }

    /// Records a new snapshot of the fleet.
    pub fn see(&mut self, mut facts: Facts) -> Changes {
        // Without a leader of the control group, the last known servers count as members.
        if facts.leader.is_some() {
            self.told = (facts.servers.clone(), facts.shards.clone());
        } else if facts.servers.is_empty() {
            (facts.servers, facts.shards) = self.told.clone();
            facts.only_heard();
            if facts.jobs.is_empty() {
                facts.jobs = self.last.jobs.iter().map(|j| Job { stale: true, ..j.clone() }).collect();
            }
            // A leader without a majority may report stale data.
            let Facts { jobs, shards, .. } = &mut facts;
            let is_lost =
                |job: u32| shards.iter().any(|s| (s.job, s.shard) == (job, 0) && s.leader.is_none());
            jobs.iter_mut().for_each(|job| job.stale |= is_lost(job.id));
        }
        self.remember(&mut facts);
        let mut news = Changes { events: std::mem::take(&mut self.unsaid), ..Changes::default() };
        let first = self.last.at == 0;
        let before = std::mem::replace(&mut self.last, facts);
        let now = self.last.clone();
        if !first {
            let mut said = Vec::new();
            servers(&before, &now, &mut said);
            shards(&before, &now, &mut said);
            jobs(&before, &now, &mut said);
            news.events.extend(said.into_iter().map(|(kind, job, what)| self.happens(kind, job, what)));
        }
        for job in now.jobs.iter().filter(|j| !j.members.is_empty()) {
            let old = before.jobs.iter().find(|j| j.id == job.id);
            let curves = self.curves.entry(job.id).or_default();
            let known = curves.evaluations.back().map(|e| e.evaluated.epoch);
            let step = fastest(job);
            if let Some(evaluated) = job.evaluated.as_ref().filter(|e| known != Some(e.epoch)) {
                let scored = EvaluationPoint { at: now.at, step, evaluated: evaluated.clone() };
                push(&mut curves.evaluations, MAX_EVALUATIONS, scored.clone());
                news.evaluations.insert(job.id, scored);
            }
            if !job.stale {
                curves.apart |= curves.seen > 0 && now.at.saturating_sub(curves.seen) > UNSEEN_AFTER_MS;
                curves.seen = now.at;
            }
            // A job that has ended gets no more points.
            if let Some(old) = old.filter(|old| **old != *job && !job.stale) {
                let mut point = point(job, old, before.at, now.at);
                if old.stale || !same_leaders(&before, &now, job.id) {
                    // Counters belong to the leaders' processes, and stale ones give no rates.
                    point = Point { at: point.at, step: point.step, ahead: point.ahead, ..Point::default() };
                }
                point.apart = std::mem::take(&mut curves.apart);
                curves.points.push_back(point.clone());
                if curves.points.len() > MAX_POINTS {
                    thin(&mut curves.points);
                }
                news.points.insert(job.id, point);
            }
        }
        while self.curves.len() > MAX_JOBS {
            // Running jobs are kept, whatever their number.
            let trains = |id: &u32| now.jobs.iter().any(|j| j.id == *id && j.state == "running");
            let ended = self.curves.keys().find(|id| !trains(id)).or_else(|| self.curves.keys().next());
            ended.copied().into_iter().for_each(|id| _ = self.curves.remove(&id));
        }
        news
    }

    /// Records an action on this page.
    pub fn acted(&mut self, what: String) {
        let happened = self.happens("action", None, what);
        self.unsaid.push(happened);
    }

    fn happens(&mut self, kind: &'static str, job: Option<u32>, what: String) -> FleetEvent {
        self.number += 1;
        let at = if kind == "action" { paraft_host::clock::unix_ms() } else { self.last.at };
        let happened = FleetEvent { number: self.number, at, kind, job, what };
        // Evaluations are frequent and are kept with the curves, so rarer events outlast them here.
        if self.events.len() == MAX_EVENTS
            && let Some(evaluation) = self.events.iter().position(|e| e.kind == "evaluation")
        {
            self.events.remove(evaluation);
        }
        push(&mut self.events, MAX_EVENTS, happened.clone());
        happened
    }

    /// The last snapshot of the fleet.
    pub fn last(&self) -> &Facts {
        &self.last
    }
}

/// Removes one point, so that older points lie further apart; never the first.
fn thin(points: &mut VecDeque<Point>) {
    let now = points.back().map_or(0, |p| p.at + 1);
    let apart = |i: usize| {
        (points[i + 1].at - points[i - 1].at) as f64 / now.saturating_sub(points[i].at).max(1) as f64
    };
    let least = (1..points.len().saturating_sub(1)).min_by(|a, b| apart(*a).total_cmp(&apart(*b)));
    let apart = least.and_then(|i| points.remove(i)).is_some_and(|p| p.apart);
    if let Some(next) = least.and_then(|i| points.get_mut(i)) {
        next.apart |= apart;
    }
}

fn push<T>(to: &mut VecDeque<T>, most: usize, one: T) {
    if to.len() == most {
        to.pop_front();
    }
    to.push_back(one);
}

/// Whether all of a job's shards have had the same leaders.
fn same_leaders(before: &Facts, now: &Facts, job: u32) -> bool {
    let of = |facts: &Facts| -> Vec<_> {
        let own = facts.shards.iter().filter(|s| s.job == job);
        own.map(|s| (s.shard, s.leader, s.term)).collect()
    };
    of(before) == of(now)
}

fn fastest(job: &Job) -> u64 {
    job.members.iter().map(|m| m.clock).max().unwrap_or_default()
}

fn point(job: &Job, old: &Job, from: u64, to: u64) -> Point {
    let seconds = to.saturating_sub(from).max(1) as f64 / 1e3;
    // Another leader's process counts from zero.
    let more = |now: u64, then: u64| now.checked_sub(then);
    let rate = |now: u64, then: u64| Some(more(now, then)? as f64 / seconds);
    let trains = || job.members.iter().filter(|m| !m.finished && !m.idle);
    // Without training workers, no worker is behind.
    let slowest = trains().map(|m| m.clock).min().unwrap_or(u64::MAX);
    let losses = more(job.losses, old.losses).filter(|n| *n > 0);
    let sums = |counts: &[u64]| {
        let all: u64 = counts.iter().sum();
        (counts.iter().enumerate().map(|(d, n)| d as u64 * n).sum::<u64>(), all)
    };
    let ((delays, pushes), (delays_before, pushes_before)) = (sums(&job.delays), sums(&old.delays));
    let delay = more(pushes, pushes_before).filter(|n| *n > 0).zip(more(delays, delays_before));
    let waits = |job: &Job| job.waits.iter().map(|w| w.seconds).sum::<f64>();
    let waited = (waits(job) - waits(old)) / (seconds * trains().count().max(1) as f64);
    Point {
        at: to,
        step: fastest(job),
        ahead: fastest(job).saturating_sub(slowest.min(fastest(job))),
        samples: rate(job.samples, old.samples),
        loss: losses.map(|n| (job.loss_sum - old.loss_sum) / n as f64),
        delay: delay.map(|(n, sum)| sum as f64 / n as f64),
        pushed: rate(job.bytes_pushed, old.bytes_pushed),
        pulled: rate(job.bytes_pulled, old.bytes_pulled),
        waited: (waited >= 0.0).then(|| waited.min(1.0)),
        apart: false,
    }
}

type Messages = Vec<(&'static str, Option<u32>, String)>;

fn servers(before: &Facts, now: &Facts, said: &mut Messages) {
    for s in &now.servers {
        match before.servers.iter().find(|o| o.id == s.id) {
            None => said.push(("server", None, format!("s{} has joined, at {}", s.id, s.address))),
            Some(o) if o.state != s.state => {
                said.push(("server", None, format!("s{} is {}, and was {}", s.id, s.state, o.state)));
            }
            Some(o) if o.trouble != s.trouble && !s.trouble.is_empty() => {
                said.push(("server", None, format!("s{}: {}", s.id, s.trouble)));
            }
            Some(_) => {}
        }
    }
    for o in before.servers.iter().filter(|o| now.servers.iter().all(|s| s.id != o.id)) {
        said.push(("server", None, format!("s{} is a server of the fleet no more", o.id)));
    }
    if before.leader != now.leader {
        said.push(match now.leader {
            Some(s) => ("election", None, format!("s{s} leads the control group")),
            None => ("election", None, "the control group has no leader that can agree".into()),
        });
    }
}

/// Up to this many shards with the same change get their own events.
const MAX_SEPARATE_EVENTS: usize = 4;

fn shards(before: &Facts, now: &Facts, said: &mut Messages) {
    let old: BTreeMap<_, _> = before.shards.iter().map(|o| ((o.job, o.shard), o)).collect();
    // A failed server has dozens of shards: shards with the same change share one event.
    let mut led: BTreeMap<(u32, Option<u64>), Vec<&Shard>> = BTreeMap::new();
    let mut states: BTreeMap<(u32, &str, &str), Vec<&Shard>> = BTreeMap::new();
    for s in &now.shards {
        let Some(o) = old.get(&(s.job, s.shard)) else { continue };
        let elected = s.leader.is_some() && (o.leader != s.leader || o.term < s.term && o.term > 0);
        if elected || o.leader.is_some() && s.leader.is_none() {
            led.entry((s.job, s.leader)).or_default().push(s);
        }
        if o.state != s.state {
            states.entry((s.job, &s.state, &o.state)).or_default().push(s);
        }
    }
    let list = |all: &[&Shard]| all.iter().map(|s| s.shard.to_string()).collect::<Vec<_>>().join(", ");
    for ((job, leader), all) in led {
        let job_name = name(now, job);
        let mut say = |what: String| said.push(("election", Some(job), what));
        match leader {
            _ if all.len() <= MAX_SEPARATE_EVENTS => all.iter().for_each(|s| {
                say(match leader {
                    Some(leader) => {
                        format!("s{leader} leads shard {} of {job_name}, in term {}", s.shard, s.term)
                    }
                    None => format!("shard {} of {job_name} has no leader", s.shard),
                });
            }),
            Some(leader) => {
                say(format!("s{leader} leads {} shards of {job_name}: {}", all.len(), list(&all)))
            }
            None => say(format!("{} shards of {job_name} have no leader: {}", all.len(), list(&all))),
        }
    }
    for ((job, state, was), all) in states {
        let job_name = name(now, job);
        let mut say = |what: String| said.push(("repair", Some(job), what));
        if all.len() > MAX_SEPARATE_EVENTS {
            say(format!("{} shards of {job_name} are {state}, and were {was}: {}", all.len(), list(&all)));
            continue;
        }
        for s in all {
            let why = if s.trouble.is_empty() { String::new() } else { format!(": {}", s.trouble) };
            say(format!("shard {} of {job_name} is {state}, and was {was}{why}", s.shard));
        }
    }
}

fn name(facts: &Facts, job: u32) -> String {
    match facts.jobs.iter().find(|j| j.id == job).map(|j| j.name.as_str()) {
        // The initial shard group of a fleet, until a worker starts a job.
        Some("") | None => "no job".into(),
        Some(name) => name.to_string(),
    }
}

fn jobs(before: &Facts, now: &Facts, said: &mut Messages) {
    for j in &now.jobs {
        let (id, name) = (Some(j.id), name(now, j.id));
        let Some(o) = before.jobs.iter().find(|o| o.id == j.id) else {
            said.push(("job", id, format!("{name} is {}", j.state)));
            continue;
        };
        if o.state != j.state {
            said.push(("job", id, format!("{name} is {}, and was {}", j.state, o.state)));
        }
        if o.mode != j.mode && !j.mode.is_empty() && !o.mode.is_empty() {
            said.push(("mode", id, format!("{name} goes on in {}, and was in {}", j.mode, o.mode)));
        }
        // Without a leader, the members of the shard are unknown.
        if !j.members.is_empty() && !o.members.is_empty() {
            for m in j.members.iter().filter(|m| o.members.iter().all(|o| o.worker != m.worker)) {
                said.push(("worker", id, format!("worker {} of {name} is there", m.worker)));
            }
            for m in o.members.iter().filter(|o| j.members.iter().all(|m| o.worker != m.worker)) {
                said.push(("worker", id, format!("worker {} of {name} has left", m.worker)));
            }
        }
        let known = o.evaluated.as_ref().map(|e| e.epoch);
        if let Some(e) = j.evaluated.as_ref().filter(|e| known != Some(e.epoch)) {
            let accuracy = if e.accuracy > 0.0 {
                format!(", accuracy {:.2} %", 100.0 * e.accuracy)
            } else {
                String::new()
            };
            let what = format!("{name}: held-out loss {:.4}{accuracy} after epoch {}", e.loss, e.epoch);
            said.push(("evaluation", id, what));
        }
        if let Some((step, _)) = j.checkpoint.filter(|c| Some(*c) != o.checkpoint) {
            said.push(("checkpoint", id, format!("{name}: a checkpoint of step {step}")));
        }
    }
}

#[cfg(test)]
mod tests {
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
        assert_eq!((point.step, point.ahead, point.samples), (9, 2, None), "another leads");
        let mut ended = facts(3250, 1, "silent", [9, 7], 55);
        ended.jobs[0].members.iter_mut().for_each(|m| m.finished = true);
        assert_eq!(history.see(ended).points[&0].ahead, 0, "nobody is behind");
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
        let nobody = Facts { at: 6000, heard: ["h0".to_string()].into(), ..Facts::default() };
        let said: Vec<String> = history.see(nobody).events.into_iter().map(|e| e.what).collect();
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
        assert_eq!(
            said(many(3000, 6, Some(1), "no-majority", 0)),
            ["s1 leads 6 shards of t: 0, 1, 2, 3, 4, 5"]
        );
        said(many(4000, 2, Some(1), "serving", 0));
        let two = ["s0 leads shard 0 of t, in term 1", "s0 leads shard 1 of t, in term 1"];
        assert_eq!(said(many(5000, 2, Some(0), "serving", 0)), two);
        (1..2 * MAX_EVENTS as u64)
            .for_each(|epoch| _ = said(many(5000 + epoch, 2, Some(0), "serving", epoch)));
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
}
