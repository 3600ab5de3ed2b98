//! `paraft`, one binary: servers, workers, launcher, comparison, benchmark, help for the user.
//!
//! - [`train`], [`launch`], [`demo`]: what a user starts. [`init`]: writes a job file. [`serve`], [`worker`]: what a fleet
//!   consists of, also by hand. [`disk_faults`]: a server's own fault points.
//! - [`engine`] ([`on`]: its flags): a job, with a fleet of its own, on an engine. [`role`]: a server or worker that an engine has started.
//! - [`status`] ([`control`], [`jobs`], [`memory`]: parts of what it shows), [`drain`], [`mode`], [`mod@data`], [`checkpoint`],
//!   [`mod@replay`], [`tables`], [`pull`], [`feed`], [`mod@relay`], [`report`], [`evaluate`], [`mod@trace`], [`track`], [`doctor`]: what a user asks.
//! - [`certs`]: who is let in. [`help`]: the help of all commands. [`short`]: short forms of `--set`.
//!
//! - [`submit`], [`end`], [`jobs`], [`logs`]: the jobs of an existing fleet. [`ended`]: what is shown of a run
//!   that has ended.
//!
//! What launches and asks fleets is `paraft-fleet`; what measures, compares and proves is `paraft-lab`, whose commands are named here
//! and nothing else.

use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};
use paraft_fleet::failure::{self, Failure};
use paraft_lab::{bench, chaos, compare, simulate, sweep, verify};
use paraft_tls::{Access, access::As};
use paraft_worker::{cli::AccessArgs, exit};
use std::{io::Write, path::PathBuf};

mod certs;
mod checkpoint;
mod completions;
mod control;
mod dashboard;
mod data;
mod demo;
mod disk_faults;
mod doctor;
mod drain;
mod end;
mod ended;
mod engine;
mod evaluate;
mod feed;
mod help;
mod init;
mod jobs;
mod launch;
mod logs;
mod memory;
mod mode;
mod on;
mod page;
mod plan;
mod pull;
mod relay;
mod replay;
mod report;
mod role;
mod save;
mod serve;
mod short;
mod status;
mod submit;
mod tables;
mod top;
mod trace;
mod track;
mod train;
mod worker;

/// docs/benchmarks.md has the difference.
#[global_allocator]
static ALLOCATOR: paraft_host::allocator::Allocator = paraft_host::allocator::Allocator;

/// Training on machines that fail: model shards replicated with Raft, synchronous or asynchronous.
#[derive(Parser)]
#[command(name = "paraft", version, max_term_width = 100)]
struct Cli {
    #[command(flatten)]
    access: AccessArgs,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Ask five questions and write a job file.
    Init(init::InitArgs),
    /// Train the embedded digits on 3 servers and 2 workers, synchronously, then asynchronously.
    Demo(demo::DemoArgs),
    /// Launch a fleet on this machine and train a job.
    Train(train::TrainArgs),
    /// Launch a fleet on this machine whose workers are a script of yours: paraft launch train.py
    Launch(launch::LaunchArgs),
    /// Give a job to a fleet that stands already (--fleet FLEET), or with a fleet of its own to an engine (--on slurm), and come
    /// back at once.
    Submit(Box<submit::SubmitArgs>),
    /// Start, end, ask and resize a fleet that an engine runs.
    Fleet(engine::FleetArgs),
    /// Train one job in several modes and show the difference.
    Compare(compare::CompareArgs),
    /// Train a job on a fleet that does not exist, in simulated time: what would 256 workers do?
    Simulate(simulate::SimulateArgs),
    /// How the workers of a job can hold its model: whole, layer by layer, in stages, in slices; what each takes, and what fits.
    Plan(plan::PlanArgs),
    /// Run one server of a fleet.
    Server(serve::ServerArgs),
    /// Run one worker of a fleet.
    Worker(paraft_worker::cli::WorkerArgs),
    /// Look into checkpoints and model files, compare them, export weights.
    Checkpoint(checkpoint::CheckpointArgs),
    /// Show the loss and accuracy of a run's, a checkpoint's or a file's weights on held-out samples.
    Evaluate(evaluate::EvaluateArgs),
    /// Rebuild weights from the logs and snapshots of servers that do not run.
    Replay(replay::ReplayArgs),
    /// Merge what servers and workers started with --trace have recorded.
    Trace(trace::TraceArgs),
    /// Write the report of what is recorded of a run, also of one whose launcher was killed.
    Report(report::ReportArgs),
    /// Send a run that has ended to MLflow, or what is missing of it there.
    Track(track::TrackArgs),
    /// Show what the servers of a fleet know; of a run that has ended, what its folder holds.
    Status(status::StatusArgs),
    /// Serve the live page of a fleet from this host.
    Dashboard(dashboard::DashboardArgs),
    /// Watch a fleet and its jobs in the terminal, and act there.
    Top(top::TopArgs),
    /// Try many settings of a job on one fleet, stop the bad ones early, and write the best job file.
    Sweep(sweep::SweepArgs),
    /// Move leaders and replicas away from a server, so that it can be stopped without a stall.
    Drain(drain::DrainArgs),
    /// Say that a server will not come back: its replicas are replaced now, and it is listed no more.
    Forget(data::ForgetArgs),
    /// Files of replicas that were quarantined: list, restore or delete them; give up what a shard held.
    Data(data::DataArgs),
    /// List the jobs of a fleet, or the job of a run that has ended.
    Jobs(jobs::ListArgs),
    /// Rows of a job's sparse tables: show, remove, export, import.
    Table(tables::TableArgs),
    /// Write the weights of a running job to a file, or each new version while it trains.
    Pull(pull::PullArgs),
    /// Keep inference engines at the newest weights of a running job.
    Feed(Box<feed::FeedArgs>),
    /// Read a running job's weights once, and give them to many readers near this host.
    Relay(relay::RelayArgs),
    /// End a job where it is; its weights are kept as after any end.
    Stop(end::StopArgs),
    /// Delete a job with all that the servers have of it.
    Delete(end::DeleteArgs),
    /// Show what the launcher, the servers and the workers of a job have said, also after its end.
    Logs(logs::LogsArgs),
    /// Switch a running job between synchronous and asynchronous training.
    Mode(mode::ModeArgs),
    /// Prove the promises on this machine: the ledger under faults, synchronous training against one process.
    Verify(verify::VerifyArgs),
    /// Put faults on a running fleet: kills, pauses and, where it has the fault points, links and disks.
    Chaos(chaos::ChaosArgs),
    /// Measure, as ratios to something in the same run.
    Bench(bench::BenchArgs),
    /// Certificates: make an authority, issue, renew and show them.
    Certs(certs::CertsArgs),
    /// Check this machine: what works, what is missing, what that disables.
    Doctor(doctor::DoctorArgs),
    /// Print version, machine and settings, ready to paste into an issue.
    Env(doctor::EnvArgs),
    /// Print shell completions.
    Completions {
        /// For which shell.
        shell: clap_complete::Shell,
    },
    /// Write man pages, one a command, into a folder: for packages.
    #[command(hide = true)]
    Man {
        /// The folder, which is there.
        #[arg(long)]
        out: PathBuf,
    },
}

