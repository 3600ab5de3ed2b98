//! The flags of `paraft worker`, for every binary that trains: the built-in models' and the user's own.

use crate::{
    checkpoints,
    device::{self, DeviceConfig},
    exit,
    job::Job,
    samples::shape_of,
    slow::{Slowness, Straggle},
    worker::{WorkerError, WorkerOptions, run, run_sparse},
};
use clap::{Args, Parser, builder::FalseyValueParser};
use paraft_common::{TableSpec, check_address, group::MAX_RANKS, optim::OptimizerConfig};
use paraft_data::{SparseDataset, SparseSplit, Split};
use paraft_models::{Keep, Layer, Model, SparseModel, SparseShape};
use paraft_record::begin::make_folder;
use paraft_tls::{
    Access,
    access::{self, As},
};
use paraft_trace::{DEFAULT_STEPS, MAX_STEPS};
use std::{
    io::Write,
    net::SocketAddr,
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicI32, Ordering::Relaxed},
    },
    thread,
};

/// Flags of a worker.
#[derive(Args, Clone, Debug)]
pub struct WorkerArgs {
    /// The job file, the same on every host.
    pub job: PathBuf,
    /// This process's rank, from 0: the worker's, or with --group-size N the group's first rank is N times the worker's.
    #[arg(long, env = "PARAFT_RANK")]
    pub rank: u32,
    /// Ranks of each worker: processes that average their gradients among themselves. Default: train.group_size.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=i64::from(MAX_RANKS)))]
    pub group_size: Option<u32>,
    /// The fleet: servers as host:port, comma-separated (one that answers is enough); to `paraft worker` also a run's folder,
    /// or a job file. Default: cluster.addresses.
    #[arg(long, env = "PARAFT_SERVERS", value_name = "FLEET")]
    pub fleet: Option<String>,
    /// Overrides a key of the job file; may be given often.
    #[arg(long, value_name = "KEY=VALUE")]
    pub set: Vec<String>,
    /// On what to compute: auto, cpu, cuda (the GPU of this worker's turn on its host) or cuda:N. Default: train.device.
    #[arg(long)]
    pub device: Option<DeviceConfig>,
    /// Where metrics.jsonl goes; made where there is none. Default: nothing is written.
    #[arg(long)]
    pub run_dir: Option<PathBuf>,
    /// Go on from a checkpoint: its folder, a folder of checkpoints or a run's folder (then its latest). Without a
    /// path, the latest of checkpoint.dir or of the run's folder. The same on every worker.
    #[arg(long, value_name = "PATH", num_args = 0..=1, default_missing_value = "latest")]
    pub resume: Option<PathBuf>,
    /// Serve Prometheus' /metrics here, for example 127.0.0.1:9100 (port 0: any).
    #[arg(long)]
    pub metrics: Option<SocketAddr>,
    /// Record the stages of this worker's gradients in this folder, as worker-RANK.jsonl; `paraft trace` merges what the
    /// processes of a job have recorded.
    #[arg(long, value_name = "FOLDER")]
    pub trace: Option<PathBuf>,
    /// With --trace: so many steps, from the first.
    #[arg(long, value_name = "N", default_value_t = DEFAULT_STEPS, requires = "trace",
        value_parser = clap::value_parser!(u64).range(1..=MAX_STEPS))]
    pub trace_steps: u64,
    /// Write the final weights here, as safetensors. (The run's folder gets model.safetensors in any case, from the
    /// lowest worker that finishes.)
    #[arg(long)]
    pub weights: Option<PathBuf>,
    /// Log as JSON lines into this file. Default: to standard error.
    #[arg(long)]
    pub log_file: Option<PathBuf>,
    /// Make each step so many times as long, 1 to 1000; set by `paraft compare --slow`.
    #[arg(long, hide = true, value_name = "FACTOR", default_value_t = 1.0, value_parser = slow_factor)]
    pub slow: f64,
    /// Make some steps longer yet; set by `paraft compare --straggle`.
    #[arg(long, hide = true, value_name = "P:Fx")]
    pub straggle: Option<Straggle>,
    /// End when standard input ends; set by the launcher.
    #[arg(long, hide = true)]
    pub supervised: bool,
}

