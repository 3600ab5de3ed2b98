//! Exports a run to trackers: event files for TensorBoard in its folder, and MLflow if the job names a
//! server (`[track]`). One follower of the record feeds both. Their errors are printed, and the run
//! continues. [`otlp`]: exports its trace at the end.

pub mod mlflow;
pub mod otlp;
mod sweep;
mod upload;

pub use sweep::{Best, Sweep};

use crate::{
    failure::Failure,
    files::{JOB_FILE, wall},
};
use mlflow::{About, Client, Metric, OpenRun, RequestError, Status};
use paraft_record::{Event, Follow, METRICS_FILE, Point, RunRecord, Value, follow, read_events};
use paraft_worker::{Job, exit};
use std::{
    fs,
    io::{BufRead, BufReader},
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, UNIX_EPOCH},
};
use upload::Upload;
use ureq::{
    Agent,
    tls::{Certificate, RootCerts, TlsConfig},
};

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

/// Sends the run in a folder; a trial is nested with its name in its sweep's run.
fn send_to(client: &Client, dir: &Path, job: &Job, below: Option<(String, &str)>) -> Result<String, Failure> {
    let events = read_events(dir.join(METRICS_FILE))?;
    let run = events.iter().find(|e| matches!(e, Event::Run(_))).ok_or_else(|| {
        Failure::new(exit::DATA, format!("{}: its record has no `run` line", dir.display()))
            .help("give the folder of a run of `paraft train`")
    })?;
    let ended = events.iter().any(|e| matches!(e, Event::Summary(_)));
    let points = follow::points(dir)?;
    let wall = points.iter().map(|p| p.wall).fold(0.0, f64::max);
    let most = Duration::from_secs(10);
    let mut about = about(dir, job, run);
    let failures = RunRecord::from_events(events).map(|r| failures(&r)).unwrap_or_default();
    let mut place = Vec::new();
    if let Some((name, parent)) = below {
        about.name.clone_from(&name);
        place = vec![(PARENT.to_string(), parent.to_string()), ("mlflow.runName".to_string(), name)];
        about.tags.push(place[0].clone());
    }
    let sent = || {
        let OpenRun { id, was_killed } = client.begin(&about, most)?;
        let status = match ended {
            true => Status::Finished,
            false if was_killed => Status::Killed,
            false => Status::Failed,
        };
        // A trial that was sent alone has another name and is not nested.
        place.iter().chain(&failures).try_for_each(|(key, value)| client.tag(&id, key, value, most))?;
        client.params(&id, &about.params, most)?;
        let all: Vec<_> = metrics(&points).collect();
        let mut rest = &all[..];
        while !rest.is_empty() {
            rest = &rest[client.metrics(&id, rest, most)?..];
        }
        client.update(&id, status, Some(wall), most)?;
        Ok(id)
    };
    sent().map_err(failed)
}

/// MLflow's tag for the parent of a nested run.
const PARENT: &str = "mlflow.parentRunId";

fn failed(wrong: RequestError) -> Failure {
    match wrong {
        RequestError::Later(why) => Failure::new(exit::UNAVAILABLE, why),
        RequestError::Refused(why) => Failure::new(exit::CONFIG, why),
    }
}

/// The ids of records that were set aside in this folder, with the time of their last write. The
/// current owner of the folder resumes them, so those runs have ended, even if no process reported it.
fn earlier(dir: &Path) -> Vec<(String, f64)> {
    let files = fs::read_dir(dir).into_iter().flatten().flatten().map(|f| f.path());
    let is_aside = |path: &PathBuf| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let number = name.strip_prefix("metrics.").and_then(|n| n.strip_suffix(".jsonl"));
        number.is_some_and(|n| !n.is_empty() && n.bytes().all(|b| b.is_ascii_digit()))
    };
    let mut aside: Vec<_> = files.filter(is_aside).collect();
    aside.sort();
    let run = |path: &PathBuf| {
        let mut line = String::new();
        let mut record = BufReader::new(fs::File::open(path).ok()?);
        record.read_line(&mut line).ok()?;
        let run: Event = serde_json::from_str(&line).ok().filter(|e| matches!(e, Event::Run(_)))?;
        let written = fs::metadata(path).and_then(|m| m.modified()).ok()?;
        let written = written.duration_since(UNIX_EPOCH).map_or(0.0, |d| d.as_secs_f64());
        Some((id_of(&run), written))
    };
    aside.iter().filter_map(run).collect()
}

/// The metrics for MLflow.
fn metrics(points: &[Point]) -> impl Iterator<Item = Metric> {
    points.iter().filter_map(|p| match p.value {
        Value::Number(value) => Some(Metric { key: p.tag.clone(), value, step: p.step, wall: p.wall }),
        Value::Delays(_) | Value::Text(_) => None,
    })
}

