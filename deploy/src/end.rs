//! `paraft stop` and `paraft delete`: what a person does with a job of a fleet, by its name.

use clap::Args;
use paraft_fleet::{ask, ended::has_end, existing, failure::Failure, out, targets::FleetArg};
use paraft_proto::JobInfo;
use paraft_worker::exit;
use std::time::{Duration, Instant};

#[derive(Args)]
pub struct StopArgs {
    /// The job's name, as `paraft jobs` shows it.
    pub job: String,
    #[command(flatten)]
    pub fleet: FleetArg,
    /// Wait at most this many seconds until its workers have finished.
    #[arg(long, default_value_t = 60)]
    pub wait: u64,
}

#[derive(Args)]
pub struct DeleteArgs {
    /// The job's name, as `paraft jobs` shows it.
    pub job: String,
    #[command(flatten)]
    pub fleet: FleetArg,
}

/// `paraft stop`: its workers finish where they are, and its weights are kept as after any end.
pub fn stop(args: &StopArgs) -> Result<i32, Failure> {
    let fleet = args.fleet.to_change()?;
    let servers = fleet.servers()?;
    let was = existing::end(&servers, &args.job, false)?;
    let deadline = Instant::now() + Duration::from_secs(args.wait);
    let own = fleet.folder();
    let mut seen = was.clone();
    while matches!(seen.as_str(), "running" | "waiting") {
        if Instant::now() > deadline {
            let why = format!("{} is told to stop, and some of its workers have not finished", args.job);
            return Err(Failure::new(exit::UNAVAILABLE, why)
                .help("it continues; `paraft status` shows who; `paraft delete` does not wait for them"));
        }
        std::thread::sleep(Duration::from_millis(50));
        match find(&servers, &args.job) {
            Ok(Some(job)) => seen = job.state,
            Ok(None) => seen = "deleted".into(),
            // The servers that a launcher has started end with its run.
            Err(_) if own.is_some_and(has_end) => seen = "stopped, and its servers with it".into(),
            Err(e) if Instant::now() > deadline => return Err(e),
            Err(_) => {}
        }
    }
    match was == seen {
        true => out!("{} was {was} already", args.job),
        false => out!("{} is {seen}", args.job),
    }
    Ok(exit::OK)
}

/// `paraft delete`: with all that the servers have of it.
pub fn delete(args: &DeleteArgs) -> Result<i32, Failure> {
    let was = existing::end(&args.fleet.to_change()?.servers()?, &args.job, true)?;
    out!("{} is deleted; it was {was}. Its files and its checkpoints stay where they are", args.job);
    Ok(exit::OK)
}

/// The latest job of this name.
pub fn find(servers: &[String], name: &str) -> Result<Option<JobInfo>, Failure> {
    let jobs = ask::jobs(servers)?;
    Ok(jobs.into_iter().filter(|j| j.name == name).max_by_key(|j| j.job))
}
