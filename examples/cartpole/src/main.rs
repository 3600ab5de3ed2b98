//! CartPole-v1 by actors and a learner: see this example's README.md.
//!
//! `paraft train` starts this program with the flags of `paraft worker`: then it is the learner. `actor` and `compare` are its
//! own commands.

use clap::{Args, Parser, Subcommand};
use paraft_example_cartpole::{
    actor::{self, Place},
    compare::{self, Compare},
    learner,
    report::table,
    settings::{Acting, Settings},
};
use paraft_tls::{Access, access::As};
use paraft_worker::{Job, WorkerError, WorkerOptions, cli};
use std::sync::{Arc, atomic::AtomicBool};

#[derive(Parser)]
#[command(about = "CartPole-v1 by actors that read versions, and a learner")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Play with the versions of a job, and send what was played to its learner.
    Actor(Actor),
    /// Train several times, with correction and without, and print rewards by the policies' age.
    Compare(Compare),
}

#[derive(Args)]
struct Actor {
    /// Servers of the fleet, as host:port, separated by commas.
    #[arg(long, env = "PARAFT_SERVERS", value_delimiter = ',', required = true)]
    servers: Vec<String>,
    /// The job's name.
    #[arg(long, default_value = "cartpole")]
    job: String,
    /// Where the learner listens.
    #[arg(long, value_name = "HOST:PORT")]
    learner: String,
    /// Seed of actions and episodes; actors of one learner need different ones.
    #[arg(long)]
    seed: u64,
    #[command(flatten)]
    acting: Acting,
}

fn main() -> anyhow::Result<()> {
    let first = std::env::args().nth(1).unwrap_or_default();
    if !["actor", "compare", "help", "--help", "-h", ""].contains(&first.as_str()) {
        cli::main_of_loop(learn);
    }
    match Cli::parse().command {
        Command::Actor(args) => play(args),
        Command::Compare(args) => compare::run(&args),
    }
}

fn learn(job: &Job, options: &WorkerOptions) -> Result<(), WorkerError> {
    let settings = Settings::of_environment().map_err(WorkerError::Job)?;
    let report = learner::train(job, options, &settings)?;
    eprint!("{}", table(&[report])); // a worker's standard error is a file in the run's folder
    Ok(())
}

fn play(args: Actor) -> anyhow::Result<()> {
    Access::of_environment(As::Worker)?.set();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    let place = Place { servers: args.servers, job: args.job, learner: args.learner, seed: args.seed };
    let played = actor::play(&place, args.acting, runtime.handle(), &Arc::new(AtomicBool::new(false)))?;
    println!("{} fragments, {} versions", played.fragments, played.versions);
    runtime.shutdown_background();
    Ok(())
}
