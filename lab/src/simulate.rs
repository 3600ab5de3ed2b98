//! `paraft simulate`: a job on a fleet that does not exist, in simulated time.
//!
//! The run's folder has the layout of `paraft train`, so the same table and report work on it. The
//! record is marked as simulated, and there are no processes and no logs.

mod watched;

use clap::Args;
use paraft_checkpoint::{MODEL_FILE, weights};
use paraft_fleet::{failure::Failure, fleet::JOB_FILE, launch, progress::Progress, run_dir::RunDir, table};
use paraft_record::{Event, METRICS_FILE, MetricsWriter, RunRecord, follow};
use paraft_sim::{
    Outcome, Setup, SimError, Straggle,
    calibrate::{self, Measured, Row},
    setup::parse_slow,
    simulate, simulate_watched,
};
use paraft_worker::{Job, cli, exit};
use std::{
    fs,
    net::SocketAddr,
    path::{Path, PathBuf},
    time::Instant,
};

/// Which job, on which fleet.
#[derive(Args)]
pub struct SimulateArgs {
    /// The job file.
    pub job: PathBuf,
    /// Overrides a key of the job file, for example train.mode=asp; may be given often.
    #[arg(long, value_name = "KEY=VALUE")]
    pub set: Vec<String>,
    /// Workers. Default: train.workers.
    #[arg(long, value_name = "N")]
    pub workers: Option<u32>,
    /// Shards, 1 to 4096: more than a fleet of this version has. Default: cluster.shards.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub shards: Option<u32>,
    #[command(flatten)]
    pub(crate) fleet: FleetArgs,
    /// Take the times from a run of this machine: the folder of a run of `paraft train`, best of one worker. Flags that are
    /// given beside it win.
    #[arg(long, value_name = "RUN_DIR")]
    pub calibrate: Option<PathBuf>,
    /// Compare what is simulated with this run of the same job and fleet, and print the error of each figure.
    #[arg(long, value_name = "RUN_DIR")]
    pub against: Option<PathBuf>,
    /// Where the run's files go. Default: runs/NAME-sim-N, the first N that is free.
    #[arg(long)]
    pub run_dir: Option<PathBuf>,
    /// Serve the live page of the simulated fleet here while it runs, for example 127.0.0.1:8080 (port 0: any), and let a simulated second
    /// take no less than a second. Who has the token in its address may look; it is drawn, or in PARAFT_DASHBOARD_TOKEN
    #[arg(long, value_name = "ADDR")]
    pub dashboard: Option<SocketAddr>,
    /// Print the summary as one JSON object instead of a table; with --against, the comparison as another.
    #[arg(long)]
    pub json: bool,
}

