//! `report.html`: one page for one run, for several side by side, or for a comparison ([`comparison`]).
//!
//! The page holds everything it needs (style, chart library, data), so it can be mailed or archived, and its
//! content policy forbids it to load anything. Facts and numbers are plain HTML made here; the charts are
//! drawn by `assets/report.js` from JSON made in [`charts`]. Names come from users: they are escaped as text in
//! [`text`], and the JSON carries no `<` at all.

mod bands;
mod charts;
mod comparison;
mod numbers;
mod staleness;
mod story;
pub mod sweep;
pub(crate) mod text;

pub use comparison::{render_comparison, write_comparison};

use crate::{RecordError, RunRecord, Summary};
use std::io::Write;
use std::path::Path;
use text::escape;

const PAGE: &str = include_str!("../assets/report.html");
const RUN: &str = include_str!("../assets/run.html");
const LIVE: &str = include_str!("../assets/live.html");
const STYLE: &str = include_str!("../assets/report.css");
const SCRIPT: &str = include_str!("../assets/report.js");
const CHARTS_SCRIPT: &str = include_str!("../assets/charts.js");
const LINES_SCRIPT: &str = include_str!("../assets/lines.js");
const UPLOT_STYLE: &str = include_str!("../assets/uPlot.min.css");
// Its terms travel with every copy, and each report is one.
const UPLOT_LICENCE: &str = include_str!("../assets/uPlot-LICENSE");
const UPLOT_SCRIPT: &str = include_str!("../assets/uPlot.iife.min.js");

/// Writes the page to `path`, whole or not at all: into a file beside it, then renamed.
pub fn write_report(path: impl AsRef<Path>, records: &[RunRecord]) -> Result<(), RecordError> {
    write_page(path.as_ref(), &render_report(records))
}

fn write_page(path: &Path, page: &str) -> Result<(), RecordError> {
    let mut beside = path.as_os_str().to_owned();
    beside.push(format!(".{}.tmp", std::process::id()));
    let beside = Path::new(&beside);
    let written = std::fs::File::create(beside)
        .and_then(|mut file| file.write_all(page.as_bytes()))
        .and_then(|()| std::fs::rename(beside, path));
    written.map_err(|e| {
        // The half-written file is of no use to anybody; that it cannot be removed either adds nothing.
        _ = std::fs::remove_file(beside);
        RecordError::io(path)(e)
    })
}

/// The page as text. No record gives a page that says so.
pub fn render_report(records: &[RunRecord]) -> String {
    let entries = Entry::all(records);
    let table = numbers::table(&entries);
    let body = fill(RUN, |name| match name {
        "title" => escape(&title(&entries)),
        "headline" => escape(&headline(&entries)),
        "facts" => numbers::facts(&entries),
        "table" => table.html.clone(),
        "table_note" => escape(&table.note),
        "happened" => story::section(&entries),
        "late" => staleness::section(entries.iter().map(|e| (e.label.as_str(), vec![e.record]))),
        other => unreachable!("run.html asks for `{other}`"),
    });
    page(&title(&entries), &body, &charts::json(&entries))
}

/// What both kinds of page are in: style, scripts, the charts' data.
fn page(title: &str, body: &str, data: &str) -> String {
    page_with(title, body, data, SCRIPT, "metrics.jsonl, the record of the run")
}

/// Likewise, with a script of its own, and the file that it is computed from.
fn page_with(title: &str, body: &str, data: &str, script: &str, from: &str) -> String {
    fill(PAGE, |name| match name {
        "from" => from.into(),
        "title" => escape(title),
        "body" => body.into(),
        "style" => STYLE.into(),
        "charts_script" => CHARTS_SCRIPT.into(),
        "script" => script.into(),
        "uplot_style" => UPLOT_STYLE.into(),
        "uplot_licence" => UPLOT_LICENCE.into(),
        "uplot_script" => UPLOT_SCRIPT.into(),
        "data" => data.into(),
        other => unreachable!("report.html asks for `{other}`"),
    })
}

/// A page of another's with the report's look and its charts (`paraftCharts` of `assets/charts.js`): `html` is the body, and has no
/// place that is to be filled.
pub fn live_page(html: &str, style: &str, script: &str) -> String {
    fill(LIVE, |name| match name {
        "body" => html.into(),
        "report_style" => STYLE.into(),
        "style" => style.into(),
        "charts_script" => format!("{CHARTS_SCRIPT}{LINES_SCRIPT}"),
        "script" => script.into(),
        "uplot_style" => UPLOT_STYLE.into(),
        "uplot_licence" => UPLOT_LICENCE.into(),
        "uplot_script" => UPLOT_SCRIPT.into(),
        other => unreachable!("live.html asks for `{other}`"),
    })
}

