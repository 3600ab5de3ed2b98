//! The charts of a comparison: a line is a group, with a band from its least seed to its largest.
//!
//! Training losses are put on common places of their axis, on straight lines between a run's points; of evaluations the n-th
//! of each run go together, at the mean of their places. A band ends where the first of its runs ends.

use super::charts::{self, Chart, Line, Lines, Mark, Page};
use super::text::rounded;
use crate::comparison::Group;
use crate::{RunRecord, curve, total};
use paraft_common::histogram::DelayHistogram;

/// Places of a line that is put together from several runs.
const PLACES: usize = 150;
/// So many groups are drawn before the reader asks for more: more lines cannot be told apart.
const DRAWN: usize = 8;
/// So many groups have bars.
const BARS: usize = 6;

/// Where a run stood.
struct Point {
    seconds: f64,
    samples: f64,
    value: f64,
}

/// A place on one of the three axes.
type Axis = fn(&Point, f64) -> f64;

/// `bytes` are those of a sample: pushed and pulled over the whole run.
const AXES: [(&str, &str, Axis); 3] = [
    ("Against samples of the fleet", "samples", |p, _| p.samples),
    ("Against training time", "seconds", |p, _| p.seconds),
    ("Against bytes pushed and pulled", "bytes", |p, bytes| p.samples * bytes),
];

