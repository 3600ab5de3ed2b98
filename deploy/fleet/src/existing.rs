//! A job on an existing fleet: submitted, trained by workers of this machine, ended.
//!
//! The servers belong to other processes: this module starts and stops none.

use crate::{ask, failure::Failure, files, orders};
use paraft_client::Order;
use paraft_common::config::MAX_NAME_CHARS;
use paraft_proto::{FleetShape, Refused, SubmitRequest, WireKind};
use paraft_worker::{Job, exit};
use serde::{Deserialize, Serialize};
use std::{
    fmt, fs, io,
    path::{Path, PathBuf},
    time::Duration,
};

/// Exists in a run's folder while the fleet may have a job to delete. A killed launcher leaves it to
/// the next one.
const LEFT_FILE: &str = "on-fleet.json";

/// An existing fleet, and how it treats the job.
#[derive(Clone, Debug)]
pub struct ExistingFleet {
    /// Some or all of its servers, as host:port.
    pub servers: Vec<String>,
    /// How long the job's weights are kept after its end; `None`: until a user deletes it.
    pub keep: Option<Duration>,
    /// The job and its data on the servers are deleted at its end.
    pub delete: bool,
    /// The run's folder records the job until then, so [`clear`] finds it after a kill of this process.
    pub remember: bool,
}

/// How long weights are kept after a job's end: `90s`, `30min`, `12h`, `7d`, or `forever`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeepTime(pub Option<Duration>);

impl fmt::Display for KeepTime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(time) => write!(f, "{}s", time.as_secs()),
            None => f.write_str("forever"),
        }
    }
}

impl std::str::FromStr for KeepTime {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "forever" {
            return Ok(Self(None));
        }
        let bad = || format!("`{text}` is no time: write 90s, 30min, 12h, 7d or forever");
        let (number, unit) = text.split_at(text.find(|c: char| !c.is_ascii_digit()).ok_or_else(bad)?);
        let seconds = match unit {
            "s" => 1,
            "min" | "m" => 60,
            "h" => 3_600,
            "d" => 86_400,
            _ => return Err(bad()),
        };
        let seconds = number.parse::<u32>().ok().and_then(|n| u64::from(n).checked_mul(seconds));
        seconds.map(|s| Self(Some(Duration::from_secs(s)))).ok_or_else(bad)
    }
}

/// A submitted job. Drop before its workers have finished stops it, since no other worker trains it.
pub struct Submitted {
    /// The job's name on the fleet.
    pub name: String,
    /// The fleet's servers.
    pub servers: Vec<String>,
    delete: bool,
    finished: bool,
    /// The folder that records it.
    known_in: Option<PathBuf>,
}

/// After this many jobs of one name, another error is likely.
const MAX_NAMES: u32 = 10_000;

impl Submitted {
    /// Submits the job. If another job has the name, this one gets a number appended.
    pub fn to(on: &ExistingFleet, job: &Job, run_dir: &Path) -> Result<Self, Failure> {
        let ExistingFleet { servers, keep, delete, remember } = on.clone();
        let servers = &servers[..];
        if remember {
            // The folder holds one record only.
            clear(run_dir, servers)?;
        }
        let shape = FleetShape {
            shards: job.shards(),
            replicas: job.cluster.replicas,
            durability: job.cluster.durability.name().into(),
        };
        let run = format!("{}:{}", paraft_host::name(), run_dir.display());
        let keep_ms = keep.map(|k| k.as_millis() as u64);
        let token = orders::token();
        let fleet = ask::agreeing(servers)?;
        let fleet_servers: Vec<String> = fleet.servers.iter().map(|s| s.address.clone()).collect();
        let taken: Vec<&str> = fleet.jobs.iter().filter(|j| !j.released).map(|j| j.name.as_str()).collect();
        let numbered = (2..MAX_NAMES).map(|n| {
            let number = format!("-{n}");
            let kept: String = job.name.chars().take(MAX_NAME_CHARS - number.len()).collect();
            kept + &number
        });
        let names = std::iter::once(job.name.clone()).chain(numbered);
        let mut names = names.filter(|n| !taken.contains(&n.as_str()));
        let name = loop {
            let Some(name) = names.next() else {
                return Err(Failure::new(
                    exit::CONFIG,
                    format!("the fleet has too many jobs `{}`", job.name),
                )
                .help("choose another name, or end some of them with `paraft delete`"));
            };
            let request = SubmitRequest {
                name: name.clone(),
                token,
                shape: Some(shape.clone()),
                keep_ms,
                run: run.clone(),
            };
            if remember {
                // Written before the request, whose reply may be lost, and before this process may be
                // killed.
                LeftoverJob::new(fleet.fleet, &fleet_servers, &request).put(run_dir)?;
            }
            match submit(servers, &request) {
                Ok(_) => break name,
                // Another client has submitted the name at the same time.
                Err(e) if e.kind() == WireKind::NameTaken => {}
                Err(e) => return Err(e.into()),
            }
        };
        ask::wait_for_job(&fleet_servers, &name);
        let known_in = remember.then(|| run_dir.to_path_buf());
        Ok(Self { name, servers: fleet_servers, delete, finished: false, known_in })
    }

    /// Its workers have finished.
    pub fn finished(mut self) {
        self.finished = true;
    }
}

impl Drop for Submitted {
    fn drop(&mut self) {
        if self.finished && !self.delete {
            return;
        }
        if let Some(e) = end(&self.servers, &self.name, self.delete).err().filter(|e| !is_gone(e)) {
            let how = if self.delete { "deleted" } else { "stopped" };
            eprintln!("warning: job {} is not {how}: {}", self.name, e.message);
            return;
        }
        if let Some(Err(e)) = self.known_in.as_deref().map(forget) {
            eprintln!("warning: {}", e.message());
        }
    }
}