/// How a process comes by connections: flags of every command.
#[derive(Args, Clone, Debug)]
pub struct AccessArgs {
    /// Certificates to speak TLS with: a folder with ca.crt, tls.crt and tls.key, or one as `paraft certs new` makes it; `-`: all
    /// three on standard input.
    #[arg(long, global = true, value_name = "FOLDER", env = access::CERTS, help_heading = "Certificates", display_order = 1000)]
    pub certs: Option<PathBuf>,
    /// Speak plain text over TCP: anybody who reaches a port may read and change everything.
    #[arg(long, global = true, env = access::INSECURE, conflicts_with = "certs", value_parser = FalseyValueParser::new(),
        help_heading = "Certificates", display_order = 1001)]
    pub insecure: bool,
}

impl AccessArgs {
    /// Applies the flags to this process's later connections.
    ///
    /// # Errors
    /// The certificates are unusable.
    pub fn take(&self, shows: As) -> Result<(), String> {
        let access = Access::of(self.certs.as_deref(), self.insecure, shows);
        access.map_err(|e| format!("--certs: {e}")).map(Access::set)
    }
}

#[derive(Parser)]
#[command(about = "A Paraft worker with a model of its own")]
struct Cli {
    #[command(flatten)]
    access: AccessArgs,
    #[command(flatten)]
    args: WorkerArgs,
}

/// A worker's flags. Applies those that concern the whole process.
fn flags() -> WorkerArgs {
    let Cli { access, args } = Cli::parse();
    if let Err(e) = access.take(As::Worker) {
        say(e);
        std::process::exit(exit::CONFIG);
    }
    args
}

/// Creates a model and its data from the job and its folder. In this job `train.device` is `cpu` or a specific GPU.
pub type Factory = fn(&Job) -> Result<(Box<dyn Model>, Split), WorkerError>;

/// `main` of a worker binary with its own model: reads the flags, trains, and exits with a code of
/// docs/configuration.md.
pub fn main(factory: Factory) -> ! {
    let code = train(&flags(), factory);
    std::process::exit(code)
}

/// `main` of a worker binary with its own training loop ([`Run`](crate::Run)), likewise.
///
/// ```no_run
/// # use paraft_worker::{Job, Run, Setup, WorkerError, WorkerOptions, cli};
/// # use paraft_worker::TensorSpec;
/// # fn setup() -> Setup<'static> { Setup::new(vec![TensorSpec::param("w", &[4])], 100, |_, w| w.fill(0.0)) }
/// fn train(job: &Job, options: &WorkerOptions) -> Result<(), WorkerError> {
///     let mut run = Run::join(job, options, setup())?;
///     // while let ... = run.next()? { ... }
///     run.finish().map(|report| eprintln!("{} steps", report.steps))
/// }
/// # fn main() {
/// cli::main_of_loop(train)
/// # }
/// ```
pub fn main_of_loop(own: impl FnOnce(&Job, &WorkerOptions) -> Result<(), WorkerError>) -> ! {
    std::process::exit(under_flags(&flags(), own))
}

/// Runs a worker; errors go to standard error as "error: ..." and into the exit code.
pub fn train(args: &WorkerArgs, factory: Factory) -> i32 {
    under_flags(args, |job, options| train_on(args, job, options, factory))
}

