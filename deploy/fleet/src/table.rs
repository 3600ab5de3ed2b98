//! Tables on the terminal. That at the end of a run has one row for each mode, and every figure is from the record.

use crate::failure::Failure;
use comfy_table::{CellAlignment, Row, Table, presets};
use paraft_common::need::Bytes;
use paraft_record::{Comparison, RunEnd, RunRecord, Summary, comparison::Spread};
use paraft_worker::exit;
use serde::Serialize;
use std::{collections::BTreeSet, path::Path};

/// A run as one object, for programs.
#[derive(Serialize)]
struct RunObject<'a> {
    #[serde(flatten)]
    summary: Summary,
    #[serde(flatten)]
    end: Option<&'a RunEnd>,
}

/// Prints a run's summary, as a table or an object, and the path of its report. A run without a step has no table.
///
/// # Errors
///
/// The summary cannot be written as JSON.
pub fn show(record: &RunRecord, json: bool, report: &Path) -> Result<(), Failure> {
    let summary = record.summarize();
    if json {
        let run = RunObject { summary, end: record.end.as_ref() };
        out!("{}", serde_json::to_string(&run).map_err(|e| Failure::new(exit::IO, e))?);
        eprintln!("report {}", report.display());
    } else {
        if summary.samples > 0 {
            out!("{}", modes(&[summary]));
        }
        out!("report  {}", report.display());
    }
    Ok(())
}

/// A table without lines.
pub fn plain(header: impl Into<Row>) -> Table {
    let mut table = Table::new();
    table.load_style(presets::NOTHING);
    table.set_header(header);
    table
}

/// Aligns the columns of numbers: all from this one on.
pub fn align_right(table: &mut Table, from: usize) {
    for column in table.column_iter_mut().skip(from) {
        column.set_cell_alignment(CellAlignment::Right);
    }
}

/// Renders summaries as a table; where no accuracy was measured it has no columns for one. Below it is a
/// line for each run whose servers failed.
pub fn modes(summaries: &[Summary]) -> String {
    let target = summaries.iter().find_map(|s| s.target_accuracy);
    let time_to = target.map_or("to target".into(), |t| format!("to {:.0}%", t * 100.0));
    let measured = summaries.iter().any(|s| s.final_accuracy.or(s.target_accuracy).is_some());
    let accuracy = |shown: String| measured.then_some(shown);
    let metrics: BTreeSet<&String> = summaries.iter().flat_map(|s| s.final_metrics.keys()).collect();
    let header = [
        Some("mode".to_string()),
        accuracy(time_to),
        Some("final loss".into()),
        accuracy("accuracy".into()),
        Some("samples/s".into()),
        Some("delay p50/p99".into()),
        Some("waited".into()),
        Some("pushed".into()),
        Some("pulled".into()),
        Some("lost".into()),
    ];
    let names = metrics.iter().map(|name| name.replace('_', " "));
    let mut table = plain(header.into_iter().flatten().chain(names));
    for s in summaries {
        let delay = match (s.delay_p50, s.delay_p99) {
            (Some(a), Some(b)) => format!("{a} / {b}"),
            _ => "-".into(),
        };
        // Without the workers' totals nothing is known.
        let sent = |n: u64| if n == 0 { "-".into() } else { bytes(n) };
        let row = [
            Some(s.switched_to.as_ref().map_or_else(|| s.mode.clone(), |to| format!("{} → {to}", s.mode))),
            accuracy(s.seconds_to_target.map_or("-".into(), |t| format!("{t:.2} s"))),
            Some(s.final_loss.map_or("-".into(), |l| format!("{l:.4}"))),
            accuracy(s.final_accuracy.map_or("-".into(), |a| format!("{:.2}%", a * 100.0))),
            Some(format!("{:.0}", s.samples_per_s)),
            Some(delay),
            Some(format!("{:.2} s", s.wait_seconds)),
            Some(sent(s.bytes_pushed)),
            Some(sent(s.bytes_pulled)),
            Some(lost(s)),
        ];
        let metric = |name: &&String| s.final_metrics.get(*name).map_or("-".into(), |x| format!("{x:.4}"));
        table.add_row(row.into_iter().flatten().chain(metrics.iter().map(metric)));
    }
    align_right(&mut table, 1);
    let mut text = table.to_string();
    for s in summaries {
        if let Some(failures) = failures(s) {
            let of = if summaries.len() > 1 { format!("{}: ", s.mode) } else { String::new() };
            text += &format!("\n {of}{failures}");
        }
    }
    text
}

