//! `paraft sweep`: one job with many settings, on one fleet; writes the best of them as a job file.
//!
//! ```text
//!  space ── a trial's settings ──▶ job ──▶ a run on the fleet ──▶ its held-out evaluation ──▶ search: next trial?
//! ```
//!
//! - `args`: the flags. `space`: the search space. `search`: chooses the next trial from numbers alone. `log`: lets a sweep resume.
//!   `trial`: one of them is trained. `output`: what is shown. `track_later`: a sweep to MLflow when it has ended.
//!
//! A trial resumes on the next rung from its checkpoint. It is a job of the fleet while it trains and leaves nothing
//! there; what is kept of it lies in its folder.

mod args;
mod log;
mod output;
mod search;
mod space;
mod track_later;
mod trial;

pub use args::{Kind, SweepArgs};
pub use track_later::{of as of_sweep, send};

use log::{LOG_FILE, Log, TrialEnd, trial_dir};
use paraft_dashboard::{LocalControl, Page, Source};
use paraft_fleet::{
    again, existing,
    failure::Failure,
    fleet::{Fleet, SERVERS_FILE},
    launch,
    run_dir::RunDir,
    track,
};
use paraft_worker::{Job, exit};
use search::{Next, Score, Search};
use serde_json::{Value, json};
use space::{Point, Space};
use std::{
    collections::BTreeMap,
    fs,
    path::PathBuf,
    sync::{
        Arc, Condvar, Mutex,
        atomic::{AtomicBool, AtomicI32, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};
use tokio::sync::watch;

/// In the sweep's folder.
const BEST_FILE: &str = "best.toml";
const REPORT_FILE: &str = "report.html";
/// Attempts for a trial that is killed, or whose fleet is unreachable.
const MAX_ATTEMPTS: u32 = 3;
/// The delay before a retry of an unreachable fleet, which may have been busy.
const RETRY_DELAY: Duration = Duration::from_secs(2);

/// A sweep and its options.
struct Sweep<'a> {
    args: &'a SweepArgs,
    space: Space,
    /// The setting of each trial.
    points: Vec<Point>,
    /// Epochs of each rung.
    rungs: Vec<u64>,
    dir: PathBuf,
    /// The trackers of the sweep.
    tracked: Option<Arc<track::Sweep>>,
    /// Trials at the same time share cores.
    shares_cores: bool,
    /// The job's name.
    job: String,
    /// The sweep's state for its page.
    seen: watch::Sender<Value>,
}

/// State that all trial threads share.
struct Shared {
    search: Search,
    log: Log,
    /// Trials that an earlier process started but did not finish.
    again: Vec<(usize, usize)>,
    failed: Option<Failure>,
}

/// Runs the trials that are left and reports the best; returns the exit code.
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
    note_unreached(args.eta as usize, &rungs, points.len());
    let dir = RunDir::of_comparison(args.run_dir.as_deref(), &format!("{}-sweep", job.name))?;
    let (seen, _) = watch::channel(Value::Null);
    let mut sweep = Sweep {
        args,
        space,
        points,
        rungs,
        dir: dir.to_path_buf(),
        tracked: None,
        shares_cores: false,
        job: job.name.clone(),
        seen,
    };
    // Invalid settings are reported before any trial starts.
    let mut ranks = 0;
    for trial in 0..sweep.points.len() {
        ranks = ranks.max(sweep.job(trial, 0)?.ranks());
    }
    let parallel;
    (parallel, sweep.shares_cores) = self::parallel(args, ranks)?;
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
    let page = |at| {
        Page::serve(
            at,
            Source::Servers(servers.clone()),
            Some(sweep.seen.subscribe()),
            LocalControl::default(),
        )
    };
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
        // A panic of a trial thread ends the sweep, as it would end a single trial.
        ended.into_iter().for_each(|e| e.unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
    });
    let Shared { search, log, failed, .. } = shared.0.into_inner().unwrap_or_else(|e| e.into_inner());
    if failed.is_none() {
        // Jobs whose deletion did not reach the fleet.
        sweep.clear();
    }
    sweep.end_tracking(&search, &log, failed.is_none(), interrupted.load(Relaxed) != 0);
    if let Some(e) = failed {
        let again = again::command("sweep", "--run-dir", args.run_dir.as_deref(), &dir);
        return Err(e.help(format!("continue the sweep: {again}")));
    }
    sweep.tell(&search, &log)?;
    Ok(exit::OK)
}