fn train_on(
    args: &WorkerArgs,
    job: &Job,
    options: &WorkerOptions,
    factory: Factory,
) -> Result<(), WorkerError> {
    let mut job = job.clone();
    if let Some(device) = args.device {
        job.compute_on(device).map_err(WorkerError::Job)?;
    }
    let asked = job.device();
    let gpu = device::choose_for(asked, job.train.precision, args.rank, job.ranks_that_reduce())
        .map_err(|why| WorkerError::Device { asked: asked.to_string(), why: why.to_string() })?;
    job.train.device = gpu.map_or(DeviceConfig::Cpu, |g| DeviceConfig::Cuda(Some(g.ordinal)));
    tracing::info!(device = %job.train.device, "this worker computes on");
    let (mut model, data) = factory(&job)?;
    run(&job, options, model.as_mut(), data).map(drop)
}

/// Runs a worker with the job's built-in model, likewise.
pub fn train_built_in(args: &WorkerArgs) -> i32 {
    under_flags(args, |job, options| match job.is_sparse() {
        true => {
            let mut job = job.clone();
            if let Some(device) = args.device {
                job.compute_on(device).map_err(WorkerError::Job)?;
            }
            job.train.device = DeviceConfig::Cpu;
            run_sparse(&job, options).map(drop)
        }
        false => train_on(args, job, options, on_device),
    })
}

/// Prints to standard error, ignoring a full disk: the exit code reports the error too.
fn say(error: impl std::fmt::Display) {
    let _ = writeln!(std::io::stderr(), "error: {error}");
}

fn under_flags(args: &WorkerArgs, work: impl FnOnce(&Job, &WorkerOptions) -> Result<(), WorkerError>) -> i32 {
    if let Err(refused) = paraft_simd::choice() {
        say(refused);
        return exit::USAGE;
    }
    paraft_host::raise_descriptor_limit();
    if let Err(e) = paraft_host::logs::start(args.log_file.as_deref()) {
        say(format_args!("the log file cannot be opened: {e}"));
        return exit::IO;
    }
    if args.supervised {
        paraft_host::lifeline::end_with_launcher();
    }
    let (interrupt, signal) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicI32::new(0)));
    watch_signals(interrupt.clone(), signal.clone());
    let failed = |e: WorkerError| (e.to_string(), e.exit_code());
    let ended = prepare(args, interrupt).and_then(|(job, options)| work(&job, &options).map_err(failed));
    match ended {
        Ok(()) => exit::OK,
        Err((message, code)) => {
            let signal = signal.load(Relaxed);
            if code == exit::INTERRUPTED && signal != 0 {
                return 128 + signal;
            }
            if args.log_file.is_some() {
                tracing::error!(worker = args.rank, "{message}");
            }
            say(format_args!("worker w{}: {message}", args.rank));
            code
        }
    }
}

/// The job and the worker's options from the flags, or an error message and exit code.
fn prepare(args: &WorkerArgs, interrupt: Arc<AtomicBool>) -> Result<(Job, WorkerOptions), (String, i32)> {
    let set = with_group_size(&args.set, args.group_size);
    let job = Job::load(&args.job, &set).map_err(|e| (e.to_string(), exit::CONFIG))?;
    let list = |fleet: &str| fleet.split(',').map(|a| a.trim().to_string()).collect::<Vec<_>>();
    let servers = args.fleet.as_deref().map_or_else(|| job.cluster.addresses.clone(), list);
    servers.iter().try_for_each(|server| check_address(server)).map_err(|why| (why, exit::USAGE))?;
    if servers.is_empty() {
        let why = "no servers are named; give --fleet host:port,... or cluster.addresses in the job file";
        return Err((why.into(), exit::USAGE));
    }
    // First the run folder: the checkpoint folder may lie in it, and an error should name the right folder.
    args.run_dir.as_deref().map_or(Ok(()), make_folder).map_err(|e| (e.to_string(), exit::IO))?;
    checkpoints::try_out(&job, args.run_dir.as_deref()).map_err(|e| (e.to_string(), e.exit_code()))?;
    let options = WorkerOptions {
        rank: args.rank,
        servers,
        run_dir: args.run_dir.clone(),
        weights: args.weights.clone(),
        resume: resume(args, &job)?,
        metrics: args.metrics,
        trace: args.trace.clone().map(|folder| (folder, args.trace_steps)),
        slow: Slowness { factor: args.slow, straggle: args.straggle.filter(Straggle::is_possible) },
        interrupt,
    };
    Ok((job, options))
}

