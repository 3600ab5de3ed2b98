//! `paraft bench resilience`: training while processes are killed: what it costs in useful samples and in accuracy, beside
//! the two things that people do without Paraft.
//!
//! The ways, each also without kills:
//! - `paraft`: the job as it is; a killed server or worker restarts after [`RESTART_DELAY`], the others continue.
//! - `restart`: the same programs with one replica and checkpoints; whatever is killed, everything is stopped, and
//!   started again from the latest checkpoint after the same while.
//! - `torchrun`: PyTorch DDP (gloo) under torchrun with restarts, with `--peers`: the same model and minibatch, a
//!   checkpoint every 50 steps. torchrun starts all workers again at once, without the while.

use super::{
    figure::{self, Figure},
    scratch,
};
use crate::{health, statistics::median};
use clap::Args;
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use paraft_checkpoint::{Checkpoint, Folder};
use paraft_fleet::{RESTART_DELAY, failure::Failure, faults::process, launch};
use paraft_record::RunRecord;
use paraft_worker::{Job, exit};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};
use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    sync::{
        Mutex,
        atomic::{AtomicBool, AtomicI32, Ordering::Relaxed},
    },
    thread,
    time::{Duration, Instant},
};
use torchrun::torchrun;

mod torchrun;

#[derive(Args)]
pub struct ResilienceBenchArgs {
    /// The job file, for example examples/mnist-convnet.toml.
    pub job: PathBuf,
    /// Overrides a key of the job file; may be given often.
    #[arg(long, value_name = "KEY=VALUE")]
    pub set: Vec<String>,
    /// Runs of each way, interleaved; the median counts.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=10_000))]
    pub repeats: u64,
    /// A run with kills that is not done after so many times the quiet run's time is ended; what it has reached by then
    /// counts.
    #[arg(long, default_value_t = 4.0)]
    pub give_up: f64,
    /// Ways to leave out, comma-separated: restart, torchrun.
    #[arg(long, value_delimiter = ',')]
    pub without: Vec<String>,
    /// A folder with fault_ddp.py, for torchrun.
    #[arg(long)]
    pub peers: Option<PathBuf>,
    /// A python with torch, for torchrun.
    #[arg(long, default_value = "python3")]
    pub python: String,
    /// One JSON object for each figure.
    #[arg(long)]
    pub json: bool,
}

/// Kills by this seed; and when the run is given up.
#[derive(Clone, Copy)]
struct Resilience {
    seed: u64,
    most: Duration,
}

/// The result of one run.
struct Run {
    /// From the start of the first process to the end of the last.
    seconds: f64,
    /// Samples whose gradients are in the final weights.
    useful: f64,
    accuracy: Option<f64>,
    kills: u32,
}

/// The figures of one way.
#[derive(Default)]
struct Case {
    rate: Vec<f64>,
    accuracy: Vec<f64>,
    kills: Vec<f64>,
}

pub fn run(args: &ResilienceBenchArgs) -> Result<i32, Failure> {
    let job = Job::load(&args.job, &args.set)?;
    let scratch = scratch::folder()?;
    let interrupted = launch::interrupts();
    let mut cases: BTreeMap<(&str, bool), Case> = BTreeMap::new();
    let mut quiet: BTreeMap<&str, f64> = BTreeMap::new();
    let wants = |way: &str| !args.without.iter().any(|w| w == way);
    for repeat in 0..args.repeats {
        for fire in [false, true] {
            for way in ["paraft", "restart", "torchrun"].into_iter().filter(|w| wants(w)) {
                let dir = scratch.path().join(format!("{way}-{fire}-{repeat}"));
                fs::create_dir_all(&dir).map_err(|e| scratch::write(&dir, e))?;
                let fire: Option<Resilience> = fire.then(|| {
                    let most = quiet.get(way).copied().unwrap_or(f64::INFINITY) * args.give_up;
                    Resilience { seed: 1 + repeat, most: Duration::from_secs_f64(most.min(86_400.0)) }
                });
                let run = match (way, &args.peers) {
                    ("paraft", _) => paraft(&job, &dir, fire, &interrupted)?,
                    ("restart", _) => restart(&job, &dir, fire, &interrupted)?,
                    (_, Some(peers)) => torchrun(&args.python, &job, peers, &dir, fire, &interrupted)?,
                    (_, None) => continue,
                };
                if fire.is_none() {
                    quiet.insert(way, run.seconds);
                }
                if !args.json {
                    let (seconds, kills) = (run.seconds, run.kills);
                    eprintln!("{way}: {kills} kills, {seconds:.1} s, accuracy {:?}", run.accuracy);
                }
                let case = cases.entry((way, fire.is_some())).or_default();
                case.rate.push(run.useful / run.seconds);
                case.accuracy.extend(run.accuracy);
                case.kills.push(f64::from(run.kills));
            }
        }
    }
    let figures = report(&cases);
    figure::show(&figures, args.json);
    Ok(exit::OK)
}

