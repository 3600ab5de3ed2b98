//! What the page draws of a run's record: its settings, curves, what happened, and its end.

use paraft_fleet::ended::{EndState, RecordedEnd, report, total_steps_of};
use paraft_record::{
    Event, METRICS_FILE, RunRecord, Series, Summary, Value, read_sampled_events,
    story::{MomentKind, moment},
};
use serde::Serialize;
use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
};

/// Maximal bytes of training lines that are decoded.
const MAX_DECODED_BYTES: u64 = 16 << 20;
/// A longer record is not read, to spare a training on this host.
const MAX_RECORD_BYTES: u64 = 2 << 30;
/// Maximal points of a curve: beyond it, each point is the mean of as many neighbours as it takes.
const MAX_POINTS: usize = 1200;
/// So many further values have the size of the rest of a point, so points become fewer.
const NAMES_OF_A_POINT: usize = 4;
/// Maximal evaluations: beyond it, every second, third, ... one, and always the last.
const MAX_EVALUATIONS: usize = 600;
/// Maximal moments: the latest ones.
const MAX_MOMENTS: usize = 300;
/// With more checkpoints than this, only the last is a moment.
const MAX_CHECKPOINTS: usize = 20;

/// What a record says. Times are Unix milliseconds.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Recorded {
    /// The configuration.
    pub run: paraft_record::Run,
    /// Its folder.
    pub folder: String,
    /// The beginning of the run.
    pub begin: u64,
    /// The steps that a worker is to train; `None`: only a script knows them, or workers share the samples.
    pub total_steps: Option<u64>,
    /// The oldest first.
    pub points: Vec<TrainingPoint>,
    /// The oldest first.
    pub evaluations: Vec<EvaluationPoint>,
    /// The oldest first.
    pub moments: Vec<RecordedMoment>,
    /// Moments that are left out.
    pub more_moments: usize,
    /// The end, if the run has ended.
    pub end: Option<EndOfRun>,
}

/// A training window over all workers.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TrainingPoint {
    /// The end of the window.
    pub at: u64,
    /// Steps of the fastest worker.
    pub step: u64,
    /// The epoch, from 1.
    pub epoch: u64,
    /// Samples that all workers have trained on.
    pub done: u64,
    /// Mean training loss.
    pub loss: Option<f64>,
    /// Samples per second.
    pub samples: Option<f64>,
    /// The further values of the training lines, by name.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub numbers: BTreeMap<String, f64>,
}

/// An evaluation.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct EvaluationPoint {
    /// The time.
    pub at: u64,
    /// Steps of the fastest worker.
    pub step: u64,
    /// Finished epochs.
    pub epoch: u64,
    /// Samples that all workers have trained on.
    pub done: u64,
    /// Held-out loss.
    pub loss: Option<f64>,
    /// Share of held-out samples classified correctly.
    pub accuracy: Option<f64>,
}

/// A failure, an election, an order or a checkpoint.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RecordedMoment {
    /// The time.
    pub at: u64,
    /// Its kind, which decides its colour.
    pub kind: &'static str,
    /// Its letter on a chart.
    pub letter: &'static str,
    /// What happened.
    pub text: String,
    /// What it cost; empty if nothing is known.
    pub cost: String,
    /// It is a checkpoint that was written.
    #[serde(skip)]
    is_checkpoint: bool,
}

/// The end of a run.
#[derive(Clone, Debug, Serialize)]
pub struct EndOfRun {
    /// finished, stopped, failed, interrupted, no-end.
    pub state: &'static str,
    /// The recorded reason.
    pub reason: Option<String>,
    /// The report, if it was written.
    pub report: Option<String>,
    /// The totals.
    pub summary: Summary,
}

impl Recorded {
    /// Reads the record in this folder.
    ///
    /// # Errors
    ///
    /// Why there is none, for people.
    pub fn read(dir: &Path) -> Result<Self, String> {
        let path = dir.join(METRICS_FILE);
        let bytes = std::fs::metadata(&path).map_err(|e| e.to_string())?.len();
        if bytes > MAX_RECORD_BYTES {
            return Err(format!("the record has {bytes} bytes, more than a server reads while it serves"));
        }
        let events = read_sampled_events(&path, MAX_DECODED_BYTES).map_err(|e| e.to_string())?;
        let mut recorded = Self::of(&events);
        let said = RecordedEnd::of(&events);
        let record = RunRecord::from_events(events).ok_or("the record has no first line yet")?;
        recorded.total_steps = total_steps_of(dir, &record.run);
        let summary = said.summary.clone().unwrap_or_else(|| record.summarize());
        let state = said.state(dir, &record, &summary, recorded.total_steps);
        recorded.end = (state != EndState::Running).then(|| EndOfRun {
            state: state.name(),
            reason: state.reason().map(str::to_string),
            report: report(dir).map(|path| path.display().to_string()),
            summary,
        });
        (recorded.run, recorded.folder) = (record.run, dir.display().to_string());
        Ok(recorded)
    }

    /// Whether an end is recorded.
    pub(crate) fn has_end(&self) -> bool {
        self.end.as_ref().is_some_and(|end| end.state != EndState::NoEnd.name())
    }