/// What the fleet is like. Each flag's default is [`Setup::default`]'s, or what --calibrate has found.
#[derive(Args, Clone, Debug, Default, PartialEq)]
pub struct FleetArgs {
    /// Seed of everything that is drawn but weights and the order of samples, which have the job's. Default: the job's.
    #[arg(long)]
    pub seed: Option<u64>,
    /// A step's forward and backward pass, on average. Default 10.
    #[arg(long, value_name = "MS")]
    pub compute_ms: Option<f64>,
    /// Deviation of a step's time over its mean (log-normal). Default 0.1.
    #[arg(long, value_name = "SHARE")]
    pub compute_spread: Option<f64>,
    /// Deviation of the workers' speeds over their mean: each draws one for the whole run (log-normal). Default 0.
    #[arg(long, value_name = "SHARE")]
    pub worker_spread: Option<f64>,
    /// A slower worker: 1:5x makes worker 1 take five times as long for a step; may be given often.
    #[arg(long, value_name = "W:Fx", value_parser = parse_slow)]
    pub slow: Vec<(u32, f64)>,
    /// Slow steps: 0.01:10x makes one step in a hundred take ten times as long.
    #[arg(long, value_name = "P:Fx")]
    pub straggle: Option<Straggle>,
    /// What a worker's processor does for a step's messages. Default 0.
    #[arg(long, value_name = "MS")]
    pub exchange_ms: Option<f64>,
    /// What the leader's processor does for a push. Default 0.
    #[arg(long, value_name = "MS")]
    pub push_ms: Option<f64>,
    /// What the followers' processors do for an update (BSP: of a round's pushes); no process waits for it. Default 0.
    #[arg(long, value_name = "MS")]
    pub follow_ms: Option<f64>,
    /// One way between two processes, on average. Default 0.1.
    #[arg(long, value_name = "MS")]
    pub latency_ms: Option<f64>,
    /// Deviation of a message's latency over its mean (log-normal). Default 0.2.
    #[arg(long, value_name = "SHARE")]
    pub jitter: Option<f64>,
    /// What a worker's link carries each way, in gigabits a second; 0: no bound. Default 10.
    #[arg(long, value_name = "GBIT")]
    pub worker_gbit: Option<f64>,
    /// What a server's link carries each way; 0: no bound. Default 10.
    #[arg(long, value_name = "GBIT")]
    pub server_gbit: Option<f64>,
    /// What a majority takes to hold an entry beyond the network: a disk, say. Default 0.
    #[arg(long, value_name = "MS")]
    pub replicate_ms: Option<f64>,
    /// All processes share a host with so many cores. Default: each has its own; with --calibrate, this machine's.
    #[arg(long, value_name = "N")]
    pub cores: Option<u32>,
    /// Mean time to the failure of a worker, in simulated seconds. Default: none fails.
    #[arg(long, value_name = "S")]
    pub mttf_s: Option<f64>,
    /// A worker that has failed is started again after so long. Default: never.
    #[arg(long, value_name = "S")]
    pub restart_s: Option<f64>,
    /// Mean time to the failure of a server. Default: none fails.
    #[arg(long, value_name = "S")]
    pub server_mttf_s: Option<f64>,
    /// A server that has failed is back after so long. Default 5.
    #[arg(long, value_name = "S")]
    pub server_restart_s: Option<f64>,
}

impl FleetArgs {
    /// The setup with the flags applied.
    pub fn over(&self, base: Setup) -> Setup {
        let mut slow = base.slow;
        slow.extend(self.slow.iter().copied());
        Setup {
            seed: self.seed.unwrap_or(base.seed),
            compute_ms: self.compute_ms.unwrap_or(base.compute_ms),
            compute_spread: self.compute_spread.unwrap_or(base.compute_spread),
            worker_spread: self.worker_spread.unwrap_or(base.worker_spread),
            slow,
            straggle: self.straggle.or(base.straggle),
            exchange_ms: self.exchange_ms.unwrap_or(base.exchange_ms),
            push_ms: self.push_ms.unwrap_or(base.push_ms),
            follow_ms: self.follow_ms.unwrap_or(base.follow_ms),
            latency_ms: self.latency_ms.unwrap_or(base.latency_ms),
            jitter: self.jitter.unwrap_or(base.jitter),
            worker_gbit: self.worker_gbit.unwrap_or(base.worker_gbit),
            server_gbit: self.server_gbit.unwrap_or(base.server_gbit),
            replicate_ms: self.replicate_ms.unwrap_or(base.replicate_ms),
            cores: self.cores.or(base.cores),
            mttf_s: self.mttf_s.or(base.mttf_s),
            restart_s: self.restart_s.or(base.restart_s),
            server_mttf_s: self.server_mttf_s.or(base.server_mttf_s),
            server_restart_s: self.server_restart_s.unwrap_or(base.server_restart_s),
        }
    }
}

/// The failure of a command whose simulation failed.
pub(crate) fn failed(e: SimError) -> Failure {
    let diverged = e.diverged();
    let failure = Failure::new(e.exit_code(), e);
    if diverged { failure.not_finite() } else { failure }
}

