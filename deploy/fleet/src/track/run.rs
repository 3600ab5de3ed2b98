//! A run as MLflow gets it: its description, its values, and the whole of an ended one, from its folder.

use super::mlflow::{About, Client, Metric, OpenRun, RequestError, Status};
use crate::failure::Failure;
use paraft_record::{
    Event, Incident, IncidentKind, METRICS_FILE, Point, RunRecord, Value, follow, read_events,
};
use paraft_worker::{Job, exit};
use std::{
    fs,
    io::{BufRead, BufReader},
    path::{Path, PathBuf},
    time::{Duration, UNIX_EPOCH},
};

/// Sends the run in a folder; returns its id. `parent`: the name of a trial and its sweep's run, in which it is nested.
pub(super) fn send_to(
    client: &Client,
    dir: &Path,
    job: &Job,
    parent: Option<(String, &str)>,
) -> Result<String, Failure> {
    let events = read_events(dir.join(METRICS_FILE))?;
    let run = events.iter().find(|e| matches!(e, Event::Run(_))).ok_or_else(|| {
        Failure::new(exit::DATA, format!("{}: its record has no `run` line", dir.display()))
            .help("give the folder of a run of `paraft train`")
    })?;
    let ended = events.iter().any(|e| matches!(e, Event::Summary(_)));
    let points = follow::points(dir)?;
    let wall = points.iter().map(|p| p.wall).fold(0.0, f64::max);
    let timeout = Duration::from_secs(10);
    let mut about = about(dir, job, run);
    let failures = RunRecord::from_events(events).map(|r| failures(&r)).unwrap_or_default();
    let mut nesting = Vec::new();
    if let Some((name, parent_run)) = parent {
        about.name.clone_from(&name);
        nesting = vec![(PARENT.to_string(), parent_run.to_string()), ("mlflow.runName".to_string(), name)];
        about.tags.push(nesting[0].clone());
    }
    let sent = || {
        let OpenRun { id, was_killed } = client.begin(&about, timeout)?;
        let status = match ended {
            true => Status::Finished,
            false if was_killed => Status::Killed,
            false => Status::Failed,
        };
        // A trial that was sent alone has another name and is not nested.
        nesting.iter().chain(&failures).try_for_each(|(key, value)| client.tag(&id, key, value, timeout))?;
        client.params(&id, &about.params, timeout)?;
        let all: Vec<_> = metrics(&points).collect();
        let mut rest = &all[..];
        while !rest.is_empty() {
            rest = &rest[client.metrics(&id, rest, timeout)?..];
        }
        client.update(&id, status, Some(wall), timeout)?;
        Ok(id)
    };
    sent().map_err(failed)
}

/// MLflow's tag for the parent of a nested run.
pub(super) const PARENT: &str = "mlflow.parentRunId";

pub(super) fn failed(wrong: RequestError) -> Failure {
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
pub(super) fn metrics(points: &[Point]) -> impl Iterator<Item = Metric> {
    points.iter().filter_map(|p| match p.value {
        Value::Number(value) => Some(Metric { key: p.tag.clone(), value, step: p.step, wall: p.wall }),
        Value::Delays(_) | Value::Text(_) => None,
    })
}

/// The description of the run for MLflow, from the resolved job and the record's first line.
pub(super) fn about(dir: &Path, job: &Job, run: &Event) -> About {
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
pub(super) fn id(text: &str) -> String {
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

/// The tags of an ended run for servers that failed or were drained; none if none was.
pub(super) fn failures(record: &RunRecord) -> Vec<(String, String)> {
    let s = record.summarize();
    let tag = |key: &str, value: String| (format!("paraft.{key}"), value);
    let lost = (s.servers_lost > 0).then(|| tag("servers_lost", s.servers_lost.to_string()));
    let elected = (s.leaders_elected > 0).then(|| tag("leaders_elected", s.leaders_elected.to_string()));
    let stall = s.longest_stall_seconds.map(|t| tag("longest_stall_seconds", format!("{t:.3}")));
    let is_drain = |i: &&Incident| matches!(i.what, IncidentKind::ServerDrained { undo: false, .. });
    let drained = record.incidents.iter().filter(is_drain).count();
    let drained = (drained > 0).then(|| tag("servers_drained", drained.to_string()));
    [lost, elected, stall, drained].into_iter().flatten().collect()
}

pub(super) fn tags(job: &Job, dir: &Path) -> Vec<(String, String)> {
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
