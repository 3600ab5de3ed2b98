//! The facts and the table of numbers, as HTML. A row is a number, a column a run: modes stand side by side,
//! and three of them fit a phone.

use super::Entry;
use super::text::{bytes, count, escape, measured, moment, number, percent, seconds};
use crate::{Run, Summary};
use std::{collections::BTreeSet, fmt::Write};

/// The table and what its reader must know.
pub(super) struct Table {
    pub html: String,
    pub note: String,
}

/// A fact about a run, as text.
pub(super) type Fact = (&'static str, fn(&Run) -> String);

pub(super) const FACTS: [Fact; 15] = [
    ("Model", |r| r.model.clone()),
    ("Parameters", |r| known(r.parameters)),
    ("Data", |r| unless_script(r, r.data.clone())),
    ("Workers", |r| r.workers.to_string()),
    ("Servers", |r| r.servers.to_string()),
    ("Shards", |r| r.shards.to_string()),
    ("Replicas of a shard", |r| r.replicas.to_string()),
    ("Batch of a worker", |r| unless_script(r, format!("{} samples", count(r.batch)))),
    ("Optimizer", |r| unless_script(r, r.optimizer.clone())),
    ("Learning rate", |r| unless_script(r, number(r.lr))),
    ("Epochs", |r| unless_script(r, count(r.epochs))),
    ("Samples to train on", |r| known(r.samples_budget)),
    ("Seed", |r| r.seed.to_string()),
    ("Run", |r| r.name.clone()),
    ("Started", |r| if r.simulated { "never: simulated".into() } else { moment(r.wall) }),
];

/// Only a program of the user's knows it, if it is none; then it is no fact of the run.
fn known(n: u64) -> String {
    if n == 0 { String::new() } else { count(n) }
}

/// What a script decides is no fact of the run either.
fn unless_script(run: &Run, value: String) -> String {
    if run.of_script() { String::new() } else { value }
}

/// What all runs have in common, as the items of a `dl`. What they do not is in the table.
pub(super) fn facts(entries: &[Entry<'_>]) -> String {
    let mut html = String::new();
    for (name, fact) in FACTS {
        if let Some(value) = common(entries, fact).filter(|v| !v.is_empty()) {
            _ = writeln!(html, "<div><dt>{name}</dt><dd>{}</dd></div>", escape(&value));
        }
    }
    html
}

fn common(entries: &[Entry<'_>], fact: fn(&Run) -> String) -> Option<String> {
    let first = fact(&entries.first()?.record.run);
    entries.iter().all(|e| fact(&e.record.run) == first).then_some(first)
}

/// Which end of a row is the good one.
#[derive(Clone, Copy, PartialEq)]
enum Best {
    Low,
    High,
    Neither,
}

/// A cell: what it shows, and the number it is judged by. `None` shows as a dash.
type Cell = Option<(String, f64)>;

struct Row {
    name: String,
    best: Best,
    cells: Vec<Cell>,
}

/// The table of all runs.
pub(super) fn table(entries: &[Entry<'_>]) -> Table {
    let rows = rows(entries);
    let mut html = String::from("<table>\n<thead><tr><th scope=\"col\">Mode</th>");
    for (i, e) in entries.iter().enumerate() {
        _ = write!(html, "<th scope=\"col\" data-run=\"{i}\">{}</th>", escape(&e.label));
    }
    html.push_str("</tr></thead>\n<tbody>\n");
    let mut marked = false;
    for row in &rows {
        _ = write!(html, "<tr><th scope=\"row\">{}</th>", escape(&row.name));
        let good = row.good();
        for cell in &row.cells {
            _ = match cell {
                Some((shown, n)) if good == Some(*n) => {
                    marked = true;
                    write!(html, "<td><strong>{}</strong></td>", escape(shown))
                }
                Some((shown, _)) => write!(html, "<td>{}</td>", escape(shown)),
                None => write!(html, "<td class=\"none\">–</td>"),
            };
        }
        html.push_str("</tr>\n");
    }
    html.push_str("</tbody>\n</table>\n");
    let mut note = String::new();
    if marked {
        note.push_str("Bold is the best of its row. ");
    }
    note.push_str(
        "Time is the training clock: evaluation is not counted. Delay is the age of a gradient, in versions \
         between the pull of its weights and its apply. CPU-seconds are those of \
         workers and servers together.",
    );
    Table { html, note }
}

impl Row {
    /// The best number, where there is something to choose between.
    fn good(&self) -> Option<f64> {
        let numbers: Vec<f64> = self.cells.iter().flatten().map(|c| c.1).filter(|n| n.is_finite()).collect();
        let (low, high) = numbers.iter().fold((f64::MAX, f64::MIN), |(l, h), n| (l.min(*n), h.max(*n)));
        let contest =
            self.cells.len() > 1 && (low < high || numbers.len() < self.cells.len()) && !numbers.is_empty();
        match self.best {
            Best::Low if contest => Some(low),
            Best::High if contest => Some(high),
            _ => None,
        }
    }
}

fn rows(entries: &[Entry<'_>]) -> Vec<Row> {
    let row = |name: &str, best, cell: &dyn Fn(&Summary) -> Cell| Row {
        name: name.into(),
        best,
        cells: entries.iter().map(|e| cell(&e.summary)).collect(),
    };
    let any = |has: fn(&Summary) -> bool| entries.iter().any(|e| has(&e.summary));
    let mut rows = Vec::new();

    let targets: Vec<f64> = entries.iter().filter_map(|e| e.summary.target_accuracy).collect();
    if let Some(first) = targets.first() {
        let same = targets.iter().all(|t| t == first) && targets.len() == entries.len();
        let what = if same { format!("{} accuracy", percent(*first)) } else { "its target accuracy".into() };
        let missed = |s: &Summary| s.target_accuracy.map(|_| ("not reached".to_string(), f64::NAN));
        rows.push(row(&format!("Time to {what}"), Best::Low, &|s| {
            s.seconds_to_target.map(|t| (seconds(t), t)).or_else(|| missed(s))
        }));
        rows.push(row(&format!("Samples to {what}"), Best::Low, &|s| {
            s.samples_to_target.map(|n| (count(n), n as f64)).or_else(|| missed(s))
        }));
    }
    if any(|s| s.final_accuracy.is_some()) {
        rows.push(row("Final accuracy", Best::High, &|s| s.final_accuracy.map(|a| (percent(a), a))));
    }
    let metrics: BTreeSet<&String> = entries.iter().flat_map(|e| e.summary.final_metrics.keys()).collect();
    for name in metrics {
        let best = if name == "auc" { Best::High } else { Best::Low };
        let of = |s: &Summary| s.final_metrics.get(name).map(|x| (measured(*x), *x));
        rows.push(row(&format!("Final {}", name.replace('_', " ")), best, &of));
    }
    let evaluated = entries.iter().all(|e| e.record.final_eval().is_some());
    let loss = if evaluated { "Final held-out loss" } else { "Final loss" };
    rows.push(row(loss, Best::Low, &|s| s.final_loss.map(|l| (measured(l), l))));
    rows.push(row("Training time", Best::Neither, &|s| Some((seconds(s.seconds), s.seconds))));
    if any(|s| s.first_step_seconds.is_some()) {
        rows.push(row("First step after", Best::Low, &|s| s.first_step_seconds.map(|t| (seconds(t), t))));
    }
    rows.push(row("Samples", Best::Neither, &|s| Some((count(s.samples), s.samples as f64))));
    rows.push(row("Samples/s", Best::High, &|s| Some((number(s.samples_per_s), s.samples_per_s))));
    rows.push(row("Delay p50 / p99 / max", Best::Neither, &|s| {
        let (p50, p99, max) = (s.delay_p50?, s.delay_p99?, s.delay_max?);
        Some((format!("{p50} / {p99} / {max}"), p99 as f64))
    }));
    rows.push(row("Waiting, all workers", Best::Low, &|s| Some((seconds(s.wait_seconds), s.wait_seconds))));
    // Without the workers' totals nothing is known.
    let sent = |n: u64| if n == 0 { None } else { Some((bytes(n), n as f64)) };
    rows.push(row("Bytes pushed", Best::Neither, &|s| sent(s.bytes_pushed)));
    rows.push(row("Bytes pulled", Best::Neither, &|s| sent(s.bytes_pulled)));
    rows.push(row("CPU-s per 1000 samples", Best::Low, &|s| {
        s.cpu_seconds_per_1000_samples.map(|c| (measured(c), c))
    }));
    let mut push_failures = |name, of: &dyn Fn(&Summary) -> u32| {
        if entries.iter().any(|e| of(&e.summary) > 0) {
            rows.push(row(name, Best::Neither, &|s| Some((of(s).to_string(), f64::from(of(s))))));
        }
    };
    push_failures("Workers lost", &|s| s.workers_lost);
    push_failures("Ranks lost", &|s| s.ranks_lost);
    push_failures("Servers lost", &|s| s.servers_lost);
    push_failures("Leaders elected", &|s| s.leaders_elected);
    if any(|s| s.longest_stall_seconds.is_some()) {
        let stall = |s: &Summary| s.longest_stall_seconds.map(|t| (seconds(t), t));
        rows.push(row("Longest stall", Best::Neither, &stall));
    }
    if any(|s| s.pushes_lost > 0) {
        let lost = |s: &Summary| Some((count(s.pushes_lost), s.pushes_lost as f64));
        rows.push(row("Acknowledged pushes lost", Best::Low, &lost));
    }
    for (name, fact) in FACTS {
        if !entries.is_empty() && common(entries, fact).is_none() {
            let cells = entries.iter().map(|e| Some((fact(&e.record.run), f64::NAN))).collect();
            rows.push(Row { name: name.into(), best: Best::Neither, cells });
        }
    }
    rows
}
