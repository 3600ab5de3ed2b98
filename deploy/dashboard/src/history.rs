//! The history of a fleet: points of each job's curves, and events, both bounded.

use crate::{
    facts::{Evaluated, Facts, Job, Server, Shard},
    record::short,
};
use serde::Serialize;
use std::collections::{BTreeMap, VecDeque};

mod events;

/// Maximal points of a job. Beyond it, the point that is closest to its neighbours relative to its age
/// is removed.
const MAX_POINTS: usize = 1200;
/// Maximal points of all jobs that a page receives when it opens; at least this many of a job.
const MAX_SHOWN_POINTS: usize = 2400;
const MIN_SHOWN_POINTS: usize = 50;
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
            events::servers(&before, &now, &mut said);
            events::shards(&before, &now, &mut said);
            events::jobs(&before, &now, &mut said);
            news.events.extend(said.into_iter().map(|(kind, job, what)| self.happens(kind, job, what)));
        }
        for job in now.jobs.iter().filter(|j| !j.members.is_empty()) {
            let old = before.jobs.iter().find(|j| j.id == job.id);
            let curves = self.curves.entry(job.id).or_default();
            let known = curves.evaluations.back().map(|e| e.evaluated.epoch);
            let step = job.steps();
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

    /// The curves for a page that opens: of many jobs each has fewer points.
    pub fn shown_curves(&self) -> BTreeMap<u32, Curves> {
        let most = (MAX_SHOWN_POINTS / self.curves.len().max(1)).max(MIN_SHOWN_POINTS);
        let shown = |(id, curves): (&u32, &Curves)| {
            let group = curves.points.len().div_ceil(most).max(1);
            let last = curves.points.len().saturating_sub(1);
            let is_kept = |(i, p): &(usize, &Point)| i.is_multiple_of(group) || *i == last || p.apart;
            let points = curves.points.iter().enumerate().filter(is_kept).map(|(_, p)| p.clone()).collect();
            (*id, Curves { points, evaluations: curves.evaluations.clone(), ..Curves::default() })
        };
        self.curves.iter().map(shown).collect()
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

fn point(job: &Job, old: &Job, from: u64, to: u64) -> Point {
    let seconds = to.saturating_sub(from).max(1) as f64 / 1e3;
    // Another leader's process counts from zero.
    let more = |now: u64, then: u64| now.checked_sub(then);
    let rate = |now: u64, then: u64| Some(more(now, then)? as f64 / seconds);
    let trains = || job.members.iter().filter(|m| !m.finished && !m.idle);
    // Without training workers, no worker is behind. The mode bounds how far ahead a worker begins a step; its clock counts
    // that step when it is pushed.
    let slowest = trains().map(|m| m.clock + 1).min().unwrap_or(u64::MAX);
    let losses = more(job.losses, old.losses).filter(|n| *n > 0);
    let sums = |counts: &[u64]| {
        let all: u64 = counts.iter().sum();
        (counts.iter().enumerate().map(|(d, n)| d as u64 * n).sum::<u64>(), all)
    };
    let ((delays, pushes), (delays_before, pushes_before)) = (sums(&job.delays), sums(&old.delays));
    let delay = more(pushes, pushes_before).filter(|n| *n > 0).zip(more(delays, delays_before));
    let waits = |job: &Job| job.waits.iter().map(|w| w.seconds).sum::<f64>();
    let waited = (waits(job) - waits(old)) / (seconds * trains().count().max(1) as f64);
    let step = job.steps();
    Point {
        at: to,
        step,
        ahead: step.saturating_sub(slowest),
        samples: rate(job.samples, old.samples).map(short),
        loss: losses.map(|n| short((job.loss_sum - old.loss_sum) / n as f64)),
        delay: delay.map(|(n, sum)| short(sum as f64 / n as f64)),
        pushed: rate(job.bytes_pushed, old.bytes_pushed).map(short),
        pulled: rate(job.bytes_pulled, old.bytes_pulled).map(short),
        waited: (waited >= 0.0).then(|| short(waited.min(1.0))),
        apart: false,
    }
}

#[cfg(test)]
#[path = "history_tests.rs"]
mod tests;
