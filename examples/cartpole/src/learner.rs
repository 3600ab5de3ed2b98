//! The learner: the job's worker. Each update is the gradient of `train.batch` fragments.

use crate::{
    actor::{self, ActorError, Place, Played},
    fragment::Fragment,
    intake::Intake,
    loss::gradient,
    net,
    report::{Report, WINDOW},
    settings::Settings,
};
use paraft_worker::{Job, ModelError, OpenRun, Setup, WorkerError, WorkerOptions};
use std::{
    fs,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::SeqCst},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

/// Between two looks at whether the learner is to end, while it waits for fragments.
const POLL: Duration = Duration::from_millis(100);
/// Updates between two values of the record and of the log.
const LOG_EVERY: u64 = 10;
/// Updates between two evaluations of weights that may have solved CartPole.
const CHECK_EVERY: u64 = 10;

/// The actors in this process.
struct Actors {
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<Result<Played, ActorError>>>,
    runtime: tokio::runtime::Runtime,
}

impl Actors {
    fn start(
        job: &Job,
        servers: &[String],
        learner: String,
        settings: &Settings,
    ) -> Result<Self, WorkerError> {
        let failed = |e: std::io::Error| ModelError::new(format!("no thread for an actor: {e}"));
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
        let (runtime, stop) = (runtime.map_err(failed)?, Arc::new(AtomicBool::new(false)));
        let mut threads = Vec::new();
        for number in 0..settings.actors {
            let place = Place {
                servers: servers.to_vec(),
                job: job.name.clone(),
                learner: learner.clone(),
                seed: job.seed.wrapping_mul(1000).wrapping_add(u64::from(number)),
            };
            let (acting, handle, stop) = (settings.acting, runtime.handle().clone(), stop.clone());
            let play = move || actor::play(&place, acting, &handle, &stop);
            threads.push(thread::Builder::new().name(format!("actor {number}")).spawn(play).map_err(failed)?);
        }
        Ok(Self { stop, threads, runtime })
    }

    /// An error if one of them has failed.
    fn check(&mut self) -> Result<(), WorkerError> {
        match self.threads.iter().position(JoinHandle::is_finished) {
            Some(i) => ended(self.threads.swap_remove(i)),
            None => Ok(()),
        }
    }

    fn end(self) -> Result<(), WorkerError> {
        self.stop.store(true, SeqCst);
        let ended = self.threads.into_iter().try_for_each(ended);
        self.runtime.shutdown_background();
        ended
    }
}

fn ended(thread: JoinHandle<Result<Played, ActorError>>) -> Result<(), WorkerError> {
    match thread.join() {
        Ok(Ok(_)) => Ok(()),
        Ok(Err(error)) => Err(ModelError::new(format!("an actor ended: {error}")).into()),
        Err(_) => Err(ModelError::new("an actor panicked: its message is above").into()),
    }
}

/// Trains until [`Settings::target`] or `train.max_steps`; returns what happened, and writes it where the settings say.
///
/// # Errors
/// The settings or the job are out of range, the learner's address is taken, an actor fails, or training does.
pub fn train(job: &Job, options: &WorkerOptions, settings: &Settings) -> Result<Report, WorkerError> {
    let intake = Intake::listen(&settings.listen, job.train.batch).map_err(|e| {
        let at = &settings.listen;
        WorkerError::Job(format!("the learner cannot listen at {at}: {e}; choose another CARTPOLE_LISTEN"))
    })?;
    train_from(job, options, settings, intake)
}

/// As [`train`], with fragments from this intake.
///
/// # Errors
/// As [`train`].
pub fn train_from(
    job: &Job,
    options: &WorkerOptions,
    settings: &Settings,
    intake: Intake,
) -> Result<Report, WorkerError> {
    settings.check().map_err(|why| WorkerError::Job(format!("settings: {why}")))?;
    if job.train.workers != 1 {
        let why = "train.workers: this example has one learner; set it to 1, and let more actors play";
        return Err(WorkerError::Job(why.into()));
    }
    let setup = Setup { data: "CartPole-v1".into(), ..Setup::new(net::tensors(), 0, net::init) };
    let mut run = OpenRun::join(job, options, setup, Box::new(vec![0.0; net::LEN]))?;
    eprintln!("the learner of job `{}` takes fragments at {}", job.name, intake.address());
    intake.updated(run.done().0);
    let mut actors = Actors::start(job, &options.servers, intake.address().to_string(), settings)?;
    let acting = settings.acting;
    let mut report = Report::new(job.seed, settings.correct, acting.refresh, acting.max_age);
    let learned = learn(job, options, settings, &mut run, &intake, &mut actors, &mut report);
    // Actors that wait to hand over a fragment learn that training is over.
    drop(intake);
    let ended = actors.end();
    learned.and(ended)?;
    run.finish()?;
    report.final_mean = actor::evaluate(run.weights(), WINDOW as u32, job.seed);
    if let Some(path) = &settings.report {
        let written = serde_json::to_vec(&report).map_err(std::io::Error::other);
        written
            .and_then(|text| fs::write(path, text))
            .map_err(|e| WorkerError::Job(format!("the report {} cannot be written: {e}", path.display())))?;
    }
    Ok(report)
}

