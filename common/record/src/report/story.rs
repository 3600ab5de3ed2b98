//! What happened in the runs: the list of a report, and the marks on its charts.

use super::Entry;
use super::text::{escape, rounded};
use crate::curve;
use crate::story::{Moment, MomentKind};
use serde::Serialize;
use std::fmt::Write;

/// The longest list of a run; what is beyond it is counted.
const MAX_LISTED: usize = 200;
/// With more checkpoints than this, a run shows only those that failed, and the last.
const MAX_CHECKPOINTS: usize = 20;

/// The section, or nothing if nothing happened.
pub(super) fn section(entries: &[Entry<'_>]) -> String {
    if entries.iter().all(|e| shown(e).is_empty()) {
        return String::new();
    }
    let several = entries.len() > 1;
    let run = if several { "<th scope=\"col\">Run</th>" } else { "" };
    let mut html = format!(
        "<section aria-labelledby=\"happened\">\n<h2 id=\"happened\">What happened</h2>\n<div class=\"scroll\">\n\
         <table class=\"happened\">\n<thead><tr><th scope=\"col\">After</th>{run}<th scope=\"col\">What</th>\
         <th scope=\"col\">Cost</th></tr></thead>\n<tbody>\n"
    );
    for e in entries {
        let run = if several { format!("<td>{}</td>", escape(&e.label)) } else { String::new() };
        let all = shown(e);
        for m in all.iter().take(MAX_LISTED) {
            _ = writeln!(
                html,
                "<tr><th scope=\"row\">{:.2} s</th>{run}<td><i class=\"letter {}\">{}</i>{}</td><td>{}</td></tr>",
                (m.wall - e.record.run.wall).max(0.0),
                m.kind.name(),
                m.kind.letter(),
                escape(&m.text),
                escape(&m.cost),
            );
        }
        if let Some(more) = all.len().checked_sub(MAX_LISTED).filter(|n| *n > 0) {
            _ = writeln!(
                html,
                "<tr><th scope=\"row\"></th>{run}<td>{more} more, in metrics.jsonl</td><td></td></tr>"
            );
        }
    }
    html.push_str(
        "</tbody>\n</table>\n</div>\n<p class=\"note\">Time is since the run's begin, by the clock. The charts below \
         have a mark with the same letter at each of these moments. A stall is the time from the end of a leader's \
         process until the shard's new leader served, as the launcher saw it.</p>\n</section>\n",
    );
    html
}

/// Something that happened in a run, on a chart.
#[derive(Clone, PartialEq, Serialize)]
pub(super) struct EventMark {
    /// The line's index.
    pub run: usize,
    pub x: f64,
    pub kind: &'static str,
    pub letter: &'static str,
    pub text: String,
}

/// The marks of all runs, for charts over samples and over training time.
#[derive(Default)]
pub(super) struct Marks {
    pub samples: Vec<EventMark>,
    pub seconds: Vec<EventMark>,
}

/// Computes the marks once for all charts.
pub(super) fn marks(entries: &[Entry<'_>]) -> Marks {
    let mut marks = Marks::default();
    for (run, e) in entries.iter().enumerate() {
        // Switches of the mode have marks of their own.
        let all: Vec<_> =
            shown(e).into_iter().filter(|m| m.kind != MomentKind::Mode).take(MAX_LISTED).collect();
        let places = curve::at_moments(e.record, all.iter().map(|m| m.wall));
        for (m, at) in all.into_iter().zip(places) {
            let mark = |x| EventMark {
                run,
                x: rounded(x),
                kind: m.kind.name(),
                letter: m.kind.letter(),
                text: m.line(),
            };
            marks.samples.push(mark(at.samples));
            marks.seconds.push(mark(at.seconds));
        }
    }
    marks
}

impl Marks {
    /// Those of a chart over `x`: `samples` or `seconds`.
    pub(super) fn over(&self, x: &str) -> Vec<EventMark> {
        if x == "samples" { self.samples.clone() } else { self.seconds.clone() }
    }
}

/// The moments of a run that are shown.
fn shown<'a>(e: &Entry<'a>) -> Vec<&'a Moment> {
    let all = &e.record.moments;
    let made = |m: &&Moment| m.kind == MomentKind::Checkpoint;
    if all.iter().filter(made).count() <= MAX_CHECKPOINTS {
        return all.iter().collect();
    }
    let last = all.iter().rposition(|m| made(&m));
    all.iter().enumerate().filter(|(i, m)| !made(m) || Some(*i) == last).map(|(_, m)| m).collect()
}
