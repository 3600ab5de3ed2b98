//! `paraft compare`: one job, several modes, one table and one report.

use crate::{failure::Failure, run_dir::RunDir, train};
use clap::Args;
use paraft_common::Mode;
use paraft_record::RunRecord;
use paraft_worker::{Job, exit};
use std::{
    path::{Path, PathBuf},
    sync::atomic::AtomicI32,
};

#[derive(Args)]
pub struct CompareArgs {
    /// The job file.
    pub job: PathBuf,
    /// Modes, comma-separated.
    #[arg(long, value_delimiter = ',', default_value = "bsp,ssp:4,asp")]
    pub modes: Vec<Mode>,
    /// Overrides a key of the job file; may be given often.
    #[arg(long, value_name = "KEY=VALUE")]
    pub set: Vec<String>,
    /// Where the runs' files go. Default: runs/NAME-N, the first N that is free.
    #[arg(long)]
    pub run_dir: Option<PathBuf>,
    /// Print one JSON object for each mode instead of a table.
    #[arg(long)]
    pub json: bool,
}

pub fn run(args: &CompareArgs) -> Result<i32, Failure> {
    let job = Job::load(&args.job, &args.set)?;
    for (i, m) in args.modes.iter().enumerate() {
        if args.modes[..i].contains(m) {
            return Err(Failure::new(exit::USAGE, format!("--modes names {m} twice")));
        }
    }
    for mode in &args.modes {
        // What goes with one mode may contradict another: said before the first of them trains.
        let set: Vec<String> = args.set.iter().cloned().chain([format!("train.mode={mode}")]).collect();
        Job::load(&args.job, &set)?;
    }
    let dir = RunDir::new(args.run_dir.as_deref(), &format!("{}-compare", job.name))?;
    compare(&job, &args.modes, &dir, args.json, &train::interrupts())
}

/// Trains the job once in each mode, one after the other: two fleets at once would share the cores and falsify
/// each other's times. Same seed, same samples in the same order, same budget.
pub fn compare(
    job: &Job,
    modes: &[Mode],
    dir: &Path,
    json: bool,
    interrupted: &AtomicI32,
) -> Result<i32, Failure> {
    let mut records: Vec<RunRecord> = Vec::new();
    for mode in modes {
        let mut job = job.clone();
        job.train.mode = *mode;
        if let Some(dir) = job.checkpoint.as_mut().and_then(|c| c.dir.as_mut()) {
            *dir = dir.join(mode.to_string().replace(':', "-")); // two modes' checkpoints are not one job's
        }
        let sub = RunDir::new(Some(&dir.join(mode.to_string().replace(':', "-"))), &job.name)?;
        records.push(train::launch(&job, &sub, None, json, interrupted)?);
    }
    let report = dir.join("report.html");
    paraft_record::write_report(&report, &records)?;
    let summaries: Vec<_> = records.iter().map(RunRecord::summarize).collect();
    let lines = summaries.iter().filter_map(|s| serde_json::to_string(s).ok()).collect::<Vec<_>>().join("\n");
    let path = dir.join("compare.jsonl");
    std::fs::write(&path, lines + "\n").map_err(|e| Failure::write(&path, e))?;
    train::show(&summaries, json, &report)?;
    Ok(exit::OK)
}