/// The description of the run for MLflow, from the resolved job and the record's first line.
fn about(dir: &Path, job: &Job, run: &Event) -> About {
    let name = dir.file_name().map_or_else(|| job.name.clone(), |n| n.to_string_lossy().into_owned());
    let track = job.track.as_ref();
    About {
        experiment: track.and_then(|t| t.experiment.clone()).unwrap_or_else(|| job.name.clone()),
        name,
        // The folder may be renamed before it is sent.
        id: id_of(run),
        earlier: earlier(dir),
        began: if let Event::Run(run) = run { run.wall } else { 0.0 },
        params: params(job),
        tags: tags(job, dir),
    }
}

fn id_of(run: &Event) -> String {
    id(&serde_json::to_string(run).unwrap_or_default())
}

/// FNV-1a hash: MLflow's filter puts the id in quotes.
fn id(text: &str) -> String {
    let hash = |h: u64, b: u8| (h ^ u64::from(b)).wrapping_mul(0x100_0000_01b3);
    format!("{:016x}", text.bytes().fold(0xcbf2_9ce4_8422_2325, hash))
}

/// The keys of a job, as in `--set`.
fn params(job: &Job) -> Vec<(String, String)> {
    fn add(all: &mut Vec<(String, String)>, key: &str, value: &serde_json::Value) {
        match value {
            serde_json::Value::Object(table) => {
                for (name, value) in table {
                    let key = if key.is_empty() { name.clone() } else { format!("{key}.{name}") };
                    add(all, &key, value);
                }
            }
            serde_json::Value::String(text) => all.push((key.into(), text.clone())),
            serde_json::Value::Null => {}
            other => all.push((key.into(), other.to_string())),
        }
    }
    let mut all = Vec::new();
    add(&mut all, "", &serde_json::to_value(job).unwrap_or_default());
    // Tracking is no parameter of the experiment. Names of tensors contain characters that MLflow's
    // keys must not have.
    all.retain(|(key, _)| !key.starts_with("track.") && !key.starts_with("constraints."));
    if !job.constraints.is_empty() {
        all.push(("constraints".into(), serde_json::to_string(&job.constraints).unwrap_or_default()));
    }
    all
}

/// The tags of an ended run for what failed of its servers; none if nothing did.
fn failures(record: &RunRecord) -> Vec<(String, String)> {
    let s = record.summarize();
    let tag = |key: &str, value: String| (format!("paraft.{key}"), value);
    let lost = (s.servers_lost > 0).then(|| tag("servers_lost", s.servers_lost.to_string()));
    let elected = (s.leaders_elected > 0).then(|| tag("leaders_elected", s.leaders_elected.to_string()));
    let stall = s.longest_stall_seconds.map(|t| tag("longest_stall_seconds", format!("{t:.3}")));
    [lost, elected, stall].into_iter().flatten().collect()
}

fn tags(job: &Job, dir: &Path) -> Vec<(String, String)> {
    let dir = std::path::absolute(dir).unwrap_or_else(|_| dir.to_path_buf());
    let commit =
        std::process::Command::new("git").arg("-C").arg(&job.base_dir).args(["rev-parse", "HEAD"]).output();
    let commit = commit.ok().filter(|c| c.status.success());
    let commit = commit.map(|c| String::from_utf8_lossy(&c.stdout).trim().to_string());
    let user = std::env::var("USER").ok().filter(|u| !u.is_empty());
    let tag = |key: &str, value: String| (key.to_string(), value);
    [
        tag("mlflow.source.name", "paraft".into()),
        tag("mlflow.source.type", "LOCAL".into()),
        tag("paraft.version", env!("CARGO_PKG_VERSION").into()),
        tag("paraft.run_dir", dir.display().to_string()),
    ]
    .into_iter()
    .chain(commit.map(|c| tag("mlflow.source.git.commit", c)))
    .chain(user.map(|u| tag("mlflow.user", u)))
    .collect()
}

/// An HTTP client for this URL. Trusted authorities are those of the system, or of `SSL_CERT_FILE`.
fn agent(url: &str) -> Agent {
    let mut config = Agent::config_builder()
        .http_status_as_error(false)
        .user_agent(concat!("paraft/", env!("CARGO_PKG_VERSION")));
    if url.starts_with("https") {
        config = config.tls_config(tls());
    }
    config.build().new_agent()
}

fn tls() -> TlsConfig {
    let roots: Vec<_> = rustls_native_certs::load_native_certs()
        .certs
        .iter()
        .map(|c| Certificate::from_der(c).to_owned())
        .collect();
    TlsConfig::builder()
        .unversioned_rustls_crypto_provider(Arc::new(rustls::crypto::ring::default_provider()))
        .root_certs(RootCerts::new_with_certs(&roots))
        .build()
}

#[cfg(test)]
mod tests;
