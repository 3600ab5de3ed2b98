//! The curves of charts, computed from a record. Pure, without drawing.
//!
//! A fleet's position at a moment is the sum of its workers' samples at that moment of their training
//! clocks. Each worker's clock starts with its own first step, so a worker that joined late is drawn as
//! if it had been there from the start.

use crate::{RunRecord, Train, total};
use std::collections::BTreeMap;

/// Maximal points of a loss curve, so it is readable and the page stays small.
pub const LOSS_WINDOWS: usize = 300;

/// Maximal points of a throughput curve. It is below [`LOSS_WINDOWS`], since a rate over a short window
/// depends more on the moments of log lines than on speed.
pub const RATE_WINDOWS: usize = 60;

/// The mean training loss of all workers, or another value of theirs, in one window of the training clock.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LossPoint {
    /// Mean training clock of the window's lines.
    pub seconds: f64,
    /// Fleet samples at that moment.
    pub samples: f64,
    /// Mean loss, weighted by samples; NaN when a worker's was.
    pub loss: f64,
}

/// The fleet's throughput in one window of the training clock.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RatePoint {
    /// The window's middle.
    pub seconds: f64,
    /// Samples per second of all workers together.
    pub samples_per_s: f64,
}

/// Training loss over the run, in at most [`LOSS_WINDOWS`] windows of equal time.
pub fn train_loss(record: &RunRecord) -> Vec<LossPoint> {
    windowed(record, record.train_losses().map(|t| (t, t.loss)))
}

/// A further value of the training lines over the run, as [`train_loss`].
pub fn value(record: &RunRecord, name: &str) -> Vec<LossPoint> {
    windowed(record, record.train.iter().filter_map(|t| Some((t, *t.values.get(name)?))))
}

fn windowed<'a>(record: &RunRecord, lines: impl Iterator<Item = (&'a Train, f64)>) -> Vec<LossPoint> {
    let fleet = Fleet::new(record);
    let windows = fleet.windows(record, LOSS_WINDOWS);
    #[derive(Clone, Default)]
    struct Sum {
        lines: f64,
        seconds: f64,
        weight: f64,
        loss: f64,
    }
    let mut sums = vec![Sum::default(); windows];
    let mut before = BTreeMap::new();
    for (t, value) in lines {
        let done = before.insert(t.worker, t.samples).unwrap_or(0);
        // A line without new samples still reports a loss; it weighs as one sample.
        let weight = t.samples.saturating_sub(done).max(1) as f64;
        // Closed on the right: a line describes the time before it.
        let i = ((t.seconds / fleet.end * windows as f64).ceil() as usize).clamp(1, windows) - 1;
        let sum = &mut sums[i];
        sum.lines += 1.0;
        sum.seconds += t.seconds;
        sum.weight += weight;
        sum.loss += weight * value;
    }
    let point = |s: &Sum| {
        let seconds = s.seconds / s.lines;
        LossPoint { seconds, samples: fleet.samples_at(seconds), loss: s.loss / s.weight }
    };
    sums.iter().filter(|s| s.lines > 0.0).map(point).collect()
}

/// Throughput of the fleet over the run, in at most [`RATE_WINDOWS`] windows of equal time.
pub fn throughput(record: &RunRecord) -> Vec<RatePoint> {
    let fleet = Fleet::new(record);
    if fleet.end <= 0.0 {
        return Vec::new();
    }
    let windows = fleet.windows(record, RATE_WINDOWS);
    let width = fleet.end / windows as f64;
    let rate = |i: usize| {
        let (from, to) = (i as f64 * width, (i + 1) as f64 * width);
        let samples_per_s = (fleet.samples_at(to) - fleet.samples_at(from)) / width;
        RatePoint { seconds: (from + to) / 2.0, samples_per_s }
    };
    (0..windows).map(rate).collect()
}

