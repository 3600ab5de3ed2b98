//! One run of a comparison: whether it is complete, how to run it, and its record if training diverges.

use super::matrix::Planned;
use crate::simulate;
use paraft_fleet::{
    existing::ExistingFleet,
    failure::Failure,
    faults::link::Link,
    fleet::{Extras, JOB_FILE},
    launch,
    run_dir::RunDir,
};
use paraft_record::{Cell, Event, METRICS_FILE, MetricsWriter, RunRecord, read_events};
use paraft_sim::Setup;
use paraft_worker::{Job, exit, slow::Straggle};
use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    sync::atomic::AtomicI32,
};

/// The conditions of a run besides its job, in its folder.
const CONDITIONS_FILE: &str = "conditions.json";

/// The mode of execution.
#[derive(Clone, Debug)]
pub enum How {
    /// Real processes on this machine; only workers if the servers belong to an existing fleet.
    Real {
        slow: BTreeMap<u32, f64>,
        straggle: Option<Straggle>,
        link: Option<Link>,
        on: Option<ExistingFleet>,
    },
    /// A simulation of this setup, seeded with the run's seed or with `seed`.
    Simulated { setup: Box<Setup>, seed: Option<u64> },
}

impl How {
    /// Checks that a job can run this way; the error is the reason.
    pub fn fits(&self, job: &Job) -> Result<(), String> {
        let workers = job.train.workers;
        match self {
            Self::Simulated { setup, .. } => paraft_sim::check(job, setup).map_err(|e| e.to_string()),
            Self::Real { slow, .. } => match slow.keys().find(|w| **w >= workers) {
                Some(w) => Err(format!("--slow names worker {w}; there are {workers}, from 0")),
                None => Ok(()),
            },
        }
    }

    /// Whether the servers belong to an existing fleet.
    pub fn stands(&self) -> bool {
        matches!(self, Self::Real { on: Some(_), .. })
    }

    /// The conditions that a run of an earlier comparison must share to be reused.
    fn text(&self, seed: u64) -> String {
        let mut json = match self {
            Self::Real { slow, straggle, link, .. } => serde_json::json!({
                "simulated": false,
                "slow": slow,
                "straggle": straggle,
                "delay_ms": link.map_or(0.0, |l| l.delay.as_secs_f64() * 1e3),
                "bandwidth_mbit": link.and_then(|l| l.bits_per_s).map(|b| b / 1e6),
            }),
            Self::Simulated { .. } => {
                serde_json::json!({ "simulated": true, "setup": self.setup(seed).map(|s| format!("{s:?}")) })
            }
        };
        if self.stands() {
            json["standing"] = true.into();
        }
        json.to_string()
    }

    fn setup(&self, run: u64) -> Option<Setup> {
        match self {
            Self::Simulated { setup, seed } => Some(Setup { seed: seed.unwrap_or(run), ..(**setup).clone() }),
            Self::Real { .. } => None,
        }
    }
}

/// A run with its folder.
pub struct Prepared<'a> {
    pub planned: &'a Planned,
    pub dir: PathBuf,
    /// It is complete, and is not run again.
    pub done: bool,
    job: Job,
    conditions: String,
}

impl<'a> Prepared<'a> {
    /// Checks the folder. A complete run of another job, or under other conditions, is an error.
    pub fn new(planned: &'a Planned, dir: &Path, how: &How) -> Result<Self, Failure> {
        let mut job = planned.job.clone();
        if let Some(checkpoints) = job.checkpoint.as_mut().and_then(|c| c.dir.as_mut()) {
            *checkpoints = checkpoints.join(&planned.dir); // checkpoints of different runs must not mix
        }
        if let How::Real { link: Some(_), .. } = how {
            job.cluster.transport = paraft_worker::job::TransportConfig::Tcp; // a Unix socket would bypass the proxies
        }
        let (dir, conditions) = (dir.join(&planned.dir), how.text(planned.seed));
        let mut resolved = job.clone();
        launch::absolute_paths(&mut resolved)?;
        let metrics = dir.join(METRICS_FILE);
        let done = metrics.exists() && read_events(&metrics)?.iter().any(|e| matches!(e, Event::Summary(_)));
        if done {
            // The fleet may have renamed the job.
            let then = how.stands().then(|| Job::load(&dir.join(JOB_FILE), &[]));
            if let Some(Ok(then)) = then {
                resolved.name = then.name;
            }
            for (file, now) in [(JOB_FILE, resolved.to_toml()), (CONDITIONS_FILE, conditions.clone())] {
                let path = dir.join(file);
                let then = fs::read_to_string(&path).unwrap_or_default();
                if then.trim() != now.trim() {
                    return Err(Failure::new(
                        exit::CONFIG,
                        format!("{} holds a run of another job or fleet: {file} differs", dir.display()),
                    )
                    .help("choose another --run-dir, or remove that folder"));
                }
            }
        }
        Ok(Self { planned, dir, done, job, conditions })
    }

    /// Runs it unless it is done. Divergence is a result.
    pub fn run(&self, how: &How, quiet: bool, interrupted: &AtomicI32) -> Result<(), Failure> {
        if self.done {
            return Ok(());
        }
        // An interrupted attempt is set aside.
        let dir = match self.dir.exists() {
            true => RunDir::again(&self.dir)?,
            false => RunDir::new(Some(&self.dir), &self.job.name)?,
        };
        let conditions = dir.join(CONDITIONS_FILE);
        fs::write(&conditions, &self.conditions).map_err(|e| Failure::write(&conditions, e))?;
        let ended = match how {
            How::Real { slow, straggle, link, on } => {
                let (slow, on) = (slow.clone(), on.clone());
                let extras = Extras { slow, straggle: *straggle, link: *link, on, ..Extras::default() };
                launch::launch_with(&self.job, &dir, None, quiet, interrupted, extras).map(drop)
            }
            How::Simulated { .. } => match how.setup(self.planned.seed) {
                Some(setup) => simulate::run_in(&self.job, &setup, &dir, quiet).map(drop),
                None => Ok(()),
            },
        };
        match ended {
            Err(e) if e.diverged() => self.keep(&dir, &e),
            ended => ended,
        }
    }

    /// Completes the record of a diverged run.
    fn keep(&self, dir: &Path, why: &Failure) -> Result<(), Failure> {
        let mut record = RunRecord::load(dir)?;
        let mut writer = MetricsWriter::append(dir.join(METRICS_FILE))?;
        if record.diverged.is_none() {
            // A simulation's times are simulated.
            let wall = record.train.iter().map(|t| t.wall).fold(0.0, f64::max);
            writer.write(&launch::diverged(wall, why))?;
            record = RunRecord::load(dir)?;
        }
        eprintln!("{}: {}", self.planned.dir, why.message());
        Ok(writer.write(&Event::Summary(record.summarize()))?)
    }

    /// The recorded run.
    pub fn cell(&self) -> Result<Cell, Failure> {
        Ok(Cell {
            mode: self.planned.mode.to_string(),
            workers: self.planned.workers,
            algorithm: self.planned.algorithm.clone(),
            seed: self.planned.seed,
            dir: self.planned.dir.clone(),
            record: RunRecord::load(&self.dir)?,
        })
    }
}
