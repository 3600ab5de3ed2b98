//! A job on its own fleet: launch, watch, end and record.

use crate::{
    ask::ask_all,
    ended,
    existing::Submitted,
    failure::Failure,
    files::{REPORT_FILE, SERVERS_FILE, wall},
    fleet::{Extras, Fleet, server_data},
    pages, process,
    progress::Progress,
    scale::Wanted,
    script,
    watch::Watch,
};
use nix::sys::signal::Signal;
use paraft_checkpoint::Checkpoint;
use paraft_common::layout::Cuts;
use paraft_record::{Event, METRICS_FILE, RunRecord, Tail, event};
use paraft_trace::TRACE_FOLDER;
use paraft_worker::{Job, Stages, checkpoints, cli, described, exit, job::SamplerKind, start, worker::Plan};
use std::{
    fs,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicI32, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

mod record;
mod stop;

pub(crate) use record::Record;
use stop::Stop;

/// The number of the user's last signal, 0 without one. The handler that finds it was meant for another
/// process may reset it. A second signal while one is pending acts on slow shutdowns.
pub fn interrupts() -> Arc<AtomicI32> {
    let flag = Arc::new(AtomicI32::new(0));
    let set = flag.clone();
    let watch = move || {
        if let Ok(rt) = tokio::runtime::Builder::new_current_thread().enable_all().build() {
            loop {
                let number = rt.block_on(paraft_host::lifeline::terminated());
                if set.swap(number, Relaxed) != 0 {
                    process::hurry();
                }
            }
        }
    };
    let _ = std::thread::Builder::new().name("signals".into()).spawn(watch);
    flag
}

/// Fails if the user has interrupted, as [`interrupts`] reports.
///
/// # Errors
///
/// The interrupt, with its exit code.
pub fn check_interrupted(interrupted: &AtomicI32) -> Result<(), Failure> {
    match interrupted.load(Relaxed) {
        0 => Ok(()),
        number => Err(ended_by(number)),
    }
}

fn ended_by(signal: i32) -> Failure {
    Failure::new(128 + signal, "interrupted; the fleet has ended")
}

/// Trains one job on its own fleet in `dir`, optionally from a checkpoint; returns the run's record.
pub fn launch(
    job: &Job,
    dir: &Path,
    resume: Option<&Path>,
    quiet: bool,
    interrupted: &AtomicI32,
) -> Result<RunRecord, Failure> {
    launch_with(job, dir, resume, quiet, interrupted, Extras::default()).map(|launched| launched.record)
}

/// A run that has ended in order.
pub struct Launched {
    /// All of it.
    pub record: RunRecord,
    /// The user has stopped it by Ctrl-C.
    pub interrupted: bool,
}

/// As [`launch`], with options.
///
/// # Errors
///
/// Those of the run; the interrupt, if a signal has ended it at once.
pub fn launch_with(
    job: &Job,
    dir: &Path,
    resume: Option<&Path>,
    quiet: bool,
    interrupted: &AtomicI32,
    extras: Extras,
) -> Result<Launched, Failure> {
    if !job.cluster.addresses.is_empty() {
        return Err(Failure::new(exit::CONFIG, "the job names servers that are started by hand (cluster.addresses)")
            .help("start `paraft server` and `paraft worker` on those hosts, or remove the key to launch a fleet here"));
    }
    if let Some(name) = job.train.init_job().filter(|_| extras.on.is_none()) {
        return Err(Failure::new(
            exit::CONFIG,
            format!("train.init = \"job:{name}\": a fleet of its own has no other job"),
        )
        .help("train it on that job's fleet with --fleet FLEET, or give a file"));
    }
    let dir = &fs::canonicalize(dir).map_err(|e| Failure::write(dir, e))?;
    let mut resolved = job.clone();
    absolute_paths(&mut resolved)?;
    script::check(&resolved.cluster.script)?;
    checkpoints::try_out(&resolved, Some(dir))?;
    // Invalid data and impossible models fail here, before any process starts.
    let mut submitted = None;
    let (logs_shards, of) = (!extras.of_many, extras.of.clone());
    let mut record = Record::begin(&mut resolved, dir, resume, logs_shards, of, |job, run| {
        let Some(on) = &extras.on else { return Ok(()) };
        let s = Submitted::to(on, job, dir)?;
        (job.name, run.servers) = (s.name.clone(), s.servers.len() as u32);
        submitted = Some(s);
        Ok(())
    })?;
    // A script hears Ctrl-C itself, and decides.
    let stop = Stop::new(extras.stops_on_interrupt && resolved.cluster.script.is_empty());
    let begun = Begun { job: &resolved, dir, resume, quiet, interrupted, stop };
    begun.train(extras, submitted, &mut record).inspect_err(|e| record.failed(e, dir))
}

/// A run whose record has its first line.
struct Begun<'a> {
    job: &'a Job,
    dir: &'a Path,
    resume: Option<&'a Path>,
    quiet: bool,
    interrupted: &'a AtomicI32,
    stop: Stop,
}