impl Command {
    /// The certificate that the command shows, where its folder has several.
    fn shows(&self) -> As {
        match self {
            Self::Server(_) | Self::Relay(_) => As::Peer,
            Self::Worker(_) => As::Worker,
            Self::Launch(a) => a.shows(),
            _ => As::Admin,
        }
    }
}

fn main() {
    paraft_host::allocator::set_up(paraft_host::memory::memory().is_scarce());
    let matches = help::with_help(Cli::command()).get_matches();
    let Cli { access, command } = Cli::from_arg_matches(&matches).unwrap_or_else(|e| e.exit());
    if let Err(refused) = paraft_simd::choice() {
        let failure = Failure::new(exit::USAGE, refused).help("without it the machine's best is used");
        std::process::exit(failure::report(Err(failure)));
    }
    if let Err(why) = access.take(command.shows()) {
        std::process::exit(failure::report(Err(Failure::new(exit::CONFIG, why))));
    }
    if command.shows() == As::Admin && access.certs.is_some() {
        Access::show_always();
    }
    let code = match command {
        Command::Init(a) => failure::report(init::run(&a)),
        Command::Demo(a) => failure::report(demo::run(&a)),
        Command::Train(a) => failure::report(train::run(&a)),
        Command::Launch(a) => failure::report(launch::run(&a)),
        Command::Submit(a) => failure::report(submit::run(&a)),
        Command::Fleet(a) => failure::report(engine::fleet(&a)),
        Command::Compare(a) => failure::report(compare::run(&a)),
        Command::Simulate(a) => failure::report(simulate::run(&a)),
        Command::Plan(a) => failure::report(plan::run(&a)),
        Command::Server(a) => failure::report(serve::run(&a)),
        Command::Worker(a) => worker::run(&a),
        Command::Checkpoint(a) => failure::report(checkpoint::run(&a)),
        Command::Evaluate(a) => failure::report(evaluate::run(&a)),
        Command::Replay(a) => failure::report(replay::run(&a)),
        Command::Trace(a) => failure::report(trace::run(&a)),
        Command::Report(a) => failure::report(report::run(&a)),
        Command::Track(a) => failure::report(track::run(&a)),
        Command::Status(a) => failure::report(status::run(&a)),
        Command::Dashboard(a) => failure::report(dashboard::run(&a)),
        Command::Top(a) => failure::report(top::run(&a)),
        Command::Sweep(a) => failure::report(sweep::run(&a)),
        Command::Drain(a) => failure::report(drain::run(&a)),
        Command::Forget(a) => failure::report(data::forget(&a)),
        Command::Data(a) => failure::report(data::run(&a)),
        Command::Jobs(a) => failure::report(jobs::all(&a)),
        Command::Table(a) => failure::report(tables::run(&a)),
        Command::Pull(a) => failure::report(pull::run(&a)),
        Command::Relay(a) => failure::report(relay::run(&a)),
        Command::Feed(a) => failure::report(feed::run(&a)),
        Command::Stop(a) => failure::report(end::stop(&a)),
        Command::Delete(a) => failure::report(end::delete(&a)),
        Command::Logs(a) => failure::report(logs::run(&a)),
        Command::Mode(a) => failure::report(mode::run(&a)),
        Command::Verify(a) => failure::report(verify::run(&a)),
        Command::Chaos(a) => failure::report(chaos::run(&a)),
        Command::Bench(a) => failure::report(bench::run(&a)),
        Command::Certs(a) => failure::report(certs::run(&a)),
        Command::Doctor(a) => failure::report(doctor::run(&a)),
        Command::Env(a) => failure::report(doctor::env(&a)),
        Command::Completions { shell } => {
            let script = completions::script(shell, help::with_help(Cli::command()));
            // A reader that closes the pipe early (`head`) is no failure.
            let _ = std::io::stdout().write_all(script.as_bytes());
            exit::OK
        }
        Command::Man { out } => {
            let written = clap_mangen::generate_to(help::with_help(Cli::command()), &out)
                .map_err(|e| Failure::write(&out, e));
            failure::report(written.map(|()| exit::OK))
        }
    };
    std::process::exit(code);
}
