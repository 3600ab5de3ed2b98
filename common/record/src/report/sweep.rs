//! The page of a sweep: the best trial, the importance of each setting, and every trial as a line
//! through its settings and as a row.

use super::{LINES_SCRIPT, fill, page_with, text::escape, write_page};
use crate::RecordError;
use serde_json::json;
use std::path::Path;

const BODY: &str = include_str!("../../assets/sweep.html");
const SCRIPT: &str = include_str!("../../assets/sweep.js");

/// A setting that varies.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Axis {
    /// A key of the job file.
    pub key: String,
    /// The labels of its axis, with their positions from 0 to 1.
    pub ticks: Vec<(f64, String)>,
}

/// The result of one trial.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Trial {
    /// Its number.
    pub trial: usize,
    /// For each axis the value as text, and its position from 0 to 1.
    pub set: Vec<(String, f64)>,
    /// Its trained epochs.
    pub epochs: u64,
    /// Its score (higher is better) after the number of epochs that every trial has.
    pub first: Option<f64>,
    /// The metric after all its epochs.
    pub value: Option<f64>,
    /// Its total training time.
    pub seconds: f64,
    /// Why it has no value; empty if it has one.
    pub why: String,
}

/// A sweep.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Sweep {
    /// The job's name.
    pub job: String,
    /// `accuracy` or `loss`.
    pub metric: String,
    /// Whether less is better.
    pub least: bool,
    /// Sentences at the top of the page.
    pub headline: Vec<String>,
    /// The settings, in the order of each trial's.
    pub axes: Vec<Axis>,
    /// The ended trials, by number.
    pub trials: Vec<Trial>,
}

impl Sweep {
    /// For each setting, the share of the variance of all trials' first scores that it explains alone,
    /// 0 to 1. This is a one-way analysis of variance over its values, with a range divided into four
    /// parts of equal size, adjusted for the number of groups (epsilon squared, Kelley 1935). `None`
    /// with too few trials.
    pub fn importance(&self) -> Vec<Option<f64>> {
        let scored: Vec<(&Trial, f64)> = self.trials.iter().filter_map(|t| Some((t, t.first?))).collect();
        (0..self.axes.len()).map(|axis| explained(&groups(&scored, axis))).collect()
    }
}

/// Scores grouped by the value of a setting.
fn groups(scored: &[(&Trial, f64)], axis: usize) -> Vec<Vec<f64>> {
    const PARTS: usize = 4;
    let mut by_place: Vec<(f64, f64)> = scored.iter().map(|(t, s)| (t.set[axis].1, *s)).collect();
    by_place.sort_by(|a, b| a.0.total_cmp(&b.0));
    let mut different = by_place.iter().map(|(place, _)| *place).collect::<Vec<_>>();
    different.dedup();
    if different.len() <= 2 * PARTS {
        let of = |place: &f64| by_place.iter().filter(|(p, _)| p == place).map(|(_, s)| *s).collect();
        return different.iter().map(of).collect();
    }
    let most = by_place.len().div_ceil(PARTS);
    by_place.chunks(most).map(|part| part.iter().map(|(_, s)| *s).collect()).collect()
}

fn explained(groups: &[Vec<f64>]) -> Option<f64> {
    let n: usize = groups.iter().map(Vec::len).sum();
    if groups.len() < 2 || n <= groups.len() {
        return None;
    }
    let mean = |all: &[f64]| all.iter().sum::<f64>() / all.len() as f64;
    let all: Vec<f64> = groups.iter().flatten().copied().collect();
    let whole = mean(&all);
    let total: f64 = all.iter().map(|s| (s - whole).powi(2)).sum();
    let within: f64 =
        groups.iter().map(|g| (mean(g), g)).flat_map(|(m, g)| g.iter().map(move |s| (s - m).powi(2))).sum();
    if total <= 0.0 {
        return Some(0.0);
    }
    let adjusted = 1.0 - (within / (n - groups.len()) as f64) / (total / (n - 1) as f64);
    Some(adjusted.max(0.0))
}

/// Writes the page atomically.
///
/// # Errors
///
/// The file cannot be written.
pub fn write_sweep(path: impl AsRef<Path>, sweep: &Sweep) -> Result<(), RecordError> {
    write_page(path.as_ref(), &render_sweep(sweep))
}