    /// The curves and the moments of these events.
    fn of(events: &[Event]) -> Self {
        let mut recorded = Self::default();
        let mut series = Series::default();
        let mut now = Now::default();
        for event in events {
            if let (Event::Run(run), 0) = (event, recorded.begin) {
                recorded.begin = millis(run.wall);
            }
            now.follow(event);
            recorded.moments.extend(moment(event).map(|m| RecordedMoment {
                at: millis(m.wall),
                kind: m.kind.name(),
                letter: m.kind.letter(),
                text: m.text,
                cost: m.cost,
                is_checkpoint: m.kind == MomentKind::Checkpoint,
            }));
            recorded.add(series.follow(event), &now);
        }
        recorded.add(series.end(), &now);
        recorded.thin();
        recorded
    }

    /// Adds points to the curves. Values of one moment are one point.
    fn add(&mut self, points: Vec<paraft_record::Point>, now: &Now) {
        for point in points {
            let Value::Number(value) = point.value else { continue };
            let (at, value) = (millis(point.wall), Some(short(value)).filter(|v| v.is_finite()));
            let (step, done) = (now.step, point.step);
            match &*point.tag {
                "eval/loss" | "eval/accuracy" => {
                    if self.evaluations.last().is_none_or(|e| e.at != at) {
                        let (step, epoch) = (now.evaluated.1.unwrap_or(step), now.evaluated.0);
                        let new = EvaluationPoint { at, step, epoch, done, loss: None, accuracy: None };
                        self.evaluations.push(new);
                    }
                    let Some(last) = self.evaluations.last_mut() else { continue };
                    match &*point.tag {
                        "eval/loss" => last.loss = value,
                        _ => last.accuracy = value,
                    }
                }
                tag => {
                    let name = tag.strip_prefix("train/");
                    if name.is_none() && tag != "perf/samples_per_s" {
                        continue;
                    }
                    if self.points.last().is_none_or(|p| p.at != at) {
                        let (epoch, numbers) = (now.epoch, BTreeMap::new());
                        let new = TrainingPoint { at, step, epoch, done, loss: None, samples: None, numbers };
                        self.points.push(new);
                    }
                    let Some(last) = self.points.last_mut() else { continue };
                    match name {
                        None => last.samples = value,
                        Some("loss") => last.loss = value,
                        Some(own) => last.numbers.extend(value.map(|value| (own.to_string(), value))),
                    }
                }
            }
        }
    }

    /// Reduces everything to what a page can draw.
    fn thin(&mut self) {
        let names: BTreeSet<&String> = self.points.iter().flat_map(|p| p.numbers.keys()).collect();
        let most = MAX_POINTS / (1 + names.len() / NAMES_OF_A_POINT);
        let group = self.points.len().div_ceil(most.max(1)).max(1);
        if group > 1 {
            self.points = self.points.chunks(group).filter_map(merged).collect();
        }
        let group = self.evaluations.len().div_ceil(MAX_EVALUATIONS).max(1);
        let last = self.evaluations.len().saturating_sub(1);
        let mut number = 0;
        self.evaluations.retain(|_| {
            number += 1;
            (last + 1 - number).is_multiple_of(group)
        });
        self.moments.sort_by_key(|m| m.at);
        let all = self.moments.len();
        if self.moments.iter().filter(|m| m.is_checkpoint).count() > MAX_CHECKPOINTS {
            let last = self.moments.iter().rposition(|m| m.is_checkpoint);
            let mut number = 0;
            self.moments.retain(|m| {
                number += 1;
                !m.is_checkpoint || Some(number - 1) == last
            });
        }
        self.moments.drain(..self.moments.len().saturating_sub(MAX_MOMENTS));
        self.more_moments = all - self.moments.len();
    }
}

/// Where the run is, by its lines so far.
#[derive(Debug, Default)]
struct Now {
    /// Of the fastest worker.
    step: u64,
    epoch: u64,
    /// Finished epochs at the last evaluation, and its step within an epoch.
    evaluated: (u64, Option<u64>),
}

impl Now {
    fn follow(&mut self, event: &Event) {
        match event {
            Event::Train(t) => {
                (self.step, self.epoch) = (self.step.max(t.step.0), self.epoch.max(t.epoch));
            }
            Event::Worker(w) => self.step = self.step.max(w.steps),
            Event::Eval(e) => self.evaluated = (e.epoch, e.step.map(|step| step.0)),
            _ => {}
        }
    }
}

/// One point for these neighbours.
fn merged(points: &[TrainingPoint]) -> Option<TrainingPoint> {
    let mean = |of: fn(&TrainingPoint) -> Option<f64>| {
        let known: Vec<f64> = points.iter().filter_map(of).collect();
        (!known.is_empty()).then(|| short(known.iter().sum::<f64>() / known.len() as f64))
    };
    // The last of each name.
    let numbers = points.iter().flat_map(|p| p.numbers.clone()).collect();
    let last = points.last()?;
    Some(TrainingPoint { loss: mean(|p| p.loss), samples: mean(|p| p.samples), numbers, ..last.clone() })
}

/// Six significant digits: finer than a screen, and half the size on the wire.
pub(crate) fn short(x: f64) -> f64 {
    format!("{x:.5e}").parse().unwrap_or(x)
}

fn millis(wall: f64) -> u64 {
    (wall * 1e3) as u64
}

#[cfg(test)]
#[path = "record_tests.rs"]
mod tests;