/// Reads `--slow`.
fn slow_factor(text: &str) -> Result<f64, String> {
    let factor: f64 = text.parse().map_err(|e| format!("{e}"))?;
    if (1.0..=1000.0).contains(&factor) { Ok(factor) } else { Err("use 1 to 1000".into()) }
}

/// `--group-size` as an assignment to the job's key.
pub fn with_group_size(set: &[String], group_size: Option<u32>) -> Vec<String> {
    let more = group_size.map(|n| format!("train.group_size={n}"));
    set.iter().cloned().chain(more).collect()
}

/// The checkpoint that `--resume` selects.
fn resume(args: &WorkerArgs, job: &Job) -> Result<Option<PathBuf>, (String, i32)> {
    let Some(path) = &args.resume else { return Ok(None) };
    if path.as_os_str() != "latest" {
        return Ok(Some(path.clone()));
    }
    let why = "--resume without a path needs --run-dir or checkpoint.dir, where it looks";
    checkpoints::folder(job, args.run_dir.as_deref()).map(Some).ok_or((why.into(), exit::USAGE))
}

/// The job's built-in model and data, on one CPU thread whatever the job says: for inspection or comparison.
pub fn built_in(job: &Job) -> Result<(Box<dyn Model>, Split), WorkerError> {
    let mut job = job.clone();
    (job.train.device, job.train.threads) = (DeviceConfig::Cpu, 1);
    on_device(&job)
}

/// The name of the job's data, if any. Workers with their own loops on the same data belong to the same job.
pub fn data_name(job: &Job) -> Result<Option<String>, WorkerError> {
    let Some(config) = &job.data else { return Ok(None) };
    Ok(Some(match config.is_sparse() {
        true => config.load_sparse(&job.base_dir)?.digest().to_string(),
        false => config.load(&job.base_dir)?.digest()?.to_string(),
    }))
}

/// An optimizer from an `[optimizer]` table, for a group of parameters.
///
/// # Errors
/// The table is none, or an option is out of its range.
pub fn optimizer(table: &str) -> Result<OptimizerConfig, String> {
    let optimizer: OptimizerConfig = toml::from_str(table).map_err(|e| e.to_string())?;
    optimizer.validate().map_err(|e| e.to_string())?;
    Ok(optimizer)
}

/// A sparse table from a `[[table]]` entry.
///
/// # Errors
/// It is none, or an option is out of its range.
pub fn table(entry: &str) -> Result<TableSpec, String> {
    let table: TableSpec = toml::from_str(entry).map_err(|e| {
        let fields: toml::Table = toml::from_str(entry).unwrap_or_default();
        let name = fields.get("name").and_then(toml::Value::as_str).unwrap_or_default();
        format!("table `{name}`: {}", e.message())
    })?;
    table.check().map_err(|e| e.to_string())?;
    Ok(table)
}

fn missing(what: &str) -> WorkerError {
    WorkerError::Job(format!("the job names no [{what}]; only a binary with a model of its own can run it"))
}

/// The job's built-in model of tables, and its data.
///
/// # Errors
/// The model does not fit the data, which cannot be read, or has no tables.
pub fn sparse_built_in(job: &Job) -> Result<(Box<dyn SparseModel>, SparseSplit), WorkerError> {
    let data = job.data.as_ref().ok_or_else(|| missing("data"))?.load_sparse(&job.base_dir)?;
    let config = job.model.as_ref().ok_or_else(|| missing("model"))?;
    let shape = SparseShape {
        fields: data.train.fields(),
        dense: data.train.dense(),
        classes: data.classes,
        mean: data.train.mean_label().filter(|_| !data.classes).unwrap_or(0.0) as f32,
    };
    let fits = |test: &SparseDataset| (test.fields(), test.dense()) == (shape.fields, shape.dense);
    if !data.test.is_empty() && !fits(&data.test) {
        return Err(WorkerError::Job(
            "[data] test_path: its samples have other fields than those of path".into(),
        ));
    }
    let model = config.build_sparse(job.train.threads, shape, &job.tables_of_model());
    let model = model.map_err(|e| WorkerError::Job(format!("[model] {}: {e}", config.name())))?;
    Ok((model, data))
}