fn learn(
    job: &Job,
    options: &WorkerOptions,
    settings: &Settings,
    run: &mut OpenRun,
    intake: &Intake,
    actors: &mut Actors,
    report: &mut Report,
) -> Result<(), WorkerError> {
    let began = Instant::now();
    let ranges: Vec<_> = (0..net::tensors().len()).map(|i| run.layout().tensor_range(i)).collect();
    let mut check_at = 0;
    while !run.is_over() {
        let batch = collect(job, options, settings, run.done().0, intake, actors, report)?;
        let of = gradient(run.weights(), &batch, settings);
        for (fragment, weight) in batch.iter().zip(&of.weights) {
            report.trained(run.done().0.saturating_sub(fragment.version), *weight);
        }
        // Last layer first: it is pushed while the others are handed over.
        for (tensor, range) in ranges.iter().enumerate().rev() {
            run.ready(tensor, &of.values[range.clone()])?;
        }
        let done = run.step(of.loss, of.steps as u64)?.done.0;
        intake.updated(done);
        report.updates = done;
        report.steps += of.steps as u64;
        report.seconds = began.elapsed().as_secs_f64();
        if done.is_multiple_of(LOG_EVERY) {
            run.log("reward", report.mean_of_last(WINDOW))?;
            run.log("entropy", f64::from(of.entropy))?;
            let weight = of.weights.iter().sum::<f32>() / of.weights.len().max(1) as f32;
            run.log("importance_weight", f64::from(weight))?;
        }
        // Those episodes were played by many versions; the newest one alone must be as good.
        if report.reaches(settings.target) && done >= check_at {
            check_at = done + CHECK_EVERY;
            if actor::evaluate(run.weights(), WINDOW as u32, job.seed.wrapping_add(done)) >= settings.target {
                report.solved_at = Some(done);
                break;
            }
        }
    }
    Ok(())
}

/// Waits for the fragments of an update. Those of too old policies are left out, and counted.
fn collect(
    job: &Job,
    options: &WorkerOptions,
    settings: &Settings,
    updates: u64,
    intake: &Intake,
    actors: &mut Actors,
    report: &mut Report,
) -> Result<Vec<Fragment>, WorkerError> {
    let mut batch = Vec::with_capacity(job.train.batch);
    while batch.len() < job.train.batch {
        if options.interrupt.is_set() {
            return Err(WorkerError::Interrupted);
        }
        let Some(fragment) = intake.next(POLL) else {
            actors.check()?;
            continue;
        };
        let age = updates.saturating_sub(fragment.version);
        report.came(age, &fragment.episodes);
        if age > settings.acting.max_age {
            report.dropped += 1;
        } else {
            batch.push(fragment);
        }
    }
    Ok(batch)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        fragment::{Answer, Step},
        settings::tests::settings,
    };
    use std::{net::TcpStream, path::Path};

    #[test]
    fn fragments_of_too_old_policies_are_left_out_and_counted() -> anyhow::Result<()> {
        let set = ["train.workers=1".into(), "train.batch=2".into()];
        let job = Job::parse("name = \"cartpole\"", Path::new("job.toml"), &set)?;
        let settings = Settings { actors: 0, ..settings() };
        let intake = Intake::listen("127.0.0.1:0", 8)?;
        let mut actor = TcpStream::connect(intake.address())?;
        for version in [9, 10, 11, 59, 60] {
            let step = Step { observation: [0.0; 4], log_probability: -0.7, right: true, over: true };
            let fragment = Fragment { version, steps: vec![step], last: [0.0; 4], episodes: vec![30] };
            fragment.write(&mut actor)?;
            Answer::read(&mut actor)?;
        }
        let mut actors = Actors::start(&job, &[], String::new(), &settings)?;
        let mut report = Report::new(1, settings.correct, 50, 50);
        let options = WorkerOptions::new(0, Vec::new());
        let batch = collect(&job, &options, &settings, 61, &intake, &mut actors, &mut report)?;
        assert_eq!(batch.iter().map(|f| f.version).collect::<Vec<_>>(), [11, 59]);
        assert_eq!((report.dropped, report.ages[4].episodes, report.mean_of_last(4)), (2, 2, 30.0));
        Ok(())
    }

    #[test]
    fn interrupted_learner_waits_for_no_fragment() -> anyhow::Result<()> {
        let job = Job::parse("name = \"cartpole\"", Path::new("job.toml"), &[])?;
        let settings = Settings { actors: 0, ..settings() };
        let intake = Intake::listen("127.0.0.1:0", 4)?;
        let mut actors = Actors::start(&job, &[], String::new(), &settings)?;
        let options =
            WorkerOptions { interrupt: Arc::new(AtomicBool::new(true)), ..WorkerOptions::new(0, Vec::new()) };
        let mut report = Report::new(1, settings.correct, 50, 50);
        let ended = collect(&job, &options, &settings, 0, &intake, &mut actors, &mut report);
        assert!(matches!(ended, Err(WorkerError::Interrupted)), "{ended:?}");
        Ok(())
    }
}
