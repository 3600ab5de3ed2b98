//! The page of a comparison: verdict, table of groups, charts with bands, idle workers, what was left out, and the rules.

use super::numbers::FACTS;
use super::text::{bytes, escape, measured, number, percent, seconds};
use super::{bands, fill, page, staleness, write_page};
use crate::comparison::{Comparison, Figures, Group, RULES, Spread};
use crate::{RecordError, total};
use paraft_common::WorkerId;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::path::Path;

const BODY: &str = include_str!("../../assets/comparison.html");

/// Writes the page of a comparison to `path`, whole or not at all.
pub fn write_comparison(path: impl AsRef<Path>, comparison: &Comparison) -> Result<(), RecordError> {
    write_page(path.as_ref(), &render_comparison(comparison))
}

/// The page as text. It loads nothing.
pub fn render_comparison(comparison: &Comparison) -> String {
    let groups = comparison.groups();
    let title = title(comparison);
    let body = fill(BODY, |name| match name {
        "title" => escape(&title),
        "verdict" => paragraphs(comparison.verdict().sentences.iter().map(String::as_str)),
        "table" => table(comparison, &groups),
        "table_note" => escape(TABLE_NOTE),
        "idle" => idle(&groups),
        "late" => staleness::section(groups.iter().map(|g| (g.label.as_str(), g.shown()))),
        "facts" => facts(comparison),
        "conditions" => conditions(comparison),
        "left_out" => left_out(comparison),
        "rules" => {
            RULES.iter().fold(String::new(), |html, rule| html + &format!("<li>{}</li>\n", escape(rule)))
        }
        other => unreachable!("comparison.html asks for `{other}`"),
    });
    page(&title, &body, &bands::json(&groups))
}

const TABLE_NOTE: &str = "Mean ± standard deviation over the seeds of a group, over the runs that count. Bold is the group to use. \
     Time is the training clock: evaluation is not counted. Waiting is the share of the workers' time that they spent in pulls: \
     for others, for replication and for the network. Delay is the age of a gradient, in versions between the pull of its \
     weights and its apply.";

fn title(c: &Comparison) -> String {
    match c.cells.first() {
        None => "No runs".into(),
        Some(cell) => format!("{}: {}", c.job, cell.record.run.what()),
    }
}

fn paragraphs<'a>(of: impl Iterator<Item = &'a str>) -> String {
    of.fold(String::new(), |html, p| html + &format!("<p>{}</p>\n", escape(p)))
}

