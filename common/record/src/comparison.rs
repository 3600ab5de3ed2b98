//! Several runs of one job side by side: the data of `compare.json` and of a comparison's table and
//! page.
//!
//! ```text
//!  RunRecord of each run ──▶ Comparison ──▶ groups (seeds combined) ──▶ figures: mean, deviation, range
//!                                                                 └──▶ verdict: sentences that follow from RULES
//! ```
//!
//! A [`Cell`] is one run. A [`Group`] holds the runs that differ only in the seed. This module only
//! computes from records; it measures and draws nothing.

mod figures;
mod verdict;

pub use figures::{Figures, Spread};
pub use verdict::{RULES, Verdict};

use crate::{RecordError, RunRecord, Summary};
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::Path;

/// One run of a comparison.
#[derive(Clone, Debug, PartialEq)]
pub struct Cell {
    /// The initial mode: `bsp`, `ssp:4`, `asp`.
    pub mode: String,
    /// Workers.
    pub workers: u32,
    /// The name of the job's changes besides mode, workers and seed; `job` without changes.
    pub algorithm: String,
    /// The seed of the weights and of the sample order.
    pub seed: u64,
    /// The run's folder, below the comparison's.
    pub dir: String,
    /// Its record.
    pub record: RunRecord,
}

/// A combination that was skipped.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct LeftOut {
    /// Its mode.
    pub mode: String,
    /// Its workers.
    pub workers: u32,
    /// Its algorithm.
    pub algorithm: String,
    /// The reason, for people.
    pub reason: String,
}

/// The conditions of all runs of a comparison, besides their jobs.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Conditions {
    /// Simulated: no processes, and all times are simulated.
    pub simulated: bool,
    /// Slow workers, with the factor on their step time.
    pub slow: BTreeMap<u32, f64>,
    /// Steps of all workers that took longer, as `P:Fx`: a share P of them took F times as long.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub straggle: Option<String>,
    /// Delay added to each direction between a worker and a server, in milliseconds.
    pub delay_ms: f64,
    /// The bandwidth limit of each direction between a worker and a server, in megabits a second;
    /// `None`: no limit.
    pub bandwidth_mbit: Option<f64>,
    /// Runs at a time.
    pub parallel: u32,
    /// Cores of the machine.
    pub cores: u32,
    /// Notes for the reader.
    pub notes: Vec<String>,
}

/// Runs of one job.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Comparison {
    /// The job's name.
    pub job: String,
    /// The runs, in the order of the matrix.
    pub cells: Vec<Cell>,
    /// The skipped combinations.
    pub left_out: Vec<LeftOut>,
    /// The conditions of the runs.
    pub conditions: Conditions,
}

/// Runs that differ only in the seed.
#[derive(Clone, Debug)]
pub struct Group<'a> {
    /// The group's distinguishing name: its mode, and workers and algorithm if there are several.
    pub label: String,
    /// The mode of all its runs.
    pub mode: &'a str,
    /// The workers of all its runs.
    pub workers: u32,
    /// The algorithm of all its runs.
    pub algorithm: &'a str,
    /// Its runs, one for each seed.
    pub cells: Vec<&'a Cell>,
    /// Their summaries, in the same order.
    pub summaries: Vec<Summary>,
}

impl Cell {
    /// Whether the run is valid evidence: it ended normally, with a finite loss.
    pub fn counts(&self) -> bool {
        self.record.diverged.is_none() && self.record.summarize().final_loss.is_none_or(f64::is_finite)
    }

    /// Its summary as one line of JSON, with the identity of the run: `algorithm`, `seed`, `dir`,
    /// `ended`.
    pub fn to_json(&self) -> Result<String, RecordError> {
        #[derive(Serialize)]
        struct Line<'a> {
            #[serde(flatten)]
            summary: Summary,
            algorithm: &'a str,
            seed: u64,
            dir: &'a str,
            ended: &'static str,
        }
        let summary = self.record.summarize();
        let Self { algorithm, seed, dir, .. } = self;
        let line = Line { summary, algorithm, seed: *seed, dir, ended: self.ended() };
        serde_json::to_string(&line).map_err(RecordError::Unwritable)
    }

    fn ended(&self) -> &'static str {
        if self.counts() { "done" } else { "diverged" }
    }
}

