//! `paraft train`: launches a fleet on this machine, trains, reports.

use crate::{page, short::ShortArgs};
use clap::Args;
use paraft_checkpoint::{Checkpoint, Folder};
use paraft_engines::fleet::quoted;
use paraft_fleet::{
    again,
    existing::{ExistingFleet, KeepTime},
    failure::Failure,
    fleet::{Extras, REPORT_FILE},
    launch, out,
    run_dir::RunDir,
    table,
    targets::StandingArg,
};
use paraft_record::{METRICS_FILE, RunRecord};
use paraft_trace::{DEFAULT_STEPS, MAX_STEPS};
use paraft_worker::{
    Job, checkpoints, cli,
    device::{DeviceConfig, choose_for},
    exit,
    job::TransportConfig,
};
use std::{
    fs,
    path::{Path, PathBuf},
};

#[derive(Args)]
pub struct TrainArgs {
    /// The job file.
    pub job: PathBuf,
    #[command(flatten)]
    pub short: ShortArgs,
    /// Overrides a key of the job file, for example train.mode=asp; may be given often.
    #[arg(long, value_name = "KEY=VALUE")]
    pub set: Vec<String>,
    /// Ranks of each worker: processes that average their gradients among themselves and push once. Default:
    /// train.group_size.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=i64::from(paraft_common::group::MAX_RANKS)))]
    pub group_size: Option<u32>,
    /// On what workers compute: auto, cpu, cuda (each worker the next GPU) or cuda:N. Default: train.device.
    #[arg(long)]
    pub device: Option<DeviceConfig>,
    /// Go on from a checkpoint: its folder, a folder of checkpoints or a run's folder (then its latest). Without a
    /// path, the latest of checkpoint.dir, of --run-dir, or of this job's newest run in runs/ that has a whole one.
    #[arg(long, value_name = "PATH", num_args = 0..=1, default_missing_value = "latest")]
    pub resume: Option<PathBuf>,
    /// In a session of its own, which no terminal ends; a failure is handed over in this file. Set by `paraft submit`.
    #[arg(long, value_name = "FILE", hide = true)]
    pub detached: Option<PathBuf>,
    #[command(flatten)]
    pub run: RunArgs,
}

/// How a run is watched, and where its files go.
#[derive(Args)]
pub struct RunArgs {
    /// Where the run's files go. Default: runs/NAME-N, the first N that is free.
    #[arg(long)]
    pub run_dir: Option<PathBuf>,
    /// Give the fleet fault points: servers and workers meet through proxies over TCP, and `paraft chaos`
    /// can cut links and fill disks. Slower; not for production.
    #[arg(long, conflicts_with = "fleet")]
    pub faults: bool,
    /// Record what happens to each bucket on its way, and write it as trace.json into the run's folder, for
    /// ui.perfetto.dev or chrome://tracing.
    #[arg(long)]
    pub trace: bool,
    /// With --trace: so many steps, from the first.
    #[arg(long, value_name = "N", default_value_t = DEFAULT_STEPS, requires = "trace",
        value_parser = clap::value_parser!(u64).range(1..=MAX_STEPS))]
    pub trace_steps: u64,
    #[command(flatten)]
    pub standing: StandingArg,
    /// With --fleet: so long after the job's end the servers keep its weights, as 90s, 30min, 12h, 7d or forever.
    #[arg(long, value_name = "TIME", default_value = "1h", requires = "fleet")]
    pub keep: KeepTime,
    /// Serve no live page.
    #[arg(long)]
    pub no_dashboard: bool,
    /// Print the summary as one JSON object instead of a table.
    #[arg(long)]
    pub json: bool,
}

impl RunArgs {
    /// The existing fleet for the job, if one is given.
    pub fn on(&self) -> Result<Option<ExistingFleet>, Failure> {
        let on = |servers| ExistingFleet { servers, keep: self.keep.0, delete: false, remember: false };
        Ok(self.standing.servers()?.map(on))
    }
}