/// A column: its head, the figure, how it is shown, and how its deviation is.
type Column = (&'static str, fn(&Figures) -> Option<Spread>, Show, Show);
type Show = fn(f64) -> String;

/// Two significant digits: a deviation is not known better.
fn rough(d: f64) -> String {
    number(format!("{d:.1e}").parse().unwrap_or(d))
}

fn rough_seconds(d: f64) -> String {
    rough(d) + " s"
}

fn whole_bytes(b: f64) -> String {
    bytes(b as u64)
}

const COLUMNS: [Column; 10] = [
    ("Final accuracy", |f| f.final_accuracy, percent, percent),
    ("Final loss", |f| f.final_loss, measured, rough),
    ("Time to target", |f| f.seconds_to_target, seconds, rough_seconds),
    ("Samples to target", |f| f.samples_to_target, number, rough),
    ("Training time", |f| f.seconds, seconds, rough_seconds),
    ("Samples/s", |f| f.samples_per_s, number, rough),
    ("Waiting", |f| f.wait_share, percent, percent),
    ("Mean delay", |f| f.delay_mean, number, rough),
    ("Pushed", |f| f.bytes_pushed, whole_bytes, whole_bytes),
    ("Pulled", |f| f.bytes_pulled, whole_bytes, whole_bytes),
];

fn table(c: &Comparison, groups: &[Group<'_>]) -> String {
    let figures: Vec<Figures> = groups.iter().map(Group::figures).collect();
    let shown: Vec<&Column> =
        COLUMNS.iter().filter(|(_, get, ..)| figures.iter().any(|f| get(f).is_some())).collect();
    let recommended = c.verdict().recommended.filter(|_| groups.len() > 1);
    let mut html = String::from(
        "<table class=\"groups\">\n<thead><tr><th scope=\"col\">Group</th><th scope=\"col\">Runs</th>",
    );
    for (name, ..) in &shown {
        _ = write!(html, "<th scope=\"col\">{name}</th>");
    }
    html.push_str("</tr></thead>\n<tbody>\n");
    for (i, (group, figures)) in groups.iter().zip(&figures).enumerate() {
        let label = escape(&group.label);
        let label = if recommended == Some(i) { format!("<strong>{label}</strong>") } else { label };
        _ = write!(html, "<tr><th scope=\"row\" data-run=\"{i}\">{label}</th>");
        let runs = match group.diverged() {
            0 => group.cells.len().to_string(),
            n => format!("{}, {n} diverged", group.cells.len()),
        };
        _ = write!(html, "<td>{runs}</td>");
        for (name, get, show, deviation) in &shown {
            let reached = name.ends_with("to target");
            match get(figures) {
                Some(s) if reached && s.runs < group.cells.len() => {
                    _ = write!(
                        html,
                        "<td>{} <small>{} of {}</small></td>",
                        escape(&show(s.mean)),
                        s.runs,
                        group.cells.len()
                    );
                }
                Some(s) => {
                    let deviation =
                        s.deviation.map(|d| format!(" <small>± {}</small>", escape(&deviation(d))));
                    _ = write!(html, "<td>{}{}</td>", escape(&show(s.mean)), deviation.unwrap_or_default());
                }
                None if reached => html.push_str("<td class=\"none\">not reached</td>"),
                None => html.push_str("<td class=\"none\">–</td>"),
            }
        }
        html.push_str("</tr>\n");
    }
    html + "</tbody>\n</table>\n"
}

/// How long each worker waited, as bars.
fn idle(groups: &[Group<'_>]) -> String {
    let mut rows = String::new();
    for group in groups {
        let shown = group.shown();
        let mut by_worker = BTreeMap::<WorkerId, Vec<f64>>::new();
        for record in &shown {
            for (worker, share) in record.wait_shares() {
                by_worker.entry(worker).or_default().push(share);
            }
        }
        let Some(all) = Spread::of(shown.iter().filter_map(|r| r.wait_share())) else { continue };
        let others = Spread::of(shown.iter().filter_map(|r| r.wait_share_for_others()));
        let workers: Vec<(u32, f64)> =
            by_worker.iter().map(|(w, s)| (w.0, total(s.iter().copied()) / s.len() as f64)).collect();
        let width = |share: f64| (share * 100.0).clamp(0.0, 100.0);
        let mut ticks = String::new();
        for (worker, share) in workers.iter().take(64) {
            _ = write!(
                ticks,
                "<i style=\"left:{:.1}%\" title=\"worker {worker}: {}\"></i>",
                width(*share),
                percent(*share)
            );
        }
        let extremes = Spread::of(workers.iter().map(|w| w.1)).filter(|_| workers.len() > 1);
        let mut each =
            extremes.map_or(String::new(), |e| format!("{} to {}", percent(e.min), percent(e.max)));
        let mut bar = format!("<b style=\"width:{:.1}%\"></b>", width(all.mean));
        if let Some(others) = &others {
            let of = others.mean.min(all.mean);
            bar = format!(
                "<b class=\"rest\" style=\"width:{:.1}%\"></b><b style=\"width:{:.1}%\"></b>",
                width(all.mean),
                width(of)
            );
            each =
                format!("for others {}, for servers and the network {}", percent(of), percent(all.mean - of));
        }
        _ = writeln!(
            rows,
            "<div class=\"share\"><span class=\"what\">{}</span><span class=\"bar\">{bar}{ticks}</span>\
             <span class=\"value\">{}</span><span class=\"each\">{each}</span></div>",
            escape(&group.label),
            percent(all.mean)
        );
    }
    if rows.is_empty() {
        return rows;
    }
    format!(
        "<section aria-labelledby=\"idle\">\n<h2 id=\"idle\">Waiting workers</h2>\n<div class=\"shares\">\n{rows}</div>\n\
         <p class=\"note\">The share of the workers' time that they spent in pulls. The dark part of a bar is waiting for other \
         workers, as the shards' leaders counted it; the light part is for servers and the network: applying, replicating and sending, \
         and processors that they share with the workers. A tick is one worker. A slow worker does not wait: the others wait for it.</p>\n</section>\n"
    )
}

fn facts(c: &Comparison) -> String {
    let mut html = String::new();
    let mut fact = |name: &str, value: &str| {
        _ = writeln!(html, "<div><dt>{name}</dt><dd>{}</dd></div>", escape(value));
    };
    let list = |values: BTreeSet<String>| values.into_iter().collect::<Vec<_>>().join(", ");
    let seeds: BTreeSet<u64> = c.cells.iter().map(|c| c.seed).collect();
    fact("Runs", &c.cells.len().to_string());
    fact("Seeds", &seeds.iter().map(u64::to_string).collect::<Vec<_>>().join(", "));
    for (name, of) in FACTS.into_iter().filter(|(name, _)| !["Run", "Started", "Seed"].contains(name)) {
        let values: BTreeSet<String> =
            c.cells.iter().map(|c| of(&c.record.run)).filter(|v| !v.is_empty()).collect();
        if (1..=4).contains(&values.len()) {
            fact(name, &list(values));
        }
    }
    html
}

fn conditions(c: &Comparison) -> String {
    let k = &c.conditions;
    let mut said = Vec::new();
    if k.simulated {
        said.push("Nothing ran but a simulation: all times are simulated.".to_string());
    }
    for (worker, factor) in &k.slow {
        said.push(format!("Worker {worker} took {} times as long for a step.", number(*factor)));
    }
    if let Some((p, factor)) = k.straggle.as_deref().and_then(|s| s.split_once(':')) {
        said.push(format!("Of the steps of all workers a share of {p} took {factor} as long."));
    }
    if k.delay_ms > 0.0 {
        said.push(format!(
            "Each way between a worker and a server took {} ms longer, by a proxy.",
            number(k.delay_ms)
        ));
    }
    if let Some(mbit) = k.bandwidth_mbit {
        said.push(format!(
            "A connection between a worker and a server carried {} Mbit/s each way, by a proxy.",
            number(mbit)
        ));
    }
    said.extend(k.notes.iter().cloned());
    if said.is_empty() {
        String::new()
    } else {
        format!("<div class=\"note\">{}</div>\n", paragraphs(said.iter().map(String::as_str)))
    }
}

fn left_out(c: &Comparison) -> String {
    if c.left_out.is_empty() {
        return String::new();
    }
    let mut rows = String::new();
    for l in &c.left_out {
        _ = writeln!(
            rows,
            "<li>{}, {} with {} workers: {}</li>",
            escape(&l.mode),
            escape(&l.algorithm),
            l.workers,
            escape(&l.reason)
        );
    }
    format!(
        "<section aria-labelledby=\"left\">\n<h2 id=\"left\">Left out</h2>\n<ul class=\"rules\">\n{rows}</ul>\n</section>\n"
    )
}
