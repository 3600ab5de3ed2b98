//! A job on a fleet of its own: launched, watched, ended, recorded.

use crate::{
    ask::ask_all,
    failure::Failure,
    fleet::{Extras, Fleet, JOB_FILE, server_data},
    progress::Progress,
    table,
};
use paraft_checkpoint::Checkpoint;
use paraft_record::{Event, METRICS_FILE, MetricsWriter, RunRecord, Summary, Tail, event, tensorboard};
use paraft_trace::TRACE_FOLDER;
use paraft_worker::{Job, checkpoints, cli, exit, job::SamplerKind, start, worker::Plan};
use std::{
    collections::BTreeMap,
    fs,
    os::unix::process::ExitStatusExt,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicI32, Ordering::Relaxed},
    },
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

/// Prints summaries and where the report is.
pub fn show(summaries: &[Summary], json: bool, report: &Path) -> Result<(), Failure> {
    if json {
        for s in summaries {
            out!("{}", serde_json::to_string(s).map_err(|e| Failure::new(exit::IO, e))?);
        }
        eprintln!("report {}", report.display());
    } else {
        out!("{}", table::modes(summaries));
        out!("report  {}", report.display());
    }
    Ok(())
}

/// Set to the signal's number when the user wants the end.
pub fn interrupts() -> Arc<AtomicI32> {
    let flag = Arc::new(AtomicI32::new(0));
    let set = flag.clone();
    let watch = move || {
        if let Ok(rt) = tokio::runtime::Builder::new_current_thread().enable_all().build() {
            let number = rt.block_on(paraft_host::lifeline::terminated());
            set.store(number, Relaxed);
        }
    };
    let _ = std::thread::Builder::new().name("signals".into()).spawn(watch);
    flag
}

/// Trains one job on a fleet of its own in `dir`, from a checkpoint where there is one; returns the run's record.
pub fn launch(
    job: &Job,
    dir: &Path,
    resume: Option<&Path>,
    quiet: bool,
    interrupted: &AtomicI32,
) -> Result<RunRecord, Failure> {
    launch_with(job, dir, resume, quiet, interrupted, Extras::default())
}

