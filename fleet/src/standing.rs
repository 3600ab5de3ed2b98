//! A job on a fleet that stands already: taken in by it, trained by workers of this machine, ended.
//!
//! The servers are not this process's: nothing here starts or stops one.

use crate::{
    ask::{self, ORDER, ordered},
    failure::Failure,
};
use paraft_proto::{FleetShape, SubmitRequest};
use paraft_worker::{Job, exit};
use std::{fmt, path::Path, time::Duration};

/// A fleet that stands already, and what it is asked to do with a job.
#[derive(Clone, Debug)]
pub struct On {
    /// Its servers, or some of them, as host:port.
    pub servers: Vec<String>,
    /// So long after its end the job's weights are kept; `None`: until somebody deletes it.
    pub keep: Option<Duration>,
    /// The job goes as soon as it has ended, with what the servers have of it.
    pub delete: bool,
}

/// How long weights are kept behind a job's end: `90s`, `30min`, `12h`, `7d`, or `forever`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Keep(pub Option<Duration>);

impl fmt::Display for Keep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(time) => write!(f, "{}s", time.as_secs()),
            None => f.write_str("forever"),
        }
    }
}

impl std::str::FromStr for Keep {
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

/// A job that a fleet has taken in. One that is dropped before its workers have finished is stopped: nobody else trains it.
pub struct Submitted {
    /// The name that the fleet knows it by.
    pub name: String,
    /// The fleet's servers.
    pub servers: Vec<String>,
    delete: bool,
    finished: bool,
}

/// After this many jobs of one name something else is wrong.
const MOST_NAMES: u32 = 10_000;

impl Submitted {
    /// Has a fleet take the job in. Where another job has the name, and it need not be this one, this one gets a number behind it.
    pub fn to(on: &On, job: &Job, run_dir: &Path) -> Result<Self, Failure> {
        let On { servers, keep, delete } = on.clone();
        let servers = &servers[..];
        let shape = FleetShape {
            shards: job.shards(),
            replicas: job.cluster.replicas,
            durability: job.cluster.durability.name().into(),
        };
        let run = format!("{}:{}", paraft_host::name(), run_dir.display());
        let keep_ms = keep.map(|k| k.as_millis() as u64);
        let token = rand::random_range(1..u64::MAX);
        let fleet = ask::agreeing(servers).map_err(|none| Failure::new(exit::UNAVAILABLE, none.why))?;
        let taken: Vec<&str> = fleet.jobs.iter().filter(|j| !j.released).map(|j| j.name.as_str()).collect();
        let numbered = (2..MOST_NAMES).map(|n| format!("{}-{n}", job.name));
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
            match ordered(servers, async |a: &str| paraft_client::submit(a, request.clone(), ORDER).await) {
                Ok(_) => break name,
                // Another was submitted at the same time.
                Err(e) if e.message().contains("has the name") => {}
                Err(e) => return Err(e),
            }
        };
        let servers = fleet.servers.iter().map(|s| s.address.clone()).collect();
        Ok(Self { name, servers, delete, finished: false })
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
        // One that somebody has deleted is gone.
        let left = |e: &Failure| !e.message().contains("has no job");
        if let Some(e) = end(&self.servers, &self.name, self.delete).err().filter(left) {
            let how = if self.delete { "deleted" } else { "stopped" };
            eprintln!("warning: job {} is not {how}: {}", self.name, e.message());
        }
    }
}

/// Has a job stopped where it is, or deleted; gives the word for what it was.
pub fn end(servers: &[String], job: &str, delete: bool) -> Result<String, Failure> {
    ordered(servers, async |a: &str| paraft_client::end_job(a, job, delete, ORDER).await)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_read_with_their_units() {
        let keep = |text: &str| text.parse::<Keep>().map(|k| k.0.map(|k| k.as_secs()));
        for (text, seconds) in [("90s", 90), ("30min", 1800), ("12h", 43_200), ("7d", 604_800), ("0s", 0)] {
            assert_eq!(keep(text), Ok(Some(seconds)), "{text}");
        }
        assert_eq!(keep("forever"), Ok(None));
        for bad in ["", "5", "h", "1 h", "1w", "-1s", "99999999999s"] {
            assert!(keep(bad).is_err_and(|e| e.contains("12h")), "{bad}");
        }
    }
}
