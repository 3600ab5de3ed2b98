//! The runs of a comparison: modes × algorithms × workers × seeds, as jobs.
//!
//! An algorithm is a name with changes to the job. The name of an `algorithm.kind` or a `train.encoding`
//! implies its change. Combinations that the job refuses are skipped, with the job's error.
//!
//! Every run trains on the samples of the unchanged job, for any number of workers. Its steps are that
//! budget divided by the samples in a step of all workers, rounded down, so runs differ by less than
//! one such step.

use paraft_common::{Encoding, ModeChoice, algorithm::AlgorithmConfig};
use paraft_fleet::failure::Failure;
use paraft_record::LeftOut;
use paraft_worker::{
    Job, JobError, cli, exit,
    job::{Exchange, SamplerKind},
    worker::Plan,
};
use std::{collections::BTreeSet, str::FromStr};

/// The name of the job's own settings, without changes.
pub const UNCHANGED: &str = "job";

/// Keys that belong to the matrix or to the budget.
const RESERVED_KEYS: [&str; 5] = ["train.mode", "train.workers", "seed", "train.epochs", "train.max_steps"];

/// The axes.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Axes {
    pub modes: Vec<ModeChoice>,
    /// Empty: that of the job.
    pub workers: Vec<u32>,
    /// Empty: that of the job.
    pub seeds: Vec<u64>,
    pub algorithms: Vec<Algorithm>,
}

/// A named set of changes to a job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Algorithm {
    pub name: String,
    kind: Kind,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Kind {
    /// No change.
    Unchanged,
    /// `algorithm.kind`
    LateGradients,
    /// `train.encoding`
    Encoding,
    /// `KEY=VALUE`
    Own(Vec<String>),
}

/// A planned run.
#[derive(Clone, Debug)]
pub struct Planned {
    pub mode: ModeChoice,
    pub workers: u32,
    pub algorithm: String,
    pub seed: u64,
    /// Its folder's name.
    pub dir: String,
    pub job: Job,
}

/// `--seeds`: how many, or which.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Seeds(pub Vec<u64>);

impl FromStr for Seeds {
    type Err = String;

    /// Reads `3` (1, 2 and 3) or `4,7,9`.
    fn from_str(text: &str) -> Result<Self, String> {
        let bad = || format!("`{text}` is neither how many seeds (3: 1, 2 and 3) nor which (4,7,9)");
        let given: Vec<u64> = text
            .split(',')
            .filter(|t| !t.is_empty())
            .map(|t| t.trim().parse().map_err(|_| bad()))
            .collect::<Result<_, _>>()?;
        let seeds: Vec<u64> = match given.as_slice() {
            [n] if !text.contains(',') => (1..=*n.min(&1001)).collect(),
            several => several.to_vec(),
        };
        match seeds.len() {
            0 => Err(bad()),
            1..=1000 => Ok(Self(seeds)),
            _ => Err("1000 seeds at most".into()),
        }
    }
}

impl Algorithm {
    /// The unchanged job.
    pub fn unchanged() -> Self {
        Self { name: UNCHANGED.into(), kind: Kind::Unchanged }
    }

    /// The algorithm that the name implies.
    pub fn named(name: &str) -> Result<Self, Failure> {
        let text = format!("kind = {}", toml::Value::from(name));
        let kind = match toml::from_str::<AlgorithmConfig>(&text) {
            Ok(_) => Kind::LateGradients,
            Err(_) if name.parse::<Encoding>().is_ok() => Kind::Encoding,
            Err(_) if name == UNCHANGED => Kind::Unchanged,
            Err(e) => {
                return Err(Failure::new(
                    exit::USAGE,
                    format!(
                        "--algorithms {name}: {} (as algorithm.kind; nor is it a train.encoding)",
                        e.message()
                    ),
                )
                .help("for changes of your own: --algorithm 'NAME: KEY=VALUE, KEY=VALUE'"));
            }
        };
        Ok(Self { name: name.into(), kind })
    }