/// The JSON that `assets/report.js` draws.
pub(super) fn json(groups: &[Group<'_>]) -> String {
    let mut all = Vec::new();
    if !groups.is_empty() {
        all.push(losses(groups));
        all.extend(held_out(groups));
        all.extend(workers(groups));
        all.push(delays(groups));
    }
    let runs = groups.iter().map(|g| g.label.as_str()).collect();
    charts::encode(&Page { runs, hidden: hidden(groups), groups: all })
}

fn bytes_of_a_sample(record: &RunRecord) -> f64 {
    let s = record.summarize();
    (s.bytes_pushed as f64 + s.bytes_pulled as f64) / (s.samples as f64).max(1.0)
}

fn losses(groups: &[Group<'_>]) -> charts::Group {
    let points = |r: &RunRecord| -> Vec<Point> {
        let all = curve::train_loss(r).into_iter();
        all.map(|p| Point { seconds: p.seconds, samples: p.samples, value: p.loss }).collect()
    };
    let runs: Vec<Vec<(Vec<Point>, f64)>> = groups
        .iter()
        .map(|g| g.shown().into_iter().map(|r| (points(r), bytes_of_a_sample(r))).collect())
        .collect();
    let log = charts::wants_log(runs.iter().flatten().flat_map(|(p, _)| p).map(|p| p.value));
    let chart = |(title, x, axis): (&str, &'static str, Axis)| {
        let line = |runs: &Vec<(Vec<Point>, f64)>| {
            let place = |(points, bytes): &(Vec<Point>, f64)| {
                Line::new(points.iter().map(|p| (axis(p, *bytes), p.value)))
            };
            common(runs.iter().map(place).collect())
        };
        Chart::Lines(Lines {
            title: title.into(),
            x,
            lines: runs.iter().map(line).collect(),
            marks: marks(groups, x, axis),
            empty: "No training loss was recorded.",
            log,
            ..Lines::default()
        })
    };
    charts::Group {
        title: "Training loss",
        note: format!(
            "{}A line is the mean over a group's seeds, its band reaches from the least to the largest seed. Smoothed: a run's \
             points are means over all workers, in at most {} windows of its time. Bytes are payload, taken to grow with the \
             samples. Drag across a chart to zoom, double-click to zoom out.{}",
            if log { "The loss axis is logarithmic. " } else { "" },
            curve::LOSS_WINDOWS,
            if groups.len() > DRAWN {
                format!(
                    " The {DRAWN} groups that are best at the end are drawn: a click on a name shows another."
                )
            } else {
                String::new()
            }
        ),
        charts: AXES.map(chart).into(),
    }
}

fn held_out(groups: &[Group<'_>]) -> Option<charts::Group> {
    let evals = || groups.iter().flat_map(Group::shown).flat_map(|r| &r.evals);
    evals().next()?;
    let accuracy = evals().any(|e| e.accuracy.is_some());
    let target =
        groups.iter().flat_map(|g| &g.summaries).find_map(|s| s.target_accuracy).filter(|_| accuracy);
    let points = |r: &RunRecord| -> Vec<Point> {
        let value = |e: &crate::Eval| if accuracy { e.accuracy } else { Some(e.loss) };
        let with = r.evals.iter().filter_map(|e| Some((e, value(e)?)));
        with.map(|(e, value)| Point { seconds: e.seconds, samples: e.samples as f64, value }).collect()
    };
    let few = groups.iter().flat_map(Group::shown).all(|r| r.evals.len() <= 60);
    let chart = |(title, x, axis): (&str, &'static str, Axis)| {
        let line = |g: &Group<'_>| {
            let place = |r: &RunRecord| {
                let bytes = bytes_of_a_sample(r);
                let mut all: Vec<_> = points(r).iter().map(|p| (axis(p, bytes), p.value)).collect();
                all.sort_by(|a, b| a.0.total_cmp(&b.0));
                Line::new(all.into_iter())
            };
            by_number(&g.shown().into_iter().map(place).collect::<Vec<_>>())
        };
        Chart::Lines(Lines {
            title: title.into(),
            x,
            lines: groups.iter().map(line).collect(),
            marks: marks(groups, x, axis),
            empty: "No evaluation was recorded.",
            percent: accuracy,
            points: few,
            target,
            ..Lines::default()
        })
    };
    Some(charts::Group {
        title: if accuracy { "Held-out accuracy" } else { "Held-out loss" },
        note: "Each point is the mean of one evaluation over a group's seeds, on data that is never trained on; the band reaches \
               from the least to the largest seed. The training clock stands still meanwhile."
            .into(),
        charts: AXES.map(chart).into(),
    })
}

/// Where the runs of a group switched to another mode: at the first worker that received each switch.
fn marks(groups: &[Group<'_>], x: &str, axis: Axis) -> Vec<Mark> {
    let mut marks: Vec<Mark> = Vec::new();
    for (run, group) in groups.iter().enumerate() {
        for record in group.shown() {
            for s in curve::switches(record) {
                let point = Point { seconds: s.seconds, samples: s.samples, value: 0.0 };
                let at = rounded(axis(&point, if x == "bytes" { bytes_of_a_sample(record) } else { 0.0 }));
                let mark = Mark { run, x: at, text: s.mode };
                if !marks.contains(&mark) {
                    marks.push(mark);
                }
            }
        }
    }
    marks
}

/// What momentum does as workers are added; nothing for one number of workers.
fn workers(groups: &[Group<'_>]) -> Option<charts::Group> {
    let mut names: Vec<String> = Vec::new();
    let mut of: Vec<Vec<&Group<'_>>> = Vec::new();
    for g in groups.iter().filter(|g| g.whole()) {
        let name = format!("{} {}", g.mode, g.algorithm);
        match names.iter().position(|n| *n == name) {
            Some(i) => of[i].push(g),
            None => {
                names.push(name);
                of.push(vec![g]);
            }
        }
    }
    let first = groups.first()?.workers;
    if groups.iter().all(|g| g.workers == first) {
        return None;
    }
    of.iter_mut().for_each(|line| line.sort_by_key(|g| g.workers));
    let accuracy = groups.iter().any(|g| g.figures().final_accuracy.is_some());
    let end = |g: &Group<'_>| if accuracy { g.figures().final_accuracy } else { g.figures().final_loss };
    let chart = |title: &str, percent: bool, value: &dyn Fn(&Group<'_>) -> Option<[f64; 3]>| {
        let line = |groups: &Vec<&Group<'_>>| {
            let mut line = Line::default();
            for (g, [mean, low, high]) in groups.iter().filter_map(|g| Some((g, value(g)?))) {
                line.x.push(f64::from(g.workers));
                line.y.push(rounded(mean));
                line.low.push(rounded(low));
                line.high.push(rounded(high));
            }
            line
        };
        Chart::Lines(Lines {
            title: title.into(),
            x: "workers",
            lines: of.iter().map(line).collect(),
            names: names.clone(),
            empty: "No group has only runs that count.",
            percent,
            points: true,
            ..Lines::default()
        })
    };
    let title = if accuracy { "Final accuracy against workers" } else { "Final loss against workers" };
    Some(charts::Group {
        title: "Momentum against workers",
        note: "Late gradients act like more momentum (Mitliagkas et al. 2016, Asynchrony begets momentum): a mean delay of d \
               versions like 1 - 1/(1 + d), beside what the optimizer has. The right chart is that number, from the delays that \
               were measured; the left one is what became of it. Groups with runs that diverged have no point."
            .into(),
        charts: vec![
            chart(title, accuracy, &|g| end(g).map(|s| [s.mean, s.min, s.max])),
            chart("Momentum that the delay amounts to", false, &|g| {
                g.figures().delay_mean.map(|s| [s.mean, s.min, s.max].map(|d| d / (1.0 + d)))
            }),
        ],
    })
}

fn delays(groups: &[Group<'_>]) -> charts::Group {
    let mut all: Vec<_> = groups
        .iter()
        .map(|g| {
            let mut all = DelayHistogram::default();
            g.shown().iter().for_each(|r| all.merge(&r.delays()));
            all
        })
        .collect();
    // Lock-step groups have one bar that says nothing: they have a place only where there is room.
    let (late, prompt): (Vec<usize>, Vec<usize>) = (0..all.len()).partition(|&i| all[i].max() > Some(0));
    for i in late.into_iter().chain(prompt).skip(BARS) {
        all[i] = DelayHistogram::default();
    }
    charts::Group {
        title: "Delay",
        note: format!(
            "How many versions old the weights of a gradient were when it was applied, over all seeds of a group.{}",
            if groups.len() > BARS {
                format!(" {BARS} groups, those with delays first; the table has the mean of all.")
            } else {
                String::new()
            }
        ),
        charts: vec![Chart::Bars(charts::delays("Share of each group's pushes", &all))],
    }
}

/// The groups that are hidden at first: all but the best at the end, where there are many.
fn hidden(groups: &[Group<'_>]) -> Vec<usize> {
    let accuracy = groups.iter().any(|g| g.figures().final_accuracy.is_some());
    let badness = |g: &Group<'_>| {
        let f = g.figures();
        let end = if accuracy { f.final_accuracy.map(|s| -s.mean) } else { f.final_loss.map(|s| s.mean) };
        end.unwrap_or(f64::INFINITY)
    };
    let mut order: Vec<(f64, usize)> = groups.iter().map(badness).zip(0..).collect();
    order.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
    let mut hidden: Vec<usize> = order.into_iter().skip(DRAWN).map(|(_, i)| i).collect();
    hidden.sort_unstable();
    hidden
}

/// Lines on common places: their mean, and the least and the largest of them.
fn common(mut lines: Vec<Line>) -> Line {
    lines.retain(|l| !l.x.is_empty());
    if lines.len() <= 1 {
        return lines.pop().unwrap_or_default();
    }
    let from = lines.iter().map(|l| l.x[0]).fold(f64::MIN, f64::max);
    let to = lines.iter().filter_map(|l| l.x.last()).copied().fold(f64::MAX, f64::min);
    let places = lines.iter().map(|l| l.x.len()).max().unwrap_or(1).clamp(2, PLACES);
    if to <= from {
        return by_number(&lines);
    }
    let mut out = Line::default();
    for i in 0..places {
        let x = from + (to - from) * i as f64 / (places - 1) as f64;
        put(&mut out, x, lines.iter().map(|l| at(l, x)));
    }
    out
}

/// The n-th points of all lines, at the mean of their places.
fn by_number(lines: &[Line]) -> Line {
    if let [one] = lines {
        return Line { x: one.x.clone(), y: one.y.clone(), ..Line::default() };
    }
    let points = lines.iter().map(|l| l.x.len()).min().unwrap_or(0);
    let mut out = Line::default();
    for i in 0..points {
        let x = total(lines.iter().map(|l| l.x[i])) / lines.len() as f64;
        put(&mut out, x, lines.iter().map(|l| l.y[i]));
    }
    out
}

fn put(out: &mut Line, x: f64, values: impl Iterator<Item = f64> + Clone) {
    let n = values.clone().count() as f64;
    let (low, high) = values.clone().fold((f64::MAX, f64::MIN), |(l, h), v| (l.min(v), h.max(v)));
    let mean = total(values) / n;
    // A value that is no number is in the mean, and leaves a gap; the least and the largest pass over it.
    let gap = |v: f64| if mean.is_nan() { f64::NAN } else { rounded(v) };
    out.x.push(rounded(x));
    out.y.push(rounded(mean));
    out.low.push(gap(low));
    out.high.push(gap(high));
}

/// The line's value at a place within it.
fn at(line: &Line, x: f64) -> f64 {
    let next = line.x.partition_point(|p| *p <= x).clamp(1, line.x.len().max(2) - 1);
    match (line.x.get(next), line.y.get(next)) {
        (Some(x1), Some(y1)) => {
            let (x0, y0) = (line.x[next - 1], line.y[next - 1]);
            y0 + (y1 - y0) * ((x - x0) / (x1 - x0)).clamp(0.0, 1.0)
        }
        _ => line.y[0],
    }
}

#[cfg(test)]
#[path = "bands_tests.rs"]
mod tests;
