//! A sweep's own run in MLflow, which those of its trials lie below.

use super::{
    mlflow::{About, Client, Metric, RequestError, Status},
    run,
};
use crate::{
    failure::Failure,
    files::{JOB_FILE, wall},
};
use paraft_worker::Job;
use parking_lot::{Condvar, Mutex};
use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

/// How long the end of a run waits for unsent values.
pub(super) const END_TIMEOUT: Duration = Duration::from_secs(10);

/// Shared by the trials; made there with the first of them.
#[derive(Debug)]
pub struct Sweep {
    client: Client,
    about: About,
    dir: PathBuf,
    /// Its id, as soon as it has one.
    run: Mutex<Option<String>>,
    trials: Mutex<Trials>,
    changed: Condvar,
}

/// The best of a sweep's trials.
#[derive(Clone, Debug, PartialEq)]
pub struct Best {
    /// The metric's line.
    pub key: &'static str,
    /// What it came to.
    pub value: f64,
    /// When, in seconds of unix time.
    pub wall: f64,
    /// Its settings, as `--set` has them.
    pub set: Vec<String>,
}

#[derive(Debug, Default)]
struct Trials {
    begun: u64,
    ended: u64,
    unsent: u64,
    said: bool,
}

impl Sweep {
    /// Of a job that names a server, in the sweep's folder; `what` says which sweep it is: a resumed one is the same. `began`: in
    /// seconds of unix time.
    pub fn new(job: &Job, dir: &Path, what: &str, began: f64) -> Option<Arc<Self>> {
        let track = job.track.as_ref()?;
        let name = dir.file_name().map_or_else(|| job.name.clone(), |n| n.to_string_lossy().into_owned());
        let about = About {
            experiment: track.experiment.clone().unwrap_or_else(|| job.name.clone()),
            id: run::id(what),
            name,
            began,
            tags: run::tags(job, dir),
            ..About::default()
        };
        Some(Arc::new(Self {
            client: Client::new(&track.mlflow),
            about,
            dir: dir.to_path_buf(),
            run: Mutex::default(),
            trials: Mutex::default(),
            changed: Condvar::new(),
        }))
    }

    pub(super) fn begun(&self) {
        self.trials.lock().begun += 1;
    }

    pub(super) fn ended(&self, unsent: bool) {
        let mut trials = self.trials.lock();
        trials.ended += 1;
        trials.unsent += u64::from(unsent);
        self.changed.notify_all();
    }

    /// Whether a trial says what went wrong: the first one does.
    pub(super) fn says(&self) -> bool {
        !std::mem::replace(&mut self.trials.lock().said, true)
    }

    /// Its id, made where there is none yet.
    pub(super) fn run(&self, most: Duration) -> Result<String, RequestError> {
        let mut run = self.run.lock();
        match &*run {
            Some(id) => Ok(id.clone()),
            None => Ok(run.insert(self.client.begin(&self.about, most)?.id).clone()),
        }
    }

    /// It has ended so, with the best that was found if any was: says what could not be sent, after 10 s or a little more.
    pub fn end(&self, status: Status, best: Option<&Best>) {
        let until = Instant::now() + END_TIMEOUT;
        let mut trials = self.trials.lock();
        while trials.ended < trials.begun && !self.changed.wait_until(&mut trials, until).timed_out() {}
        let unsent = trials.unsent + trials.begun - trials.ended;
        drop(trials);
        let mut told = match unsent {
            0 => None,
            n => Some(format!("{n} of its runs are not there, or not whole")),
        };
        if let Err(e) = self.told(status, best, until) {
            told = Some(format!("{}{}", e.why(), told.map(|t| format!("; {t}")).unwrap_or_default()));
        }
        if let Some(told) = told {
            eprintln!("warning: the sweep in MLflow at {}: {told}", self.client.url());
            eprintln!("  help: `paraft track {}` sends it later, with all its trials", self.dir.display());
        }
    }

    fn told(&self, status: Status, best: Option<&Best>, until: Instant) -> Result<(), RequestError> {
        // Where no trial has begun it has not either.
        let Some(run) = self.run.try_lock_until(until).and_then(|r| r.clone()) else { return Ok(()) };
        let most = until.saturating_duration_since(Instant::now()).max(Duration::from_secs(1));
        self.tell(&run, status, wall(), best, most)
    }

    fn tell(
        &self,
        run: &str,
        status: Status,
        ended: f64,
        best: Option<&Best>,
        most: Duration,
    ) -> Result<(), RequestError> {
        if let Some(Best { key, value, wall, set }) = best {
            let split = |s: &String| s.split_once('=').map(|(k, v)| (format!("best.{k}"), v.to_string()));
            let params: Vec<_> = set.iter().filter_map(split).collect();
            self.client.params(run, &params, most)?;
            self.client.metrics(
                run,
                &[Metric { key: (*key).into(), value: *value, step: 0, wall: *wall }],
                most,
            )?;
        }
        self.client.update(run, status, Some(ended), most)
    }

    /// Sends a sweep that has ended: its own run, and those in these folders below it; its id there. What is there already stays.
    pub fn send(
        &self,
        job: &Job,
        trials: &[PathBuf],
        status: Status,
        ended: f64,
        best: Option<&Best>,
    ) -> Result<String, Failure> {
        let run = self.run(END_TIMEOUT).map_err(run::failed)?;
        for dir in trials {
            let sent = Job::load(&dir.join(JOB_FILE), &[]).map_err(Failure::from).and_then(|mut trial| {
                trial.track = job.track.clone();
                if let Some(track) = &mut trial.track {
                    // The fleet may have given it another name.
                    track.experiment = Some(self.about.experiment.clone());
                }
                run::send_to(&self.client, dir, &trial, Some((name_of(dir), &run)))
            });
            sent.map_err(|e| {
                Failure::new(e.code(), format!("{}: {}", dir.display(), e.message()))
                    .help("the same command sends what is missing; what is there stays")
            })?;
        }
        self.tell(&run, status, ended, best, END_TIMEOUT).map_err(run::failed)?;
        Ok(run)
    }
}

/// The name of a trial's run: its two last folders.
pub(super) fn name_of(dir: &Path) -> String {
    let mut parts: Vec<_> = dir.iter().rev().map(|p| p.to_string_lossy()).take(2).collect();
    parts.reverse();
    parts.join("/")
}
