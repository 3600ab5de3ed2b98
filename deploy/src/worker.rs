//! `paraft worker`.

use paraft_fleet::{
    failure::{self, Failure},
    targets::FleetName,
};
use paraft_tls::access::As;
use paraft_worker::cli::{self, WorkerArgs};

/// Runs a worker, which knows servers by their addresses alone; returns the exit code.
pub fn run(args: &WorkerArgs) -> i32 {
    let servers = |fleet: &str| Ok::<_, Failure>(FleetName::read(fleet)?.servers_for(As::Worker)?.join(","));
    match args.fleet.as_deref().map(servers).transpose() {
        Ok(fleet) => cli::train_built_in(&WorkerArgs { fleet, ..args.clone() }),
        Err(e) => failure::report(Err(e)),
    }
}
