//! `paraft track` for a sweep's folder: sends to MLflow what was not sent during the sweep.

use super::{
    args::Kind,
    log::{LOG_FILE, LogContent, TrialEnd, trial_dir},
    search::{Next, Search},
    space::Metric,
};
use clap::ValueEnum;
use paraft_fleet::{
    failure::Failure,
    track::{self, Best, mlflow::Status},
};
use paraft_record::METRICS_FILE;
use paraft_worker::{Job, exit};
use std::path::{Path, PathBuf};

/// The best trial for trackers; `None` without a value.
pub(super) fn best(
    metric: Metric,
    ended: &[TrialEnd],
    which: (usize, usize),
    set: Vec<String>,
) -> Option<Best> {
    let ended = ended.iter().rfind(|e| (e.trial, e.rung) == which)?;
    let key = match metric {
        Metric::Accuracy => "eval/accuracy",
        Metric::Loss => "eval/loss",
        Metric::Auc => "eval/auc",
    };
    Some(Best { key, value: ended.value?, wall: ended.ended_ms as f64 / 1e3, set })
}

/// The sweep of this folder, if it belongs to a sweep or to one of its trials.
pub fn of(dir: &Path) -> Option<PathBuf> {
    // The path may be `.`, or a link.
    let dir = dir.canonicalize().ok()?;
    let of_trial = dir.parent().and_then(Path::parent).filter(|_| dir.join(METRICS_FILE).exists());
    [Some(&*dir), of_trial].into_iter().flatten().find(|d| d.join(LOG_FILE).is_file()).map(Path::to_path_buf)
}

/// Sends the sweep in `dir` with all its trials, to `to` or to the server of its job; returns its run
/// there and the number of nested runs. Existing data stays.
pub fn send(dir: &Path, to: Option<&str>, experiment: Option<&str>) -> Result<(String, usize), Failure> {
    let path = dir.join(LOG_FILE);
    let said = LogContent::read(&path)?;
    let found = SweepFiles::of(&said).ok_or_else(|| {
        Failure::new(exit::DATA, format!("{}: it does not say which sweep it is of", path.display()))
            .help("give the folder of a sweep of `paraft sweep`")
    })?;
    let mut job = Job::parse(said.sweep["job"].as_str().unwrap_or_default(), &path, &[])?;
    track::set(&mut job, dir, to, experiment)?;
    let (id, began_ms) = said.id(dir);
    // A trial that was killed before its start has no record.
    let trials: Vec<_> =
        found.trials.iter().map(|d| dir.join(d)).filter(|d| d.join(METRICS_FILE).exists()).collect();
    let began = began_ms as f64 / 1e3;
    let last = said.ended.iter().map(|e| e.ended_ms).max().unwrap_or(0).max(began_ms) as f64 / 1e3;
    let sweep = track::Sweep::new(&job, dir, &id, began)
        .ok_or_else(|| Failure::new(exit::USAGE, "no MLflow server is named"))?;
    let run = sweep.send(&job, &trials, found.status(), last, found.best.as_ref())?;
    Ok((run, trials.len()))
}

/// The runs of a log.
struct SweepFiles {
    /// Folders of trials, below the sweep's.
    trials: Vec<String>,
    /// Set if the sweep is done.
    best: Option<Best>,
}

impl SweepFiles {
    fn of(said: &LogContent) -> Option<Self> {
        let rungs: Vec<u64> = said.sweep["epochs"].as_array()?.iter().filter_map(|e| e.as_u64()).collect();
        let points = said.sweep["points"].as_array()?.len();
        let metric = [Metric::Accuracy, Metric::Loss, Metric::Auc]
            .into_iter()
            .find(|m| said.sweep["metric"] == m.name())?;
        let rule = Kind::from_str(said.sweep["search"].as_str()?, false).ok()?.rule();
        let mut search = Search::new(rule, points, rungs.len(), said.sweep["eta"].as_u64()? as usize);
        said.tell(&mut search, |e| e.value.map(|v| metric.score(v)));
        let mut trials: Vec<String> = Vec::new();
        for (trial, rung, _) in &said.begun {
            let dir = trial_dir(*trial, *rungs.get(*rung)?);
            // A retried trial has started twice.
            if !trials.contains(&dir) {
                trials.push(dir);
            }
        }
        let best = search.best().and_then(|(trial, rung, _)| {
            let set = said.begun.iter().rfind(|b| b.0 == trial).map(|b| b.2.clone())?;
            best(metric, &said.ended, (trial, rung), set)
        });
        let done = search.next() == Next::Done;
        Some(Self { trials, best: best.filter(|_| done) })
    }

    /// The status at the sweep's end.
    fn status(&self) -> Status {
        if self.best.is_some() { Status::Finished } else { Status::Failed }
    }
}

#[cfg(test)]
#[path = "track_later_tests.rs"]
mod tests;