/// Runs the simulation; returns the exit code.
pub fn run(args: &SimulateArgs) -> Result<i32, Failure> {
    let mut set = args.set.clone();
    set.extend(args.workers.map(|n| format!("train.workers={n}")));
    let mut job = Job::load(&args.job, &set)?;
    // The job file's limit applies to Raft groups of real servers, not to simulated ones.
    job.cluster.shards = args.shards.or(job.cluster.shards);
    // Read first: the simulation may take long.
    let measured = args.against.as_deref().map(RunRecord::load).transpose()?;
    if let Some(measured) = &measured {
        calibrate::same_job(&launch::describe(&mut job.clone(), None)?, &measured.run).map_err(failed)?;
    }
    let mut setup = Setup { seed: job.seed, ..Setup::default() };
    if let Some(dir) = &args.calibrate {
        setup = calibrated(dir, setup, &args.fleet, args.json)?;
    }
    let setup = args.fleet.over(setup);
    paraft_sim::check(&job, &setup).map_err(failed)?;
    let page = args.dashboard.map(watched::Page::serve).transpose()?;
    let dir = RunDir::new(args.run_dir.as_deref(), &format!("{}-sim", job.name))?;
    let began = Instant::now();
    let (record, outcome) = run_watched(&job, &setup, &dir, args.json, page.as_ref())?;
    let took = began.elapsed().as_secs_f64();
    let report = dir.join("report.html");
    paraft_record::write_report(&report, std::slice::from_ref(&record))?;
    let lines = said(&job, &outcome, took);
    if args.json {
        eprintln!("{lines}");
    }
    table::show(&record, args.json, &report)?;
    if !args.json {
        out!("{lines}");
    }
    if !outcome.stages.is_empty() {
        show_stages(&job, &outcome, args.json)?;
    }
    if let Some(measured) = measured {
        show_against(&calibrate::against(&record, &measured).map_err(failed)?, args.json)?;
    }
    Ok(exit::OK)
}

/// Simulates a job and writes its record to `dir`.
pub fn run_in(job: &Job, setup: &Setup, dir: &Path, quiet: bool) -> Result<(RunRecord, Outcome), Failure> {
    run_watched(job, setup, dir, quiet, None)
}

fn run_watched(
    job: &Job,
    setup: &Setup,
    dir: &Path,
    quiet: bool,
    page: Option<&watched::Page>,
) -> Result<(RunRecord, Outcome), Failure> {
    let mut resolved = job.clone();
    launch::absolute_paths(&mut resolved)?;
    let mut run = launch::describe(&mut resolved, None)?;
    (run.wall, run.simulated) = (0.0, true);
    warn(&resolved, run.parameters);
    let job_file = dir.join(JOB_FILE);
    fs::write(&job_file, resolved.to_toml()).map_err(|e| Failure::write(&job_file, e))?;
    let (model, data) = cli::built_in(&resolved)?;
    let mut writer = MetricsWriter::append(dir.join(METRICS_FILE))?;
    writer.write(&Event::Run(run.clone()))?;
    let mut progress = Progress::new(&run, false, quiet);
    let sink = move |event: &Event| {
        writer.write(event)?;
        progress.update(std::slice::from_ref(event));
        Ok(())
    };
    let outcome = match page {
        None => simulate(&resolved, setup, model, data, Box::new(sink)),
        Some(page) => simulate_watched(&resolved, setup, model, data, Box::new(sink), page.watcher()),
    }
    .map_err(failed)?;
    weights::save(&dir.join(MODEL_FILE), &outcome.layout, &outcome.weights, outcome.steps)?;
    let record = RunRecord::load(dir)?;
    MetricsWriter::append(dir.join(METRICS_FILE))?.write(&Event::Summary(record.summarize()))?;
    follow::export(dir)?;
    Ok((record, outcome))
}

/// Warns about settings of the job that have no effect here.
fn warn(job: &Job, parameters: u64) {
    if job.checkpoints().is_some() {
        eprintln!("note: a simulation writes no checkpoints");
    }
    if job.track.is_some() {
        eprintln!("note: a simulation is not sent to MLflow; `paraft track` with its folder sends it");
    }
    let len = job.cluster.bucket_bytes.map(|b| (b / 4) as u64).unwrap_or_else(|| {
        paraft_common::placement::default_bucket_len(parameters as usize, job.shards()) as u64
    });
    let buckets = parameters.div_ceil(len.max(1));
    if buckets < u64::from(job.shards()) {
        eprintln!(
            "note: {buckets} of {} shards hold a bucket; for a part on each, --set cluster.bucket_bytes={}",
            job.shards(),
            4 * parameters.div_ceil(u64::from(job.shards()))
        );
    }
}