/// Notes that no trial reaches the top rung, where that is so: of each rung one trial in `eta` continues.
fn note_unreached(eta: usize, rungs: &[u64], trials: usize) {
    let reached = (0..rungs.len()).rev().find(|r| eta.saturating_pow(*r as u32) <= trials);
    if let Some((top, reached)) = rungs.last().zip(reached.filter(|r| r + 1 < rungs.len())) {
        eprintln!(
            "note: of {trials} trials with --eta {eta} none is trained for more than {} of {top} epochs: that takes {} trials",
            rungs[reached],
            eta.saturating_pow(reached as u32 + 1),
        );
    }
}

/// The setting of each trial.
fn points(args: &SweepArgs, space: &Space, seed: u64) -> Result<Vec<Point>, Failure> {
    let grid = space.grid();
    if args.search == Kind::Grid {
        let n = grid.map_err(|why| Failure::new(exit::CONFIG, format!("{}: {why}", args.space.display())))?;
        return Ok((0..args.trials.map_or(n, |t| n.min(t as usize))).map(|i| space.of_grid(i)).collect());
    }
    match grid {
        // Each point once, in an order drawn with the seed.
        Ok(n) => {
            let mut order: Vec<usize> = (0..n).collect();
            shuffle(&mut order, seed);
            order.truncate(args.trials.map_or(n, |t| t as usize));
            Ok(order.into_iter().map(|i| space.of_grid(i)).collect())
        }
        Err(_) => Ok((0..args.trials.unwrap_or(64) as usize).map(|t| space.drawn(seed, t)).collect()),
    }
}

/// Fisher-Yates shuffle.
fn shuffle(order: &mut [usize], seed: u64) {
    use rand_chacha::rand_core::{Rng, SeedableRng};
    let mut rng = rand_chacha::ChaCha8Rng::seed_from_u64(seed);
    for i in (1..order.len()).rev() {
        order.swap(i, (rng.next_u64() % (i as u64 + 1)) as usize);
    }
}

/// Epochs of each rung: `min_epochs` times powers of `eta`, and the job's own epochs at the top.
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

/// The number of parallel trials, and whether they share cores.
fn parallel(args: &SweepArgs, ranks: u32) -> Result<(u32, bool), Failure> {
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
    Ok((asked, asked > own))
}

/// Restarts dead servers until the sweep is over; then ends the fleet.
fn keep_up(mut fleet: Fleet, over: &AtomicBool) {
    const POLL_INTERVAL: Duration = Duration::from_millis(100);
    const RESTART_DELAY: Duration = Duration::from_secs(1);
    let mut again: BTreeMap<usize, Instant> = BTreeMap::new();
    while !over.load(Relaxed) {
        for id in 0..fleet.servers.len() {
            let server = &mut fleet.servers[id];
            if server.ended().is_some() && !again.contains_key(&id) {
                let end = server.end();
                eprintln!("warning: {} {end}; it is started again", server.name);
                again.insert(id, Instant::now() + RESTART_DELAY);
            }
        }
        if let Some((&id, _)) = again.iter().find(|(_, at)| Instant::now() >= **at) {
            match fleet.restart_server(id) {
                Ok(()) => _ = again.remove(&id),
                Err(e) => {
                    eprintln!("warning: server-{id} could not be started again: {}", e.message());
                    again.insert(id, Instant::now() + 10 * RESTART_DELAY);
                }
            }
        }
        std::thread::sleep(POLL_INTERVAL);
    }
    fleet.stop();
}

