//! How late the pushes of each worker were: a table of delay, distance and age, each with its histogram.

use super::text::{escape, number};
use crate::{RunRecord, Staleness};
use paraft_common::{
    WorkerId,
    histogram::{DelayHistogram, LogHistogram},
};
use std::{collections::BTreeMap, fmt::Write};

/// A group of more workers has a row for all of them, and one for each of the latest.
const WORKERS: usize = 8;
const LATEST: usize = 3;
/// Rows of the table, at most.
const ROWS: usize = 48;
/// Size of a histogram, in pixels.
const WIDTH: f64 = 72.0;
const HEIGHT: f64 = 20.0;

/// Whose pushes, and how late they were.
struct Row {
    group: String,
    worker: String,
    late: Staleness,
}

/// A measure of staleness as the table shows it.
struct Measure {
    name: &'static str,
    bins: fn(&Staleness) -> Vec<(f64, u64)>,
    /// Median, 99th percentile.
    quantiles: fn(&Staleness) -> [Option<String>; 2],
}

const MEASURES: [Measure; 3] = [
    Measure {
        name: "Delay (versions)",
        bins: |l| {
            let delays = DelayHistogram::from_counts(&l.delay);
            let mut sizes = LogHistogram::default();
            let bins =
                delays.counts().iter().enumerate().filter(|(_, n)| **n > 0).map(|(d, n)| (d as f64, *n));
            sizes.merge(&LogHistogram::from_bins(bins, 0.0));
            sizes.bins()
        },
        quantiles: |l| {
            let delays = DelayHistogram::from_counts(&l.delay);
            [0.5, 0.99].map(|q| delays.quantile(q).map(|d| d.to_string()))
        },
    },
    Measure {
        name: "Distance (average steps)",
        bins: |l| l.distance.bins(),
        quantiles: |l| [0.5, 0.99].map(|q| l.distance.quantile(q).map(rough)),
    },
    Measure {
        name: "Age",
        bins: |l| l.age.bins(),
        quantiles: |l| [0.5, 0.99].map(|q| l.age.quantile(q).map(|s| format!("{} s", rough(s)))),
    },
];

/// Two digits: quantiles are known to a factor of 1.4.
fn rough(x: f64) -> String {
    let unit = if x > 0.0 { 10f64.powf(x.log10().floor() - 1.0) } else { 1.0 };
    number((x / unit).round() * unit)
}

/// The section, or nothing where no push was late. `groups`: what each is called, and its runs.
pub(super) fn section<'a>(groups: impl Iterator<Item = (&'a str, Vec<&'a RunRecord>)>) -> String {
    let mut rows = Vec::new();
    for (name, runs) in groups {
        rows.extend(of_group(name, &runs));
    }
    if rows.is_empty() {
        return String::new();
    }
    let left = rows.len().saturating_sub(ROWS);
    rows.truncate(ROWS);
    let mut html = String::from(
        "<section aria-labelledby=\"late\">\n<h2 id=\"late\">Late pushes, by worker</h2>\n<div class=\"scroll\">\n\
         <table class=\"groups\">\n<thead><tr><th scope=\"col\">Run</th><th scope=\"col\">Worker</th>",
    );
    for m in &MEASURES {
        _ = write!(
            html,
            "<th scope=\"col\">{}<br><small>p50, p99</small></th><th scope=\"col\"></th>",
            m.name
        );
    }
    html.push_str("</tr></thead>\n<tbody>\n");
    let axes = MEASURES.each_ref().map(|m| Axis::of(&rows, m));
    for row in &rows {
        _ = write!(html, "<tr><th scope=\"row\">{}</th><td>{}</td>", escape(&row.group), escape(&row.worker));
        for (m, axis) in MEASURES.iter().zip(&axes) {
            let shown = (m.quantiles)(&row.late).map(|q| q.unwrap_or_else(|| "–".into()));
            _ = write!(
                html,
                "<td>{}</td><td>{}</td>",
                escape(&shown.join(", ")),
                axis.draw(&(m.bins)(&row.late))
            );
        }
        html.push_str("</tr>\n");
    }
    let more = if left > 0 { format!(" {left} more rows are not shown.") } else { String::new() };
    _ = write!(
        html,
        "</tbody>\n</table>\n</div>\n<p class=\"note\">Delay: updates of a bucket between the pull of its weights and the apply of the \
         gradient. Distance: how far the weights went meanwhile, in average steps. Age: how long that took. Each push counts once for \
         each of its buckets. Bars are shares of a worker's pushes; each place to the right is twice as much, from 0 on the very \
         left, on the same axis in all rows.{more}</p>\n</section>\n"
    );
    html
}

