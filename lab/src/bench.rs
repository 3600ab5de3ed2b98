//! `paraft bench`: every figure is a ratio to something measured in the same run.

use clap::{Args, Subcommand};
use paraft_fleet::failure::Failure;

mod apply;
mod copies;
mod failover;
mod far;
mod figure;
mod flags;
mod gpu;
mod kernels;
mod large;
mod load;
mod meter;
mod peers;
mod plain;
mod raw;
mod resilience;
mod scratch;
mod shard;
mod table;
mod train;
mod wire;

/// Which benchmark.
#[derive(Args)]
pub struct BenchArgs {
    #[command(subcommand)]
    which: Benchmark,
}

#[derive(Subcommand)]
enum Benchmark {
    /// Training: samples/s, CPU time, accuracy and memory of a local fleet, against one process without
    /// servers and, where given, against PyTorch's ways to do the same.
    Train(train::TrainBenchArgs),
    /// Push and pull: goodput and CPU time by payload, over TCP and over the Unix socket, against raw sockets.
    Wire(wire::WireBenchArgs),
    /// Optimizers: GB/s of gradient, against what the memory allows.
    Apply(apply::ApplyBenchArgs),
    /// Rows of a sparse table: pulls and updates, against the same accesses without a table and, where given, PyTorch's;
    /// and what an image of it costs them.
    Table(table::TableBenchArgs),
    /// Pushes through admission, log and apply: goodput, pushes a second, latency of acks and bytes on the wire, by
    /// replicas and durability level.
    Shard(shard::ShardBenchArgs),
    /// Training while processes are killed: useful samples a second and accuracy, beside checkpoint-and-restart and, where
    /// given, PyTorch under torchrun.
    Resilience(resilience::ResilienceBenchArgs),
    /// Killed leaders: how long no push is acknowledged; and a snapshot: what sending it costs the pushes.
    Failover(failover::FailoverBenchArgs),
    /// On a GPU: a training step alone, beside PyTorch's where one is named; and the kernels that only move bytes, beside a copy.
    Gpu(gpu::GpuBenchArgs),
    /// On the CPU, one thread: a training step alone with each set of vector instructions, beside PyTorch's with the same where one is
    /// named.
    Kernels(kernels::KernelsBenchArgs),
    /// A model that fills the memory: loaded, trained, written as a snapshot, its only server killed; what each takes, and
    /// the peak memory of both processes.
    Large(large::LargeBenchArgs),
    /// The steps of one process; started by `kernels`.
    #[command(hide = true)]
    KernelSteps(kernels::StepsArgs),
    /// The far side of raw sockets; started by the others.
    #[command(hide = true)]
    RawPeer(far::FarArgs),
}

/// Runs the benchmark; returns the exit code.
pub fn run(args: &BenchArgs) -> Result<i32, Failure> {
    match &args.which {
        Benchmark::Train(a) => train::run(a),
        Benchmark::Wire(a) => wire::run(a),
        Benchmark::Resilience(a) => resilience::run(a),
        Benchmark::Shard(a) => shard::run(a),
        Benchmark::Table(a) => table::run(a),
        Benchmark::Failover(a) => failover::run(a),
        Benchmark::Apply(a) => apply::run(a),
        Benchmark::Large(a) => large::run(a),
        Benchmark::Gpu(a) => gpu::run(a),
        Benchmark::Kernels(a) => kernels::run(a),
        Benchmark::KernelSteps(a) => kernels::steps(a),
        Benchmark::RawPeer(a) => raw::serve(a),
    }
}
