//! The first Ctrl-C of a run: its job is stopped as `paraft stop` does, and its workers finish.

use crate::{existing, process};
use paraft_proto::{Refused, WireKind};
use std::{
    thread::{self, Builder, JoinHandle},
    time::{Duration, Instant},
};

/// The time for the order and for the workers to finish, as in `paraft stop`.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Whether and how a run's job is stopped.
pub(super) struct Stop {
    /// The first Ctrl-C stops the job instead of ending the fleet.
    on_interrupt: bool,
    begun: Option<Begun>,
}

struct Begun {
    /// Until the fleet has executed or refused it. On a thread: meanwhile the launcher restarts servers, which the order may
    /// need.
    order: Option<JoinHandle<Result<String, Refused>>>,
    deadline: Instant,
}

/// The control group learns of a job from its shards, a moment after the training has begun.
fn end(servers: &[String], job: &str) -> Result<String, Refused> {
    let began = Instant::now();
    loop {
        match existing::end(servers, job, false) {
            Err(e) if e.kind() == WireKind::NoSuchJob && began.elapsed() < TIMEOUT / 4 => {
                thread::sleep(Duration::from_millis(50));
            }
            ended => return ended,
        }
    }
}

impl Stop {
    /// Of a run that the first Ctrl-C stops, or else ends at once like every other signal.
    pub(super) fn new(on_interrupt: bool) -> Self {
        Self { on_interrupt, begun: None }
    }

    /// Tells the fleet to stop the job; returns what to say to the user. `None`: this interrupt ends the fleet.
    pub(super) fn begin(&mut self, servers: &[String], job: &str) -> Option<String> {
        // A second signal may come before the first is noticed.
        if !self.on_interrupt || self.begun.is_some() || process::hurries() {
            return None;
        }
        let (servers, name) = (servers.to_vec(), job.to_string());
        let give = move || end(&servers, &name);
        let order = Builder::new().name("stop".into()).spawn(give).ok()?;
        self.begun = Some(Begun { order: Some(order), deadline: Instant::now() + TIMEOUT });
        Some(format!(
            "stopping {job}: workers finish their step and the weights are kept; Ctrl-C again ends everything at once"
        ))
    }

    /// Whether the user has interrupted the run.
    pub(super) fn has_begun(&self) -> bool {
        self.begun.is_some()
    }

    /// Why the job does not stop; the run is to end at once then.
    pub(super) fn failed(&mut self) -> Option<String> {
        let begun = self.begun.as_mut()?;
        if Instant::now() > begun.deadline {
            return Some(format!("some workers have not finished within {} s", TIMEOUT.as_secs()));
        }
        let order = begun.order.take_if(|order| order.is_finished())?;
        match order.join() {
            Ok(Ok(_)) => None,
            Ok(Err(refused)) => Some(format!("the job cannot be stopped: {}", refused.message)),
            Err(_) => Some("the job cannot be stopped: the order ended in a panic".into()),
        }
    }
}