/// What failed of a run's servers, if anything did.
fn failures(s: &Summary) -> Option<String> {
    let all = [
        (s.servers_lost > 0).then(|| format!("servers lost {}", s.servers_lost)),
        (s.leaders_elected > 0).then(|| format!("leaders elected {}", s.leaders_elected)),
        s.longest_stall_seconds.map(|t| format!("longest stall {t:.2} s")),
    ];
    let all: Vec<_> = all.into_iter().flatten().collect();
    (!all.is_empty()).then(|| all.join(", "))
}

/// Renders a comparison: a row for each group of seeds. Where only modes differ it is the table of modes.
pub fn comparison(comparison: &Comparison) -> String {
    let groups = comparison.groups();
    let is_mode =
        |g: &paraft_record::comparison::Group<'_>| g.cells.len() == 1 && g.whole() && g.label == g.mode;
    if groups.iter().all(is_mode) {
        return modes(&groups.iter().flat_map(|g| g.summaries.clone()).collect::<Vec<_>>());
    }
    let summaries = || groups.iter().flat_map(|g| &g.summaries);
    let target = summaries().find_map(|s| s.target_accuracy);
    let to = target.map_or("to target".into(), |t| format!("to {:.0}%", t * 100.0));
    let mut table = plain([
        "group",
        "runs",
        &to,
        "final loss",
        "accuracy",
        "samples/s",
        "delay",
        "waited",
        "pushed",
        "pulled",
    ]);
    for g in &groups {
        let f = g.figures();
        let cell = |s: Option<Spread>, show: &dyn Fn(f64) -> String| match s {
            None => "-".into(),
            Some(Spread { mean, deviation: None, .. }) => show(mean),
            Some(Spread { mean, deviation: Some(d), .. }) => format!("{} ± {}", show(mean), show(d)),
        };
        let mean = |s: Option<Spread>, show: &dyn Fn(f64) -> String| s.map_or("-".into(), |s| show(s.mean));
        let runs = match g.diverged() {
            0 => g.cells.len().to_string(),
            n => format!("{}, {n} diverged", g.cells.len()),
        };
        let reached = f.seconds_to_target.filter(|s| s.runs < g.cells.len());
        let reached = reached.map(|s| format!(" ({} of {})", s.runs, g.cells.len())).unwrap_or_default();
        table.add_row(vec![
            g.label.clone(),
            runs,
            cell(f.seconds_to_target, &|t| format!("{t:.2} s")) + &reached,
            cell(f.final_loss, &|l| format!("{l:.4}")),
            cell(f.final_accuracy, &|a| format!("{:.2}%", a * 100.0)),
            cell(f.samples_per_s, &|r| format!("{r:.0}")),
            mean(f.delay_mean, &|d| format!("{d:.1}")),
            cell(f.wait_share, &|w| format!("{:.0}%", w * 100.0)),
            mean(f.bytes_pushed, &|b| bytes(b as u64)),
            mean(f.bytes_pulled, &|b| bytes(b as u64)),
        ]);
    }
    align_right(&mut table, 1);
    table.to_string()
}

fn lost(s: &Summary) -> String {
    let some = |n: u64, what: &str| match n {
        0 => None,
        1 => Some(format!("1 {what}")),
        n => Some(format!("{n} {what}{}", if what.ends_with("sh") { "es" } else { "s" })),
    };
    let all = [
        some(s.workers_lost.into(), "worker"),
        some(s.ranks_lost.into(), "rank"),
        some(s.pushes_lost, "push"),
    ];
    let text = all.into_iter().flatten().collect::<Vec<_>>().join(", ");
    if text.is_empty() { "-".into() } else { text }
}

/// Bytes for people: 1.5 MiB.
pub fn bytes(n: u64) -> String {
    Bytes(n).to_string()
}

#[cfg(test)]
#[path = "table_tests.rs"]
mod tests;
