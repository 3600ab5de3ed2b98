//! The curves for trackers, computed while the record grows: a run in progress gives the same points as
//! its complete file.
//!
//! A point is emitted once and never changes. So the end of a window depends only on the file so far,
//! not on the run's total time. Windows start at 0.1 s and later are a 300th of the run so far, which
//! gives a few thousand points for the longest run. A window covers all workers that train, unless one
//! is silent for long.

use crate::{Event, Incarnations, Shard, count};
use paraft_common::histogram::DelayHistogram;
use paraft_common::{ServerId, ShardId, WorkerId};
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
    /// The curve: `train/loss`, `eval/loss`, `eval/accuracy`, `perf/samples_per_s`, `ps/delay`.
    pub tag: &'static str,
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
        match self.incarnations.follow(event.clone()) {
            Event::Run(run) if self.walls.is_none() => {
                self.now(run.wall);
                let before = run.resumed_step.map_or(0, |s| s.0);
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
            Event::Eval(e) if self.evaluated.insert((e.epoch, e.is_final)) => {
                let now = self.now(e.wall);
                let trained = self.trained();
                let step = self.first_step + if trained > 0 { trained } else { e.samples };
                // The final weights are often those of the last epoch's end.
                let same = |(at, loss): (u64, f64)| at == step && loss.to_bits() == e.loss.to_bits();
                if !self.last_eval.is_some_and(same) {
                    self.last_eval = Some((step, e.loss));
                    let mut point = |tag, x| {
                        points.push(Point { tag, value: Value::Number(x), step, wall: now });
                    };
                    point("eval/loss", e.loss);
                    e.accuracy.into_iter().for_each(|a| point("eval/accuracy", a));
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
            points.push(Point { tag: "ps/delay", value: Value::Delays(delays), step, wall: now });
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
        let Window { heard, weight, loss } = std::mem::take(&mut self.window);
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
        let mut point = |tag, x| points.push(Point { tag, value: Value::Number(x), step, wall: now });
        if weight > 0.0 {
            point("train/loss", loss / weight);
        }
        if rate > 0.0 && rate.is_finite() {
            point("perf/samples_per_s", rate);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Eval, Leave, Run, Train, Worker};
    use paraft_common::Step;

    fn line(worker: u32, wall: f64, samples: u64, loss: f64) -> Event {
        let worker = WorkerId(worker);
        Event::Train(Train { wall, worker, samples, seconds: wall - 100.0, loss, ..Train::default() })
    }

    fn run() -> Event {
        Event::Run(Run { wall: 100.0, workers: 2, batch: 10, ..Run::default() })
    }

    fn of(events: &[Event]) -> Vec<Point> {
        let mut series = Series::default();
        let mut points: Vec<_> = events.iter().flat_map(|e| series.follow(e)).collect();
        points.extend(series.end());
        points
    }

    fn numbers(points: &[Point], wanted: &str) -> Vec<(u64, f64)> {
        let of = points.iter().filter(|p| p.tag == wanted);
        let number = |p: &Point| match p.value {
            Value::Number(x) => Some((p.step, x)),
            Value::Delays(_) => None,
        };
        of.filter_map(number).collect()
    }

    #[test]
    fn a_window_averages_by_samples_and_sums_rates() {
        let points =
            of(&[run(), line(0, 101.0, 100, 9.0), line(0, 101.5, 200, 4.0), line(1, 102.0, 300, 2.0)]);
        // The first line covers one worker only; the second window has both.
        assert_eq!(numbers(&points, "train/loss"), [(100, 9.0), (200, 4.0), (500, 2.0)]);
        let both = of(&[
            run(),
            line(0, 101.0, 100, 9.0),
            line(1, 101.01, 0, 9.0),
            line(1, 103.0, 300, 2.0),
            line(0, 103.0, 300, 4.0),
        ]);
        // 1 sample's worth of worker 1's first line, 300 of its second, 200 of worker 0's.
        assert_eq!(numbers(&both, "train/loss")[1], (600, (9.0 + 300.0 * 2.0 + 200.0 * 4.0) / 501.0));
        let (step, rate) = numbers(&both, "perf/samples_per_s")[1];
        assert!(step == 600 && (rate - (100.0 + 100.0)).abs() < 1e-9, "{step} {rate}");
    }

    #[test]
    fn a_gone_or_silent_worker_holds_no_window_open() {
        let two = [run(), line(0, 101.0, 100, 1.0), line(1, 101.0, 100, 1.0), line(1, 101.2, 200, 1.0)];
        let then = |event: Option<Event>, until: f64| {
            let more = (1..).map(|i| 101.2 + f64::from(i) * 0.2).take_while(|w| *w < until);
            let more = more.enumerate().map(|(i, w)| line(1, w, 300 + i as u64, 1.0));
            let events: Vec<_> = two.iter().cloned().chain(event).chain(more).collect();
            let mut series = Series::default();
            events.iter().flat_map(|e| series.follow(e)).filter(|p| p.tag == "train/loss").count()
        };
        let waits = then(None, 105.0);
        let left = Event::Leave(Leave { worker: WorkerId(0), ..Leave::default() });
        let ended = Event::Worker(Worker { wall: 101.2, worker: WorkerId(0), ..Worker::default() });
        assert!(then(Some(left), 105.0) > waits + 10);
        assert!(then(Some(ended), 105.0) > waits + 10);
        assert!(then(None, 130.0) > waits, "it is silent for long");
    }

    #[test]
    fn a_long_run_has_few_thousand_points_and_no_two_at_one_step() {
        let week = 7.0 * 86_400.0;
        let lines = (1..).map(|i: u64| (i, i as f64 * 0.5)).take_while(|(_, s)| *s < week);
        let events = [run()].into_iter().chain(lines.map(|(i, s)| line(0, 100.0 + s, i, 1.0)));
        let mut series = Series::default();
        let losses: Vec<_> =
            events.flat_map(|e| series.follow(&e)).filter(|p| p.tag == "train/loss").collect();
        assert!((300..4000).contains(&losses.len()), "{}", losses.len());
        assert!(losses.windows(2).all(|w| w[0].step < w[1].step));
    }

    #[test]
    fn one_evaluation_is_one_point_and_the_final_if_it_differs() {
        let eval = |epoch, loss, is_final| {
            let accuracy = Some(1.0 - loss);
            Event::Eval(Eval { wall: 103.0, epoch, samples: 7, loss, accuracy, is_final, ..Eval::default() })
        };
        let train = line(0, 101.0, 100, 1.0);
        let same = of(&[run(), train.clone(), eval(1, 0.5, false), eval(1, 0.5, false), eval(1, 0.5, true)]);
        assert_eq!(numbers(&same, "eval/loss"), [(100, 0.5)]);
        assert_eq!(numbers(&same, "eval/accuracy"), [(100, 0.5)]);
        let other = of(&[run(), train, eval(1, 0.5, false), eval(1, 0.25, true)]);
        assert_eq!(numbers(&other, "eval/loss"), [(100, 0.5), (100, 0.25)]);
        // A fleet without workers that write lines here.
        assert_eq!(numbers(&of(&[run(), eval(1, 0.5, true)]), "eval/loss"), [(7, 0.5)]);
    }

    #[test]
    fn a_resumed_run_continues_at_its_samples() {
        let resumed = Event::Run(Run {
            wall: 100.0,
            workers: 2,
            batch: 10,
            resumed_step: Some(Step(50)),
            ..Run::default()
        });
        // The servers still report the checkpoint's evaluation, before any training.
        let known = Event::Eval(Eval { wall: 100.5, epoch: 1, samples: 7, loss: 0.5, ..Eval::default() });
        let points = of(&[resumed, known, line(0, 101.0, 30, 1.0)]);
        assert_eq!(numbers(&points, "eval/loss"), [(1007, 0.5)]);
        assert_eq!(numbers(&points, "train/loss"), [(1030, 1.0)]);
    }

    #[test]
    fn a_worker_without_loss_has_no_line_a_diverging_one_has() {
        let silent = [run(), line(0, 101.0, 100, f64::NAN)];
        assert_eq!(numbers(&of(&silent), "train/loss"), []);
        let diverged = of(&[run(), line(0, 101.0, 100, 1.0), line(0, 102.0, 200, f64::NAN)]);
        assert!(numbers(&diverged, "train/loss")[1].1.is_nan());
    }
}