impl Begun<'_> {
    /// Trains up to the end of the fleet. The record and the report are complete before the servers end, so that their pages
    /// can show the end.
    fn train(
        self,
        extras: Extras,
        submitted: Option<Submitted>,
        record: &mut Record,
    ) -> Result<Launched, Failure> {
        let Self { job: resolved, dir, resume, quiet, interrupted, mut stop } = self;
        let processors = std::thread::available_parallelism().map_or(usize::MAX, usize::from);
        let (of_many, reports) = (extras.of_many, extras.reports);
        if let Some(note) = resolved.oversubscribes(processors).filter(|_| !of_many) {
            eprintln!("{note}");
        }

        if extras.trace.is_some() {
            let _ = fs::remove_dir_all(dir.join(TRACE_FOLDER)); // of an earlier run in this folder
        }
        let wanted = Wanted::of(resolved, dir);
        let mut fleet = match &submitted {
            Some(s) => Fleet::on(&s.servers, dir, extras)?,
            None => {
                let fleet = Fleet::servers(resolved, dir, extras)?;
                pages::say(&fleet.addresses);
                fleet
            }
        };
        let servers_file = dir.join(SERVERS_FILE);
        fs::write(&servers_file, fleet.addresses.join(",")).map_err(|e| Failure::write(&servers_file, e))?;
        record.before(ask_all(&fleet.addresses, false));
        fleet.start_workers(resolved, resume, quiet)?;
        if let Some(path) = resume.filter(|_| !of_many) {
            let step = record.run.resumed_step.map_or(0, |s| s.0);
            eprintln!("resuming from step {step}, {}", path.display());
        }
        let leased = resolved.train.sampler == SamplerKind::Leased;
        // A script prints its own progress.
        let scripts = !resolved.cluster.script.is_empty();
        let mut progress = Progress::new(&record.run, leased, quiet || scripts).logged(&record.log);
        let mut tail = Tail::new(dir.join(METRICS_FILE));
        let mut watch = Watch::new(resolved, wanted);
        loop {
            let number = interrupted.load(Relaxed);
            let is_interrupt = number == Signal::SIGINT as i32;
            let mut ends_by = None;
            if is_interrupt && fleet.workers.iter().any(|w| w.has_terminal()) {
                // The terminal has sent the signal to the script too, which may run a debugger: the
                // script's end decides.
                let _ = interrupted.compare_exchange(number, 0, Relaxed, Relaxed);
            } else if is_interrupt && let Some(note) = stop.begin(&fleet.addresses, &resolved.name) {
                // The next signal is the second.
                let _ = interrupted.compare_exchange(number, 0, Relaxed, Relaxed);
                progress.note(&note);
            } else if number != 0 {
                ends_by = Some(number);
            } else if let Some(why) = stop.failed() {
                progress.warn(&format!("{why}; everything ends at once"));
                ends_by = Some(Signal::SIGINT as i32);
            }
            if let Some(number) = ends_by {
                let signal = Signal::try_from(number).unwrap_or(Signal::SIGTERM);
                fleet.stop_workers(signal);
                record.killed();
                fleet.stop_as(signal);
                return Err(ended_by(number));
            }
            fleet.follow_faults();
            let events = tail.poll()?;
            watch.follow(&events);
            progress.update(&events);
            record.tracked.notes().iter().for_each(|note| progress.note(note));
            match watch.look(&mut fleet, &mut record.writer, &progress) {
                Ok(true) => break,
                Ok(false) => {}
                Err(e) => {
                    if e.diverged() {
                        record.writer.write(&diverged(wall(), &e))?;
                    }
                    if stop.has_begun() {
                        // Workers that had not joined yet are refused by a stopped job.
                        progress.warn(e.message());
                        record.killed();
                        return Err(ended_by(Signal::SIGINT as i32));
                    }
                    fleet.stop_workers(Signal::SIGTERM);
                    record.failed(&e, dir);
                    return Err(e);
                }
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        progress.update(&tail.poll()?);
        progress.finish();
        let after = ask_all(&fleet.addresses, false);
        if let Some(why) = has_stopped(&after, resolved, &record.run, stop.has_begun()).filter(|_| !quiet) {
            progress.note(&why);
        }
        record.end(&after, resolved)?;
        let mut all = record.close(dir)?;
        ended::RecordedEnd::in_order(&all).note(dir, &mut all);
        if reports {
            paraft_record::write_report(dir.join(REPORT_FILE), std::slice::from_ref(&all))?;
        }
        fleet.stop();
        if let Some(submitted) = submitted {
            submitted.finished();
        }
        // The run is over, and its results are in the record and in the weights. Logs remain for `paraft
        // replay`.
        if !resolved.cluster.durability.on_disk() && fleet.servers.len() == resolved.servers() as usize {
            (0..resolved.servers()).for_each(|id| _ = fs::remove_dir_all(server_data(dir, id)));
        }
        Ok(Launched { record: all, interrupted: stop.has_begun() })
    }
}

/// The reply of a server to a query.
type Answer = Result<paraft_proto::StatusReply, String>;

/// Why a job ended early, if it did.
fn has_stopped(servers: &[Answer], job: &Job, run: &event::Run, interrupted: bool) -> Option<String> {
    let first = |s: &&paraft_proto::ShardStatus| s.shard == 0 && s.job_name == job.name;
    let shards = servers.iter().flatten().flat_map(|reply| &reply.shards).filter(first);
    // The rule may also fire at the last evaluation.
    let by_steps = job.eval.every_steps.is_some();
    let is_before_the_end = |number: u64| match by_steps {
        true => ended::total_steps(run, Some(job)).is_none_or(|last| number < last),
        false => job.train.max_steps.is_none() && number < job.train.epochs,
    };
    let evaluated =
        shards.filter_map(|s| s.evaluated.as_ref()).find(|e| e.stop && is_before_the_end(e.epoch))?;
    let who = match &job.eval.early_stop {
        _ if interrupted => "it was interrupted (Ctrl-C)".to_string(),
        Some(rule) => format!(
            "the held-out loss has not fallen by more than {} in {} evaluations (eval.early_stop), or a user has stopped it",
            rule.min_delta, rule.patience
        ),
        None => "a user has stopped it (`paraft stop`)".to_string(),
    };
    let unit = if by_steps { "step" } else { "epoch" };
    Some(format!("{} has stopped before its end, after {unit} {} or later: {who}", job.name, evaluated.epoch))
}

/// The line with the reason of an early end.
pub fn diverged(wall: f64, why: &Failure) -> Event {
    Event::Diverged(event::Diverged { wall, reason: why.message().to_string() })
}

/// Makes paths absolute: the resolved job lies in the run's folder, and its paths and its experiment
/// must not depend on that folder.
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
    script::absolute(&mut job.cluster.script, &base);
    let is_file = job.train.init_job().is_none();
    let init = job.train.init.as_mut().filter(|_| is_file);
    let checkpoints = job.checkpoint.as_mut().and_then(|c| c.dir.as_mut());
    for path in checkpoints.into_iter().chain(init) {
        *path = base.join(&*path);
    }
    if let Some(track) = &mut job.track {
        track.experiment.get_or_insert_with(|| job.name.clone());
    }
    job.base_dir = base;
    Ok(())
}

