//! `paraft verify`: the promises, proven on the user's own machine.
//!
//! - `ledger`: an acknowledged push is applied exactly once. Uses `cluster` (the fleet, and every fault
//!   that can be put on it), `storm` (what a fault does),
//!   `clients` (who push, and remember what was acknowledged) and `verdict` (what is said in the end).
//! - `sync`: synchronous training is training in one process.

mod clients;
mod cluster;
mod ledger;
mod storm;
mod sync;
mod verdict;

use clap::{Args, Subcommand};
use paraft_fleet::failure::Failure;

/// Which promise.
#[derive(Args)]
pub struct VerifyArgs {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand)]
enum What {
    /// Kill leaders under load; every acknowledged push must be in the final weights exactly once.
    Ledger(ledger::LedgerArgs),
    /// Train synchronously on a fleet and in one process; every bit of the weights must be the same.
    Sync(sync::SyncArgs),
}

/// Tries it; the exit code says whether it held.
pub fn run(args: &VerifyArgs) -> Result<i32, Failure> {
    match &args.what {
        What::Ledger(a) => ledger::run(a),
        What::Sync(a) => sync::run(a),
    }
}