/// The rows of a group: its workers over all of its runs, or the latest of them.
fn of_group(name: &str, runs: &[&RunRecord]) -> Vec<Row> {
    let mut by_worker = BTreeMap::<WorkerId, Staleness>::new();
    let mut all = Staleness::default();
    for (worker, late) in runs.iter().flat_map(|r| r.staleness()) {
        by_worker.entry(worker).or_default().add(&late);
        all.add(&late);
    }
    let is_late = |l: &Staleness| DelayHistogram::from_counts(&l.delay).max() > Some(0);
    if !is_late(&all) {
        return Vec::new();
    }
    let row = |worker: String, late: Staleness| Row { group: name.into(), worker, late };
    if by_worker.len() <= WORKERS {
        return by_worker.into_iter().map(|(w, l)| row(w.0.to_string(), l)).collect();
    }
    let mut latest: Vec<(WorkerId, Staleness)> = by_worker.into_iter().collect();
    latest.sort_by(|a, b| b.1.age.mean().unwrap_or(0.0).total_cmp(&a.1.age.mean().unwrap_or(0.0)));
    let count = latest.len();
    let mut rows = vec![row(format!("all {count}"), all)];
    rows.extend(latest.into_iter().take(LATEST).map(|(w, l)| row(w.0.to_string(), l)));
    rows
}

/// From the smallest size to the largest of all rows: powers of two. Place 0 is for 0.
struct Axis {
    least: i32,
    places: usize,
}

/// The power of two that a bound is at most.
fn power(bound: f64) -> i32 {
    bound.log2().ceil().clamp(-40.0, 40.0) as i32
}

impl Axis {
    fn of(rows: &[Row], m: &Measure) -> Self {
        let bounds = rows.iter().flat_map(|r| (m.bins)(&r.late)).map(|b| b.0).filter(|b| *b > 0.0).map(power);
        let (least, most) = bounds.fold((i32::MAX, i32::MIN), |(l, m), b| (l.min(b), m.max(b)));
        Self { least, places: if least > most { 1 } else { (most - least + 2) as usize } }
    }

    fn draw(&self, bins: &[(f64, u64)]) -> String {
        let mut counts = vec![0u64; self.places];
        for (bound, n) in bins {
            let place = if *bound > 0.0 { (power(*bound) - self.least + 1) as usize } else { 0 };
            if let Some(count) = counts.get_mut(place) {
                *count = count.saturating_add(*n);
            }
        }
        let all = counts.iter().fold(0u64, |sum, n| sum.saturating_add(*n)).max(1) as f64;
        let wide = WIDTH / self.places as f64;
        let mut svg = format!(
            "<svg class=\"spark\" width=\"{WIDTH}\" height=\"{HEIGHT}\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" aria-hidden=\"true\">"
        );
        for (place, n) in counts.iter().enumerate().filter(|(_, n)| **n > 0) {
            let high = (*n as f64 / all * HEIGHT).max(1.0);
            _ = write!(
                svg,
                "<rect x=\"{:.1}\" y=\"{:.1}\" width=\"{:.1}\" height=\"{high:.1}\"/>",
                place as f64 * wide,
                HEIGHT - high,
                (wide - 1.0).max(1.0)
            );
        }
        svg + "</svg>"
    }
}

#[cfg(test)]
#[path = "staleness_tests.rs"]
mod tests;
