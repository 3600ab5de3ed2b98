//! The data of the charts, as the JSON that `assets/report.js` draws.

use super::story::{self, EventMark};
use super::{Entry, text::rounded};
use crate::{
    Eval, curve,
    event::{GRADIENT_NORM, LEARNING_RATE},
};
use paraft_common::histogram::DelayHistogram;
use serde::Serialize;
use std::collections::BTreeMap;

/// The maximal number of bins on the delay axis: a phone cannot show more bars.
const DELAY_BINS: u64 = 24;

/// The loss axis is logarithmic if the largest loss exceeds this multiple of the smallest.
const LOG_FROM: f64 = 5.0;

#[derive(Serialize)]
pub(super) struct Page<'a> {
    /// Labels of the runs, or of groups of them.
    pub runs: Vec<&'a str>,
    /// Indices of runs that are hidden until the reader selects them.
    pub hidden: Vec<usize>,
    pub groups: Vec<Group>,
}

#[derive(Serialize)]
pub(super) struct Group {
    pub title: &'static str,
    pub note: String,
    pub charts: Vec<Chart>,
}

#[derive(Serialize)]
#[serde(untagged)]
pub(super) enum Chart {
    Lines(Lines),
    Bars(Bars),
}

#[derive(Default, Serialize)]
pub(super) struct Lines {
    pub title: String,
    /// `samples`, `seconds`, `bytes` or `workers`.
    pub x: &'static str,
    pub lines: Vec<Line>,
    /// The names of the lines, if they are not the page's runs.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub names: Vec<String>,
    /// Marked moments of a line.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub marks: Vec<Mark>,
    /// What happened in the runs.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub events: Vec<EventMark>,
    /// The text if no run has a point.
    pub empty: &'static str,
    pub percent: bool,
    /// Whether the y axis starts at 0.
    pub zero: bool,
    /// Whether the y axis is logarithmic.
    pub log: bool,
    /// Whether points are marked, since there are few.
    pub points: bool,
    pub target: Option<f64>,
}

/// A marked moment of a line.
#[derive(Clone, PartialEq, Serialize)]
pub(super) struct Mark {
    /// The line's index.
    pub run: usize,
    pub x: f64,
    pub text: String,
}

/// `y` is `null` where a value is NaN.
#[derive(Default, Serialize)]
pub(super) struct Line {
    pub x: Vec<f64>,
    pub y: Vec<f64>,
    /// The minimum and maximum at the same x, if the line is a mean.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub low: Vec<f64>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub high: Vec<f64>,
}

impl Line {
    /// Points in the order of x; of several points at one x only the last stays, as the chart library
    /// requires.
    pub fn new(points: impl Iterator<Item = (f64, f64)>) -> Self {
        let mut line = Line::default();
        for (x, y) in points.map(|(x, y)| (rounded(x), rounded(y))) {
            match line.x.last() {
                Some(&last) if x == last => _ = line.y.pop(),
                Some(&last) if x < last => continue,
                _ => line.x.push(x),
            }
            line.y.push(y);
        }
        line
    }
}

#[derive(Serialize)]
pub(super) struct Bars {
    pub title: &'static str,
    pub empty: &'static str,
    /// The delays of each bin: `0`, `5–9`, `20+`.
    pub bins: Vec<String>,
    /// For each run the share of its pushes in each bin; empty without recorded delays.
    pub shares: Vec<Vec<f64>>,
}

