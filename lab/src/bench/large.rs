//! `paraft bench large`: a model that fills the memory: loaded, trained for some steps, its state written as a snapshot,
//! its only server killed and started again on its disk. What each takes, and the peak memory of both processes against
//! what cannot be less: for each parameter 12 bytes on the server (weight and Adam's two) and 8 on the worker (weight
//! and gradient).

use super::{
    figure::{self, Figure},
    scratch,
};
use clap::Args;
use paraft_fleet::{
    ask::ask_all,
    failure::Failure,
    fleet::{Fleet, JOB_FILE, server_data},
    launch,
};
use paraft_proto::ShardStatus;
use paraft_worker::{Job, exit};
use std::{
    fs,
    path::{Path, PathBuf},
    sync::atomic::AtomicI32,
    thread,
    time::{Duration, Instant, SystemTime},
};

#[derive(Args)]
pub struct LargeBenchArgs {
    /// Parameters of the model, an MLP on the embedded digits; about so many. Each needs 40 bytes of disk, in TMPDIR.
    #[arg(long, default_value_t = 1e8, value_parser = parameters)]
    pub params: f64,
    /// Steps. The server is killed in one of them, once it has written a snapshot: each three steps, as a rule.
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u64).range(1..))]
    pub steps: u64,
    /// Overrides a key of the job; may be given often.
    #[arg(long, value_name = "KEY=VALUE")]
    pub set: Vec<String>,
    /// One JSON object for each figure.
    #[arg(long)]
    pub json: bool,
}

/// For example 1e5.
fn parameters(text: &str) -> Result<f64, String> {
    let n: f64 = text.parse().map_err(|e| format!("{e}"))?;
    if (1e4..=1.6e10).contains(&n) { Ok(n) } else { Err("it is not within 1e4 to 1.6e10".into()) }
}

/// The minimum: weight and Adam's two state vectors on the server, weight and gradient on the worker.
const SERVER_BYTES: f64 = 12.0;
const WORKER_BYTES: f64 = 8.0;
/// Hidden layers of the model: the worker pushes its last gradients while it computes the first.
const LAYERS: usize = 5;
/// Size of the digits' images, and number of classes.
const INPUTS: usize = 64;
const CLASSES: usize = 10;
/// The timeout of each phase, per 1e8 parameters.
const TIMEOUT: Duration = Duration::from_secs(300);

/// The width of the hidden layers for about `params` parameters, and the model's exact number.
fn shape(params: f64) -> (usize, usize) {
    let hidden = (LAYERS - 1) as f64;
    let around = (INPUTS + CLASSES + LAYERS) as f64;
    let width = ((around * around + 4.0 * hidden * params).sqrt() - around) / (2.0 * hidden);
    let w = (width.round() as usize).max(1);
    (w, (INPUTS + 1) * w + (LAYERS - 1) * (w + 1) * w + (w + 1) * CLASSES)
}

pub fn run(args: &LargeBenchArgs) -> Result<i32, Failure> {
    let (width, params) = shape(args.params);
    let text = format!(
        "name = \"large\"\n[model]\nkind = \"mlp\"\nhidden = {:?}\n[data]\nkind = \"digits\"\n\
         [train]\ndevice = \"cpu\"\nworkers = 1\nbatch = 4\nepochs = 1000\nmax_steps = {}\n[optimizer]\nkind = \"adam\"\nlr = 1e-5\n\
         [eval]\nevery_epoch = false\n[cluster]\nservers = 1\nreplicas = 1\nshards = 1\ndurability = \"quorum-disk\"\n\
         timeout_ms = {}\n",
        [width; LAYERS],
        args.steps,
        TIMEOUT.as_millis(),
    );
    let scratch = scratch::folder()?;
    let job = Job::parse(&text, Path::new("bench"), &args.set)?;
    let file = scratch.path().join(JOB_FILE);
    fs::write(&file, job.to_toml()).map_err(|e| scratch::write(&file, e))?;
    let timeout = TIMEOUT.mul_f64((params as f64 / 1e8).max(1.0));
    let mut bench = Bench {
        fleet: Fleet::servers(&job, scratch.path(), Default::default())?,
        shard: server_data(scratch.path(), 0).join("shard-0"),
        interrupted: launch::interrupts(),
        deadline: Instant::now() + timeout,
        timeout,
        seen: Measurements::default(),
    };
    let figures = bench.run(args, &job, params as f64)?;
    figure::show(&figures, args.json);
    Ok(exit::OK)
}

