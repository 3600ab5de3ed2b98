//! `paraft demo`: the first thing a stranger runs. Needs nothing but this binary.

use crate::page;
use clap::Args;
use paraft_common::Mode;
use paraft_fleet::{failure::Failure, launch, run_dir::RunDir};
use paraft_lab::compare;
use paraft_worker::Job;
use std::path::{Path, PathBuf};

#[derive(Args)]
pub struct DemoArgs {
    /// Where the runs' files go. Default: runs/demo-N, the first N that is free.
    #[arg(long)]
    pub run_dir: Option<PathBuf>,
    /// Print one JSON object for each mode instead of a table.
    #[arg(long)]
    pub json: bool,
    /// Overrides a key of the demo's job; may be given often.
    #[arg(long, value_name = "KEY=VALUE")]
    pub set: Vec<String>,
}

/// The demo's job, also in examples/.
const JOB: &str = include_str!("../../examples/digits.toml");

pub fn run(args: &DemoArgs) -> Result<i32, Failure> {
    let job = Job::parse(JOB, Path::new("demo.toml"), &args.set)?;
    let dir = RunDir::new(args.run_dir.as_deref(), &job.name)?;
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    eprintln!(
        "paraft {}  {cores} cores, {}  data: embedded digits (UCI, 1,797 images 8x8, CC BY 4.0)",
        env!("CARGO_PKG_VERSION"),
        job.train.device.to_string().to_uppercase()
    );
    eprintln!(
        "{} servers, {} shards x {} replicas, {} workers; first synchronous (bsp), then asynchronous (asp)",
        job.servers(),
        job.shards(),
        job.cluster.replicas,
        job.train.workers
    );
    page::of_fleets(job.servers())?;
    let load = |more: &[String]| {
        let set: Vec<String> = args.set.iter().chain(more).cloned().collect();
        Job::parse(JOB, Path::new("demo.toml"), &set)
    };
    compare::compare_modes(
        &load,
        &[Mode::Bsp.into(), Mode::Asp.into()],
        &dir,
        args.json,
        &launch::interrupts(),
    )
}