/// The JSON, safe inside a `script` element: it has no `<`.
pub(super) fn json(entries: &[Entry<'_>]) -> String {
    let mut groups = Vec::new();
    if !entries.is_empty() {
        let events = story::marks(entries);
        groups.push(loss(entries, &events));
        groups.extend(held_out(entries, &events));
        groups.push(servers(entries, &events));
        groups.extend(values(entries, &events));
    }
    encode(&Page { runs: entries.iter().map(|e| e.label.as_str()).collect(), hidden: Vec::new(), groups })
}

/// As [`json`].
pub(super) fn encode(page: &Page<'_>) -> String {
    // In JSON a `<` occurs only inside strings.
    serde_json::to_string(page).expect("strings and numbers have a JSON form").replace('<', "\\u003c")
}

fn loss(entries: &[Entry<'_>], events: &story::Marks) -> Group {
    let points: Vec<_> = entries.iter().map(|e| curve::train_loss(e.record)).collect();
    let log = wants_log(points.iter().flatten().map(|p| p.loss));
    let chart = |title: &str, x, place: fn(&curve::LossPoint) -> f64| {
        let marks = marks(entries, x);
        let line = |p: &Vec<curve::LossPoint>| Line::new(p.iter().map(|p| (place(p), p.loss)));
        Chart::Lines(Lines {
            title: title.into(),
            x,
            lines: points.iter().map(line).collect(),
            marks,
            events: events.over(x),
            empty: "No training loss was recorded.",
            log,
            ..Lines::default()
        })
    };
    let most = points.iter().map(Vec::len).max().unwrap_or(0);
    Group {
        title: "Training loss",
        note: format!(
            "{}Smoothed: each point is the mean over all workers in one of at most {} equal windows of the run's \
             time (here up to {most} points a line). Drag across a chart to zoom, double-click to zoom out.",
            if log { "The loss axis is logarithmic. " } else { "" },
            curve::LOSS_WINDOWS
        ),
        charts: vec![
            chart("Against samples of the fleet", "samples", |p| p.samples),
            chart("Against training time", "seconds", |p| p.seconds),
        ],
    }
}

/// The switches of the runs' modes, on an axis of samples or seconds.
fn marks(entries: &[Entry<'_>], x: &str) -> Vec<Mark> {
    let of = |(run, e): (usize, &Entry<'_>)| {
        let switches = curve::switches(e.record).into_iter();
        switches.map(move |s| (run, s)).collect::<Vec<_>>()
    };
    let mark = |(run, s): (usize, curve::SwitchPoint)| {
        let at = if x == "samples" { s.samples } else { s.seconds };
        Mark { run, x: rounded(at), text: s.mode }
    };
    entries.iter().enumerate().flat_map(of).map(mark).collect()
}

/// On a linear axis a loss that fell far is a flat line, with the runs on top of each other.
pub(super) fn wants_log(losses: impl Iterator<Item = f64>) -> bool {
    let finite = losses.filter(|l| l.is_finite());
    let (low, high) = finite.fold((f64::MAX, 0.0_f64), |(low, high), l| (low.min(l), high.max(l)));
    low > 0.0 && high > LOG_FROM * low
}

/// The held-out loss, after the accuracy if any run has one; `None` without evaluations.
fn held_out(entries: &[Entry<'_>], events: &story::Marks) -> Option<Group> {
    let evals = || entries.iter().flat_map(|e| &e.record.evals);
    evals().next()?;
    let accuracy = evals().any(|e| e.accuracy.is_some());
    let target = entries.iter().find_map(|e| e.summary.target_accuracy);
    let chart = |is_accuracy: bool, x: &'static str| {
        let value = |e: &Eval| if is_accuracy { e.accuracy } else { Some(e.loss) };
        let place = |e: &Eval| if x == "samples" { e.samples as f64 } else { e.seconds };
        let line = |e: &Entry<'_>| {
            let mut points: Vec<_> =
                e.record.evals.iter().filter_map(|eval| Some((place(eval), value(eval)?))).collect();
            points.sort_by(|a, b| a.0.total_cmp(&b.0));
            Line::new(points.into_iter())
        };
        let what = match (is_accuracy, accuracy) {
            (true, _) => "Accuracy against",
            (false, true) => "Loss against",
            (false, false) => "Against",
        };
        let over = if x == "samples" { "samples of the fleet" } else { "training time" };
        Chart::Lines(Lines {
            title: format!("{what} {over}"),
            x,
            lines: entries.iter().map(line).collect(),
            marks: marks(entries, x),
            events: events.over(x),
            empty: "No evaluation was recorded.",
            percent: is_accuracy,
            log: !is_accuracy && wants_log(evals().map(|e| e.loss)),
            points: evals().count() <= 60 * entries.len(),
            target: target.filter(|_| is_accuracy),
            ..Lines::default()
        })
    };
    let values: &[bool] = if accuracy { &[true, false] } else { &[false] };
    Some(Group {
        title: if accuracy { "Held-out accuracy and loss" } else { "Held-out loss" },
        note:
            "Each point is one evaluation on data that is never trained on. The training clock stands still \
               meanwhile."
                .into(),
        charts: values.iter().flat_map(|is| ["samples", "seconds"].map(|x| chart(*is, x))).collect(),
    })
}

/// The further values of the training lines, a chart for each name. A value that no run has changed has no curve: it is
/// the learning rate, which the table shows.
fn values(entries: &[Entry<'_>], events: &story::Marks) -> Option<Group> {
    // Whether the value changes in a run.
    let mut names = BTreeMap::<&str, bool>::new();
    for entry in entries {
        let mut first = BTreeMap::<&str, f64>::new();
        for (name, value) in entry.record.train.iter().flat_map(|t| &t.values) {
            *names.entry(name).or_default() |= *first.entry(name).or_insert(*value) != *value;
        }
    }
    let chart = |name: &str| {
        let points: Vec<_> = entries.iter().map(|e| curve::value(e.record, name)).collect();
        let title = match name {
            LEARNING_RATE => "Learning rate",
            GRADIENT_NORM => "Norm of a worker's gradient",
            own => own,
        };
        Chart::Lines(Lines {
            title: title.into(),
            x: "samples",
            lines: points.iter().map(|p| Line::new(p.iter().map(|p| (p.samples, p.loss)))).collect(),
            marks: marks(entries, "samples"),
            events: events.over("samples"),
            empty: "No value was recorded.",
            log: name == GRADIENT_NORM && wants_log(points.iter().flatten().map(|p| p.loss)),
            ..Lines::default()
        })
    };
    let charts: Vec<_> =
        names.into_iter().filter(|(_, changes)| *changes).map(|(name, _)| chart(name)).collect();
    (!charts.is_empty()).then(|| Group {
        title: "Rates, norms and the script's own values",
        note: "Smoothed as the training loss, against samples of the fleet. Norms are of gradients before any clipping."
            .into(),
        charts,
    })
}

fn servers(entries: &[Entry<'_>], events: &story::Marks) -> Group {
    let rate =
        |e: &Entry<'_>| Line::new(curve::throughput(e.record).iter().map(|p| (p.seconds, p.samples_per_s)));
    let throughput = Lines {
        title: "Throughput of the fleet, samples/s".into(),
        x: "seconds",
        lines: entries.iter().map(rate).collect(),
        marks: marks(entries, "seconds"),
        events: events.over("seconds"),
        empty: "No progress was recorded.",
        zero: true,
        ..Lines::default()
    };
    Group {
        title: "Delay and throughput",
        note: format!(
            "Delay: how many versions old the weights of a gradient were when it was applied. Throughput: in at \
             most {} equal windows; it falls when a worker ends before the others.",
            curve::RATE_WINDOWS
        ),
        charts: vec![
            Chart::Bars(delays(
                "Delay of pushes, share of each mode's pushes",
                &entries.iter().map(|e| e.record.delays()).collect::<Vec<_>>(),
            )),
            Chart::Lines(throughput),
        ],
    }
}

/// Bins for the delays of nearly all pushes, and one bin for the long tail, which would otherwise
/// compress all others.
pub(super) fn delays(title: &'static str, all: &[DelayHistogram]) -> Bars {
    let most = |value: fn(&DelayHistogram) -> Option<u64>| all.iter().filter_map(value).max().unwrap_or(0);
    let (nearly_all, max) = (most(|h| h.quantile(0.995)), most(DelayHistogram::max));
    let width = [1, 2, 5, 10, 20, 50].into_iter().find(|w| nearly_all / w < DELAY_BINS).unwrap_or(100);
    let exact = nearly_all / width + 1;
    let tail = max >= exact * width || max >= DelayHistogram::EXACT as u64;
    let name = |i: u64| match (i * width, width) {
        (from, _) if i == exact => format!("{from}+"),
        (from, 1) => from.to_string(),
        (from, w) => format!("{from}–{}", from + w - 1),
    };
    let share = |h: &DelayHistogram| {
        if h.total() == 0 {
            return Vec::new();
        }
        let mut shares = vec![0.0; (exact + u64::from(tail)) as usize];
        let last = shares.len() - 1;
        for (delay, &n) in h.counts().iter().enumerate() {
            shares[(delay / width as usize).min(last)] += n as f64 / h.total() as f64;
        }
        shares.into_iter().map(rounded).collect()
    };
    Bars {
        title,
        empty: "No delay was recorded.",
        bins: (0..exact + u64::from(tail)).map(name).collect(),
        shares: all.iter().map(share).collect(),
    }
}