/// Measurements during the run.
#[derive(Default)]
struct Measurements {
    server_peak: f64,
    worker_peak: f64,
    log_memory: u64,
    log_length: u64,
    disk: u64,
    /// Finished steps, with the time of the first observation.
    steps: Vec<(u64, Instant)>,
    /// When the current snapshot's write started.
    writing: Option<Instant>,
    /// The time of the last snapshot.
    snapshot: Option<SystemTime>,
    /// Seconds of each snapshot.
    snapshots: Vec<f64>,
}

struct Bench {
    fleet: Fleet,
    /// The folder of the only replica.
    shard: PathBuf,
    interrupted: std::sync::Arc<AtomicI32>,
    deadline: Instant,
    timeout: Duration,
    seen: Measurements,
}

impl Bench {
    fn run(&mut self, args: &LargeBenchArgs, job: &Job, params: f64) -> Result<Vec<Figure>, Failure> {
        let began = Instant::now();
        self.fleet.start_workers(job, None, true)?;
        self.until("the first pull", |_, s| s.bytes_pulled as f64 >= 4.0 * params)?;
        let loaded = began.elapsed().as_secs_f64();
        let mut figures = Vec::new();
        let case = format!("{params:.4e} parameters");
        let mut add = |what, value: f64, unit, theory: Option<(&str, f64)>| {
            let (reference, ratio) = theory.map_or(("-", None), |(name, least)| (name, Some(value / least)));
            let (case, reference) = (case.clone(), reference.into());
            figures.push(Figure { bench: "large", case, what, value, unit, reference, ratio, spread: None });
        };
        add("load", loaded, "s", None);
        let least = SERVER_BYTES * params / 1e9;
        self.until("a snapshot", |seen, s| !seen.snapshots.is_empty() && step(s) > 0)?;
        let at = self.seen.steps.last().map_or(0, |s| s.0);
        self.until("the next step", |_, s| step(s) > at)?;
        add("server peak", self.seen.server_peak, "GB", Some(("12 bytes a parameter", least)));
        let (killed, at) = (Instant::now(), self.seen.steps.last().map_or(0, |s| s.0));
        self.fleet.servers[0].kill();
        (self.seen.server_peak, self.seen.writing) = (0.0, None);
        self.fleet.restart_server(0)?;
        self.until("a leader", |_, s| s.role == "leader" && s.buckets > 0)?;
        add("failover, until it leads", killed.elapsed().as_secs_f64(), "s", None);
        self.until("the next pull", |_, s| s.bytes_pulled > 0)?;
        add("failover, until weights come", killed.elapsed().as_secs_f64(), "s", None);
        self.until("the next step", |_, s| step(s) > at)?;
        // The step of the kill and the current one are not representative.
        self.seen.steps.retain(|(s, _)| *s < at || *s > at + 1);
        self.until("the last step", |_, s| step(s) == args.steps)?;
        add(
            "server peak after its restart",
            self.seen.server_peak,
            "GB",
            Some(("12 bytes a parameter", least)),
        );
        self.end(args)?;
        add(
            "worker peak",
            self.seen.worker_peak,
            "GB",
            Some(("8 bytes a parameter", WORKER_BYTES * params / 1e9)),
        );
        let pairs = self.seen.steps.windows(2).filter(|w| w[1].0 == w[0].0 + 1);
        let steps: Vec<f64> = pairs.map(|w| w[1].1.duration_since(w[0].1).as_secs_f64()).collect();
        for (what, values) in [("step", &steps), ("snapshot", &self.seen.snapshots)] {
            if let Some((value, _)) = crate::statistics::median(values) {
                add(what, value, "s", None);
            }
        }
        let log = self.seen.log_length as f64;
        add(
            "log in memory, most",
            self.seen.log_memory as f64 / 1e9,
            "GB",
            Some(("the longest log", log / 1e9)),
        );
        add("disk, most", self.seen.disk as f64 / 1e9, "GB", Some(("12 bytes a parameter", least)));
        Ok(figures)
    }

    /// Waits for the worker's end, and checks that every push was applied exactly once.
    fn end(&mut self, args: &LargeBenchArgs) -> Result<(), Failure> {
        let mut last = None;
        let status = loop {
            last = self.look()?.or(last);
            if let Some(status) = self.fleet.workers[0].ended() {
                break status;
            }
        };
        let failed = |what: String| Err(Failure::new(exit::FAILED, what));
        if !status.success() {
            let worker = &mut self.fleet.workers[0];
            let (how, words) = (worker.obituary(), worker.last_words());
            return failed(format!("the worker {how}: {words}"));
        }
        let last = self.look()?.or(last);
        let (pushes, wanted) = last.map_or((0, 0), |s| (s.pushes, args.steps * u64::from(s.buckets)));
        match pushes == wanted {
            true => Ok(()),
            false => failed(format!("{pushes} pushes are in, and {wanted} were made")),
        }
    }

