//! `paraft bench`: every figure is a ratio to something measured in the same run.

use crate::failure::Failure;
use clap::{Args, Subcommand};

mod failover;
mod figure;
mod fire;
mod load;
mod log;
mod peers;
mod plain;
mod push;
mod train;

#[derive(Args)]
pub struct BenchArgs {
    #[command(subcommand)]
    which: Which,
}

#[derive(Subcommand)]
enum Which {
    /// Training: samples/s, CPU time, accuracy and memory of a local fleet, against one process without
    /// servers and, where given, against PyTorch's ways to do the same.
    Train(train::TrainBenchArgs),
    /// The two ways into the log: bytes replicated for each byte pushed, and pushes a second, of update entries and
    /// of image cuts.
    Log(log::LogBenchArgs),
    /// Pushes: goodput, latency of acks and bytes on the wire, by replicas and durability level.
    Push(push::PushBenchArgs),
    /// Training while processes are killed: useful samples a second and accuracy, beside checkpoint-and-restart and, where
    /// given, PyTorch under torchrun.
    Fire(fire::FireBenchArgs),
    /// Killed leaders: how long no push is acknowledged; and a snapshot: what sending it costs the pushes.
    Failover(failover::FailoverBenchArgs),
}

pub fn run(args: &BenchArgs) -> Result<i32, Failure> {
    match &args.which {
        Which::Train(a) => train::run(a),
        Which::Log(a) => log::run(a),
        Which::Fire(a) => fire::run(a),
        Which::Push(a) => push::run(a),
        Which::Failover(a) => failover::run(a),
    }
}
