//! `paraft compare`: one job in several modes, with several algorithms, numbers of workers and seeds;
//! one table, one verdict, one report.
//!
//! - `matrix`: the planned runs, as jobs. `cell`: one of these runs, real or simulated.
//!
//! Runs are sequential: two fleets at the same time share the cores and distort each other's times. An
//! interrupted comparison resumes in its folder: complete runs are not repeated.
//! `paraft_record::comparison` defines the numbers and the verdict.

mod cell;
mod matrix;

use crate::simulate::{self, FleetArgs};
use cell::{How, Prepared};
use clap::Args;
use matrix::{Algorithm, Axes, Planned, Seeds};
use paraft_common::ModeChoice;
use paraft_fleet::{
    again, existing::ExistingFleet, failure::Failure, faults::link::Link, launch, run_dir::RunDir, table,
    targets::StandingArg,
};
use paraft_record::{Comparison, Conditions};
use paraft_sim::Setup;
use paraft_worker::{Job, JobError, exit};
use std::{
    path::{Path, PathBuf},
    sync::{
        Mutex,
        atomic::{AtomicI32, AtomicUsize, Ordering::Relaxed},
    },
    time::Duration,
};

/// Which job, in which ways.
#[derive(Args)]
pub struct CompareArgs {
    /// The job file.
    pub job: PathBuf,
    /// Modes, comma-separated.
    #[arg(long, value_delimiter = ',', default_value = "bsp,ssp:4,asp")]
    pub modes: Vec<ModeChoice>,
    /// Numbers of workers, comma-separated. All runs train on as many samples as the job's own number does. Default:
    /// train.workers.
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..=65536))]
    pub workers: Vec<u32>,
    /// How many seeds (3: 1, 2 and 3), or which (4,7,9). Default: the job's.
    #[arg(long, value_name = "N|LIST")]
    pub seeds: Option<Seeds>,
    /// Each an algorithm.kind, a train.encoding, or `job`; comma-separated. Default: the job as it is.
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    pub algorithms: Vec<String>,
    /// An algorithm of your own: 'weak: algorithm.kind=dc-asgd-c, algorithm.lambda=0.1'; may be given often.
    #[arg(long, value_name = "NAME: KEY=VALUE, ...")]
    pub algorithm: Vec<String>,
    /// Overrides a key of the job file; may be given often.
    #[arg(long, value_name = "KEY=VALUE")]
    pub set: Vec<String>,
    /// Hold back what passes between a worker and a server, each way, by a proxy.
    #[arg(long, value_name = "MS", default_value_t = 0.0, conflicts_with = "fleet")]
    pub delay_ms: f64,
    /// What a connection between a worker and a server carries each way, by a proxy. Default: no bound.
    #[arg(long, value_name = "MBIT/S", conflicts_with = "fleet")]
    pub bandwidth: Option<f64>,
    /// Simulate every run instead (docs/simulator.md). The flags below say what the fleet is like; of them --slow and --straggle are also for
    /// real runs.
    #[arg(long, conflicts_with = "fleet")]
    pub simulate: bool,
    /// With --simulate: take the times from a run of this machine.
    #[arg(long, value_name = "RUN_DIR", requires = "simulate")]
    pub calibrate: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) fleet: FleetArgs,
    /// Runs at a time. More than one is refused where workers and servers would share cores.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=256))]
    pub parallel: u32,
    /// Let runs that go at the same time share cores all the same. The report says so: their times are worth little.
    #[arg(long)]
    pub share_cores: bool,
    #[command(flatten)]
    pub(crate) standing: StandingArg,
    /// Where the runs' files go. An interrupted comparison continues in its folder. Default: runs/NAME-compare-N, the first N
    /// that is free.
    #[arg(long)]
    pub run_dir: Option<PathBuf>,
    /// Print one JSON object for each run instead of a table.
    #[arg(long)]
    pub json: bool,
}

/// Runs the missing runs and reports the results; returns the exit code.
pub fn run(args: &CompareArgs) -> Result<i32, Failure> {
    let load = |more: &[String]| {
        let set: Vec<String> = args.set.iter().chain(more).cloned().collect();
        Job::load(&args.job, &set)
    };
    let job = load(&[])?;
    let mut algorithms =
        args.algorithms.iter().map(|a| Algorithm::named(a)).collect::<Result<Vec<_>, _>>()?;
    algorithms.extend(args.algorithm.iter().map(|a| Algorithm::own(a)).collect::<Result<Vec<_>, _>>()?);
    if algorithms.is_empty() {
        algorithms.push(Algorithm::unchanged());
    }
    let axes = Axes {
        modes: args.modes.clone(),
        workers: args.workers.clone(),
        seeds: args.seeds.clone().map_or(Vec::new(), |s| s.0),
        algorithms,
    };
    let how = how(args)?;
    let (planned, left_out) = matrix::expand(&axes, &load, &|job| how.fits(job))?;
    for l in &left_out {
        eprintln!("left out: {}, {} with {} workers: {}", l.mode, l.algorithm, l.workers, l.reason);
    }
    let conditions = conditions(args, &how, &planned)?;
    let dir = RunDir::of_comparison(args.run_dir.as_deref(), &format!("{}-compare", job.name))?;
    // A simulation ends with its process, on the default signal handler.
    let interrupted = if args.simulate { AtomicI32::new(0).into() } else { launch::interrupts() };
    let cells = run_all(&planned, &dir, &how, args.parallel, args.json, &interrupted)
        .map_err(|e| with_command(e, args, &dir))?;
    let comparison = Comparison { job: job.name.clone(), cells, left_out, conditions };
    tell(&comparison, &dir, args.json, true)?;
    Ok(exit::OK)
}