    /// Polls until `done` holds for the measurements and the shard's status.
    fn until(
        &mut self,
        what: &str,
        done: impl Fn(&Measurements, &ShardStatus) -> bool,
    ) -> Result<(), Failure> {
        self.deadline = Instant::now() + self.timeout;
        loop {
            if self.look()?.is_some_and(|s| done(&self.seen, &s)) {
                return Ok(());
            }
            let why = if self.fleet.workers[0].ended().is_some_and(|s| s.success()) {
                format!("the last step was done before {what}")
            } else if self.fleet.workers[0].ended().is_some() {
                let worker = &mut self.fleet.workers[0];
                let how = worker.obituary();
                format!("the worker {how} before {what}: {}", worker.last_words())
            } else if self.fleet.servers[0].ended().is_some() {
                let server = &mut self.fleet.servers[0];
                let how = server.obituary();
                format!("the server {how} before {what}: {}", server.last_words())
            } else if Instant::now() > self.deadline {
                format!("there is still no sign of {what}")
            } else {
                continue;
            };
            return Err(Failure::new(exit::FAILED, why).help("give more --steps or fewer --params"));
        }
    }

    /// Takes one measurement; returns the shard's status if the server answers.
    fn look(&mut self) -> Result<Option<ShardStatus>, Failure> {
        thread::sleep(Duration::from_millis(50));
        launch::check_interrupted(&self.interrupted)?;
        let seen = &mut self.seen;
        seen.server_peak = seen.server_peak.max(peak(self.fleet.servers[0].id()));
        seen.worker_peak = seen.worker_peak.max(peak(self.fleet.workers[0].id()));
        let modified = |name: &str| fs::metadata(self.shard.join(name)).and_then(|m| m.modified()).ok();
        if modified("snapshot.tmp").is_some() {
            seen.writing.get_or_insert_with(Instant::now);
        }
        let snapshot = modified("snapshot");
        if snapshot != seen.snapshot {
            seen.snapshots.extend(seen.writing.take().map(|since| since.elapsed().as_secs_f64()));
            seen.snapshot = snapshot;
        }
        seen.disk = seen.disk.max(bytes_in(&self.shard) + bytes_in(&self.shard.with_file_name("log")));
        let replies = ask_all(&self.fleet.addresses, false);
        let shard = replies.into_iter().flatten().flat_map(|r| r.shards).next();
        if let Some(s) = &shard {
            seen.log_memory = seen.log_memory.max(s.log_memory_bytes);
            seen.log_length = seen.log_length.max(s.log_bytes);
            if seen.steps.last().is_none_or(|(last, _)| step(s) > *last) {
                seen.steps.push((step(s), Instant::now()));
            }
        }
        Ok(shard)
    }
}

/// Finished steps of the worker.
fn step(s: &ShardStatus) -> u64 {
    s.members.iter().map(|m| m.clock).max().unwrap_or(0)
}

/// The peak resident set of a process in GB; 0 after its end.
fn peak(pid: u32) -> f64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = status.lines().find_map(|l| l.strip_prefix("VmHWM:"));
    let kib = line.and_then(|l| l.split_whitespace().next()?.parse::<f64>().ok());
    kib.unwrap_or(0.0) * 1024.0 / 1e9
}

/// Bytes of the files in a folder.
fn bytes_in(dir: &Path) -> u64 {
    let files = fs::read_dir(dir).into_iter().flatten().flatten();
    files.filter_map(|f| f.metadata().ok()).filter(|m| m.is_file()).map(|m| m.len()).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_model_has_about_as_many_parameters_as_were_asked_for() {
        for asked in [1e4, 1e6, 1e8, 1e9] {
            let (width, params) = shape(asked);
            let model = paraft_models::ModelConfig::Mlp { hidden: vec![width; LAYERS] };
            let model = model
                .build(paraft_models::DataShape {
                    sample: paraft_models::Sample::Values(INPUTS),
                    classes: Some(CLASSES),
                })
                .expect("a model");
            assert_eq!(model.tensors().iter().map(|t| t.len()).sum::<usize>(), params);
            assert!((params as f64 / asked - 1.0).abs() < 0.02, "{params} for {asked}");
        }
    }
}