/// Another client may have deleted it.
fn is_gone(e: &Refused) -> bool {
    e.kind() == WireKind::NoSuchJob
}

fn submit(servers: &[String], request: &SubmitRequest) -> Result<u32, Refused> {
    let order = Order::Submit(request.clone());
    orders::given_again(servers, &order, request.token, orders::ORDER_TIMEOUT).map(|done| done.job)
}

/// The record of a submission.
#[derive(Debug, Serialize, Deserialize)]
struct LeftoverJob {
    fleet: u64,
    servers: Vec<String>,
    name: String,
    token: u64,
    shards: u32,
    replicas: u32,
    durability: String,
    run: String,
}

impl LeftoverJob {
    fn new(fleet: u64, servers: &[String], request: &SubmitRequest) -> Self {
        let shape = request.shape.clone().unwrap_or_default();
        Self {
            fleet,
            servers: servers.to_vec(),
            name: request.name.clone(),
            token: request.token,
            shards: shape.shards,
            replicas: shape.replicas,
            durability: shape.durability,
            run: request.run.clone(),
        }
    }

    fn put(&self, dir: &Path) -> Result<(), Failure> {
        let file = dir.join(LEFT_FILE);
        let text = serde_json::to_string(self).map_err(|e| Failure::write(&file, e))?;
        files::put(&file, &text).map_err(|e| Failure::write(&file, e))
    }

    fn request(&self) -> SubmitRequest {
        let shape =
            FleetShape { shards: self.shards, replicas: self.replicas, durability: self.durability.clone() };
        SubmitRequest {
            name: self.name.clone(),
            token: self.token,
            shape: Some(shape),
            keep_ms: Some(0),
            run: self.run.clone(),
        }
    }

    /// The addresses of its fleet; `None`: the fleet is gone.
    fn servers(&self, given: &[String]) -> Result<Option<Vec<String>>, Failure> {
        if !given.is_empty() && ask::agreeing(given)?.fleet == self.fleet {
            return Ok(Some(given.to_vec()));
        }
        match ask::agreeing(&self.servers) {
            Ok(there) => Ok((there.fleet == self.fleet).then(|| self.servers.clone())),
            Err(_) => {
                let servers = self.servers.join(",");
                eprintln!(
                    "warning: an earlier try may have left job {} on the fleet at {servers}, which is not reached",
                    self.name
                );
                eprintln!("  help: where it stands again: paraft delete {} --fleet {servers}", self.name);
                Ok(None)
            }
        }
    }

    /// Deletes the job if the fleet has it; returns whether it had.
    fn delete(&self, servers: &[String]) -> Result<bool, Failure> {
        let fleet = ask::agreeing(servers)?;
        if !fleet.jobs.iter().any(|j| !j.released && j.name == self.name) {
            return Ok(false);
        }
        // Another job may have the name by now. A repeated request with its token tells whether the job
        // is this one.
        match submit(servers, &self.request()) {
            Ok(_) => {}
            Err(e) if e.kind() == WireKind::NameTaken => return Ok(false),
            Err(e) => return Err(e.into()),
        }
        match end(servers, &self.name, true) {
            Err(e) if !is_gone(&e) => Err(e.into()),
            _ => Ok(true),
        }
    }
}

/// Deletes the job that a launcher of this run left on its fleet, after a kill or a failed deletion. It
/// contacts `servers` if they belong to that fleet, else the recorded addresses.
pub fn clear(dir: &Path, servers: &[String]) -> Result<(), Failure> {
    let file = dir.join(LEFT_FILE);
    let text = files::read(&file).map_err(|e| Failure::new(exit::IO, format!("{}: {e}", file.display())))?;
    let Some(text) = text else { return Ok(()) };
    let left: LeftoverJob = serde_json::from_str(&text).map_err(|e| {
        Failure::new(exit::DATA, format!("{}: {e}", file.display())).help(
            "look with `paraft jobs` for what the run has left on its fleet, delete it, and remove the file",
        )
    })?;
    if let Some(servers) = left.servers(servers)?
        && left.delete(&servers)?
    {
        eprintln!("job {}, which an earlier try had left on the fleet, is deleted there", left.name);
    }
    forget(dir)
}

fn forget(dir: &Path) -> Result<(), Failure> {
    let file = dir.join(LEFT_FILE);
    match fs::remove_file(&file) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(Failure::write(&file, e)),
        _ => Ok(()),
    }
}

/// Stops or deletes a job; returns its previous state.
///
/// # Errors
///
/// As [`orders::give`]'s.
pub fn end(servers: &[String], job: &str, delete: bool) -> Result<String, Refused> {
    orders::given(servers, &Order::EndJob { job: job.into(), delete }).map(|done| done.was)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_read_with_their_units() {
        let keep = |text: &str| text.parse::<KeepTime>().map(|k| k.0.map(|k| k.as_secs()));
        for (text, seconds) in [("90s", 90), ("30min", 1800), ("12h", 43_200), ("7d", 604_800), ("0s", 0)] {
            assert_eq!(keep(text), Ok(Some(seconds)), "{text}");
        }
        assert_eq!(keep("forever"), Ok(None));
        for bad in ["", "5", "h", "1 h", "1w", "-1s", "99999999999s"] {
            assert!(keep(bad).is_err_and(|e| e.contains("12h")), "{bad}");
        }
    }
}
