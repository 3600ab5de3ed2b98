//! `paraft track`: a run that has ended, sent to MLflow.

use clap::Args;
use paraft_fleet::{failure::Failure, out, track};
use paraft_worker::exit;
use std::path::PathBuf;

#[derive(Args)]
pub struct TrackArgs {
    /// The run's folder.
    pub run_dir: PathBuf,
    /// The MLflow server, as http://host:5000. Default: track.mlflow of the run's job.
    #[arg(long, value_name = "URL")]
    pub mlflow: Option<String>,
    /// The experiment there. Default: track.experiment, or the job's name.
    #[arg(long, value_name = "NAME")]
    pub experiment: Option<String>,
}

pub fn run(args: &TrackArgs) -> Result<i32, Failure> {
    let sent = track::send(&args.run_dir, args.mlflow.as_deref(), args.experiment.as_deref())?;
    out!("run {sent}");
    Ok(exit::OK)
}
