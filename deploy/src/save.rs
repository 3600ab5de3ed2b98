//! `paraft checkpoint save`: an immediate checkpoint of a running job.
//!
//! The leader of shard 0 selects a worker, which writes it after its next step; the worker reports the
//! complete checkpoint to the control group.

use clap::Args;
use paraft_fleet::{ask, failure::Failure, orders, out, targets::FleetArg};
use paraft_proto::CheckpointInfo;
use paraft_worker::exit;
use std::{
    thread,
    time::{Duration, Instant},
};

#[derive(Args)]
pub struct SaveArgs {
    /// The job's name, as `paraft status` shows it.
    pub job: String,
    #[command(flatten)]
    pub fleet: FleetArg,
    /// Wait at most this many seconds until it is on the disk.
    #[arg(long, default_value_t = 60)]
    pub wait: u64,
}

const RETRY_DELAY: Duration = Duration::from_millis(100);
const REPLY_TIMEOUT: Duration = Duration::from_secs(3);

pub fn run(args: &SaveArgs) -> Result<i32, Failure> {
    let servers = args.fleet.to_change()?.servers()?;
    let deadline = Instant::now() + Duration::from_secs(args.wait);
    let began = Instant::now();
    let before = loop {
        match known(&servers, &args.job) {
            // The control group learns of a job a moment after its workers have started it.
            Err(_) if began.elapsed() < REPLY_TIMEOUT && Instant::now() < deadline => {
                thread::sleep(RETRY_DELAY)
            }
            known => break known?,
        }
    };
    let left = deadline.saturating_duration_since(Instant::now());
    let worker = orders::block_on(orders::save(&servers, &args.job, left))?;
    let same = |a: &CheckpointInfo, b: &CheckpointInfo| {
        (&a.path, a.step, a.written_ms) == (&b.path, b.step, b.written_ms)
    };
    let is_new = |c: &CheckpointInfo| c.worker == Some(worker) && !before.iter().any(|b| same(b, c));
    loop {
        // The control group may be in an election.
        if let Some(new) = known(&servers, &args.job).ok().and_then(|all| all.into_iter().find(is_new)) {
            out!("step {}  {}", new.step, new.path);
            return Ok(exit::OK);
        }
        if Instant::now() > deadline {
            let what =
                format!("w{worker} was told to write a checkpoint, and none is known after {} s", args.wait);
            return Err(Failure::new(exit::UNAVAILABLE, what)
                .help("its log says why; where its shard's leader has died since, ask again"));
        }
        thread::sleep(RETRY_DELAY);
    }
}

/// The fleet's known checkpoints of the job.
fn known(servers: &[String], job: &str) -> Result<Vec<CheckpointInfo>, Failure> {
    let jobs = ask::jobs(servers)?;
    let names: Vec<_> = jobs.iter().filter(|j| !j.name.is_empty()).map(|j| j.name.as_str()).collect();
    let why = || format!("this fleet has no job `{job}` (it has: {})", names.join(", "));
    let found = jobs.iter().rfind(|j| j.name == job);
    Ok(found.ok_or_else(|| Failure::new(exit::CONFIG, why()))?.checkpoints.clone())
}