fn report(cases: &BTreeMap<(&'static str, bool), Case>) -> Vec<Figure> {
    let mut figures = Vec::new();
    for ((way, fire), case) in cases {
        let quiet = cases.get(&(way, false));
        let name = if *fire { format!("{way}, with kills") } else { format!("{way}, quiet") };
        let mut add = |what, values: &[f64], of_quiet: Option<&[f64]>, unit| {
            let Some((value, spread)) = median(values) else { return };
            let base = of_quiet.and_then(median).map(|m| m.0);
            figures.push(Figure {
                bench: "resilience",
                case: name.clone(),
                what,
                value,
                unit,
                reference: "quiet".into(),
                ratio: base.filter(|b| *b > 0.0).map(|b| value / b),
                spread,
            });
        };
        add("goodput", &case.rate, quiet.map(|q| q.rate.as_slice()), "useful samples/s");
        let percent = |v: &[f64]| v.iter().map(|a| a * 100.0).collect::<Vec<_>>();
        let (accuracy, base) = (percent(&case.accuracy), quiet.map(|q| percent(&q.accuracy)));
        add("accuracy", &accuracy, base.as_deref(), "%");
        if *fire {
            add("kills", &case.kills, None, "kills");
        }
    }
    figures
}

/// Seconds between two kills, on average: each is between half and one and a half times this.
const KILL_INTERVAL: f64 = 10.0;

/// What was done while processes were killed, or were not.
struct Measured<T> {
    result: T,
    /// How long it took.
    seconds: f64,
    kills: u32,
}

impl<T> Measured<T> {
    /// `victims` are those that may be killed; `killed` is called after each kill.
    fn of(
        fire: Option<Resilience>,
        victims: impl FnMut() -> Vec<(String, u32)> + Send,
        killed: impl FnMut() + Send,
        run: impl FnOnce() -> T,
    ) -> Self {
        let (stop, began) = (AtomicBool::new(false), Instant::now());
        let (result, kills) = thread::scope(|s| {
            let stop = &stop;
            let killing = fire.map(|f| s.spawn(move || killer(f.seed, stop, victims, killed)));
            let result = run();
            stop.store(true, Relaxed);
            (result, killing.map_or(0, |k| k.join().unwrap_or(0)))
        });
        Self { result, seconds: began.elapsed().as_secs_f64(), kills }
    }
}

/// Kills a random one of `victims` at intervals until it is stopped; returns the number of kills.
fn killer(
    seed: u64,
    stop: &AtomicBool,
    mut victims: impl FnMut() -> Vec<(String, u32)>,
    mut killed: impl FnMut(),
) -> u32 {
    let began = Instant::now();
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let mut share = || f64::from(rng.next_u32()) / f64::from(u32::MAX);
    let mut kills = 0;
    loop {
        let until = Instant::now() + Duration::from_secs_f64(KILL_INTERVAL * (0.5 + share()));
        while Instant::now() < until {
            if stop.load(Relaxed) {
                return kills;
            }
            thread::sleep(Duration::from_millis(20));
        }
        let victims = victims();
        let Some((name, pid)) = victims.get((share() * victims.len() as f64) as usize) else { continue };
        if !stop.load(Relaxed) && kill(Pid::from_raw(*pid as i32), Signal::SIGKILL).is_ok() {
            kills += 1;
            eprintln!("  {:6.1} s  kill {name}", began.elapsed().as_secs_f64());
            killed();
        }
    }
}

/// Processes that may be killed: no server while another one is down or learning, and not the last
/// worker.
fn minority(dir: &Path) -> Vec<(String, u32)> {
    let addresses = fs::read_to_string(dir.join(paraft_fleet::fleet::SERVERS_FILE)).unwrap_or_default();
    let addresses: Vec<String> = addresses.split(',').map(str::to_string).collect();
    let whole = health::look(&addresses).and_then(|(fleet, replies)| health::whole(&fleet, &replies)).is_ok();
    let all = process::parts_of(dir);
    let workers = all.iter().filter(|(n, _)| n.starts_with("worker")).count();
    all.into_iter().filter(|(n, _)| if n.starts_with("worker") { workers > 1 } else { whole }).collect()
}

/// Samples in the final weights, from the servers' counters. (BatchNorm's buffers are pushed too but do
/// not count as parameters: a ConvNet's figure is a third of a percent too high, in all runs.)
fn useful(record: &RunRecord, job: &Job, parameters: u64) -> f64 {
    let pushed: u64 = record.shards.iter().map(|s| s.bytes_pushed).sum();
    pushed as f64 / (4.0 * parameters as f64) * job.train.batch as f64
}

fn paraft(job: &Job, dir: &Path, fire: Option<Resilience>, interrupted: &AtomicI32) -> Result<Run, Failure> {
    let mut job = job.clone();
    job.cluster.max_restarts = u32::MAX;
    let launch = || launch::launch(&job, dir, None, true, interrupted);
    let Measured { result, seconds, kills } = Measured::of(fire, || minority(dir), || (), launch);
    let record = result?;
    let accuracy = record.summarize().final_accuracy;
    Ok(Run { seconds, useful: useful(&record, &job, record.run.parameters), accuracy, kills })
}

fn restart(job: &Job, dir: &Path, fire: Option<Resilience>, interrupted: &AtomicI32) -> Result<Run, Failure> {
    let mut job = job.clone();
    (job.cluster.replicas, job.cluster.max_restarts) = (1, 0);
    // As often as the torchrun script.
    let mut checkpoint = job.checkpoint.clone().unwrap_or_default();
    (checkpoint.every_steps, checkpoint.keep) = (Some(50), checkpoint.keep.max(1));
    job.checkpoint = Some(checkpoint);
    let (done, now) = (AtomicBool::new(false), Mutex::new(dir.join("0")));
    // The signal that ends a launch: the user's, or this harness's after a kill.
    let end = AtomicI32::new(0);
    let began = Instant::now();
    let most = fire.map_or(Duration::MAX, |f| f.most);
    // The record of the run; for a run that timed out, the step of its last checkpoint.
    let run = || -> Result<Result<RunRecord, u64>, Failure> {
        for life in 0.. {
            let here = dir.join(life.to_string());
            fs::create_dir_all(&here).map_err(|e| scratch::write(&here, e))?;
            if let Ok(mut now) = now.lock() {
                now.clone_from(&here);
            }
            let latest =
                (0..life).rev().find_map(|l| Folder::new(dir.join(format!("{l}/checkpoints"))).latest());
            end.store(0, Relaxed);
            match launch::launch(&job, &here, latest.as_deref(), true, &end) {
                Ok(record) => return Ok(Ok(record)),
                Err(e) if interrupted.load(Relaxed) != 0 || fire.is_none() => return Err(e),
                Err(_) if began.elapsed() > most => {
                    let steps = latest
                        .iter()
                        .filter_map(|l| Checkpoint::open(l).ok())
                        .map(|c| c.manifest().resume_step);
                    return Ok(Err(steps.max().unwrap_or(0)));
                }
                Err(_) if end.load(Relaxed) != 0 => thread::sleep(RESTART_DELAY),
                Err(e) => return Err(e),
            }
        }
        Err(Failure::new(exit::FAILED, "the run never ended"))
    };
    let victims = || now.lock().map(|d| process::parts_of(&d)).unwrap_or_default();
    let killed = || end.store(Signal::SIGKILL as i32, Relaxed);
    let Measured { result, seconds, kills } = thread::scope(|s| {
        s.spawn(|| {
            while !done.load(Relaxed) {
                if interrupted.load(Relaxed) != 0 || began.elapsed() > most {
                    end.store(interrupted.load(Relaxed).max(1), Relaxed);
                }
                thread::sleep(Duration::from_millis(20));
            }
        });
        let measured = Measured::of(fire, victims, killed, run);
        done.store(true, Relaxed);
        measured
    });
    let samples = |steps: u64| (steps * job.train.batch as u64 * u64::from(job.shares())) as f64;
    let (useful, accuracy) = match result? {
        // Every step is in the weights, even if some were trained twice.
        Ok(record) => {
            let resumed = record.run.resumed_step.map_or(0, |s| s.0);
            (record.run.samples_budget as f64 + samples(resumed), record.summarize().final_accuracy)
        }
        Err(steps) => (samples(steps), None),
    };
    Ok(Run { seconds, useful, accuracy, kills })
}