pub fn run(args: &TrainArgs) -> Result<i32, Failure> {
    let Some(file) = &args.detached else { return run_here(args) };
    let session = nix::unistd::setsid();
    let session = session.map_err(|e| Failure::new(exit::IO, format!("no session of its own: {e}")));
    let ran = session.and_then(|_| run_here(args));
    if let Err(failure) = &ran
        && let Err(e) = failure.hand_over(file)
    {
        eprintln!("warning: {}: {e}", file.display());
    }
    ran
}

fn run_here(args: &TrainArgs) -> Result<i32, Failure> {
    let set = args.short.with(&args.set)?;
    let mut job = Job::load(&args.job, &cli::with_group_size(&set, args.group_size))?;
    if let Some(device) = args.device {
        job.compute_on(device).map_err(|e| Failure::new(exit::CONFIG, e))?;
    }
    job.checkpoint_by_default();
    // Workers report it too, but in their own logs and after the servers have started.
    if job.model.is_some() {
        let asked = job.device();
        choose_for(asked, job.train.precision, 0, job.ranks_that_reduce())
            .map_err(|e| Failure::new(exit::UNAVAILABLE, format!("train.device = \"{asked}\": {e}")))?;
    }
    train("train", &mut job, args.resume.as_deref(), &args.run)?;
    Ok(exit::OK)
}

/// Trains a job on its own fleet and reports, for this command; returns the run's folder.
pub fn train(
    command: &str,
    job: &mut Job,
    resumed: Option<&Path>,
    args: &RunArgs,
) -> Result<PathBuf, Failure> {
    if args.faults {
        job.cluster.transport = TransportConfig::Tcp; // a Unix socket would bypass the proxies
    }
    let resume = resumed.map(|p| find_checkpoint(p, job, args.run_dir.as_deref())).transpose()?;
    let dir = RunDir::of(args.run_dir.as_deref(), &job.name, resume.is_some())?;
    if !args.no_dashboard {
        page::of_fleets(job.servers())?;
    }
    let interrupted = launch::interrupts();
    let trace = args.trace.then_some(args.trace_steps);
    let extras = Extras {
        faults: args.faults,
        trace,
        on: args.on()?,
        stops_on_interrupt: true,
        reports: true,
        ..Extras::default()
    };
    let launched = launch::launch_with(job, &dir, resume.as_deref(), args.json, &interrupted, extras);
    // Also for a failed run: the trace may show the cause.
    let trace = args.trace.then(|| paraft_trace::merge(&dir, None));
    let trace_line = trace.map(|t| t.map_or_else(|e| format!("none: {e}"), |t| crate::trace::summary(&t)));
    if let Some(trace_line) = trace_line.as_ref().filter(|_| launched.is_err() || args.json) {
        eprintln!("trace {trace_line}");
    }
    let end = End { command, job, dir: &dir, resumed };
    let launched = launched.map_err(|e| end.failed(e))?;
    table::show(&launched.record, args.json, &dir.join(REPORT_FILE))?;
    if let Some(trace_line) = trace_line.filter(|_| !args.json) {
        out!("trace   {trace_line}");
    }
    match launched.interrupted {
        true => Err(end.stopped()),
        false => Ok(dir.to_path_buf()),
    }
}

/// How a run has ended early, and what its user can do then.
struct End<'a> {
    command: &'a str,
    job: &'a Job,
    dir: &'a Path,
    /// What it was resumed from, as the user gave it.
    resumed: Option<&'a Path>,
}