/// As [`launch`], with more.
pub fn launch_with(
    job: &Job,
    dir: &Path,
    resume: Option<&Path>,
    quiet: bool,
    interrupted: &AtomicI32,
    extras: Extras,
) -> Result<RunRecord, Failure> {
    if !job.cluster.addresses.is_empty() {
        return Err(Failure::new(exit::CONFIG, "the job names servers that are started by hand (cluster.addresses)")
            .help("start `paraft server` and `paraft worker` on those hosts, or remove the key to launch a fleet here"));
    }
    let dir = &fs::canonicalize(dir).map_err(|e| Failure::write(dir, e))?;
    let mut resolved = job.clone();
    absolute_paths(&mut resolved)?;
    checkpoints::try_out(&resolved, Some(dir))?;
    let run = describe(&mut resolved, resume)?; // wrong data and impossible models end here, before any process starts
    if run.shards < job.shards() {
        eprintln!(
            "cluster.shards = {}, and the model has fewer buckets: made are {}",
            job.shards(),
            run.shards
        );
    }
    let processors = std::thread::available_parallelism().map_or(usize::MAX, usize::from);
    if let Some(note) = resolved.oversubscribes(processors) {
        eprintln!("{note}");
    }
    let job_file = dir.join(JOB_FILE);
    fs::write(&job_file, resolved.to_toml()).map_err(|e| Failure::write(&job_file, e))?;
    let metrics = dir.join(METRICS_FILE);
    let mut writer = MetricsWriter::append(&metrics)?;
    writer.write(&Event::Run(run.clone()))?;

    if extras.trace.is_some() {
        let _ = fs::remove_dir_all(dir.join(TRACE_FOLDER)); // of the run before, in a folder that is used again
    }
    let mut fleet = Fleet::servers(&resolved, dir, extras)?;
    let servers_file = dir.join("servers");
    fs::write(&servers_file, fleet.addresses.join(",")).map_err(|e| Failure::write(&servers_file, e))?;
    let before = ask_all(&fleet.addresses, false);
    fleet.start_workers(&resolved, resume)?;
    if let Some(path) = resume {
        let step = run.resumed_step.map_or(0, |s| s.0);
        eprintln!("going on from step {step}, {}", path.display());
    }
    let leased = resolved.train.sampler == SamplerKind::Leased;
    let mut progress = Progress::new(&run, leased, quiet);
    let mut tail = Tail::new(&metrics);
    let mut watch = Watch {
        job: &resolved,
        started: false,
        restarts: BTreeMap::new(),
        over: BTreeMap::new(),
        pending: Vec::new(),
    };
    loop {
        let number = interrupted.load(Relaxed);
        if number != 0 {
            fleet.stop();
            return Err(Failure::new(128 + number, "interrupted; the fleet has ended"));
        }
        fleet.follow_faults();
        let events = tail.poll()?;
        watch.started |= events.iter().any(|e| matches!(e, Event::Train(_)));
        progress.update(&events);
        match watch.look(&mut fleet, &mut writer, &progress) {
            Ok(true) => break,
            Ok(false) => {}
            Err(e) => {
                if e.diverged() {
                    writer.write(&diverged(wall(), &e))?;
                }
                return Err(e);
            }
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    progress.update(&tail.poll()?);
    progress.finish();
    let after = ask_all(&fleet.addresses, false);
    // Each replica that has led it has answered some.
    let pulls = |shard: u32| {
        let of = after.iter().flatten().flat_map(|r| &r.shards).filter(move |s| s.shard == shard);
        of.fold((0, 0), |(waited, bytes), s| (waited + s.pulls_waited, bytes + s.bytes_pulled))
    };
    for reply in after.iter().flatten() {
        let began = before.iter().flatten().find(|b| b.server == reply.server).map_or(0.0, |b| b.cpu_seconds);
        writer.write(&Event::Server(event::Server {
            wall: wall(),
            server: paraft_common::ServerId(reply.server),
            cpu_seconds: reply.cpu_seconds - began,
            peak_rss_bytes: reply.peak_rss_bytes,
        }))?;
        for s in reply.shards.iter().filter(|s| s.role == "leader" && s.buckets > 0) {
            let (pulls_waited, bytes_pulled) = pulls(s.shard);
            writer.write(&Event::Shard(event::Shard {
                wall: wall(),
                shard: paraft_common::ShardId(s.shard),
                server: paraft_common::ServerId(reply.server),
                version: paraft_common::Version(s.version),
                delay: s.delay_counts.clone(),
                pushes: s.pushes,
                pulls_waited,
                bytes_pushed: s.bytes_pushed,
                bytes_pulled,
                pushes_lost: s.pushes_lost,
                dropped: s.dropped,
                staleness: s.staleness.iter().map(staleness).collect(),
            }))?;
        }
    }
    fleet.stop();
    // The run is over: what it gave is in the record and in the weights. Logs stay for `paraft replay`.
    if !resolved.cluster.durability.on_disk() {
        (0..resolved.servers()).for_each(|id| _ = fs::remove_dir_all(server_data(dir, id)));
    }
    let record = RunRecord::load(dir)?;
    writer.write(&Event::Summary(record.summarize()))?;
    tensorboard::export(dir.join("tensorboard"), &record)?;
    Ok(record)
}

fn staleness(of: &paraft_proto::WorkerStaleness) -> event::Staleness {
    let bins = |bins: &[paraft_proto::Bin], sum| {
        paraft_common::histogram::LogHistogram::from_bins(bins.iter().map(|b| (b.upper, b.count)), sum)
    };
    event::Staleness {
        worker: paraft_common::WorkerId(of.worker),
        delay: of.delay_counts.clone(),
        distance: bins(&of.distance, of.distance_sum),
        age: bins(&of.age_seconds, of.age_seconds_sum),
    }
}

/// The line that says why a run ended before its time.
pub fn diverged(wall: f64, why: &Failure) -> Event {
    Event::Diverged(event::Diverged { wall, reason: why.message().to_string() })
}

/// One of the fleet's processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Process {
    Server(usize),
    Worker(usize),
}

/// What the launcher has seen of its processes.
struct Watch<'a> {
    job: &'a Job,
    started: bool,
    /// How often each was started again.
    restarts: BTreeMap<Process, u32>,
    /// Workers that are groups, and when the first of their ranks ended well: the others have nothing to do.
    over: BTreeMap<usize, Instant>,
    /// Those that ended before their time, and when they are started again, if they are.
    pending: Vec<(Process, Option<Instant>)>,
}

