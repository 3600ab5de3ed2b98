//! What happened in a run besides training, in words: one moment for each failure, election, order or
//! checkpoint. Reports list the moments, and trackers show them.

use crate::event::{Event, IncidentKind, SwitchedBy};

/// The kind of a moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MomentKind {
    /// A server ended, came back, is drained or takes part again.
    Server,
    /// A shard got a new leader.
    Leader,
    /// A worker ended, left or came back.
    Worker,
    /// A user switched the mode.
    Mode,
    /// Another number of workers is wanted.
    Scale,
    /// A checkpoint was written.
    Checkpoint,
    /// A checkpoint could not be written.
    FailedCheckpoint,
    /// A fault was injected.
    Fault,
}

impl MomentKind {
    /// Its name, which decides its colour on a chart.
    pub fn name(self) -> &'static str {
        match self {
            Self::Server => "server",
            Self::Leader => "leader",
            Self::Worker => "worker",
            Self::Mode => "mode",
            Self::Scale => "scale",
            Self::Checkpoint | Self::FailedCheckpoint => "checkpoint",
            Self::Fault => "fault",
        }
    }

    /// Its letter on a chart.
    pub fn letter(self) -> &'static str {
        match self {
            Self::Server => "S",
            Self::Leader => "L",
            Self::Worker => "W",
            Self::Mode => "M",
            Self::Scale => "N",
            Self::Checkpoint | Self::FailedCheckpoint => "C",
            Self::Fault => "F",
        }
    }
}

/// Something that happened.
#[derive(Clone, Debug, PartialEq)]
pub struct Moment {
    /// Unix time, seconds.
    pub wall: f64,
    /// Its kind.
    pub kind: MomentKind,
    /// What, for people.
    pub text: String,
    /// What it cost, for people; empty if nothing is known.
    pub cost: String,
}

impl Moment {
    /// What happened, with its cost.
    pub fn line(&self) -> String {
        match self.cost.is_empty() {
            true => self.text.clone(),
            false => format!("{} ({})", self.text, self.cost),
        }
    }
}

/// The moment of an event, if it is one. Switches by the rule of mode `auto` are frequent and are none.
pub fn moment(event: &Event) -> Option<Moment> {
    let (wall, kind, text, cost) = match event {
        Event::Incident(i) => {
            let (kind, text, cost) = incident(&i.what)?;
            (i.wall, kind, text, cost)
        }
        Event::Leave(l) => {
            let who = worker(l.worker.0, l.rank);
            (l.wall, MomentKind::Worker, format!("{who} has left: {}", l.reason), String::new())
        }
        Event::Checkpoint(c) => match &c.error {
            Some(why) => {
                let text = format!("no checkpoint of step {}: {why}", c.step.0);
                (c.wall, MomentKind::FailedCheckpoint, text, String::new())
            }
            None => {
                let text = format!("checkpoint of step {} in {}", c.step.0, c.path);
                (c.wall, MomentKind::Checkpoint, text, format!("{:.2} s beside training", c.seconds))
            }
        },
        _ => return None,
    };
    Some(Moment { wall, kind, text, cost })
}

fn incident(what: &IncidentKind) -> Option<(MomentKind, String, String)> {
    let none = String::new;
    Some(match what {
        IncidentKind::ServerEnded { server, how, restarts, .. } => {
            let then = if *restarts { "it is started again" } else { "the launcher does not start it again" };
            (MomentKind::Server, format!("server {} {how}; {then}", server.0), none())
        }
        IncidentKind::ServerBack { server, seconds } => {
            (MomentKind::Server, format!("server {} is back", server.0), format!("away for {seconds:.1} s"))
        }
        IncidentKind::ServerDrained { server, undo } => {
            let now = if *undo { "takes part again" } else { "is drained" };
            (MomentKind::Server, format!("server {} {now}", server.0), none())
        }
        IncidentKind::LeaderChanged { shard, from, to, stall_seconds, handed_over, .. } => {
            let (shard, from, to) = (shard.0, from.0, to.0);
            let text = match (from == to, handed_over) {
                (true, _) => format!("server {to} leads shard {shard} again"),
                (false, true) => format!("server {from} handed shard {shard} over to server {to}"),
                (false, false) => format!("server {to} leads shard {shard} instead of server {from}"),
            };
            let cost = stall_seconds.map(|s| format!("stall of {s:.2} s"));
            (MomentKind::Leader, text, cost.unwrap_or_default())
        }
        IncidentKind::WorkerBack { worker: w, rank } => {
            (MomentKind::Worker, format!("{} is started again", worker(w.0, *rank)), none())
        }
        IncidentKind::WorkersWanted { workers } => {
            (MomentKind::Scale, format!("workers wanted: {workers}"), none())
        }
        IncidentKind::ModeSwitched { from, to, by: SwitchedBy::User, .. } => {
            (MomentKind::Mode, format!("a user switched the mode from {from} to {to}"), none())
        }
        IncidentKind::Fault { fault, target } => {
            (MomentKind::Fault, format!("chaos: {fault}, {target}"), none())
        }
        IncidentKind::ModeSwitched { by: SwitchedBy::Rule, .. } | IncidentKind::Other => return None,
    })
}

fn worker(worker: u32, rank: Option<u32>) -> String {
    match rank {
        Some(rank) => format!("rank {rank} of worker {worker}"),
        None => format!("worker {worker}"),
    }
}

#[cfg(test)]
#[path = "story_tests.rs"]
mod tests;