impl End<'_> {
    /// The first Ctrl-C has stopped it.
    fn stopped(&self) -> Failure {
        let why = format!(
            "interrupted; the job was stopped, its weights and its report are in {}",
            self.dir.display()
        );
        Failure::new(exit::INTERRUPTED, why)
            .help(self.command().unwrap_or_else(|| self.no_checkpoint().into()))
    }

    /// It has failed, or was ended at once.
    fn failed(&self, e: Failure) -> Failure {
        if matches!(e.code(), exit::USAGE | exit::CONFIG) {
            return e; // a repetition fails again
        }
        let e = e.more_help(self.command().unwrap_or_else(|| self.no_checkpoint().into()));
        match self.dir.join(METRICS_FILE).exists() {
            true => e.more_help(format!(
                "for a report of what is recorded: paraft report {}",
                quoted(&self.dir.display().to_string())
            )),
            false => e,
        }
    }

    /// The command that continues from the last whole checkpoint, if there is one.
    fn command(&self) -> Option<String> {
        let folder = checkpoints::folder(self.job, Some(self.dir))?;
        Folder::new(&folder).newest_whole(None)?;
        let own = self.job.checkpoint.as_ref().is_some_and(|c| c.dir.is_some());
        let from: &Path = if own { &folder } else { self.dir };
        Some(format!(
            "continue from the last checkpoint: {}",
            again::command(self.command, "--resume", self.resumed, from)
        ))
    }

    fn no_checkpoint(&self) -> &'static str {
        match (&self.job.checkpoint, self.job.checkpoints()) {
            (_, Some(_)) => {
                "there is no checkpoint to continue from yet; checkpoint.every_steps or checkpoint.every_epochs makes them more often"
            }
            (Some(_), None) => "there is no checkpoint to continue from; checkpoint.keep = 0 turns them off",
            (None, None) => {
                "there is no checkpoint to continue from; checkpoint.every_epochs = 1 in the job file makes one each epoch"
            }
        }
    }
}

/// Writes the report of a run and prints its summary.
pub fn tell(record: &RunRecord, dir: &Path, json: bool) -> Result<(), Failure> {
    let report = dir.join(REPORT_FILE);
    paraft_record::write_report(&report, std::slice::from_ref(record))?;
    table::show(record, json, &report)
}

/// The whole checkpoint to resume from.
pub fn find_checkpoint(path: &Path, job: &Job, run_dir: Option<&Path>) -> Result<PathBuf, Failure> {
    let found = match (path.to_str(), checkpoints::folder(job, run_dir)) {
        (Some("latest"), Some(folder)) => Folder::find(&folder)?,
        (Some("latest"), None) => {
            let (found, passed_over) = newest_checkpoint(Path::new("runs"), &job.name);
            passed_over.iter().for_each(|run| eprintln!("passed over {run}"));
            found.ok_or_else(|| {
                let why = format!("no run of `{}` in runs/ has a whole checkpoint", job.name);
                Failure::new(exit::DATA, why)
                    .help("leave --resume out to begin from the start, or give the path of a checkpoint")
            })?
        }
        _ => Folder::find(path)?,
    };
    let checkpoint = Checkpoint::open(&found)?;
    checkpoint.verify()?;
    fs::canonicalize(&found).map_err(|e| Failure::new(exit::DATA, format!("{}: {e}", found.display())))
}

/// The newest whole checkpoint of the newest `runs/NAME-N` that has one; and the newer runs, with the
/// reasons why they do not count.
fn newest_checkpoint(runs: &Path, name: &str) -> (Option<PathBuf>, Vec<String>) {
    let number = |p: &Path| {
        let file = p.file_name()?.to_str()?;
        file.strip_prefix(name)?.strip_prefix('-')?.parse::<u64>().ok()
    };
    let all = fs::read_dir(runs).into_iter().flatten().flatten().map(|e| e.path());
    let mut all: Vec<_> = all.filter_map(|p| Some((number(&p)?, p))).collect();
    all.sort_by(|a, b| b.cmp(a));
    let mut passed_over = Vec::new();
    for (_, run) in all {
        let folder = Folder::new(run.join("checkpoints"));
        let newest = folder.list().into_iter().next();
        match (folder.newest_whole(None), newest) {
            (Some(whole), newest) => {
                let broken = newest.filter(|n| *n != whole);
                passed_over.extend(broken.map(|n| format!("{}: it is not whole", n.display())));
                return (Some(whole), passed_over);
            }
            (None, Some(_)) => {
                passed_over.push(format!("{}: none of its checkpoints is whole", run.display()))
            }
            (None, None) => passed_over.push(format!("{}: it holds no checkpoint", run.display())),
        }
    }
    (None, passed_over)
}