impl Sweep<'_> {
    fn score(&self, ended: &TrialEnd) -> Score {
        ended.value.map(|v| self.space.metric.score(v))
    }

    /// Ends the sweep's own run in MLflow, if it has one.
    fn end_tracking(&self, search: &Search, log: &Log, succeeded: bool, interrupted: bool) {
        let Some(tracked) = &self.tracked else { return };
        let best = search.best().filter(|_| succeeded);
        let best = best.and_then(|(trial, rung, _)| {
            let set = self.space.set(&self.points[trial]);
            track_later::best(self.space.metric, &log.ended, (trial, rung), set)
        });
        let status = match (succeeded, interrupted) {
            (true, _) if best.is_some() => track::mlflow::Status::Finished,
            (_, false) => track::mlflow::Status::Failed,
            _ => track::mlflow::Status::Killed,
        };
        tracked.end(status, best.as_ref());
    }

    fn trial_dir(&self, trial: usize, rung: usize) -> String {
        trial_dir(trial, self.rungs[rung])
    }

    /// Deletes the jobs that trials left on a shared fleet, after a kill or while the fleet was
    /// unreachable.
    fn clear(&self) {
        let servers = self.args.standing.servers().ok().flatten();
        for trial in 0..self.points.len() {
            for dir in (0..self.rungs.len()).map(|rung| self.dir.join(self.trial_dir(trial, rung))) {
                if let Err(e) = existing::clear(&dir, servers.as_deref().unwrap_or_default()) {
                    // The deletion is retried with the trial, and at the sweep's end.
                    eprintln!("warning: what {} has left on its fleet: {}", dir.display(), e.message());
                }
            }
        }
    }

    /// The servers of a shared fleet, or of a fleet that belongs to the sweep and ends with it.
    fn fleet(&self, job: &Job) -> Result<(Option<Fleet>, Vec<String>), Failure> {
        if let Some(servers) = self.args.standing.servers()? {
            return Ok((None, servers));
        }
        let dir = self.dir.join("fleet");
        // Server data of an earlier attempt is useless: trials resume from their checkpoints.
        match fs::remove_dir_all(&dir) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => return Err(Failure::write(&dir, e)),
            _ => {}
        }
        fs::create_dir_all(&dir).map_err(|e| Failure::write(&dir, e))?;
        // Tools find the processes of a fleet by its absolute path.
        let dir = fs::canonicalize(&dir).map_err(|e| Failure::write(&dir, e))?;
        let fleet = Fleet::standing(job.servers(), &dir)?;
        let servers = fleet.addresses.clone();
        // Lets commands address the fleet by the sweep's folder.
        let file = dir.join(SERVERS_FILE);
        fs::write(&file, servers.join(",")).map_err(|e| Failure::write(&file, e))?;
        Ok((Some(fleet), servers))
    }

    /// Trains one trial after the other, until none is left.
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
            // A panicking thread must not leave the others waiting for its result.
            let ended = std::panic::catch_unwind(std::panic::AssertUnwindSafe(train)).unwrap_or_else(|_| {
                Err(Failure::new(exit::FAILED, format!("trial {trial} ended in a panic: please report it")))
            });
            all = lock();
            let written = ended.and_then(|ended| {
                let ended = TrialEnd { ended_ms: paraft_host::clock::unix_ms(), ..ended };
                all.search.ended(trial, rung, self.score(&ended));
                all.log.end(&ended)?;
                self.say(&ended, all.log.ended.len());
                self.show(&all.search, &all.log);
                Ok(())
            });
            if let Err(e) = written {
                if interrupted.load(Relaxed) == 0 {
                    eprintln!("trial {trial}: {}; nothing new begins", e.message());
                }
                all.failed.get_or_insert(e);
            }
            changed.notify_all();
        }
        changed.notify_all();
    }
}