/// A switch of the mode.
#[derive(Clone, Debug, PartialEq)]
pub struct SwitchPoint {
    /// The training clock of the first worker that received it.
    pub seconds: f64,
    /// Fleet samples at that moment.
    pub samples: f64,
    /// The mode from then on.
    pub mode: String,
}

/// The switches of the mode, each at the first worker that received it.
pub fn switches(record: &RunRecord) -> Vec<SwitchPoint> {
    let fleet = Fleet::new(record);
    let mut seen = 0;
    let mut points = Vec::new();
    for s in &record.switches {
        if s.number > seen {
            seen = s.number;
            let (seconds, samples) = (s.seconds, fleet.samples_at(s.seconds));
            points.push(SwitchPoint { seconds, samples, mode: s.mode.clone() });
        }
    }
    points
}

/// A run's position at a moment.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Place {
    /// The training clock.
    pub seconds: f64,
    /// Fleet samples at that moment.
    pub samples: f64,
}

/// The run's positions at moments in Unix time (seconds), between the workers' lines by the clock.
pub fn at_moments(record: &RunRecord, walls: impl Iterator<Item = f64>) -> Vec<Place> {
    let fleet = Fleet::new(record);
    let mut lines: Vec<(f64, f64)> = record.train.iter().map(|t| (t.wall, t.seconds)).collect();
    lines.sort_by(|a, b| a.0.total_cmp(&b.0));
    // The furthest clock counts, so positions never go back.
    let mut furthest = 0.0_f64;
    for (_, seconds) in &mut lines {
        furthest = furthest.max(*seconds);
        *seconds = furthest;
    }
    let place = |wall: f64| {
        let seconds = lines.first().filter(|l| l.0 <= wall).map_or(0.0, |_| interpolated(&lines, wall));
        Place { seconds, samples: fleet.samples_at(seconds) }
    };
    walls.map(place).collect()
}

/// Every worker's samples as a function of its training clock.
struct Fleet {
    tracks: Vec<Vec<(f64, f64)>>,
    end: f64,
}

impl Fleet {
    fn new(record: &RunRecord) -> Self {
        let mut tracks = BTreeMap::<_, Vec<(f64, f64)>>::new();
        let lines = record.train.iter().map(|t| (t.worker, t.seconds, t.samples));
        let totals = record.workers.iter().map(|w| (w.worker, w.seconds, w.samples));
        for (worker, seconds, samples) in lines.chain(totals) {
            let track = tracks.entry(worker).or_insert_with(|| vec![(0.0, 0.0)]);
            // Both must increase for the search; a worker that restarted under its rank counts from
            // zero.
            if let Some(&(s, n)) = track.last()
                && seconds > s
            {
                track.push((seconds, n.max(samples as f64)));
            }
        }
        let tracks: Vec<_> = tracks.into_values().collect();
        let end = tracks.iter().filter_map(|t| t.last()).map(|p| p.0).fold(0.0, f64::max);
        Self { tracks, end }
    }

    /// Samples of all workers when their clocks show `seconds`, interpolated linearly between their
    /// lines.
    fn samples_at(&self, seconds: f64) -> f64 {
        let one = |track: &Vec<(f64, f64)>| interpolated(track, seconds);
        total(self.tracks.iter().map(one))
    }

    /// As many windows as a worker has lines, so each window has about one line of every worker.
    fn windows(&self, record: &RunRecord, most: usize) -> usize {
        (record.train.len() / self.tracks.len().max(1)).clamp(1, most)
    }
}

/// The value at `x` on the line through these points, which ascend by the first number and are at least one; beyond an
/// end, the value there.
fn interpolated(points: &[(f64, f64)], x: f64) -> f64 {
    let next = points.partition_point(|p| p.0 <= x).max(1);
    let (x0, y0) = points[next - 1];
    match points.get(next) {
        Some((x1, y1)) => y0 + (y1 - y0) * ((x - x0) / (x1 - x0)).clamp(0.0, 1.0),
        None => y0,
    }
}

#[cfg(test)]
#[path = "curve_tests.rs"]
mod tests;
