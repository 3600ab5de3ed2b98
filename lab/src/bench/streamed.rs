//! `paraft bench streamed`: a transformer whose worker holds some of its layers at a time (`memory.resident`) beside the same
//! with all of them: samples a second, and the worker's peak of anonymous memory against its budget.
//!
//! One worker, one server of one shard, TCP: what is on its way is in the worker's own memory and counted. Initial weights lie in a file
//! that the kernel may take out of memory; they are not.

use super::{
    figure::{self, Figure},
    load::go_on,
};
use clap::Args;
use paraft_common::need::Bytes;
use paraft_fleet::{
    failure::Failure,
    fleet::{Fleet, JOB_FILE},
    launch,
};
use paraft_record::{Event, METRICS_FILE, read_events};
use paraft_worker::{Job, exit};
use std::{fs, path::Path, sync::atomic::AtomicI32, thread, time::Duration};

#[derive(Args)]
pub struct StreamedBenchArgs {
    /// Blocks of the transformer.
    #[arg(long, default_value_t = 24, value_parser = clap::value_parser!(u32).range(2..=1024))]
    pub layers: u32,
    /// Its width: a multiple of 64.
    #[arg(long, default_value_t = 512, value_parser = clap::value_parser!(u32).range(64..=16384))]
    pub width: u32,
    /// Tokens of a sample.
    #[arg(long, default_value_t = 128, value_parser = clap::value_parser!(u32).range(1..=65536))]
    pub context: u32,
    /// Samples of a minibatch.
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=65536))]
    pub batch: u32,
    /// Layers that the worker may hold.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub resident: u32,
    /// Steps of each run.
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u64).range(2..=1_000_000))]
    pub steps: u64,
    /// Runs, streamed and whole in turn; the median counts.
    #[arg(long, default_value_t = 3, value_parser = super::repeats)]
    pub repeats: usize,
    /// Streamed runs alone, for a model that is larger than the memory.
    #[arg(long)]
    pub no_whole: bool,
    /// Overrides a key of the jobs; may be given often.
    #[arg(long, value_name = "KEY=VALUE")]
    pub set: Vec<String>,
    /// One JSON object for each figure.
    #[arg(long)]
    pub json: bool,
}

/// Bytes of a block's weights and biases, norms without biases: what `resident` counts.
fn block(width: u32) -> f64 {
    let w = f64::from(width);
    4.0 * (12.0 * w * w + 11.0 * w)
}

/// What one run came to.
struct Run {
    samples_per_s: f64,
    peak_bytes: f64,
}

pub fn run(args: &StreamedBenchArgs) -> Result<i32, Failure> {
    let scratch = tempfile::tempdir().map_err(|e| Failure::new(exit::IO, e))?;
    let interrupted = launch::interrupts();
    let text = scratch.path().join("text.txt");
    // Samples do not overlap, and one in ten is held out.
    let tokens = u64::from(args.context) * u64::from(args.batch) * args.steps * 2 + 4096;
    fs::write(&text, "the quick brown fox jumps over the lazy dog. ".repeat(tokens as usize / 45 + 1))
        .map_err(|e| super::write(&text, e))?;
    let (mut streamed, mut whole) = (Vec::new(), Vec::new());
    for repeat in 0..args.repeats {
        for (resident, runs) in [(Some(args.resident), &mut streamed), (None, &mut whole)] {
            if resident.is_none() && args.no_whole {
                continue;
            }
            let dir = scratch.path().join(format!("{repeat}-{}", resident.is_some()));
            let job = job(args, &text, resident)?;
            runs.push(one(&job, &dir, &interrupted)?);
            let _ = fs::remove_dir_all(&dir);
        }
    }
    figure::show(&figures(args, &streamed, &whole), args.json);
    Ok(exit::OK)
}