impl Group<'_> {
    /// Whether all of its runs count.
    pub fn whole(&self) -> bool {
        self.cells.iter().all(|c| c.counts())
    }

    /// The number of diverged runs.
    pub fn diverged(&self) -> usize {
        self.cells.iter().filter(|c| !c.counts()).count()
    }

    /// The runs behind its figures and curves: those that count, or all if none does.
    pub fn shown(&self) -> Vec<&RunRecord> {
        let counting: Vec<_> = self.cells.iter().filter(|c| c.counts()).map(|c| &c.record).collect();
        if counting.is_empty() { self.cells.iter().map(|c| &c.record).collect() } else { counting }
    }

    /// Its figures, over the runs that count.
    pub fn figures(&self) -> Figures {
        Figures::of(self)
    }
}

impl Comparison {
    /// The runs grouped by mode, workers and algorithm, in the order of first occurrence.
    pub fn groups(&self) -> Vec<Group<'_>> {
        let several = |differ: &dyn Fn(&Cell, &Cell) -> bool| {
            self.cells.first().is_some_and(|first| self.cells.iter().any(|c| differ(first, c)))
        };
        let workers = several(&|a, b| a.workers != b.workers);
        let algorithms = several(&|a, b| a.algorithm != b.algorithm);
        let mut groups: Vec<Group<'_>> = Vec::new();
        for cell in &self.cells {
            let same = |g: &&mut Group<'_>| {
                (g.mode, g.workers, g.algorithm)
                    == (cell.mode.as_str(), cell.workers, cell.algorithm.as_str())
            };
            if let Some(group) = groups.iter_mut().find(same) {
                group.cells.push(cell);
                group.summaries.push(cell.record.summarize());
                continue;
            }
            let mut label = cell.mode.clone();
            if algorithms {
                label += &format!(" {}", cell.algorithm);
            }
            if workers {
                label += &format!(" ×{}", cell.workers);
            }
            groups.push(Group {
                label,
                mode: &cell.mode,
                workers: cell.workers,
                algorithm: &cell.algorithm,
                cells: vec![cell],
                summaries: vec![cell.record.summarize()],
            });
        }
        groups
    }

    /// The conclusions from [`RULES`].
    pub fn verdict(&self) -> Verdict {
        Verdict::of(&self.groups())
    }

    /// `compare.json` (docs/metrics.md), one object in one line.
    pub fn to_json(&self) -> Result<String, RecordError> {
        let groups = self.groups();
        let verdict = Verdict::of(&groups);
        let name = |i: usize| groups.get(i).map(|g| g.label.clone());
        let json = Json {
            job: &self.job,
            conditions: &self.conditions,
            cells: self.cells.iter().map(JsonCell::of).collect(),
            groups: groups.iter().map(JsonGroup::of).collect(),
            left_out: &self.left_out,
            recommended: verdict.recommended.and_then(name),
            verdict: verdict.sentences,
        };
        serde_json::to_string(&json).map_err(RecordError::Unwritable)
    }

    /// Writes [`Self::to_json`] to a file.
    pub fn write_json(&self, path: impl AsRef<Path>) -> Result<(), RecordError> {
        let path = path.as_ref();
        std::fs::write(path, self.to_json()? + "\n").map_err(RecordError::io(path))
    }
}

#[derive(Serialize)]
struct Json<'a> {
    job: &'a str,
    conditions: &'a Conditions,
    cells: Vec<JsonCell<'a>>,
    groups: Vec<JsonGroup<'a>>,
    left_out: &'a [LeftOut],
    recommended: Option<String>,
    verdict: Vec<String>,
}

#[derive(Serialize)]
struct JsonCell<'a> {
    mode: &'a str,
    workers: u32,
    algorithm: &'a str,
    seed: u64,
    dir: &'a str,
    ended: &'static str,
    diverged: Option<&'a str>,
    summary: Summary,
}

impl<'a> JsonCell<'a> {
    fn of(cell: &'a Cell) -> Self {
        Self {
            mode: &cell.mode,
            workers: cell.workers,
            algorithm: &cell.algorithm,
            seed: cell.seed,
            dir: &cell.dir,
            ended: cell.ended(),
            diverged: cell.record.diverged.as_ref().map(|d| d.reason.as_str()),
            summary: cell.record.summarize(),
        }
    }
}

#[derive(Serialize)]
struct JsonGroup<'a> {
    label: String,
    mode: &'a str,
    workers: u32,
    algorithm: &'a str,
    runs: usize,
    diverged: usize,
    figures: Figures,
}

impl<'a> JsonGroup<'a> {
    fn of(group: &Group<'a>) -> Self {
        Self {
            label: group.label.clone(),
            mode: group.mode,
            workers: group.workers,
            algorithm: group.algorithm,
            runs: group.cells.len(),
            diverged: group.diverged(),
            figures: group.figures(),
        }
    }
}
