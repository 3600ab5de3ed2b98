//! `paraft track`: a run or a sweep that has ended, sent to MLflow.

use clap::Args;
use paraft_fleet::{failure::Failure, out, run_dir::held, track};
use paraft_lab::sweep;
use paraft_worker::exit;
use std::path::{Path, PathBuf};

#[derive(Args)]
pub struct TrackArgs {
    /// The run's folder, or a sweep's: that goes with all its trials, as it does where the folder is a trial's.
    pub run_dir: PathBuf,
    /// The MLflow server, as http://host:5000. Default: track.mlflow of the run's job.
    #[arg(long, value_name = "URL")]
    pub mlflow: Option<String>,
    /// The experiment there. Default: track.experiment, or the job's name.
    #[arg(long, value_name = "NAME")]
    pub experiment: Option<String>,
}

pub fn run(args: &TrackArgs) -> Result<i32, Failure> {
    let (to, experiment) = (args.mlflow.as_deref(), args.experiment.as_deref());
    if let Some(dir) = sweep::of_sweep(&args.run_dir) {
        has_ended(&dir)?;
        let (sent, trials) = sweep::send(&dir, to, experiment)?;
        out!("run {sent}, and {trials} of its trials below it");
        return Ok(exit::OK);
    }
    has_ended(&args.run_dir)?;
    let sent = track::send(&args.run_dir, to, experiment)?;
    out!("run {sent}");
    Ok(exit::OK)
}

/// What still trains would be sent as failed.
fn has_ended(dir: &Path) -> Result<(), Failure> {
    let Some(held) = held(dir) else { return Ok(()) };
    let why = format!("{}: this is not over yet: another process trains there", held.display());
    Err(Failure::new(exit::CONFIG, why)
        .help("send it when it has ended; with [track] in the job file it is sent while it trains"))
}
