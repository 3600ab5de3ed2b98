//! `paraft mode`: the live switch between synchronous and asynchronous training.

use clap::Args;
use paraft_common::ModeChoice;
use paraft_fleet::{failure::Failure, orders, out, targets};
use paraft_worker::exit;
use std::{path::PathBuf, time::Duration};

#[derive(Args)]
pub struct ModeArgs {
    /// The job's name, as `paraft status` shows it.
    pub job: String,
    /// The mode in which it goes on: bsp, ssp:S, asp, or auto (a rule chooses the staleness bound).
    pub mode: ModeChoice,
    /// A run's folder, or a job file with cluster.addresses.
    #[arg(long)]
    pub of: Option<PathBuf>,
    /// Servers of the fleet as host:port, comma-separated.
    #[arg(long, env = "PARAFT_SERVERS", value_delimiter = ',')]
    pub servers: Vec<String>,
    /// Wait at most this many seconds until every shard has switched.
    #[arg(long, default_value_t = 30)]
    pub wait: u64,
}

pub fn run(args: &ModeArgs) -> Result<i32, Failure> {
    let servers = targets::addresses(args.of.as_deref(), &args.servers)?;
    let within = Duration::from_secs(args.wait);
    let now = orders::block_on(orders::switch(&servers, &args.job, args.mode, within))?;
    let by = if args.mode == ModeChoice::Auto { ", and a rule chooses from here on" } else { "" };
    out!("{}: {} -> {} (switch {}){by}", args.job, now.before, now.mode, now.number);
    out!("{} shard{} switched", now.shards, if now.shards == 1 { "" } else { "s" });
    Ok(exit::OK)
}
