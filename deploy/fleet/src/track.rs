//! Exports a run to trackers: event files for TensorBoard in its folder, and MLflow if the job names a
//! server (`[track]`). One follower of the record feeds both. Their errors are printed, and the run
//! continues. [`otlp`]: exports its trace at the end.

pub mod mlflow;
pub mod otlp;
mod run;
mod sweep;
mod upload;

pub use sweep::{Best, Sweep};

use crate::{
    failure::Failure,
    files::{JOB_FILE, wall},
};
use mlflow::{Client, Status};
use paraft_record::{Event, Follow, Point, RunRecord};
use paraft_worker::{Job, exit};
use run::{about, failures, metrics, send_to};
use std::{
    path::{Path, PathBuf},
    sync::Arc,
};
use upload::Upload;

/// A followed run, until drop.
#[derive(Debug)]
pub(crate) struct Tracked {
    follow: Option<Follow>,
    upload: Option<Arc<Upload>>,
    of: Option<Arc<Sweep>>,
    /// The run's folder.
    dir: PathBuf,
    /// The status if the run ended now.
    pub(crate) status: Status,
}

impl Tracked {
    /// Follows the record in `dir`, which has its first line, `run`.
    pub(crate) fn new(dir: &Path, job: &Job, run: &Event, of: Option<Arc<Sweep>>) -> Self {
        let upload = job.track.as_ref().map(|track| {
            let mut about = about(dir, job, run);
            if let Some(sweep) = &of {
                about.name = sweep::name_of(dir);
                sweep.begun();
            }
            Arc::new(Upload::start(Client::new(&track.mlflow), about, of.clone()))
        });
        let to = upload.clone();
        let sink = move |points: &[Point]| {
            if let Some(upload) = &to {
                upload.push(metrics(points));
            }
        };
        let say = |e: &paraft_record::RecordError| eprintln!("warning: no more points for trackers: {e}");
        let follow = Follow::first(dir, Box::new(sink), say);
        Self { follow: Some(follow), upload, of, dir: dir.to_path_buf(), status: Status::Failed }
    }

    /// Takes the messages for the user.
    pub(crate) fn notes(&self) -> Vec<String> {
        self.upload.as_ref().map(|u| u.notes()).unwrap_or_default()
    }
}

impl Drop for Tracked {
    fn drop(&mut self) {
        self.follow.take(); // to the record's end
        let Some(upload) = &self.upload else { return };
        // A record that cannot be read has no tags; the follower has said why.
        upload.tag(RunRecord::load(&self.dir).map(|r| failures(&r)).unwrap_or_default());
        upload.end(self.status, wall());
        // The next trial need not wait for it; the sweep's end does.
        if self.of.is_some() {
            return;
        }
        let unsent = upload.wait();
        self.notes().iter().for_each(|note| eprintln!("{note}"));
        if let Err(unsent) = unsent {
            eprintln!("warning: {}", unsent.why);
            eprintln!(
                "  help: MLflow has not got {}; `paraft track` with the run's folder sends it later",
                match unsent.metrics {
                    0 => "the whole of the run".to_string(),
                    n => format!("{n} numbers of the run"),
                }
            );
        }
    }
}

/// Sends an ended run from its folder, to `to` or to the server of its job. Existing data stays.
pub fn send(dir: &Path, to: Option<&str>, experiment: Option<&str>) -> Result<String, Failure> {
    let mut job = Job::load(&dir.join(JOB_FILE), &[])?;
    set(&mut job, dir, to, experiment)?;
    let url = job.track.as_ref().map(|t| t.mlflow.clone()).unwrap_or_default();
    send_to(&Client::new(&url), dir, &job, None)
}

/// Sets a job's tracking server and experiment, unless they are not given.
pub fn set(job: &mut Job, dir: &Path, to: Option<&str>, experiment: Option<&str>) -> Result<(), Failure> {
    let track = job.track.take();
    let mlflow =
        to.map(str::to_string).or_else(|| track.as_ref().map(|t| t.mlflow.clone())).ok_or_else(|| {
            Failure::new(exit::USAGE, format!("the job in {} has no [track]", dir.display()))
                .help("name the server: --mlflow http://host:5000")
        })?;
    let experiment = experiment.map(str::to_string).or_else(|| track.and_then(|t| t.experiment));
    job.track = Some(paraft_worker::job::TrackConfig { mlflow, experiment });
    job.refused().map_or(Ok(()), |why| Err(Failure::new(exit::USAGE, why)))
}

#[cfg(test)]
mod tests;
