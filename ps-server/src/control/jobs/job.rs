//! A job of the agreed state.

use paraft_changes::{
    job::{JobFacts, JobState},
    shape::Shape,
};
use paraft_common::{ShardId, checkpoint::KnownCheckpoint};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// A job.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Job {
    /// The shape of its groups.
    pub shape: Shape,
    /// Empty until its first worker names it, in a fleet that is founded for one job.
    pub name: String,
    /// Token of its submission; 0: it was not submitted.
    pub token: u64,
    /// The founding of each shard that it runs in, as the leaders last reported.
    pub foundings: BTreeMap<ShardId, u64>,
    /// Its facts; `None`: no worker has begun it.
    pub facts: Option<JobFacts>,
    /// Its state.
    pub state: JobState,
    /// A person has asked for its end.
    pub stopping: bool,
    /// When the control group first received it, in ms of unix time, by the clock of its leader then.
    pub first_seen_ms: u64,
    /// When it ended, by the same clock; 0: it has not.
    pub ended_ms: u64,
    /// How long its weights are kept after that; `None`: until the job is deleted.
    pub keep_ms: Option<u64>,
    /// It has no shards any more, only checkpoints.
    pub released: bool,
    /// The folder of its record and its workers' logs, for people.
    pub run: String,
    /// Its checkpoints, the latest last; at most
    /// [`MAX_KNOWN_CHECKPOINTS`](paraft_common::checkpoint::MAX_KNOWN_CHECKPOINTS).
    pub checkpoints: Vec<KnownCheckpoint>,
}

impl Job {
    /// A job that no worker has begun.
    pub(in crate::control) fn with(shape: Shape) -> Self {
        Self {
            shape,
            name: String::new(),
            token: 0,
            foundings: BTreeMap::new(),
            facts: None,
            state: JobState::Waiting,
            stopping: false,
            first_seen_ms: 0,
            ended_ms: 0,
            keep_ms: None,
            released: false,
            run: String::new(),
            checkpoints: Vec::new(),
        }
    }

    /// The founding of its first shard, which names this run; 0: it has not begun.
    pub fn founding(&self) -> u64 {
        self.foundings.get(&ShardId(0)).copied().unwrap_or(0)
    }

    /// Whether its weights were kept for long enough.
    pub fn is_over(&self, now_ms: u64) -> bool {
        let kept = |keep: u64| now_ms.saturating_sub(self.ended_ms) >= keep;
        !self.released && self.state.has_ended() && self.ended_ms > 0 && self.keep_ms.is_some_and(kept)
    }

    /// Sets the state, and the time of its end.
    pub(super) fn ends(&mut self, state: JobState, now_ms: u64) {
        self.state = state;
        self.ended_ms = if state.has_ended() { now_ms.max(1) } else { 0 };
    }

    /// The checkpoint that was written last.
    pub fn latest(&self) -> Option<&KnownCheckpoint> {
        self.checkpoints.last()
    }
}
