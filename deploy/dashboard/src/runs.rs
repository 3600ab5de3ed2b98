//! Recorded runs in a folder: their settings and results, for a table, and one of them for comparison with the fleet's
//! jobs.

use crate::record::Recorded;
use paraft_fleet::ended::{RecordedEnd, total_steps_of};
use paraft_record::{METRICS_FILE, RunRecord, read_ends};
use serde::Serialize;
use std::{
    fs,
    path::Path,
    time::{SystemTime, UNIX_EPOCH},
};

/// The maximal number of runs: the latest ones.
const MAX_RUNS: usize = 200;
/// Bytes at the end of a record that are read for the table.
const LAST_BYTES: u64 = 1 << 16;

/// A run.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Run {
    /// Its folder's name.
    pub name: String,
    /// Unix milliseconds of the record's last change.
    pub at: u64,
    /// The settings and results; absent if the record has no first line.
    #[serde(flatten)]
    pub row: Option<Row>,
}

/// The settings and results of a run.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Row {
    /// running, finished, stopped, failed, interrupted, no-end.
    pub state: &'static str,
    /// The recorded reason of a failure.
    pub reason: Option<String>,
    /// The mode that the run began in, with that of the last switch, if any.
    pub mode: String,
    /// Model and data set.
    pub what: String,
    /// Workers at the start.
    pub workers: u32,
    /// Samples in a worker's step.
    pub batch: u64,
    /// Passes over the training data.
    pub epochs: u64,
    /// The optimizer.
    pub optimizer: String,
    /// Its learning rate.
    pub lr: f64,
    /// The seed.
    pub seed: u64,
    /// The longest training clock of a worker.
    pub seconds: Option<f64>,
    /// Samples per second.
    pub samples_per_s: Option<f64>,
    /// Held-out loss at the end, or else the last training loss.
    pub loss: Option<f64>,
    /// Held-out accuracy at the end.
    pub accuracy: Option<f64>,
    /// How often the process of a server ended.
    pub servers_lost: u32,
    /// The longest time that a shard was without a leader.
    pub longest_stall_seconds: Option<f64>,
}

/// The runs with a record, the latest first, except the run of the fleet's own job, which the page
/// draws live.
pub fn list(folder: &Path, own: Option<&Path>) -> Vec<Run> {
    let of = |entry: fs::DirEntry| {
        let name = entry.file_name().into_string().ok().filter(|n| is_name(n))?;
        if own.is_some_and(|own| entry.path() == own) {
            return None;
        }
        let written = fs::metadata(entry.path().join(METRICS_FILE)).ok()?.modified().ok()?;
        Some(Run { name, at: millis(written), row: None })
    };
    let mut runs: Vec<Run> = fs::read_dir(folder).into_iter().flatten().flatten().filter_map(of).collect();
    runs.sort_by(|a, b| (b.at, &b.name).cmp(&(a.at, &a.name)));
    runs.truncate(MAX_RUNS);
    runs.iter_mut().for_each(|run| run.row = row(&folder.join(&run.name)));
    runs
}

/// One run.
///
/// # Errors
///
/// Why it cannot be shown, for people.
pub fn one(folder: &Path, name: &str) -> Result<Recorded, String> {
    match is_name(name) {
        true => Recorded::read(&folder.join(name)).map_err(|e| format!("{name}: {e}")),
        false => Err("that is no run's name".into()),
    }
}

/// Whether it names a folder directly below, and not a hidden one.
fn is_name(name: &str) -> bool {
    !name.is_empty() && !name.starts_with('.') && !name.contains(['/', '\0'])
}

/// The settings and results of the run in this folder, from the ends of its record.
fn row(dir: &Path) -> Option<Row> {
    let events = read_ends(dir.join(METRICS_FILE), LAST_BYTES).ok()?;
    let end = RecordedEnd::of(&events);
    let record = RunRecord::from_events(events)?;
    // Without its middle, a record gives no totals of its own.
    let summary = end.summary.clone().unwrap_or_default();
    let state = end.state(dir, &record, &summary, total_steps_of(dir, &record.run));
    let measured = |number: f64| Some(number).filter(|n| *n > 0.0);
    let run = &record.run;
    Some(Row {
        state: state.name(),
        reason: state.reason().map(str::to_string),
        mode: match &summary.switched_to {
            Some(last) => format!("{} → {last}", run.mode),
            None => run.mode.clone(),
        },
        what: run.what(),
        workers: run.workers,
        batch: run.batch,
        epochs: run.epochs,
        optimizer: run.optimizer.clone(),
        lr: run.lr,
        seed: run.seed,
        seconds: measured(summary.seconds),
        samples_per_s: measured(summary.samples_per_s),
        loss: summary.final_loss.or_else(|| record.final_eval().map(|e| e.loss)),
        accuracy: summary.final_accuracy.or_else(|| record.final_eval()?.accuracy),
        servers_lost: summary.servers_lost,
        longest_stall_seconds: summary.longest_stall_seconds,
    })
}

fn millis(at: SystemTime) -> u64 {
    at.duration_since(UNIX_EPOCH).map_or(0, |d| d.as_millis() as u64)
}

#[cfg(test)]
#[path = "runs_tests.rs"]
mod tests;
