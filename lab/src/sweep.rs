//! `paraft sweep`: one job with many settings, on one fleet that stands; the best of them, as a job file.
//!
//! ```text
//!  space ── a trial's settings ──▶ job ──▶ a run on the fleet ──▶ its held-out evaluation ──▶ search: who goes on?
//! ```
//!
//! - `space`: what may be tried. `search`: who goes next; it knows numbers alone. `log`: what was done, so that a sweep goes on.
//!   `track_later`: a sweep to MLflow when it has ended.
//!
//! A trial that goes on to the next rung begins with its own checkpoint. It is a job of the fleet while it trains and leaves nothing
//! there; what is kept of it lies in its folder.

mod log;
mod search;
mod space;
mod track_later;

pub use track_later::{of as of_sweep, send};

use clap::{Args, ValueEnum};
use log::{Ended, Log};
use paraft_checkpoint::Folder;
use paraft_dashboard::{Here, Page, Source};
use paraft_fleet::{
    failure::Failure,
    fleet::{Extras, Fleet, SERVERS_FILE},
    launch,
    run_dir::RunDir,
    standing::{self, On},
    track,
    whose::addresses,
};
use paraft_record::sweep::{self, write_sweep};
use paraft_worker::{Job, exit};
use search::{Next, Rule, Score, Search};
use serde_json::{Value, json};
use space::{Point, Space};
use std::{
    collections::BTreeMap,
    fs,
    net::SocketAddr,
    path::PathBuf,
    sync::{
        Arc, Condvar, Mutex,
        atomic::{AtomicBool, AtomicI32, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};
use tokio::sync::watch;

/// In the sweep's folder.
const LOG_FILE: &str = "sweep.jsonl";
const BEST_FILE: &str = "best.toml";
const REPORT_FILE: &str = "report.html";
/// A trial that is killed, or whose fleet is not reached, is tried so often.
const TRIES: u32 = 3;
/// Before a fleet that was not reached is tried again: what kept it busy may be over by then.
const PAUSE: Duration = Duration::from_secs(2);

/// How settings are searched.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Kind {
    /// Every point of the space, for all epochs.
    Grid,
    /// So many points, drawn with the seed, for all epochs.
    Random,
    /// Successive halving: all begin with few epochs, and of each rung the best of each `eta` go on.
    Halving,
    /// Likewise, but nobody waits for a rung to be full (Li et al. 2018).
    Asha,
}

impl Kind {
    fn rule(self) -> Rule {
        match self {
            Self::Grid | Self::Random => Rule::Once,
            Self::Halving => Rule::Halving,
            Self::Asha => Rule::Asha,
        }
    }
}

/// Which job, over which settings.
#[derive(Args)]
pub struct SweepArgs {
    /// The job file.
    pub job: PathBuf,
    /// The settings that are tried: docs/sweeps.md.
    #[arg(long, value_name = "FILE")]
    pub space: PathBuf,
    /// How they are searched.
    #[arg(long, value_enum, default_value_t = Kind::Asha)]
    pub search: Kind,
    /// Settings that are tried at most. Default: the whole grid, else 64.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub trials: Option<u32>,
    /// With halving and asha: epochs of the lowest rung; the highest is train.epochs.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..))]
    pub min_epochs: u64,
    /// With halving and asha: one of so many goes on, with so many times the epochs.
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u32).range(2..=64))]
    pub eta: u32,
    /// Of what is drawn. Default: the job's.
    #[arg(long, value_name = "N")]
    pub seed: Option<u64>,
    /// Trials at a time. Default: as many as have cores of their own.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=256))]
    pub parallel: Option<u32>,
    /// Let trials that go at the same time share cores.
    #[arg(long)]
    pub share_cores: bool,
    /// Train on a fleet that stands already instead of one of the sweep's own: its folder, a job file with cluster.addresses, or servers as
    /// host:port, comma-separated.
    #[arg(long, value_name = "FLEET")]
    pub to: Option<PathBuf>,
    /// Overrides a key of the job file; may be given often.
    #[arg(long, value_name = "KEY=VALUE")]
    pub set: Vec<String>,
    /// Where everything goes. A sweep that was ended goes on in its folder. Default: runs/NAME-sweep-N, the first N that is free.
    #[arg(long)]
    pub run_dir: Option<PathBuf>,
    /// Serve the live page of the fleet here, with the sweep's trials, for example 127.0.0.1:8080 (port 0: any). Who has the token in its
    /// address may look and act; it is drawn, or in PARAFT_DASHBOARD_TOKEN
    #[arg(long, value_name = "ADDR")]
    pub dashboard: Option<SocketAddr>,
    /// Print one JSON object for each trial that has ended, and one for the best.
    #[arg(long)]
    pub json: bool,
}