/// Prints the stages of the model, and their cost.
fn say_cut(job: &Job, stages: &Stages, steps: usize) {
    let all: f64 = stages.costs().iter().sum();
    for (i, ((layers, own), cost)) in stages.layers().iter().zip(stages.own()).zip(stages.costs()).enumerate()
    {
        let (first, last, share) = (layers.start, layers.end - 1, 100.0 * cost / all.max(f64::MIN_POSITIVE));
        eprintln!(
            "stage {i}  layers {first} to {last}, {} parameters, {share:.0} % of the arithmetic",
            own.len()
        );
    }
    if job.parallel.tensor > 1 {
        eprintln!("        each of them in {} slices, on a rank each", job.parallel.tensor);
    }
    if job.train.group_size > 1 {
        eprintln!("        {} such meshes, each with samples of its own", job.train.group_size);
    }
    let micro = job.micro_batches();
    let bubble = 100.0 * job.parallel.schedule.bubble_of(stages.costs(), micro, steps);
    eprintln!(
        "        {micro} micro-batches, {}: a stage is idle for {bubble:.0} % of the time",
        job.parallel.schedule.name()
    );
}

/// The run's first line. Loads the data and builds the model, so their errors appear before any process
/// starts. Reduces the job's shards to those with buckets.
pub fn describe(job: &mut Job, resume: Option<&Path>) -> Result<event::Run, Failure> {
    let began = Instant::now();
    let (parameters, budget, done, left_out) = if job.is_sparse() && !job.cluster.own_program() {
        let (model, data) = cli::sparse_built_in(job)?;
        let tables = job.tables_of_model();
        let layout = job.layout(model.tensors()).and_then(|l| l.with_tables(&tables));
        let layout = layout.map_err(|e| Failure::new(exit::CONFIG, e))?;
        job.only_shards_with_buckets(&layout);
        let plan = Plan::of(job, data.train.len())?.resuming_from(job, resume)?;
        let beginning =
            start::begin(job, resume, None, (&layout, &[], &tables), &plan, &std::env::temp_dir())?;
        let budget = plan.budget(job, beginning.start.as_ref());
        (layout.params_len() as u64, budget, beginning.step(), plan.left_out)
    } else if !job.cluster.own_program() {
        let (model, data) = cli::built_in(job)?;
        let stages = match job.parallel.is_cut() {
            false => Vec::new(),
            true => {
                let no = |e| {
                    Failure::new(exit::CONFIG, e).help("`paraft plan JOB` says how this model can be cut")
                };
                job.check_slices(&*model).map_err(no)?;
                let stages = job.stages(&model.layers()).map_err(no)?;
                say_cut(job, &stages, Plan::new(job, &data.train)?.between_ends(job));
                stages.values()
            }
        };
        let cuts = Cuts { stages: &stages, ..Cuts::default() };
        let layout = job.layout_cut(model.tensors(), cuts).map_err(|e| Failure::new(exit::CONFIG, e))?;
        job.only_shards_with_buckets(&layout);
        let plan = Plan::new(job, &data.train)?.resuming_from(job, resume)?;
        // The workers draw the weights from the seed.
        let beginning = start::begin(job, resume, None, (&layout, &[], &[]), &plan, &std::env::temp_dir())?;
        let budget = plan.budget(job, beginning.start.as_ref());
        (layout.params_len() as u64, budget, beginning.step(), plan.left_out)
    } else {
        // Only the script knows the model; its workers report a mismatch.
        (0, 0, resume.map(Checkpoint::open).transpose()?.map_or(0, |c| c.manifest().resume_step), 0)
    };
    tracing::debug!(seconds = began.elapsed().as_secs_f64(), "data and model are fine");
    let resumed = resume.map(|_| (paraft_common::Step(done), left_out));
    let run = described(job, parameters, budget, resumed);
    Ok(match run.of_script() {
        true => event::Run { model: script::name(&job.cluster.script), ..run },
        false => run,
    })
}