/// A rank of a group whose job is done has this long to end.
const HUNG: Duration = Duration::from_secs(15);

impl Watch<'_> {
    /// True when all workers have ended. A process that was killed is started again while `cluster.max_restarts`
    /// allows it, else it is lost and the others go on. A worker that ended with an error ends the run, since the same
    /// would happen to the others.
    fn look(
        &mut self,
        fleet: &mut Fleet,
        writer: &mut MetricsWriter,
        progress: &Progress,
    ) -> Result<bool, Failure> {
        for (i, server) in fleet.servers.iter_mut().enumerate() {
            if server.ended().is_some() && !self.is_down(Process::Server(i)) {
                let (name, end) = (server.name.clone(), server.end());
                // The first server of the list founds the fleet.
                let then = match i == 0 && !self.started {
                    true => "the others go on if it had founded the fleet, and wait for it if not",
                    false => "the others go on as long as they are a majority",
                };
                let then = self.down(Process::Server(i), then);
                progress.note(&format!("warning: {name} {end}; {then}"));
            }
        }
        let mut running = 0;
        let size = self.job.train.group_size as usize;
        for (i, worker) in fleet.workers.iter_mut().enumerate() {
            let over = self.over.get(&(i / size)).copied().filter(|_| size > 1);
            let Some(status) = worker.ended() else {
                if over.is_some_and(|o| o.elapsed() > HUNG) {
                    progress.note(&format!(
                        "warning: {} hangs, and its group is done; it is killed",
                        worker.name
                    ));
                    worker.signal(nix::sys::signal::Signal::SIGKILL);
                }
                running += 1;
                continue;
            };
            if status.success() {
                self.over.entry(i / size).or_insert_with(Instant::now);
            } else if over.is_some() {
                continue;
            }
            if status.success() || self.is_down(Process::Worker(i)) {
                continue;
            }
            let how = worker.obituary();
            let tried = self.restarts.get(&Process::Worker(i)).copied().unwrap_or(0);
            let comes_back = tried < self.job.cluster.max_restarts;
            // Before training has begun the others wait for it.
            if status.signal().is_none() || !(self.started || comes_back) {
                // Let the servers' view of the others settle no further: this run has failed.
                let code = status.code().unwrap_or(exit::FAILED);
                let words = Some(worker.last_words()).filter(|w| !w.is_empty());
                let words = words.map(|w| format!(": {w}")).unwrap_or_default();
                let first = format!("{} {how} before the others{words}", worker.name);
                return Err(Failure::new(code, first)
                    .help(format!("its log is {}.log in the run's folder", worker.name)));
            }
            let (name, size) = (worker.name.clone(), size as u32);
            let then = self.down(Process::Worker(i), "the others go on");
            progress.note(&format!("warning: {name} {how}; {then}"));
            writer.write(&Event::Leave(event::Leave {
                wall: wall(),
                worker: paraft_common::WorkerId(i as u32 / size),
                rank: (size > 1).then_some(i as u32 % size),
                reason: how,
            }))?;
        }
        let lost = |(process, again): &&(Process, Option<Instant>)| {
            matches!(process, Process::Worker(_)) && again.is_none()
        };
        if self.pending.iter().filter(lost).count() == fleet.workers.len() {
            return Err(Failure::new(exit::FAILED, "all workers are lost"));
        }
        // One that comes back when all others have finished has nothing to do.
        let finished = fleet.workers.iter_mut().any(|w| w.ended().is_some_and(|s| s.success()));
        let comes_back =
            self.pending.iter().any(|(p, again)| matches!(p, Process::Worker(_)) && again.is_some());
        if running == 0 && (finished || !comes_back) {
            return Ok(true);
        }
        self.start_again(fleet, progress);
        Ok(false)
    }

    fn is_down(&self, process: Process) -> bool {
        self.pending.iter().any(|(p, _)| *p == process)
    }

    /// Says what happens now that it is down.
    fn down(&mut self, process: Process, without: &str) -> String {
        let tried = self.restarts.get(&process).copied().unwrap_or(0);
        let pause = Duration::from_millis(self.job.cluster.restart_ms);
        let again = tried < self.job.cluster.max_restarts;
        self.pending.push((process, again.then(|| Instant::now() + pause)));
        match again {
            true => format!("started again in {:.1} s", pause.as_secs_f64()),
            false => without.to_string(),
        }
    }

    /// Starts what is due.
    fn start_again(&mut self, fleet: &mut Fleet, progress: &Progress) {
        let now = Instant::now();
        let (due, wait) =
            std::mem::take(&mut self.pending).into_iter().partition(|(_, at)| at.is_some_and(|at| at <= now));
        self.pending = wait;
        for (process, _) in due {
            *self.restarts.entry(process).or_default() += 1;
            let started = match process {
                Process::Server(i) => fleet.restart_server(i),
                Process::Worker(i) => fleet.restart_worker(self.job, i),
            };
            if let Err(e) = started {
                let then = self.down(process, "it stays down");
                progress.note(&format!("warning: {}; {then}", e.message()));
            }
        }
    }
}