/// A sweep as it was asked for.
struct Sweep<'a> {
    args: &'a SweepArgs,
    space: Space,
    /// Of each trial.
    points: Vec<Point>,
    /// Epochs of each rung.
    rungs: Vec<u64>,
    dir: PathBuf,
    /// Where trackers have it.
    tracked: Option<Arc<track::Sweep>>,
    /// The job's name.
    job: String,
    /// As its page shows it.
    seen: watch::Sender<Value>,
}

/// After how many epochs a trial has ended, where that is before all of its job's. `before`: those that it had when it began; `last`: the
/// last that was evaluated; `share`: how much of its samples it has trained. One of the two alone may lack what was not heard, or what is
/// skipped where a round doesn't wait, or what a short last minibatch has less than a whole one.
fn ended_early(job: &Job, before: u64, last: Option<u64>, share: f64) -> Option<u64> {
    let train = &job.train;
    let epochs = train.epochs;
    let is_exact = train.drop_last && !job.round.drops_late();
    let lacks = share < if is_exact { 0.999 } else { 1.0 - 0.5 / epochs.max(1) as f64 };
    match (lacks && train.max_steps.is_none(), job.eval.every_epoch) {
        (true, true) => Some(last.unwrap_or(before)).filter(|last| *last < epochs),
        (true, false) if is_exact => Some(before + (share * epochs.saturating_sub(before) as f64) as u64),
        _ => None,
    }
}

/// What those share who train trials.
struct Shared {
    search: Search,
    log: Log,
    /// Begun before this process, and not ended.
    again: Vec<(usize, usize)>,
    failed: Option<Failure>,
}

