//! A sweep's own run in MLflow, which those of its trials lie below.

use super::{
    mlflow::{About, Client, Metric, Status, Wrong},
    upload::AT_END,
};
use crate::files::wall;
use paraft_worker::Job;
use parking_lot::{Condvar, Mutex};
use std::{
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

/// Shared by the trials; made there with the first of them.
#[derive(Debug)]
pub struct Sweep {
    client: Client,
    about: About,
    /// Its id, as soon as it has one.
    run: Mutex<Option<String>>,
    trials: Mutex<Trials>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Trials {
    begun: u64,
    ended: u64,
    unsent: u64,
    said: bool,
}

impl Sweep {
    /// Of a job that names a server, in the sweep's folder; `what` says which sweep it is: one that goes on is the same.
    pub fn new(job: &Job, dir: &Path, what: &str) -> Option<Arc<Self>> {
        let track = job.track.as_ref()?;
        let name = dir.file_name().map_or_else(|| job.name.clone(), |n| n.to_string_lossy().into_owned());
        let about = About {
            experiment: track.experiment.clone().unwrap_or_else(|| job.name.clone()),
            id: super::id(&format!("{}\n{what}", std::path::absolute(dir).unwrap_or_default().display())),
            name,
            began: wall(),
            params: Vec::new(),
            tags: super::tags(job, dir),
        };
        Some(Arc::new(Self {
            client: Client::new(&track.mlflow),
            about,
            run: Mutex::default(),
            trials: Mutex::default(),
            changed: Condvar::new(),
        }))
    }

    /// The name of a trial's run.
    pub(super) fn name_of(&self, dir: &Path) -> String {
        let mut parts: Vec<_> = dir.iter().rev().map(|p| p.to_string_lossy()).take(2).collect();
        parts.reverse();
        parts.join("/")
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
    pub(super) fn run(&self, most: Duration) -> Result<String, Wrong> {
        let mut run = self.run.lock();
        match &*run {
            Some(id) => Ok(id.clone()),
            None => Ok(run.insert(self.client.begin(&self.about, most)?).clone()),
        }
    }

    /// It has ended so, with the best that was found if any was: says what could not be sent, after 10 s or a little more.
    pub fn end(&self, status: Status, best: Option<(&'static str, f64, &[String])>) {
        let until = Instant::now() + AT_END;
        let mut trials = self.trials.lock();
        while trials.ended < trials.begun && !self.changed.wait_until(&mut trials, until).timed_out() {}
        let unsent = trials.unsent + trials.begun - trials.ended;
        drop(trials);
        let mut told = match unsent {
            0 => None,
            n => Some(format!(
                "{n} of its runs are not there, or not whole; `paraft track` sends the folder of one"
            )),
        };
        if let Err(e) = self.told(status, best, until) {
            told = Some(format!("{}{}", e.why(), told.map(|t| format!("; {t}")).unwrap_or_default()));
        }
        if let Some(told) = told {
            eprintln!("warning: the sweep in MLflow at {}: {told}", self.client.url());
        }
    }

    fn told(
        &self,
        status: Status,
        best: Option<(&'static str, f64, &[String])>,
        until: Instant,
    ) -> Result<(), Wrong> {
        // Where no trial has begun it has not either.
        let Some(run) = self.run.try_lock_until(until).and_then(|r| r.clone()) else { return Ok(()) };
        let most = until.saturating_duration_since(Instant::now()).max(Duration::from_secs(1));
        if let Some((key, value, set)) = best {
            let split = |s: &String| s.split_once('=').map(|(k, v)| (format!("best.{k}"), v.to_string()));
            let params: Vec<_> = set.iter().filter_map(split).collect();
            self.client.params(&run, &params, most)?;
            self.client.metrics(&run, &[Metric { key, value, step: 0, wall: wall() }], most)?;
        }
        self.client.update(&run, status, Some(wall()), most)
    }
}