    /// `NAME: KEY=VALUE, KEY=VALUE`
    pub fn own(text: &str) -> Result<Self, Failure> {
        let bad = |why: &str| {
            Failure::new(exit::USAGE, format!("--algorithm '{text}': {why}"))
                .help("for example --algorithm 'weak: algorithm.kind=dc-asgd-c, algorithm.lambda=0.1'")
        };
        let (name, rest) = text.split_once(':').ok_or_else(|| bad("there is no `:` after its name"))?;
        let name = name.trim();
        if name.is_empty() || name.len() > 60 || name.chars().any(char::is_control) {
            return Err(bad("its name must have 1 to 60 characters"));
        }
        let set: Vec<String> =
            split(rest).into_iter().map(|s| s.trim().to_string()).filter(|s| !s.is_empty()).collect();
        if set.is_empty() {
            return Err(bad("it changes nothing"));
        }
        for s in &set {
            let Some((key, _)) = s.split_once('=') else {
                return Err(bad(&format!("`{s}` is not KEY=VALUE")));
            };
            if RESERVED_KEYS.contains(&key.trim()) {
                return Err(bad(&format!(
                    "{} is the comparison's own: modes, workers and seeds have flags, and all runs have one budget",
                    key.trim()
                )));
            }
        }
        Ok(Self { name: name.into(), kind: Kind::Own(set) })
    }

    /// Its changes to this job.
    fn set(&self, job: &Job) -> Vec<String> {
        match &self.kind {
            // If the job already has this kind, its options stay.
            Kind::LateGradients if job.algorithm.kind() == self.name => Vec::new(),
            Kind::Unchanged => Vec::new(),
            Kind::LateGradients => {
                vec![format!("algorithm={{ kind = {} }}", toml::Value::from(self.name.as_str()))]
            }
            Kind::Encoding => vec![format!("train.encoding={}", toml::Value::from(self.name.as_str()))],
            Kind::Own(set) => set.clone(),
        }
    }
}

/// Splits at commas outside of quotes and brackets.
fn split(text: &str) -> Vec<String> {
    let (mut parts, mut depth, mut quote) = (vec![String::new()], 0_i32, None);
    for c in text.chars() {
        match (c, quote) {
            (c, Some(q)) if c == q => quote = None,
            ('"' | '\'', None) => quote = Some(c),
            ('[' | '{', None) => depth += 1,
            (']' | '}', None) => depth -= 1,
            _ => {}
        }
        if c == ',' && depth == 0 && quote.is_none() {
            parts.push(String::new());
        } else if let Some(last) = parts.last_mut() {
            last.push(c);
        }
    }
    parts
}

/// The runs, the first seeds of all groups first, and the skipped combinations. `load` returns the job
/// under these assignments; `fits` returns why this comparison cannot run a job.
pub fn expand(
    axes: &Axes,
    load: &dyn Fn(&[String]) -> Result<Job, JobError>,
    fits: &dyn Fn(&Job) -> Result<(), String>,
) -> Result<(Vec<Planned>, Vec<LeftOut>), Failure> {
    let base = load(&[])?;
    twice("--modes", axes.modes.iter().map(ModeChoice::to_string))?;
    twice("--workers", axes.workers.iter().map(u32::to_string))?;
    twice("--seeds", axes.seeds.iter().map(u64::to_string))?;
    twice("--algorithms", axes.algorithms.iter().map(|a| a.name.clone()))?;
    let own = |given: &[u32]| if given.is_empty() { vec![base.train.workers] } else { given.to_vec() };
    let seeds = if axes.seeds.is_empty() { vec![base.seed] } else { axes.seeds.clone() };
    let mut budget = Budget { base: &base, train: None };
    let (mut planned, mut left_out) = (Vec::new(), Vec::new());
    for mode in &axes.modes {
        for algorithm in &axes.algorithms {
            for workers in own(&axes.workers) {
                let mut set = vec![format!("train.mode={mode}"), format!("train.workers={workers}")];
                set.extend(algorithm.set(&base));
                let made = load(&set).map_err(|e| (e.unknown_key, e.message)).and_then(|mut job| {
                    budget.give(&mut job).and_then(|()| fits(&job)).map_err(|why| (false, why))?;
                    Ok(job)
                });
                let job = match made {
                    Ok(job) => job,
                    // This is an error in every job.
                    Err((true, why)) => {
                        return Err(Failure::new(
                            exit::CONFIG,
                            format!("algorithm {}: {why}", algorithm.name),
                        ));
                    }
                    Err((false, reason)) => {
                        let (mode, algorithm) = (mode.to_string(), algorithm.name.clone());
                        left_out.push(LeftOut { mode, workers, algorithm, reason });
                        continue;
                    }
                };
                for seed in &seeds {
                    let job = Job { seed: *seed, ..job.clone() };
                    let dir = folder(&base, *mode, &algorithm.name, workers, *seed);
                    let algorithm = algorithm.name.clone();
                    planned.push(Planned { mode: *mode, workers, algorithm, seed: *seed, dir, job });
                }
            }
        }
    }
    twice("two runs have the same folder:", planned.iter().map(|p| p.dir.clone()))?;
    if planned.is_empty() {
        let why: BTreeSet<&str> = left_out.iter().map(|l| l.reason.as_str()).collect();
        let why = why.into_iter().collect::<Vec<_>>().join("; ");
        return Err(Failure::new(exit::CONFIG, format!("nothing is left to compare: {why}")));
    }
    Ok((planned, left_out))
}

