//! Recorded runs in a folder, for comparison with the fleet's jobs.

use paraft_record::{METRICS_FILE, Point, RecordError, Value, follow};
use serde::Serialize;
use std::{
    collections::BTreeMap,
    fs,
    path::Path,
    time::{SystemTime, UNIX_EPOCH},
};

/// The maximal number of runs: the latest ones.
const MAX_RUNS: usize = 100;
/// A longer record is not read, to spare a training on this host.
const MAX_RECORD_BYTES: u64 = 64 << 20;

/// A run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Run {
    /// Its folder's name.
    pub name: String,
    /// Unix milliseconds of the record's last change.
    pub at: u64,
}

/// The curves of a record for the live page. Times are Unix milliseconds.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Curves {
    /// The oldest first.
    pub points: Vec<TrainingPoint>,
    /// The oldest first.
    pub evaluations: Vec<EvaluationPoint>,
}

/// A training window over all workers.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct TrainingPoint {
    /// The end of the window.
    pub at: u64,
    /// Mean training loss.
    pub loss: Option<f64>,
    /// Samples per second.
    pub samples: Option<f64>,
}

/// An evaluation.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct EvaluationPoint {
    /// The time.
    pub at: u64,
    /// Held-out loss.
    pub loss: Option<f64>,
    /// Share of held-out samples classified correctly.
    pub accuracy: Option<f64>,
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
        Some(Run { name, at: millis(written) })
    };
    let mut runs: Vec<Run> = fs::read_dir(folder).into_iter().flatten().flatten().filter_map(of).collect();
    runs.sort_by(|a, b| (b.at, &b.name).cmp(&(a.at, &a.name)));
    runs.truncate(MAX_RUNS);
    runs
}

/// The curves of one run.
///
/// # Errors
///
/// Why it has none, for people.
pub fn curves(folder: &Path, name: &str) -> Result<Curves, String> {
    if !is_name(name) {
        return Err("that is no run's name".into());
    }
    let dir = folder.join(name);
    let record = dir.join(METRICS_FILE);
    let bytes = fs::metadata(&record).map_err(|e| format!("{name}: {e}"))?.len();
    if bytes > MAX_RECORD_BYTES {
        return Err(format!(
            "the record of {name} has {bytes} bytes, more than a server reads while it serves"
        ));
    }
    let points = follow::points(&dir).map_err(|e: RecordError| format!("{name}: {e}"))?;
    Ok(of(&points))
}

/// Whether it names a folder directly below, and not a hidden one.
fn is_name(name: &str) -> bool {
    !name.is_empty() && !name.starts_with('.') && !name.contains(['/', '\0'])
}

/// Points of the same time are one point.
fn of(points: &[Point]) -> Curves {
    let (mut trained, mut scored) = (BTreeMap::new(), BTreeMap::new());
    for Point { tag, value, wall, .. } in points {
        let Value::Number(value) = value else { continue };
        let (at, value) = ((wall * 1e3) as u64, Some(*value).filter(|v| v.is_finite()));
        let t = || TrainingPoint { at, ..TrainingPoint::default() };
        let s = || EvaluationPoint { at, ..EvaluationPoint::default() };
        match &**tag {
            "train/loss" => trained.entry(at).or_insert_with(t).loss = value,
            "perf/samples_per_s" => trained.entry(at).or_insert_with(t).samples = value,
            "eval/loss" => scored.entry(at).or_insert_with(s).loss = value,
            "eval/accuracy" => scored.entry(at).or_insert_with(s).accuracy = value,
            _ => {}
        }
    }
    Curves { points: trained.into_values().collect(), evaluations: scored.into_values().collect() }
}

fn millis(at: SystemTime) -> u64 {
    at.duration_since(UNIX_EPOCH).map_or(0, |d| d.as_millis() as u64)
}

#[cfg(test)]
#[path = "runs_tests.rs"]
mod tests;