/// A failure, with the command that continues the comparison. What is wrong with a run or its folder stays wrong.
fn with_command(e: Failure, args: &CompareArgs, dir: &Path) -> Failure {
    if e.code() == exit::CONFIG {
        return e;
    }
    let again = again::command("compare", "--run-dir", args.run_dir.as_deref(), dir);
    e.more_help(format!("continue the comparison: {again}"))
}

/// Trains a job once in each mode, as `paraft demo` does.
pub fn compare_modes(
    load: &dyn Fn(&[String]) -> Result<Job, JobError>,
    modes: &[ModeChoice],
    dir: &Path,
    json: bool,
    interrupted: &AtomicI32,
) -> Result<i32, Failure> {
    let axes = Axes { modes: modes.to_vec(), algorithms: vec![Algorithm::unchanged()], ..Axes::default() };
    let how = How::Real { slow: Default::default(), straggle: None, link: None, on: None };
    let (planned, left_out) = matrix::expand(&axes, load, &|job| how.fits(job))?;
    let cells = run_all(&planned, dir, &how, 1, json, interrupted)?;
    let conditions = Conditions {
        parallel: 1,
        cores: cores(),
        notes: crowded(&planned, 1, &how),
        ..Conditions::default()
    };
    let job = load(&[])?.name;
    tell(&Comparison { job, cells, left_out, conditions }, dir, json, false)?;
    Ok(exit::OK)
}

/// Real or simulated runs, and their fleet.
fn how(args: &CompareArgs) -> Result<How, Failure> {
    let usage = |why: String| Err(Failure::new(exit::USAGE, why));
    if args.simulate {
        if args.delay_ms != 0.0 || args.bandwidth.is_some() {
            return usage("--delay-ms and --bandwidth are a proxy's: with --simulate use --latency-ms and --worker-gbit".into());
        }
        let mut base = Setup::default();
        if let Some(dir) = &args.calibrate {
            base = simulate::calibrated(dir, base, &args.fleet, args.json)?;
        }
        return Ok(How::Simulated { setup: Box::new(args.fleet.over(base)), seed: args.fleet.seed });
    }
    if (FleetArgs { slow: Vec::new(), straggle: None, ..args.fleet.clone() }) != FleetArgs::default() {
        return usage(
            "of the flags that say what a simulated fleet is like only --slow and --straggle are for real runs".into(),
        );
    }
    if let Some((worker, factor)) = args.fleet.slow.iter().find(|(_, f)| !(1.0..=1000.0).contains(f)) {
        return usage(format!("--slow {worker}:{factor}x: use 1x to 1000x; no worker can be made faster"));
    }
    let straggle = args.fleet.straggle;
    if let Some(s) = straggle.filter(|s| !s.is_possible()) {
        return usage(format!("--straggle {s}: use 0 to 1, and 1x to 1000x"));
    }
    if !(0.0..=60_000.0).contains(&args.delay_ms) {
        return usage(format!("--delay-ms {}: use 0 to 60000", args.delay_ms));
    }
    if let Some(b) = args.bandwidth.filter(|b| !(0.001..=1e6).contains(b)) {
        return usage(format!("--bandwidth {b}: use 0.001 to 1000000 Mbit/s"));
    }
    let link = Link {
        delay: Duration::from_secs_f64(args.delay_ms / 1e3),
        bits_per_s: args.bandwidth.map(|mbit| mbit * 1e6),
    };
    let slow: std::collections::BTreeMap<u32, f64> = args.fleet.slow.iter().copied().collect();
    if slow.len() < args.fleet.slow.len() {
        return usage("--slow names a worker twice".into());
    }
    let on = args.standing.servers()?.map(|servers| ExistingFleet {
        servers,
        keep: None,
        delete: true,
        remember: true,
    });
    Ok(How::Real { slow, straggle, link: (link != Link::default()).then_some(link), on })
}

fn cores() -> u32 {
    std::thread::available_parallelism().map_or(1, |n| n.get() as u32)
}