fn twice(what: &str, names: impl Iterator<Item = String>) -> Result<(), Failure> {
    let mut seen = BTreeSet::new();
    for name in names {
        if seen.contains(&name) {
            return Err(Failure::new(exit::USAGE, format!("{what} {name} twice")));
        }
        seen.insert(name);
    }
    Ok(())
}

/// The folder's name: the mode and the differences from the job file. It stays the same when a
/// comparison grows.
fn folder(base: &Job, mode: ModeChoice, algorithm: &str, workers: u32, seed: u64) -> String {
    let mut name = mode.to_string();
    if algorithm != UNCHANGED {
        name += &format!("_{algorithm}");
    }
    if workers != base.train.workers {
        name += &format!("_w{workers}");
    }
    if seed != base.seed {
        name += &format!("_s{seed}");
    }
    name.chars().map(|c| if c.is_ascii_alphanumeric() || "._-".contains(c) { c } else { '-' }).collect()
}

/// The samples for every run.
struct Budget<'a> {
    base: &'a Job,
    /// The training samples, loaded on demand.
    /// Training samples, once counted.
    train: Option<usize>,
}

impl Budget<'_> {
    /// Gives a job of another size as many steps as the samples allow.
    fn give(&mut self, job: &mut Job) -> Result<(), String> {
        let size = |j: &Job| (j.shares(), j.train.batch, j.train.drop_last);
        // The leased sampler hands out each epoch once, for any number of workers.
        if size(job) == size(self.base) || job.train.sampler == SamplerKind::Leased {
            return Ok(());
        }
        if job.cluster.own_program() {
            return Err(
                "its workers' own program decides how many samples there are: leave --workers out".into()
            );
        }
        if job.train.exchange == Exchange::AllReduce {
            return Err("all ranks of an all-reduce job are one worker".into());
        }
        let train = match self.train {
            Some(train) => train,
            None => *self.train.insert(cli::training_samples(self.base).map_err(|e| e.to_string())?),
        };
        let all = Plan::of(self.base, train).map_err(|e| e.to_string())?.budget(self.base, None);
        let step = job.train.batch as u64 * u64::from(job.shares());
        let steps = all / step;
        if steps == 0 {
            return Err(format!("one step of its workers is {step} samples, and the job has {all}"));
        }
        job.train.max_steps = None;
        let per_epoch = Plan::of(job, train).map_err(|e| e.to_string())?.per_epoch;
        job.train.epochs = steps.div_ceil(per_epoch);
        job.train.max_steps = (steps < job.train.epochs * per_epoch).then_some(steps);
        Ok(())
    }
}

#[cfg(test)]
#[path = "matrix_tests.rs"]
mod tests;