/// Tries what has not been tried, and says what is best; the exit code.
pub fn run(args: &SweepArgs) -> Result<i32, Failure> {
    let job = Job::load(&args.job, &args.set)?;
    let space = Space::load(&args.space)?;
    let seed = args.seed.unwrap_or(job.seed);
    let points = points(args, &space, seed)?;
    let rungs = rungs(args, job.train.epochs)?;
    if rungs.len() > 1 && space.axes.iter().any(|axis| axis.key == "train.epochs") {
        let what =
            format!("{}: train.epochs is what the search itself sets, rung by rung", args.space.display());
        return Err(Failure::new(exit::CONFIG, what)
            .help("leave it out of the space, or take --search grid or random"));
    }
    // Of each rung one in eta goes on.
    let reached =
        (0..rungs.len()).rev().find(|r| (args.eta as usize).saturating_pow(*r as u32) <= points.len());
    if let Some((top, reached)) = rungs.last().zip(reached.filter(|r| r + 1 < rungs.len())) {
        eprintln!(
            "note: of {} trials with --eta {} none is trained for more than {} of {top} epochs: that takes {} trials",
            points.len(),
            args.eta,
            rungs[reached],
            (args.eta as usize).saturating_pow(reached as u32 + 1),
        );
    }
    let dir = RunDir::of_comparison(args.run_dir.as_deref(), &format!("{}-sweep", job.name))?;
    let (seen, _) = watch::channel(Value::Null);
    let mut sweep = Sweep {
        args,
        space,
        points,
        rungs,
        dir: dir.to_path_buf(),
        tracked: None,
        job: job.name.clone(),
        seen,
    };
    // What no trial could be is said before any has begun.
    let mut ranks = 0;
    for trial in 0..sweep.points.len() {
        ranks = ranks.max(sweep.job(trial, 0)?.ranks());
    }
    let parallel = parallel(args, ranks)?;
    let mut search =
        Search::new(args.search.rule(), sweep.points.len(), sweep.rungs.len(), args.eta as usize);
    let about = json!({
        "job": job.to_toml(),
        "metric": sweep.space.metric.name(),
        "search": format!("{:?}", args.search).to_lowercase(),
        "points": (0..sweep.points.len()).map(|t| sweep.space.set(&sweep.points[t]).join(", ")).collect::<Vec<_>>(),
        "epochs": sweep.rungs,
        "eta": args.eta,
    });
    let log = Log::open(&dir.join(LOG_FILE), &about, &mut search, |e| sweep.score(e))?;
    let again = search.unfinished();
    if !log.ended.is_empty() || !again.is_empty() {
        eprintln!("{} trials have ended already, {} are tried again", log.ended.len(), again.len());
    }
    let interrupted = launch::interrupts();
    sweep.tracked = track::Sweep::new(&job, &dir, &log.id.0, log.id.1 as f64 / 1e3);
    sweep.clear();
    let (own, servers) = sweep.fleet(&job)?;
    sweep.show(&search, &log);
    let page =
        |at| Page::serve(at, Source::Servers(servers.clone()), Some(sweep.seen.subscribe()), Here::default());
    let _page = args.dashboard.map(page).transpose()?;
    let shared = (Mutex::new(Shared { search, log, again, failed: None }), Condvar::new());
    let over = AtomicBool::new(false);
    std::thread::scope(|s| {
        if let Some(own) = own {
            s.spawn(|| keep_up(own, &over));
        }
        let work = || s.spawn(|| sweep.work(&servers, &shared, &interrupted));
        let at_work: Vec<_> = (0..parallel).map(|_| work()).collect();
        let ended: Vec<_> = at_work.into_iter().map(|w| w.join()).collect();
        over.store(true, Relaxed);
        // One that has panicked ends the sweep, as it would have alone.
        ended.into_iter().for_each(|e| e.unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
    });
    let Shared { search, log, failed, .. } = shared.0.into_inner().unwrap_or_else(|e| e.into_inner());
    if failed.is_none() {
        // A job whose deletion its fleet did not hear.
        sweep.clear();
    }
    if let Some(tracked) = &sweep.tracked {
        let best = search.best().filter(|_| failed.is_none());
        let best = best.and_then(|(trial, rung, _)| {
            let set = sweep.space.set(&sweep.points[trial]);
            track_later::best(sweep.space.metric, &log.ended, (trial, rung), set)
        });
        let status = match (&failed, interrupted.load(Relaxed)) {
            (None, _) if best.is_some() => track::mlflow::Status::Finished,
            (_, 0) => track::mlflow::Status::Failed,
            _ => track::mlflow::Status::Killed,
        };
        tracked.end(status, best.as_ref());
    }
    if let Some(e) = failed {
        return Err(e.help(format!("go on with the same command and --run-dir {}", dir.display())));
    }
    sweep.tell(&search, &log)?;
    Ok(exit::OK)
}

/// Where a trial is that is trained to so many epochs, below the sweep's folder.
fn trial_dir(trial: usize, epochs: u64) -> String {
    format!("trial-{trial:04}/epochs-{epochs}")
}

/// The setting of each trial.
fn points(args: &SweepArgs, space: &Space, seed: u64) -> Result<Vec<Point>, Failure> {
    let grid = space.grid();
    if args.search == Kind::Grid {
        let n = grid.map_err(|why| Failure::new(exit::CONFIG, format!("{}: {why}", args.space.display())))?;
        return Ok((0..args.trials.map_or(n, |t| n.min(t as usize))).map(|i| space.of_grid(i)).collect());
    }
    match grid {
        // Each point once, in an order that the seed has drawn.
        Ok(n) => {
            let mut order: Vec<usize> = (0..n).collect();
            shuffle(&mut order, seed);
            order.truncate(args.trials.map_or(n, |t| t as usize));
            Ok(order.into_iter().map(|i| space.of_grid(i)).collect())
        }
        Err(_) => Ok((0..args.trials.unwrap_or(64) as usize).map(|t| space.drawn(seed, t)).collect()),
    }
}

/// Fisher and Yates.
fn shuffle(order: &mut [usize], seed: u64) {
    use rand_chacha::rand_core::{Rng, SeedableRng};
    let mut rng = rand_chacha::ChaCha8Rng::seed_from_u64(seed);
    for i in (1..order.len()).rev() {
        order.swap(i, (rng.next_u64() % (i as u64 + 1)) as usize);
    }
}

/// Epochs of each rung: `min_epochs` times powers of `eta`, and the job's own at the top.
fn rungs(args: &SweepArgs, epochs: u64) -> Result<Vec<u64>, Failure> {
    if matches!(args.search, Kind::Grid | Kind::Random) {
        return Ok(vec![epochs]);
    }
    let most = std::iter::successors(Some(args.min_epochs), |e| e.checked_mul(u64::from(args.eta)));
    let mut rungs: Vec<u64> = most.take_while(|e| *e < epochs).collect();
    if rungs.is_empty() {
        let what = format!(
            "--min-epochs {}: the job trains {epochs} epochs, so nothing could be stopped early",
            args.min_epochs
        );
        return Err(
            Failure::new(exit::USAGE, what).help("raise train.epochs, or take --search grid or random")
        );
    }
    rungs.push(epochs);
    Ok(rungs)
}

/// Trials at a time.
fn parallel(args: &SweepArgs, ranks: u32) -> Result<u32, Failure> {
    let cores = std::thread::available_parallelism().map_or(1, |n| n.get() as u32);
    let own = (cores / ranks.max(1)).max(1);
    let asked = args.parallel.unwrap_or(own);
    if asked > own && !args.share_cores {
        return Err(Failure::new(
            exit::USAGE,
            format!(
                "--parallel {asked}: {} workers at a time would share {cores} cores",
                asked.saturating_mul(ranks)
            ),
        )
        .help(format!("take --parallel {own}, or say --share-cores where times do not matter")));
    }
    Ok(asked)
}

/// Starts servers that have died again, until all is over; then the fleet ends.
fn keep_up(mut fleet: Fleet, over: &AtomicBool) {
    const LOOK: Duration = Duration::from_millis(100);
    const PAUSE: Duration = Duration::from_secs(1);
    let mut again: BTreeMap<usize, Instant> = BTreeMap::new();
    while !over.load(Relaxed) {
        for id in 0..fleet.servers.len() {
            let server = &mut fleet.servers[id];
            if server.ended().is_some() && !again.contains_key(&id) {
                let end = server.end();
                eprintln!("warning: {} {end}; it is started again", server.name);
                again.insert(id, Instant::now() + PAUSE);
            }
        }
        if let Some((&id, _)) = again.iter().find(|(_, at)| Instant::now() >= **at) {
            match fleet.restart_server(id) {
                Ok(()) => _ = again.remove(&id),
                Err(e) => {
                    eprintln!("warning: server-{id} could not be started again: {}", e.message());
                    again.insert(id, Instant::now() + 10 * PAUSE);
                }
            }
        }
        std::thread::sleep(LOOK);
    }
    fleet.stop();
}

impl Sweep<'_> {
    fn score(&self, ended: &Ended) -> Score {
        ended.value.map(|v| self.space.metric.score(v))
    }

    /// The job of a trial up to a rung.
    fn job(&self, trial: usize, rung: usize) -> Result<Job, Failure> {
        let point = self.space.set(&self.points[trial]);
        let mut set: Vec<String> = self.args.set.iter().cloned().chain(point.clone()).collect();
        let several = self.rungs.len() > 1;
        if several {
            set.push(format!("train.epochs={}", self.rungs[rung]));
            set.push(format!("checkpoint.every_epochs={}", self.rungs[rung]));
        }
        let mut job = Job::load(&self.args.job, &set).map_err(|e| {
            let failure = Failure::from(e);
            Failure::new(exit::CONFIG, format!("trial {trial} ({}): {}", point.join(", "), failure.message()))
        })?;
        if let Some(checkpoint) = &mut job.checkpoint {
            // Trials have their own.
            checkpoint.dir = None;
        }
        Ok(job)
    }

    fn trial_dir(&self, trial: usize, rung: usize) -> String {
        trial_dir(trial, self.rungs[rung])
    }

    /// Deletes jobs that trials have left on a fleet that stands: of a sweep that was killed, or that could not reach it.
    fn clear(&self) {
        let servers = self.args.to.as_deref().and_then(|to| addresses(Some(to), &[]).ok());
        for trial in 0..self.points.len() {
            for dir in (0..self.rungs.len()).map(|rung| self.dir.join(self.trial_dir(trial, rung))) {
                if let Err(e) = standing::clear(&dir, servers.as_deref().unwrap_or_default()) {
                    // Looked for again when the trial is, and at the sweep's end.
                    eprintln!("warning: what {} has left on its fleet: {}", dir.display(), e.message());
                }
            }
        }
    }

    /// The servers: those of a fleet that stands, or of one that is the sweep's own and ends with it.
    fn fleet(&self, job: &Job) -> Result<(Option<Fleet>, Vec<String>), Failure> {
        if let Some(to) = &self.args.to {
            return Ok((None, addresses(Some(to), &[])?));
        }
        let dir = self.dir.join("fleet");
        // What servers of an earlier try held is of no use: trials go on from their checkpoints.
        match fs::remove_dir_all(&dir) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => return Err(Failure::write(&dir, e)),
            _ => {}
        }
        fs::create_dir_all(&dir).map_err(|e| Failure::write(&dir, e))?;
        // Whoever looks for its processes finds them by the whole path.
        let dir = fs::canonicalize(&dir).map_err(|e| Failure::write(&dir, e))?;
        let fleet = Fleet::standing(job.servers(), &dir)?;
        let servers = fleet.addresses.clone();
        // For whoever asks it by the sweep's folder.
        let file = dir.join(SERVERS_FILE);
        fs::write(&file, servers.join(",")).map_err(|e| Failure::write(&file, e))?;
        Ok((Some(fleet), servers))
    }

    /// Trains one trial after the other, until there is none.
    fn work(
        &self,
        servers: &[String],
        (shared, changed): &(Mutex<Shared>, Condvar),
        interrupted: &AtomicI32,
    ) {
        let lock = || shared.lock().unwrap_or_else(|e| e.into_inner());
        let mut all = lock();
        loop {
            if all.failed.is_some() {
                break;
            }
            let (trial, rung) = match all.again.pop() {
                Some(again) => again,
                None => match all.search.next() {
                    Next::Train { trial, rung } => (trial, rung),
                    Next::Wait => {
                        all = changed.wait(all).unwrap_or_else(|e| e.into_inner());
                        continue;
                    }
                    Next::Done => break,
                },
            };
            let begun = all.log.begin(trial, rung, &self.space.set(&self.points[trial]));
            drop(all);
            let train = || begun.and_then(|()| self.train(trial, rung, servers, interrupted));
            // One that panics must not keep the others waiting for what it will never say.
            let ended = std::panic::catch_unwind(std::panic::AssertUnwindSafe(train)).unwrap_or_else(|_| {
                Err(Failure::new(exit::FAILED, format!("trial {trial} ended in a panic: please report it")))
            });
            all = lock();
            let told = ended.and_then(|ended| {
                let ended = Ended { ended_ms: paraft_host::clock::unix_ms(), ..ended };
                all.search.ended(trial, rung, self.score(&ended));
                all.log.end(&ended)?;
                self.say(&ended, all.log.ended.len());
                self.show(&all.search, &all.log);
                Ok(())
            });
            if let Err(e) = told {
                if interrupted.load(Relaxed) == 0 {
                    eprintln!("trial {trial}: {}; nothing new begins", e.message());
                }
                all.failed.get_or_insert(e);
            }
            changed.notify_all();
        }
        changed.notify_all();
    }

    /// What a trial goes on from. Where its checkpoint was not made, since a leader was lost or moved just then, it trains from the
    /// start.
    fn checkpoint_before(&self, trial: usize, rung: usize) -> Option<PathBuf> {
        let below = self.dir.join(self.trial_dir(trial, rung.checked_sub(1)?)).join("checkpoints");
        let found = Folder::find(&below).map_err(|e| e.to_string());
        match found.and_then(|path| fs::canonicalize(path).map_err(|e| e.to_string())) {
            Ok(path) => Some(path),
            Err(why) => {
                eprintln!("trial {trial} trains from the start: {why}");
                None
            }
        }
    }

    /// One trial up to a rung. What goes wrong with its setting is its result; what goes wrong with the fleet is an error.
    fn train(
        &self,
        trial: usize,
        rung: usize,
        servers: &[String],
        interrupted: &AtomicI32,
    ) -> Result<Ended, Failure> {
        let job = self.job(trial, rung)?;
        let name = self.trial_dir(trial, rung);
        let mut ended = Ended {
            trial,
            rung,
            value: None,
            seconds: 0.0,
            start_seconds: None,
            tries: 0,
            why: String::new(),
            stopped: None,
            dir: name.clone(),
            ended_ms: 0,
        };
        while ended.tries < TRIES {
            ended.tries += 1;
            ended.why.clear();
            let began = Instant::now();
            let resume = self.checkpoint_before(trial, rung);
            let path = self.dir.join(&name);
            // Those of a try that came to nothing.
            match fs::remove_dir_all(path.join("checkpoints")) {
                Err(e) if e.kind() != std::io::ErrorKind::NotFound => return Err(Failure::write(&path, e)),
                _ => {}
            }
            // Also where one was killed when its record was aside and it had not begun another.
            let dir = match path.exists() {
                true => RunDir::again(&path)?,
                false => RunDir::new(Some(&path), &job.name)?,
            };
            // The sweep's own servers end with it, and what they have.
            let remember = self.args.to.is_some();
            let on = On { servers: servers.to_vec(), keep: None, delete: true, remember };
            let of = self.tracked.clone();
            let extras = Extras { on: Some(on), of_many: true, of, ..Extras::default() };
            match launch::launch_with(&job, &dir, resume.as_deref(), true, interrupted, extras) {
                // Without one of its workers it was another job.
                Ok(record) if !record.leaves.is_empty() => {
                    ended.why = "a worker was lost".into();
                    ended.seconds = began.elapsed().as_secs_f64();
                    eprintln!("trial {trial}: {}; try {} of {TRIES}", ended.why, ended.tries);
                }
                Ok(record) => {
                    let summary = record.summarize();
                    ended.value = match self.space.metric {
                        space::Metric::Accuracy => summary.final_accuracy,
                        space::Metric::Loss => summary.final_loss,
                    };
                    ended.seconds = began.elapsed().as_secs_f64();
                    ended.start_seconds = summary.first_step_seconds;
                    if ended.value.is_none() {
                        ended.why = format!("it has no held-out {}", self.space.metric.name());
                    }
                    let last = record.evals.iter().filter(|e| !e.is_final).map(|e| e.epoch).max();
                    let share = summary.samples as f64 / record.run.samples_budget.max(1) as f64;
                    let before =
                        resume.as_ref().and(rung.checked_sub(1)).map_or(0, |below| self.rungs[below]);
                    ended.stopped = ended_early(&job, before, last, share);
                    // The job's own rule belongs to its settings; what a person has ended says nothing of them.
                    if let Some(after) = ended.stopped.filter(|_| job.eval.early_stop.is_none()) {
                        ended.value = None;
                        ended.why = format!("somebody has stopped it after {after} epochs");
                    }
                    if let Some(mode) = &summary.switched_to {
                        eprintln!(
                            "trial {trial}: somebody has switched it to {mode}: its settings alone do not come to what it has"
                        );
                    }
                    return Ok(ended);
                }
                Err(e) if interrupted.load(Relaxed) != 0 || e.code() == exit::IO => return Err(e),
                Err(e) if e.code() == exit::UNAVAILABLE => {
                    // No fault of its setting: the sweep goes on with it later, if the fleet is not reached by then.
                    if ended.tries == TRIES {
                        return Err(e);
                    }
                    eprintln!("trial {trial}: {}; try {} of {TRIES}", e.message(), ended.tries);
                    let until = Instant::now() + PAUSE;
                    while Instant::now() < until && interrupted.load(Relaxed) == 0 {
                        std::thread::sleep(Duration::from_millis(50));
                    }
                }
                Err(e) => {
                    ended.why = e.message().to_string();
                    ended.seconds = began.elapsed().as_secs_f64();
                    if e.diverged() {
                        return Ok(ended);
                    }
                    // Also what a worker says of its job or its servers: one that is just back may not know the job yet.
                    eprintln!("trial {trial}: {}; try {} of {TRIES}", ended.why, ended.tries);
                }
            }
        }
        Ok(ended)
    }

    fn say(&self, e: &Ended, n: usize) {
        let set = self.space.set(&self.points[e.trial]).join(" ");
        if self.args.json {
            out!(
                "{}",
                json!({
                    "trial": e.trial, "epochs": self.epochs(e), "value": e.value, "seconds": e.seconds, "tries": e.tries,
                    "why": e.why, "set": self.space.set(&self.points[e.trial]), "dir": e.dir,
                })
            );
            return;
        }
        let value = match e.value {
            Some(v) => self.shown(v),
            None => e.why.clone(),
        };
        out!("{n:4}  trial {:4}  {:4} epochs  {value}  {:.1} s  {set}", e.trial, self.epochs(e), e.seconds);
    }

    /// How many it has trained.
    fn epochs(&self, e: &Ended) -> u64 {
        e.stopped.unwrap_or(self.rungs[e.rung])
    }

    /// Likewise, of a trial on a rung.
    fn epochs_on(&self, log: &Log, trial: usize, rung: usize) -> u64 {
        let ended = log.ended.iter().rfind(|e| (e.trial, e.rung) == (trial, rung));
        ended.map_or(self.rungs[rung], |e| self.epochs(e))
    }

    fn shown(&self, value: f64) -> String {
        match self.space.metric {
            space::Metric::Accuracy => format!("{:6.2} %", 100.0 * value),
            space::Metric::Loss => format!("{value:.4}"),
        }
    }

    /// On its page.
    fn show(&self, search: &Search, log: &Log) {
        // Nobody serves one.
        if self.args.dashboard.is_none() {
            return;
        }
        self.seen.send_replace(sweep::data(&self.picture(search, log)));
    }

    /// What the sweep has come to.
    fn tell(&self, search: &Search, log: &Log) -> Result<(), Failure> {
        let Some((trial, rung, _)) = search.best() else {
            return Err(Failure::new(
                exit::FAILED,
                format!("none of {} trials has a result", self.points.len()),
            )
            .help(format!("{} says why for each", self.dir.join(LOG_FILE).display())));
        };
        let ended = log.ended.iter().rfind(|e| (e.trial, e.rung) == (trial, rung));
        let point = self.space.set(&self.points[trial]);
        let set: Vec<String> = self.args.set.iter().cloned().chain(point.clone()).collect();
        let mut best = Job::load(&self.args.job, &set)?;
        launch::absolute_paths(&mut best)?;
        let file = self.dir.join(BEST_FILE);
        fs::write(&file, best.to_toml()).map_err(|e| Failure::write(&file, e))?;
        let value = ended.and_then(|e| e.value);
        let epochs = self.epochs_on(log, trial, rung);
        let report = self.dir.join(REPORT_FILE);
        write_sweep(&report, &self.picture(search, log))?;
        if self.args.json {
            out!(
                "{}",
                json!({ "best": { "trial": trial, "epochs": epochs, "value": value, "set": point, "job": file } })
            );
            return Ok(());
        }
        let value = value.map(|v| self.shown(v)).unwrap_or_default();
        out!(
            "best    trial {trial}, {} {} after {epochs} epochs: {}",
            self.space.metric.name(),
            value.trim(),
            point.join(" ")
        );
        out!("job     {}", file.display());
        out!("report  {}", report.display());
        Ok(())
    }

    /// The sweep as its page shows it.
    fn picture(&self, search: &Search, log: &Log) -> sweep::Sweep {
        let best = search.best().map(|(trial, rung, score)| {
            format!(
                "Best: trial {trial}, {} {} after {} epochs, with {}.",
                self.space.metric.name(),
                self.shown(self.space.metric.score(score)).trim(),
                self.epochs_on(log, trial, rung),
                self.space.set(&self.points[trial]).join(", ")
            )
        });
        let axes = self.space.axes.iter();
        let axis = |a: &space::Axis| sweep::Axis { key: a.key.clone(), ticks: a.ticks() };
        let mut by_trial: BTreeMap<usize, Vec<&Ended>> = BTreeMap::new();
        log.ended.iter().for_each(|e| by_trial.entry(e.trial).or_default().push(e));
        let trial = |(&trial, ended): (&usize, &Vec<&Ended>)| {
            let last = ended.iter().max_by_key(|e| e.rung)?;
            let set = self.points[trial].iter().zip(&self.space.axes);
            Some(sweep::Trial {
                trial,
                set: set.map(|(value, axis)| (space::shown(value), axis.place(value))).collect(),
                epochs: self.epochs(last),
                first: ended.iter().find(|e| e.rung == 0).and_then(|e| self.score(e)),
                value: last.value,
                seconds: ended.iter().map(|e| e.seconds).sum(),
                why: last.why.clone(),
            })
        };
        let trials: Vec<_> = by_trial.iter().filter_map(trial).collect();
        let whole = trials.iter().filter(|t| Some(&t.epochs) == self.rungs.last()).count();
        let epochs: u64 = log
            .ended
            .iter()
            .map(|e| self.epochs(e).saturating_sub(if e.rung > 0 { self.rungs[e.rung - 1] } else { 0 }))
            .sum();
        let all = self.rungs.last().copied().unwrap_or_default() * trials.len() as u64;
        sweep::Sweep {
            job: self.job.clone(),
            metric: self.space.metric.name().into(),
            least: self.space.metric == space::Metric::Loss,
            headline: vec![
                best.unwrap_or_else(|| "No trial has a result yet.".into()),
                format!(
                    "{} of {} trials had all {} epochs; {epochs} epochs were trained, where a grid would have trained {all}.",
                    whole,
                    trials.len(),
                    self.rungs.last().copied().unwrap_or_default()
                ),
            ],
            axes: axes.map(axis).collect(),
            trials,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trial_that_was_stopped_is_told_from_one_that_came_to_its_end() {
        let job = |set: &[&str]| {
            let base =
                "[model]\nkind = \"mlp\"\nhidden = [8]\n[data]\nkind = \"digits\"\n[train]\nworkers = 2\n";
            let set: Vec<String> = set.iter().map(|s| s.to_string()).collect();
            Job::parse(base, "job.toml".as_ref(), &set).expect("valid")
        };
        let whole = job(&["train.epochs=8", "eval.every_epoch=true"]);
        assert_eq!(ended_early(&whole, 0, Some(8), 1.0), None);
        assert_eq!(ended_early(&whole, 0, Some(7), 1.0), None, "the last evaluation was not heard");
        assert_eq!(ended_early(&whole, 0, Some(5), 0.7), Some(5));
        assert_eq!(ended_early(&whole, 2, None, 0.1), Some(2));
        let short = job(&["train.epochs=8", "eval.every_epoch=true", "train.drop_last=false"]);
        assert_eq!(ended_early(&short, 0, Some(8), 0.93), None, "short minibatches");
        assert_eq!(ended_early(&short, 0, Some(5), 0.6), Some(5));
        let unseen = job(&["train.epochs=16", "eval.every_epoch=false"]);
        assert_eq!(ended_early(&unseen, 4, None, 1.0), None);
        assert_eq!(ended_early(&unseen, 4, None, 0.5), Some(10));
        assert_eq!(ended_early(&job(&["train.max_steps=10"]), 0, None, 0.1), None);
        let skips = job(&["train.epochs=8", "eval.every_epoch=false", "round.kind=quorum", "round.quorum=1"]);
        assert_eq!(ended_early(&skips, 0, None, 0.6), None, "what a round did not wait for is skipped");
    }
}
