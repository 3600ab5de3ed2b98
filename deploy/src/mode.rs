//! `paraft mode`: the live switch between synchronous and asynchronous training.

use clap::Args;
use paraft_common::ModeChoice;
use paraft_fleet::{failure::Failure, orders, out, targets::FleetArg};
use paraft_worker::exit;
use std::time::Duration;

#[derive(Args)]
pub struct ModeArgs {
    /// The job's name, as `paraft status` shows it.
    pub job: String,
    /// The mode from now on: bsp, ssp:S, asp, or auto (a rule chooses the staleness bound).
    pub mode: ModeChoice,
    #[command(flatten)]
    pub fleet: FleetArg,
    /// Wait at most this many seconds until every shard has switched.
    #[arg(long, default_value_t = 30)]
    pub wait: u64,
}

pub fn run(args: &ModeArgs) -> Result<i32, Failure> {
    let servers = args.fleet.to_change()?.servers()?;
    let within = Duration::from_secs(args.wait);
    let now = orders::block_on(orders::switch(&servers, &args.job, args.mode, within))?;
    let by = if args.mode == ModeChoice::Auto { ", and a rule chooses from here on" } else { "" };
    out!("{}: {} -> {} (switch {}){by}", args.job, now.before, now.mode, now.number);
    out!("{} shard{} switched", now.shards, if now.shards == 1 { "" } else { "s" });
    Ok(exit::OK)
}