/// One run on the page.
struct Entry<'a> {
    /// Its mode; with its name where two runs have the same mode, numbered where that is not enough.
    label: String,
    record: &'a RunRecord,
    summary: Summary,
}

impl<'a> Entry<'a> {
    fn all(records: &'a [RunRecord]) -> Vec<Self> {
        let mode = RunRecord::modes;
        let named = |r: &RunRecord| format!("{} ({})", r.modes(), r.run.name);
        let unique = |label: &dyn Fn(&RunRecord) -> String, r: &RunRecord| {
            records.iter().filter(|other| label(other) == label(r)).count() == 1
        };
        let label = |(i, r): (usize, &RunRecord)| match () {
            () if unique(&mode, r) => mode(r),
            () if unique(&named, r) => named(r),
            () => format!("{} #{}", named(r), i + 1),
        };
        let entry = |(i, r): (usize, &'a RunRecord)| Entry {
            label: label((i, r)),
            record: r,
            summary: r.summarize(),
        };
        records.iter().enumerate().map(entry).collect()
    }
}

fn title(entries: &[Entry<'_>]) -> String {
    match entries {
        [] => "No runs".into(),
        [one] => format!("{}: {}, {}", one.record.run.name, one.record.run.what(), one.label),
        [first, ..] => {
            let run = &first.record.run;
            let same = entries.iter().all(|e| e.record.run.what() == run.what());
            let labels: Vec<_> = entries.iter().map(|e| e.label.as_str()).collect();
            let what = if same { format!("{}: ", run.what()) } else { String::new() };
            format!("{what}{}", labels.join(", "))
        }
    }
}

/// How the runs ended, if not in order, and the result.
fn headline(entries: &[Entry<'_>]) -> String {
    let ends = entries.iter().filter_map(|e| {
        let end = e.record.end.as_ref()?.sentence.as_ref()?;
        Some(if entries.len() > 1 { format!("{}: {end} ", e.label) } else { format!("{end} ") })
    });
    ends.chain([result(entries)]).collect()
}

/// The result in one or two sentences, from the same numbers as the table.
fn result(entries: &[Entry<'_>]) -> String {
    let with_target: Vec<_> = entries.iter().filter(|e| e.summary.target_accuracy.is_some()).collect();
    let mut reached: Vec<(f64, &Entry<'_>)> =
        with_target.iter().filter_map(|e| Some((e.summary.seconds_to_target?, *e))).collect();
    reached.sort_by(|a, b| a.0.total_cmp(&b.0));
    let target = |e: &Entry<'_>| text::percent(e.summary.target_accuracy.unwrap_or_default());
    match (reached.as_slice(), entries) {
        (_, []) => "There is nothing to show.".into(),
        ([(s, e)], [_]) => {
            format!("Reached {} held-out accuracy after {} of training.", target(e), text::seconds(*s))
        }
        ([(s, e)], _) => {
            format!(
                "{} reached {} held-out accuracy after {}; no other did.",
                e.label,
                target(e),
                text::seconds(*s)
            )
        }
        ([(s, e), .., (slow, last)], _) => format!(
            "{} reached {} held-out accuracy first, after {}; {} took {}, {:.1} times as long.",
            e.label,
            target(e),
            text::seconds(*s),
            last.label,
            text::seconds(*slow),
            slow / s.max(1e-9),
        ),
        ([], _) => {
            let speed =
                |e: &Entry<'_>| format!("{} {} samples/s", e.label, text::number(e.summary.samples_per_s));
            let speeds: Vec<_> = entries.iter().map(speed).collect();
            let missed = with_target.first().map_or(String::new(), |e| {
                format!("The target of {} held-out accuracy was not reached. ", target(e))
            });
            format!("{missed}Throughput: {}.", speeds.join(", "))
        }
    }
}

/// Puts values in the places named `{{so}}`, in one pass: a value that itself looks like a place stays text.
fn fill(page: &str, value: impl Fn(&str) -> String) -> String {
    let mut out = String::with_capacity(page.len() * 2);
    let mut rest = page;
    while let Some((before, after)) = rest.split_once("{{") {
        let (name, after) = after.split_once("}}").expect("the pages are ours; their tests fill every place");
        out.push_str(before);
        out.push_str(&value(name));
        rest = after;
    }
    out + rest
}