/// Fits a setup to the run in `dir`. Values that the flags set are fixed during the fit.
pub fn calibrated(dir: &Path, base: Setup, flags: &FleetArgs, quiet: bool) -> Result<Setup, Failure> {
    let record = RunRecord::load(dir)?;
    let own = std::thread::available_parallelism().map_or(1, |n| n.get() as u32);
    let cores = flags.cores.unwrap_or(own);
    let measured = Measured::of(&record, cores).map_err(failed)?;
    let job = Job::load(&dir.join(JOB_FILE), &[])?;
    let mut make = || Ok(cli::built_in(&job)?);
    let setup = calibrate::fit(
        &job,
        &measured,
        cores,
        &Setup { jitter: flags.jitter.unwrap_or(base.jitter), ..base },
        &mut make,
    )
    .map_err(failed)?;
    if !quiet {
        let Measured { compute_ms, compute_spread, exchange_ms, servers_ms, wait_ms } = measured;
        eprintln!(
            "measured in {}: a step computes {compute_ms:.3} ms (spread {compute_spread:.2}) and waits {wait_ms:.3} ms; \
             the worker's processor does {exchange_ms:.3} ms for its messages, the servers' {servers_ms:.3} ms for a push",
            dir.display()
        );
        let Setup { latency_ms, push_ms, follow_ms, exchange_ms, .. } = &setup;
        eprintln!(
            "set up: --cores {cores} --compute-ms {compute_ms:.4} --compute-spread {compute_spread:.3} --exchange-ms {exchange_ms:.4} \
             --push-ms {push_ms:.4} --follow-ms {follow_ms:.4} --latency-ms {latency_ms:.4} --worker-gbit 0 --server-gbit 0"
        );
    }
    Ok(setup)
}

fn said(job: &Job, o: &Outcome, took: f64) -> String {
    let failed = match (o.worker_failures, o.server_failures) {
        (0, 0) => String::new(),
        (w, s) => format!("; workers failed {w} times, servers {s} times"),
    };
    format!(
        "simulated {:.2} s of {} workers and {} shards in {took:.1} s: {} events; the largest step lead was {} steps{failed}",
        o.seconds,
        job.train.workers,
        job.shards(),
        o.happened,
        o.largest_lead
    )
}

fn show_stages(job: &Job, o: &Outcome, json: bool) -> Result<(), Failure> {
    if json {
        out!("{}", serde_json::json!({ "stages": o.stages }));
        return Ok(());
    }
    let mut table = table::plain([
        "stage",
        "layers",
        "cost %",
        "idle %",
        "delay",
        "pushed MB",
        "pulled MB",
        "to other stages MB",
    ]);
    let mb = |bytes: u64| format!("{:.2}", bytes as f64 / 1e6);
    for (i, s) in o.stages.iter().enumerate() {
        table.add_row([
            i.to_string(),
            format!("{} to {}", s.layers.start, s.layers.end - 1),
            format!("{:.1}", 100.0 * s.cost),
            format!("{:.1}", 100.0 * s.idle),
            format!("{:.2}", s.delay),
            mb(s.pushed),
            mb(s.pulled),
            mb(s.sent),
        ]);
    }
    table::align_right(&mut table, 0);
    out!("{table}");
    let costs: Vec<f64> = o.stages.iter().map(|s| s.cost).collect();
    let alone = job.parallel.schedule.bubble_of(&costs, job.micro_batches(), o.steps_between_ends);
    out!(
        "idle: {:.1} % of all stages; of the schedule \"{}\" alone, without a network: {:.1} %",
        100.0 * o.stages.iter().map(|s| s.idle).sum::<f64>() / o.stages.len() as f64,
        job.parallel.schedule.name(),
        100.0 * alone
    );
    Ok(())
}

fn show_against(rows: &[Row], json: bool) -> Result<(), Failure> {
    if json {
        let line = serde_json::json!({ "against": rows });
        out!("{line}");
    } else {
        out!("{}", prediction(rows));
    }
    Ok(())
}

/// The table of predicted and measured figures.
fn prediction(rows: &[Row]) -> String {
    let mut table = table::plain(["", "predicted", "measured", "error"]);
    for r in rows {
        let error = r.error_percent.map_or("-".into(), |e| format!("{e:+.1} %"));
        table.add_row([r.figure.into(), format!("{:.3}", r.predicted), format!("{:.3}", r.measured), error]);
    }
    table::align_right(&mut table, 1);
    table.to_string()
}