/// The number of the job's training samples.
///
/// # Errors
/// The job names no data, or it cannot be read.
pub fn training_samples(job: &Job) -> Result<usize, WorkerError> {
    let data = job.data.as_ref().ok_or_else(|| missing("data"))?;
    Ok(match data.is_sparse() {
        true => data.load_sparse(&job.base_dir)?.train.len(),
        false => data.load(&job.base_dir)?.train.len(),
    })
}

/// The job's built-in model, on the device that the job names, and its data.
///
/// # Errors
/// A device is missing, the model does not fit the data, which cannot be read; or the model is one of sparse tables.
pub fn on_device(job: &Job) -> Result<(Box<dyn Model>, Split), WorkerError> {
    if job.is_sparse() {
        let model = job.model.as_ref().map_or("", |m| m.name());
        return Err(WorkerError::Job(format!(
            "the rows of {model} are in sparse tables on the servers: `paraft train` trains it, and its record has the \
             evaluations"
        )));
    }
    let data = job.data.as_ref().ok_or_else(|| missing("data"))?.load(&job.base_dir)?;
    let config = job.model.as_ref().ok_or_else(|| missing("model"))?;
    let gpu = device::choose(job.train.device, job.train.precision, 0)
        .map_err(|e| WorkerError::Job(format!("train.device = \"{}\": {e}", job.train.device)))?;
    let shape = shape_of(&data.train);
    let model = match gpu {
        None => config.build_with(job.train.threads, shape),
        Some(options) if job.by_layers() => config.build_layered(options, |layers| keep(job, layers), shape),
        Some(options) => config.build_on(options, shape),
    };
    let model = model.map_err(|e| WorkerError::Job(format!("[model] {}: {e}", config.name())))?;
    Ok((model, data))
}

/// How much of a job's weights stays on the GPU when a process holds some layers at a time.
fn keep(job: &Job, layers: &[Layer]) -> Keep {
    match job.memory.resident {
        Some(resident) => {
            let values = |l: &Layer| l.params.iter().map(ExactSizeIterator::len).sum();
            Keep::Values(resident.values(layers.iter().map(values).max().unwrap_or_default()))
        }
        // Includes the editions at which minibatches in progress started.
        None => Keep::Editions(if job.parallel.schedule.overlaps_minibatches() { 2 } else { 1 }),
    }
}

/// How long a signalled worker may take to finish its step and leave the shards. Launchers wait longer.
const SIGNAL_TIMEOUT: std::time::Duration = std::time::Duration::from_secs(2);

/// The first signal ends the run at the next step, or during a wait. A second signal ends it at once, as does a
/// step that takes too long.
fn watch_signals(interrupt: Arc<AtomicBool>, signal: Arc<AtomicI32>) {
    let watch = move || {
        let Ok(rt) = tokio::runtime::Builder::new_current_thread().enable_all().build() else { return };
        rt.block_on(async {
            let number = paraft_host::lifeline::terminated().await;
            signal.store(number, Relaxed);
            interrupt.store(true, Relaxed);
            let soon = tokio::time::sleep(SIGNAL_TIMEOUT);
            tokio::select! { _ = paraft_host::lifeline::terminated() => {}, () = soon => {} }
            std::process::exit(128 + number);
        });
    };
    let _ = thread::Builder::new().name("signals".into()).spawn(watch);
}