fn figures(args: &StreamedBenchArgs, streamed: &[Run], whole: &[Run]) -> Vec<Figure> {
    let case =
        format!("{} layers of {}, {} held", args.layers, Bytes(block(args.width) as u64), args.resident);
    let rates = |runs: &[Run]| runs.iter().map(|r| r.samples_per_s).collect::<Vec<_>>();
    let peaks = |runs: &[Run]| runs.iter().map(|r| r.peak_bytes / 1e6).collect::<Vec<_>>();
    let budget = vec![block(args.width) * f64::from(args.resident) / 1e6; streamed.len()];
    let model = vec![block(args.width) * f64::from(args.layers) / 1e6; whole.len()];
    let (rate, memory) = ("samples", "the worker's memory, most");
    let one = |case: &str, what, unit, values: &[f64], against: &str, theirs: &[f64]| {
        let figure = Figure::alone("streamed", case, what, unit, values)?;
        Some(if theirs.is_empty() { figure } else { figure.against(against, values, theirs) })
    };
    let all = "all layers held";
    [
        one(&case, rate, "samples/s", &rates(streamed), all, &rates(whole)),
        one(&case, memory, "MB", &peaks(streamed), "its budget", &budget),
        one(all, rate, "samples/s", &rates(whole), "-", &[]),
        one(all, memory, "MB", &peaks(whole), "the layers", &model),
    ]
    .into_iter()
    .flatten()
    .collect()
}

fn job(args: &StreamedBenchArgs, text: &Path, resident: Option<u32>) -> Result<Job, Failure> {
    let memory = resident.map_or(String::new(), |n| format!("[memory]\nresident = {n}\n"));
    let text = format!(
        "name = \"streamed\"\n[model]\nkind = \"transformer\"\nlayers = {}\nheads = {}\nwidth = {}\n\
         [data]\nkind = \"text\"\npath = {text:?}\ncontext = {}\n{memory}[train]\ndevice = \"cpu\"\nworkers = 1\n\
         batch = {}\nepochs = 1000\nmax_steps = {}\n[optimizer]\nkind = \"sgd\"\nlr = 0.01\n[eval]\nevery_epoch = false\n\
         [cluster]\nservers = 1\nreplicas = 1\nshards = 1\ntransport = \"tcp\"\ntimeout_ms = 300000\n",
        args.layers,
        args.width / 64,
        args.width,
        args.context,
        args.batch,
        args.steps
    );
    Ok(Job::parse(&text, Path::new("bench"), &args.set)?)
}

fn one(job: &Job, dir: &Path, interrupted: &AtomicI32) -> Result<Run, Failure> {
    fs::create_dir_all(dir).map_err(|e| super::write(dir, e))?;
    let file = dir.join(JOB_FILE);
    fs::write(&file, job.to_toml()).map_err(|e| super::write(&file, e))?;
    let mut fleet = Fleet::servers(job, dir, Default::default())?;
    fleet.start_workers(job, None, true)?;
    let pid = fleet.workers[0].id();
    let mut peak_bytes = 0.0f64;
    let status = loop {
        go_on(interrupted)?;
        peak_bytes = peak_bytes.max(anonymous(pid));
        if let Some(status) = fleet.workers[0].ended() {
            break status;
        }
        thread::sleep(Duration::from_millis(2));
    };
    if !status.success() {
        let worker = &mut fleet.workers[0];
        let (how, words) = (worker.obituary(), worker.last_words());
        return Err(Failure::new(exit::FAILED, format!("the worker {how}: {words}")));
    }
    let events = read_events(dir.join(METRICS_FILE)).map_err(|e| Failure::new(exit::IO, e))?;
    let worker = events.into_iter().find_map(|e| if let Event::Worker(w) = e { Some(w) } else { None });
    let Some(worker) = worker.filter(|w| w.seconds > 0.0) else {
        return Err(Failure::new(exit::FAILED, "the worker has not said how long it took"));
    };
    Ok(Run { samples_per_s: worker.samples as f64 / worker.seconds, peak_bytes })
}

/// What a process has in anonymous memory now, in bytes; 0 where it has ended.
fn anonymous(pid: u32) -> f64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = status.lines().find_map(|l| l.strip_prefix("RssAnon:"));
    line.and_then(|l| l.split_whitespace().next()?.parse::<f64>().ok()).unwrap_or(0.0) * 1024.0
}
