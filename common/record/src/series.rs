//! The curves for trackers, computed while the record grows: a run in progress gives the same points as
//! its complete file.
//!
//! A point is emitted once and never changes. So the end of a window depends only on the file so far,
//! not on the run's total time. Windows start at 0.1 s and later are a 300th of the run so far, which
//! gives a few thousand points for the longest run. A window covers all workers that train, unless one
//! is silent for long.

use crate::{Event, Incarnations, Shard, count, story};
use paraft_common::histogram::DelayHistogram;
use paraft_common::{ServerId, ShardId, WorkerId};
use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};

/// The width of the first windows, in seconds.
const WIDTH: f64 = 0.1;
/// A window is this fraction (1 / `WINDOWS`) of the run so far.
const WINDOWS: f64 = 300.0;
/// Seconds that a window waits for a silent worker.
const SILENCE_SECONDS: f64 = 10.0;

/// A point of a curve, emitted once.
#[derive(Clone, Debug, PartialEq)]
pub struct Point {
    /// The curve: `train/loss`, `train/NAME` of a further value, `eval/loss`, `eval/accuracy`, `perf/samples_per_s`,
    /// `ps/delay`, `events`.
    pub tag: Cow<'static, str>,
    /// Its value.
    pub value: Value,
    /// The samples that the fleet has trained on; a resumed run includes those before its checkpoint.
    pub step: u64,
    /// Unix time, seconds.
    pub wall: f64,
}

/// The value of a point.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// A number, or NaN.
    Number(f64),
    /// Delays of pushes.
    Delays(DelayHistogram),
    /// Something that happened, in words.
    Text(String),
}

/// The known state of a worker.
#[derive(Clone, Copy, Debug, Default)]
struct WorkerState {
    samples: u64,
    seconds: f64,
    /// Samples and clock at the end of its last window.
    before: (u64, f64),
    /// Its samples per second in that window.
    rate: f64,
    /// It trains: it has neither left nor ended.
    trains: bool,
    /// It has reported a loss, which a script need not do.
    says_loss: bool,
}

/// An open window.
#[derive(Clone, Debug, Default)]
struct Window {
    heard: BTreeSet<WorkerId>,
    weight: f64,
    loss: f64,
    /// By name: the weight, and the weighted sum.
    values: BTreeMap<String, (f64, f64)>,
}

/// Converts the events of one run, in the order of its file, to points.
#[derive(Clone, Debug, Default)]
pub struct Series {
    incarnations: Incarnations,
    workers: BTreeMap<WorkerId, WorkerState>,
    /// Samples before the checkpoint that the run resumes from.
    first_step: u64,
    /// The times of the start and of the latest line. Clocks of hosts differ, so the latter never
    /// decreases.
    walls: Option<(f64, f64)>,
    opened: f64,
    window: Window,
    evaluated: BTreeSet<(u64, bool)>,
    /// The last evaluation: its step, its loss.
    last_eval: Option<(u64, f64)>,
    shards: BTreeMap<(ShardId, ServerId), Shard>,
}

impl Series {
    /// The step of a run's first point: not 0 for a resumed run. Known as soon as a point exists.
    pub fn first_step(&self) -> u64 {
        self.first_step
    }

