//! `paraft dashboard`: the live page of a fleet whose servers serve none, or cannot be reached from a browser; and the page
//! of a run that has ended.

use clap::Args;
use paraft_dashboard::{
    LocalControl, Page, Source,
    facts::{Facts, Job},
};
use paraft_fleet::{
    ask,
    ended::EndedRun,
    failure::Failure,
    faults::FAULTS_FILE,
    fleet::server_data,
    launch, submitted,
    targets::{FleetArg, Target},
};
use paraft_host::clock::unix_ms;
use paraft_worker::exit;
use std::{
    net::SocketAddr,
    path::{Path, PathBuf},
    sync::atomic::Ordering::Relaxed,
    time::Duration,
};
use tokio::sync::watch;

#[derive(Args)]
pub struct DashboardArgs {
    #[command(flatten)]
    pub fleet: FleetArg,
    /// Where it is served; port 0: any that is free.
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1:0")]
    pub at: SocketAddr,
    /// Recorded runs to compare with; by default those that lie beside the run.
    #[arg(long, value_name = "FOLDER")]
    pub runs: Option<PathBuf>,
}

/// An interrupt is heard within this time.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

pub fn run(args: &DashboardArgs) -> Result<i32, Failure> {
    // Who is refused, and what is done, are said here.
    paraft_host::logs::on_terminal(tracing::level_filters::LevelFilter::INFO);
    let fleet = args.fleet.to_ask()?;
    let target = fleet.target()?;
    let mut here = here(fleet.folder());
    let source = match target {
        Target::Servers(servers) => {
            // Fails with a clear error if no server answers.
            ask::jobs(&servers)?;
            Source::Servers(servers)
        }
        Target::Ended(run) => {
            let dir = std::fs::canonicalize(&run.dir).unwrap_or_else(|_| run.dir.clone());
            // Nothing is left to be done to it.
            here = LocalControl { run: Some(dir), runs: here.runs, ..LocalControl::default() };
            Source::Facts(recorded(&run))
        }
    };
    if let Some(runs) = &args.runs {
        here.runs = Some(
            std::fs::canonicalize(runs)
                .map_err(|e| Failure::new(exit::CONFIG, format!("--runs {}: {e}", runs.display())))?,
        );
    }
    let interrupted = launch::interrupts();
    let _page = Page::serve(args.at, source, None, here)?;
    while interrupted.load(Relaxed) == 0 {
        std::thread::sleep(POLL_INTERVAL);
    }
    Ok(exit::OK)
}

/// A fleet without servers, whose job has ended.
fn recorded(run: &EndedRun) -> watch::Receiver<Facts> {
    let now = unix_ms();
    let job = Job {
        name: run.run.name.clone(),
        state: run.state.name().into(),
        mode: run.mode.clone(),
        workers: run.run.workers,
        shards: run.run.shards,
        replicas: run.run.replicas,
        since: (run.run.wall * 1e3) as u64,
        ..Job::default()
    };
    let (tell, told) = watch::channel(Facts::default());
    // The receiver is there.
    _ = tell.send(Facts { at: now, jobs: vec![job], ..Facts::default() });
    told
}

/// What this host has of a run that is given by its folder.
pub fn here(of: Option<&Path>) -> LocalControl {
    let folder = of.filter(|of| of.is_dir()).and_then(|of| std::fs::canonicalize(of).ok());
    // Another fleet's job may have its run here.
    let run = folder.clone().filter(|run| server_data(run, 0).is_dir() || submitted::is(run));
    let faults = run.as_ref().map(|run| run.join(FAULTS_FILE)).filter(|file| file.exists());
    let engine = run.as_deref().and_then(submitted::most);
    let runs = folder.and_then(|folder| Some(folder.parent()?.to_path_buf()));
    LocalControl { faults, run, engine, runs, acts: None }
}