/// The page as text.
pub fn render_sweep(sweep: &Sweep) -> String {
    let title = format!("{}: {} trials", sweep.job, sweep.trials.len());
    let sentences: String = sweep.headline.iter().map(|s| format!("<p>{}</p>\n", escape(s))).collect();
    let body = fill(BODY, |name| match name {
        "title" => escape(&title),
        "headline" => sentences.clone(),
        "importance" => importance(sweep),
        "table" => table(sweep),
        other => unreachable!("sweep.html asks for `{other}`"),
    });
    let data = data(sweep);
    // Names come from users, so the page's data contains no `<`.
    let data = data.to_string().replace('<', "\\u003c");
    let script = format!("{LINES_SCRIPT}{SCRIPT}");
    page_with(&title, &body, &data, &script, "sweep.jsonl, the record of the sweep")
}

/// The sweep as data for its pages.
pub fn data(sweep: &Sweep) -> serde_json::Value {
    let span = sweep.trials.iter().filter_map(|t| t.value).fold(None, |span: Option<(f64, f64)>, v| {
        Some(span.map_or((v, v), |(lo, hi)| (lo.min(v), hi.max(v))))
    });
    json!({
        "runs": [], "hidden": [],
        "job": sweep.job, "headline": sweep.headline, "metric": sweep.metric, "least": sweep.least, "span": span,
        "axes": sweep.axes.iter().zip(sweep.importance()).map(|(a, matters)| {
            json!({ "key": a.key, "ticks": a.ticks, "matters": matters })
        }).collect::<Vec<_>>(),
        "trials": sweep.trials.iter().map(|t| json!({
            "trial": t.trial, "places": t.set.iter().map(|(_, p)| *p).collect::<Vec<_>>(), "value": t.value, "epochs": t.epochs,
            "set": t.set.iter().map(|(text, _)| text).collect::<Vec<_>>(), "seconds": t.seconds, "why": t.why,
        })).collect::<Vec<_>>(),
    })
}

fn importance(sweep: &Sweep) -> String {
    let rows = sweep.axes.iter().zip(sweep.importance()).map(|(axis, share)| {
        let (bar, value) = match share {
            Some(share) => (format!("<b style=\"width: {:.1}%\"></b>", 100.0 * share), format!("{:.0} %", 100.0 * share)),
            None => (String::new(), "-".into()),
        };
        format!(
            "<div class=\"share\"><span class=\"what\">{}</span><span class=\"bar\">{bar}</span><span class=\"value\">{value}</span><span></span></div>\n",
            escape(&axis.key)
        )
    });
    rows.collect()
}

fn table(sweep: &Sweep) -> String {
    let head =
        |name: &str| format!("<th scope=\"col\"><button type=\"button\">{}</button></th>", escape(name));
    let names = ["trial", "epochs", &sweep.metric, "seconds"].map(String::from);
    let head: String = names.iter().map(|n| head(n)).chain(sweep.axes.iter().map(|a| head(&a.key))).collect();
    let cell = |text: &str, sort: f64| format!("<td data-sort=\"{sort}\">{}</td>", escape(text));
    let row = |t: &Trial| {
        let value = match t.value {
            Some(v) if sweep.least => cell(&format!("{v:.4}"), v),
            Some(v) => cell(&format!("{:.2} %", 100.0 * v), v),
            None => format!("<td class=\"none\" title=\"{0}\">{0}</td>", escape(&t.why)),
        };
        let set: String = t.set.iter().map(|(text, place)| cell(text, *place)).collect();
        let (epochs, seconds) =
            (cell(&t.epochs.to_string(), t.epochs as f64), cell(&format!("{:.1}", t.seconds), t.seconds));
        format!(
            "<tr data-trial=\"{0}\"><th scope=\"row\" data-sort=\"{0}\">{0}</th>{epochs}{value}{seconds}{set}</tr>\n",
            t.trial
        )
    };
    let rows: String = sweep.trials.iter().map(row).collect();
    format!(
        "<table class=\"groups\" id=\"trials\"><thead><tr>{head}</tr></thead><tbody>\n{rows}</tbody></table>"
    )
}

#[cfg(test)]
#[path = "sweep_tests.rs"]
mod tests;