    /// Takes the next event; returns the points that it completes.
    pub fn follow(&mut self, event: &Event) -> Vec<Point> {
        let mut points = Vec::new();
        if let Some(moment) = story::moment(event).filter(|_| self.walls.is_some()) {
            let (wall, step) = (self.now(moment.wall), self.first_step + self.trained());
            points.push(Point { tag: "events".into(), value: Value::Text(moment.line()), step, wall });
        }
        match self.incarnations.follow(event.clone()) {
            Event::Run(run) if self.walls.is_none() => {
                self.now(run.wall);
                let before = run.resumed_step.map_or(0, |s| s.0.saturating_sub(run.steps_left_out));
                self.first_step = before.saturating_mul(run.batch).saturating_mul(u64::from(run.workers));
            }
            Event::Train(t) => {
                let now = self.now(t.wall);
                let of = self.workers.entry(t.worker).or_default();
                // A line without new samples still reports a loss; it weighs as one sample.
                let weight = t.samples.saturating_sub(of.samples).max(1) as f64;
                (of.samples, of.seconds) = (of.samples.max(t.samples), of.seconds.max(t.seconds));
                of.trains = true;
                of.says_loss |= !t.loss.is_nan();
                if of.says_loss {
                    self.window.weight += weight;
                    self.window.loss += weight * t.loss;
                }
                for (name, value) in t.values {
                    let of = self.window.values.entry(name).or_default();
                    *of = (of.0 + weight, of.1 + weight * value);
                }
                self.window.heard.insert(t.worker);
                if self.is_full(now) {
                    self.close(now, &mut points);
                }
            }
            Event::Worker(w) => {
                self.now(w.wall);
                let of = self.workers.entry(w.worker).or_default();
                (of.samples, of.seconds) = (of.samples.max(w.samples), of.seconds.max(w.seconds));
                of.trains = false;
            }
            Event::Leave(l) if l.rank.is_none() => {
                self.workers.entry(l.worker).or_default().trains = false;
            }
            Event::Eval(e) if self.evaluated.insert((e.number(), e.is_final)) => {
                let now = self.now(e.wall);
                let trained = self.trained();
                let step = self.first_step + if trained > 0 { trained } else { e.samples };
                // The final weights are often those of the last epoch's end.
                let same = |(at, loss): (u64, f64)| at == step && loss.to_bits() == e.loss.to_bits();
                if !self.last_eval.is_some_and(same) {
                    self.last_eval = Some((step, e.loss));
                    let mut point = |tag: Cow<'static, str>, x| {
                        points.push(Point { tag, value: Value::Number(x), step, wall: now });
                    };
                    point("eval/loss".into(), e.loss);
                    e.accuracy.into_iter().for_each(|a| point("eval/accuracy".into(), a));
                    e.metrics.into_iter().for_each(|(name, x)| point(format!("eval/{name}").into(), x));
                }
            }
            Event::Shard(s) => _ = self.shards.insert((s.shard, s.server), s),
            _ => {}
        }
        points
    }

    /// The points of the open window, at the end of the events.
    pub fn end(&mut self) -> Vec<Point> {
        let mut points = Vec::new();
        let now = self.walls.map_or(0.0, |(_, now)| now);
        if !self.window.heard.is_empty() {
            self.close(now, &mut points);
        }
        let mut delays = DelayHistogram::default();
        self.shards.values().for_each(|s| delays.merge(&s.delays()));
        if delays.total() > 0 {
            let step = self.first_step + self.trained();
            points.push(Point { tag: "ps/delay".into(), value: Value::Delays(delays), step, wall: now });
        }
        self.shards.clear();
        points
    }

    /// The current time, after an event at `wall`.
    fn now(&mut self, wall: f64) -> f64 {
        let (began, now) = self.walls.get_or_insert_with(|| {
            self.opened = wall;
            (wall, wall)
        });
        *now = now.max(wall);
        *began = began.min(*now);
        *now
    }

    fn trained(&self) -> u64 {
        count(self.workers.values().map(|w| w.samples))
    }

    fn is_full(&self, now: f64) -> bool {
        let began = self.walls.map_or(now, |(began, _)| began);
        let width = WIDTH.max((self.opened - began) / WINDOWS);
        let open = now - self.opened;
        let all = self.workers.iter().all(|(w, of)| !of.trains || self.window.heard.contains(w));
        open >= width && (all || open >= width + SILENCE_SECONDS)
    }

    fn close(&mut self, now: f64, points: &mut Vec<Point>) {
        let Window { heard, weight, loss, values } = std::mem::take(&mut self.window);
        self.opened = now;
        let step = self.first_step + self.trained();
        let mut rate = 0.0;
        for (worker, of) in &mut self.workers {
            let heard = heard.contains(worker);
            let (samples, seconds) = of.before;
            if heard && of.seconds > seconds {
                of.rate = of.samples.saturating_sub(samples) as f64 / (of.seconds - seconds);
                of.before = (of.samples, of.seconds);
            }
            // A worker without a line in this window is assumed to keep its rate.
            rate += if heard || of.trains { of.rate } else { 0.0 };
        }
        let mut point =
            |tag: Cow<'static, str>, x| points.push(Point { tag, value: Value::Number(x), step, wall: now });
        if weight > 0.0 {
            point("train/loss".into(), loss / weight);
        }
        for (name, (weight, sum)) in values {
            point(format!("train/{name}").into(), sum / weight);
        }
        if rate > 0.0 && rate.is_finite() {
            point("perf/samples_per_s".into(), rate);
        }
    }
}

#[cfg(test)]
#[path = "series_tests.rs"]
mod tests;