fn wall() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |d| d.as_secs_f64())
}

/// The resolved job lies in the run's folder; its paths must not depend on that.
pub fn absolute_paths(job: &mut Job) -> Result<(), Failure> {
    let base =
        fs::canonicalize(if job.base_dir.as_os_str().is_empty() { Path::new(".") } else { &job.base_dir });
    let base = base.map_err(|e| Failure::new(exit::CONFIG, format!("the job's folder: {e}")))?;
    if let Some(data) = &mut job.data {
        data.rebase(&base);
    }
    if let Some(own) = job.cluster.worker_command.first_mut().filter(|c| c.contains('/')) {
        *own = base.join(&*own).to_string_lossy().into_owned();
    }
    let checkpoints = job.checkpoint.as_mut().and_then(|c| c.dir.as_mut());
    for path in checkpoints.into_iter().chain(&mut job.train.init) {
        *path = base.join(&*path);
    }
    job.base_dir = base;
    Ok(())
}

/// The run's first line. Loads the data and builds the model, so that what is wrong with them is said before
/// any process starts. The job gets no shards that its model has no buckets for.
pub fn describe(job: &mut Job, resume: Option<&Path>) -> Result<event::Run, Failure> {
    let began = Instant::now();
    let (parameters, budget, done) = if job.cluster.worker_command.is_empty() {
        let (model, data) = cli::built_in(job)?;
        let layout = job.layout(model.tensors()).map_err(|e| Failure::new(exit::CONFIG, e))?;
        job.only_shards_with_buckets(&layout);
        let plan = Plan::new(job, &data.train)?;
        let beginning = start::begin(job, resume, Some(&mut |seed, w| model.init(seed, w)), &layout, &plan)?;
        let budget = plan.budget(job, beginning.start.as_ref());
        (layout.params_len() as u64, budget, beginning.step())
    } else {
        // Only its own binary knows the model; its workers say what does not fit.
        (0, 0, resume.map(Checkpoint::open).transpose()?.map_or(0, |c| c.manifest().resume_step))
    };
    tracing::debug!(seconds = began.elapsed().as_secs_f64(), "data and model are fine");
    let t = &job.train;
    Ok(event::Run {
        wall: wall(),
        name: job.name.clone(),
        mode: t.mode.to_string(),
        model: job.model.as_ref().map_or("custom", |m| m.name()).to_string(),
        data: job.data.as_ref().map_or("custom", |d| d.name()).to_string(),
        workers: t.workers,
        servers: job.servers(),
        shards: job.shards(),
        replicas: job.cluster.replicas,
        batch: t.batch as u64 * u64::from(t.group_size),
        seed: job.seed,
        epochs: t.epochs,
        parameters,
        // A short last minibatch (drop_last = false) makes it a little less.
        samples_budget: budget,
        optimizer: job.optimizer.kind().to_string(),
        algorithm: job.algorithm.kind().to_string(),
        encoding: t.encoding.to_string(),
        round: job.round.kind().to_string(),
        lr: job.optimizer.lr(),
        target_accuracy: job.eval.target_accuracy,
        resumed_step: resume.map(|_| paraft_common::Step(done)),
        simulated: false,
    })
}
