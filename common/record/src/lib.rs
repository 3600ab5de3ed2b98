//! What a training run leaves behind, and how people look at it.
//!
//! ```text
//!  workers, servers --append--> metrics.jsonl --load--> RunRecord --summarize--> Summary
//!                                |                         |--write_report--> report.html
//!                                |    several of them -----`--Comparison-----> compare.json, report.html
//!                                `--follow--> Series ------> events.out.tfevents.*, other trackers
//! ```
//!
//! [`metrics.jsonl`](METRICS_FILE) is the canonical record: one JSON object a line, any tool can read it.
//! Everything else here is computed from it and may be deleted and made again. What this crate is not: it
//! serves no live metrics (that is Prometheus, in the server) and draws no terminal tables.

// A test that unwraps fails with the place and the value; that is what it should do.
#![cfg_attr(test, allow(clippy::unwrap_used))]

pub mod begin;
pub mod comparison;
mod crc32c;
pub mod curve;
mod error;
pub mod event;
pub mod follow;
mod incarnations;
mod metrics_file;
mod partial;
mod report;
mod run;
mod series;
pub mod story;
pub mod tensorboard;

pub use comparison::{Cell, Comparison, Conditions, LeftOut};
pub use error::RecordError;
pub use event::{
    Diverged, End, EndKind, Eval, Evaluating, Event, Incident, IncidentKind, Leave, ModeSwitch, Run, Server,
    Shard, Staleness, Summary, SwitchedBy, Train, Wait, Worker,
};
pub use follow::{Follow, TENSORBOARD_FOLDER};
pub use incarnations::Incarnations;
pub use metrics_file::{METRICS_FILE, MetricsWriter, Tail, read_events};
pub use partial::{read_ends, read_sampled_events};
pub use report::{live_page, render_comparison, render_report, sweep, write_comparison, write_report};
pub use run::{RunEnd, RunRecord};
pub use series::{Point, Series, Value};

/// A sum of counts. They come from a file: the largest number rather than an overflow.
pub(crate) fn count(counts: impl IntoIterator<Item = u64>) -> u64 {
    counts.into_iter().fold(0, u64::saturating_add)
}

/// The sum of numbers that are shown: 0 for none of them, where `Iterator::sum` gives -0.
pub fn total(numbers: impl IntoIterator<Item = f64>) -> f64 {
    numbers.into_iter().fold(0.0, |sum, n| sum + n)
}
