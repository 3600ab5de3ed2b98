//! Several runs of a job, each by `paraft train`, and their reports in one table. Settings that they share are variables of the
//! environment.

use crate::{
    report::{Report, table},
    settings::{Correct, Settings},
};
use anyhow::{Context, ensure};
use clap::Args;
use std::{
    env, fs,
    path::{Path, PathBuf},
    process::Command,
};

/// Which runs.
#[derive(Args, Clone, Debug)]
pub struct Compare {
    /// The job file.
    pub job: PathBuf,
    /// Seeds of the job, separated by commas.
    #[arg(long, value_delimiter = ',', default_value = "1")]
    pub seeds: Vec<u64>,
    /// Corrections, separated by commas.
    #[arg(long, value_enum, value_delimiter = ',', default_value = "vtrace,none")]
    pub corrections: Vec<Correct>,
    /// Ages at which actors take a version, in updates, separated by commas.
    #[arg(long, value_delimiter = ',', default_value = "50", value_parser = clap::value_parser!(u64).range(1..))]
    pub ages: Vec<u64>,
    /// The `paraft` program.
    #[arg(long, default_value = "paraft")]
    pub paraft: PathBuf,
    /// Where the runs' folders and reports go. It must not exist.
    #[arg(long, default_value = "runs/cartpole-compare")]
    pub to: PathBuf,
    /// Override a key of the job file, in all runs; may be given often.
    #[arg(long, value_name = "KEY=VALUE")]
    pub set: Vec<String>,
    /// Print the reports as a JSON list instead of a table.
    #[arg(long)]
    pub json: bool,
}

/// Runs them one after the other, and prints the reports.
///
/// # Errors
/// The folder exists, a variable of the environment is out of range, or a run fails: the text says where its log is.
pub fn run(args: &Compare) -> anyhow::Result<()> {
    Settings::of_environment().map_err(|why| anyhow::anyhow!(why))?; // which the runs inherit
    ensure!(!args.to.exists(), "{} exists: give another folder with --to", args.to.display());
    fs::create_dir_all(&args.to).with_context(|| format!("{} cannot be made", args.to.display()))?;
    let to = fs::canonicalize(&args.to)?;
    let program = env::current_exe().context("this program's own path is unknown")?;
    let mut reports = Vec::new();
    for seed in &args.seeds {
        for age in &args.ages {
            for correct in &args.corrections {
                let name = format!("seed-{seed}-age-{age}-{}", correct.name());
                eprintln!("{name} ...");
                reports.push(one(args, &program, *seed, *age, *correct, &to.join(name))?);
            }
        }
    }
    match args.json {
        true => println!("{}", serde_json::to_string_pretty(&reports)?),
        false => print!("{}", table(&reports)),
    }
    Ok(())
}

fn one(
    args: &Compare,
    program: &Path,
    seed: u64,
    age: u64,
    correct: Correct,
    folder: &Path,
) -> anyhow::Result<Report> {
    let (report, log) = (folder.with_extension("json"), folder.with_extension("log"));
    let output = fs::File::create(&log).with_context(|| format!("{} cannot be written", log.display()))?;
    let mut command = Command::new(&args.paraft);
    command.arg("train").arg(&args.job).arg("--no-dashboard").arg("--run-dir").arg(folder);
    let program = serde_json::to_string(&[program])?; // as TOML writes a list of texts
    command.args(["--set", &format!("seed={seed}"), "--set", &format!("cluster.worker_command={program}")]);
    args.set.iter().for_each(|set| _ = command.args(["--set", set]));
    command.env("CARTPOLE_REFRESH", age.to_string()).env("CARTPOLE_CORRECT", correct.name());
    command.env("CARTPOLE_REPORT", &report);
    command.stdout(output.try_clone()?).stderr(output);
    let failed = || format!("{} cannot be started; name it with --paraft", args.paraft.display());
    let status = command.status().with_context(failed)?;
    ensure!(status.success(), "a run failed ({status}): {} says why", log.display());
    let text = fs::read(&report).with_context(|| format!("{} cannot be read", report.display()))?;
    serde_json::from_slice(&text).with_context(|| format!("{} is no report", report.display()))
}
