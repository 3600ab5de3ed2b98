//! What the control log says of a job.

use crate::shape::Shape;
use paraft_common::{Durability, ModeChoice, checkpoint::KnownCheckpoint};
use serde::{Deserialize, Serialize};

/// The facts of a job; fixed when it begins.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobFacts {
    /// Its name, cut to [`JobFacts::NAME_CHARS`] characters.
    pub name: String,
    /// BSP, SSP(s) or ASP.
    pub mode: ModeChoice,
    /// Its configured number of workers, from 1.
    pub workers: u32,
    /// What an acknowledged push survives.
    pub durability: Durability,
}

impl JobFacts {
    /// Maximum characters of a job's name that are kept.
    pub const NAME_CHARS: usize = 200;
}

/// The state of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum JobState {
    /// Some worker has something to do, or will when it returns.
    Running,
    /// Every remaining worker has finished, on every shard.
    Finished,
    /// A shard lost its state before the job had finished; the job can continue from a checkpoint.
    Lost,
    /// Its shards exist, or will; no worker has begun it.
    Waiting,
    /// A person ended it before its workers had finished.
    Stopped,
}

impl JobState {
    /// Its name in the status.
    pub fn name(self) -> &'static str {
        match self {
            JobState::Running => "running",
            JobState::Finished => "finished",
            JobState::Lost => "lost",
            JobState::Waiting => "waiting",
            JobState::Stopped => "stopped",
        }
    }

    /// Whether no worker trains it any more.
    pub fn has_ended(self) -> bool {
        matches!(self, JobState::Finished | JobState::Lost | JobState::Stopped)
    }
}

/// A request for a job with shards of its own on a fleet.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Submission {
    /// Unique among jobs with shards.
    pub name: String,
    /// Random: a client that sends the request again, since the answer was lost, gets the same job.
    pub token: u64,
    /// The shape of its groups.
    pub shape: Shape,
    /// How long its weights are kept after its end, in milliseconds; `None`: until the job is deleted.
    pub keep_ms: Option<u64>,
    /// Time of the request, in ms of unix time.
    pub seen_ms: u64,
    /// The folder of its record and its workers' logs, for people.
    pub run: String,
}

/// A change of a job's checkpoints.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Difference {
    /// Present, with their current facts.
    pub held: Vec<KnownCheckpoint>,
    /// Paths that no longer exist.
    pub gone: Vec<String>,
}