/// The largest number of processes of `parallel` simultaneous runs.
fn processes(planned: &[Planned], parallel: u32, how: &How) -> u32 {
    let servers = |job: &Job| if how.stands() { 0 } else { job.servers() };
    let one = planned.iter().map(|p| p.job.ranks().saturating_add(servers(&p.job))).max().unwrap_or(0);
    one.saturating_mul(parallel)
}

/// Notes about the machine for the reader of the report.
fn crowded(planned: &[Planned], parallel: u32, how: &How) -> Vec<String> {
    let (processes, cores) = (processes(planned, parallel, how), cores());
    let what = if how.stands() { "workers" } else { "workers and servers" };
    let crowded = match (processes > cores, parallel) {
        (false, _) => None,
        (true, 1) => Some(format!(
            "A run has up to {processes} {what}, and this machine {cores} cores: they share them, in every run alike."
        )),
        (true, n) => Some(format!(
            "{n} runs went at the same time, with up to {processes} {what} on {cores} cores: times, throughput and waiting are not to \
             be relied on."
        )),
    };
    let standing = how
        .stands()
        .then(|| "The servers are those of a fleet that stands, which may have had other jobs.".to_string());
    crowded.into_iter().chain(standing).collect()
}

fn conditions(args: &CompareArgs, how: &How, planned: &[Planned]) -> Result<Conditions, Failure> {
    let (cores, n) = (cores(), args.parallel);
    let busy = if args.simulate { n } else { processes(planned, n, how) };
    if n > 1 && busy > cores && !args.share_cores {
        return Err(Failure::new(
            exit::USAGE,
            format!("--parallel {n}: {busy} processes at a time would share {cores} cores, and falsify each other's times"),
        )
        .help("leave --parallel out, or say --share-cores where times do not matter"));
    }
    let (slow, straggle, link) = match how {
        How::Real { slow, straggle, link, .. } => (slow.clone(), *straggle, link.unwrap_or_default()),
        How::Simulated { setup, .. } => (setup.slow.clone(), setup.straggle, Link::default()),
    };
    Ok(Conditions {
        simulated: args.simulate,
        slow,
        straggle: straggle.map(|s| s.to_string()),
        delay_ms: link.delay.as_secs_f64() * 1e3,
        bandwidth_mbit: link.bits_per_s.map(|b| b / 1e6),
        parallel: n,
        cores,
        notes: if args.simulate { Vec::new() } else { crowded(planned, n, how) },
    })
}

/// Runs what is missing, `parallel` at a time; returns the records of all.
fn run_all(
    planned: &[Planned],
    dir: &Path,
    how: &How,
    parallel: u32,
    json: bool,
    interrupted: &AtomicI32,
) -> Result<Vec<paraft_record::Cell>, Failure> {
    let all = planned.iter().map(|p| Prepared::new(p, dir, how)).collect::<Result<Vec<_>, _>>()?;
    let done = all.iter().filter(|p| p.done).count();
    if done > 0 {
        eprintln!("{done} of {} runs are complete already", all.len());
    }
    let several = planned.iter().any(|p| p.dir != p.mode.to_string().replace(':', "-"));
    let (next, failed) = (AtomicUsize::new(0), Mutex::new(None));
    let one_by_one = || {
        loop {
            let i = next.fetch_add(1, Relaxed);
            let Some(run) = all.get(i) else { return };
            if several && !json && !run.done {
                eprintln!("[{}/{}] {}", i + 1, all.len(), run.planned.dir);
            }
            if let Err(e) = run.run(how, json || parallel > 1, interrupted) {
                next.store(all.len(), Relaxed); // the other threads finish their current runs
                failed.lock().unwrap_or_else(|e| e.into_inner()).get_or_insert(e);
            }
        }
    };
    match parallel {
        1 => one_by_one(),
        n => std::thread::scope(|s| (0..n).for_each(|_| _ = s.spawn(one_by_one))),
    }
    match failed.into_inner().unwrap_or_else(|e| e.into_inner()) {
        Some(e) => Err(e),
        None => all.iter().map(Prepared::cell).collect(),
    }
}

/// Writes the files of a comparison and prints it.
fn tell(comparison: &Comparison, dir: &Path, json: bool, verdict: bool) -> Result<(), Failure> {
    let report = dir.join("report.html");
    comparison.write_json(dir.join("compare.json"))?;
    paraft_record::write_comparison(&report, comparison)?;
    if json {
        for cell in &comparison.cells {
            out!("{}", cell.to_json()?);
        }
        eprintln!("report {}", report.display());
        return Ok(());
    }
    out!("{}", table::comparison(comparison));
    if verdict {
        for sentence in comparison.verdict().sentences {
            out!("{sentence}");
        }
    }
    out!("report  {}", report.display());
    Ok(())
}
