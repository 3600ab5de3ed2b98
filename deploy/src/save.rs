//! `paraft checkpoint save`: a checkpoint of now, of a job that trains.
//!
//! The leader of shard 0 tells a worker, which writes it behind its next step; the control group hears of it when it is whole.

use crate::mode::leaders;
use clap::Args;
use paraft_fleet::{ask, failure::Failure, out, whose};
use paraft_proto::{Advice, CheckpointInfo};
use paraft_worker::exit;
use std::{
    path::PathBuf,
    thread,
    time::{Duration, Instant},
};

#[derive(Args)]
pub struct SaveArgs {
    /// The job's name, as `paraft status` shows it.
    pub job: String,
    /// A run's folder, a job file with cluster.addresses, or any server as host:port.
    #[arg(long)]
    pub of: Option<PathBuf>,
    /// Servers of the fleet as host:port, comma-separated.
    #[arg(long, env = "PARAFT_SERVERS", value_delimiter = ',')]
    pub servers: Vec<String>,
    /// Wait at most this many seconds until it is on the disk.
    #[arg(long, default_value_t = 60)]
    pub wait: u64,
}

const ANSWER: Duration = Duration::from_secs(10);
const BETWEEN: Duration = Duration::from_millis(100);
const HEARD: Duration = Duration::from_secs(3);

pub fn run(args: &SaveArgs) -> Result<i32, Failure> {
    let servers = whose::addresses(args.of.as_deref(), &args.servers)?;
    let deadline = Instant::now() + Duration::from_secs(args.wait);
    let began = Instant::now();
    let before = loop {
        match known(&servers, &args.job) {
            // The control group hears of a job a moment after its workers have begun it.
            Err(_) if began.elapsed() < HEARD && Instant::now() < deadline => thread::sleep(BETWEEN),
            known => break known?,
        }
    };
    let worker = tell(&servers, &args.job, deadline)?;
    let same = |a: &CheckpointInfo, b: &CheckpointInfo| {
        (&a.path, a.step, a.written_ms) == (&b.path, b.step, b.written_ms)
    };
    let is_new = |c: &CheckpointInfo| c.worker == Some(worker) && !before.iter().any(|b| same(b, c));
    loop {
        // The control group may have an election meanwhile.
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
        thread::sleep(BETWEEN);
    }
}

/// The checkpoints that the fleet knows of the job.
fn known(servers: &[String], job: &str) -> Result<Vec<CheckpointInfo>, Failure> {
    let jobs = ask::jobs(servers)?;
    let names: Vec<_> = jobs.iter().filter(|j| !j.name.is_empty()).map(|j| j.name.as_str()).collect();
    let why = || format!("this fleet has no job `{job}` (it has: {})", names.join(", "));
    let found = jobs.iter().rfind(|j| j.name == job);
    Ok(found.ok_or_else(|| Failure::new(exit::CONFIG, why()))?.checkpoints.clone())
}

/// Asks the leader of shard 0 until it has taken it in; gives the worker that is to write.
fn tell(servers: &[String], job: &str, deadline: Instant) -> Result<u32, Failure> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|e| Failure::new(exit::UNAVAILABLE, format!("no runtime: {e}")))?;
    loop {
        let why = match leaders(servers, job).0.get(&0) {
            None => "shard 0 has no leader".to_string(),
            Some(address) => match runtime.block_on(paraft_client::save(address, job, ANSWER)) {
                Ok(worker) => return Ok(worker),
                Err(r) if matches!(r.advice(), Advice::Fix | Advice::Stop | Advice::Lost) => {
                    return Err(Failure::new(exit::CONFIG, r.message));
                }
                Err(r) => r.message,
            },
        };
        if Instant::now() > deadline {
            return Err(Failure::new(exit::UNAVAILABLE, format!("no checkpoint of `{job}`: {why}"))
                .help("`paraft status` shows which servers answer, and who trains"));
        }
        thread::sleep(BETWEEN);
    }
}
