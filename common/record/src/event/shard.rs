//! A server's totals for a shard.

use paraft_common::{
    ServerId, ShardId, Version, WorkerId,
    histogram::{DelayHistogram, LogHistogram},
};
use serde::{Deserialize, Serialize};

/// What one server counted for one shard while it led it. A later line of the same server and shard replaces
/// the earlier one; counts of several leaders of a shard add up.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Shard {
    /// Unix time, seconds.
    pub wall: f64,
    /// The shard.
    pub shard: ShardId,
    /// The server that counted.
    pub server: ServerId,
    /// The shard's version.
    pub version: Version,
    /// `delay[d]` pushes were applied `d` versions after their weights were pulled.
    pub delay: Vec<u64>,
    /// Pushes applied.
    pub pushes: u64,
    /// Pulls that had to wait for other workers.
    pub pulls_waited: u64,
    /// Gradient bytes received, as encoded.
    pub bytes_pushed: u64,
    /// Weight bytes sent, as encoded.
    pub bytes_pulled: u64,
    /// Acknowledged pushes that were lost with a leader.
    #[serde(default)]
    pub pushes_lost: u64,
    /// Pushes that closed lock-step rounds left out.
    #[serde(default)]
    pub dropped: u64,
    /// The lateness of each worker's pushes, counted while this server led.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub staleness: Vec<Staleness>,
    /// Which worker waited for which, counted while this server led.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub waits: Vec<Wait>,
}

impl Shard {
    /// The delays as a histogram.
    pub fn delays(&self) -> DelayHistogram {
        DelayHistogram::from_counts(&self.delay)
    }
}

/// How long one worker waited for another.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Wait {
    /// The worker that waited.
    pub worker: WorkerId,
    /// The worker whose push it waited for.
    #[serde(rename = "for")]
    pub of: WorkerId,
    /// Total seconds.
    pub seconds: f64,
}

/// How late a worker's pushes were, counted per bucket.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Staleness {
    /// The worker.
    pub worker: WorkerId,
    /// `delay[d]` pushes were applied `d` versions after their weights were pulled.
    pub delay: Vec<u64>,
    /// Distance in average steps between the pulled weights and the weights that the push was applied
    /// to: upper bounds and counts.
    pub distance: LogHistogram,
    /// Seconds between the answer to the pull and the update: upper bounds and counts.
    pub age: LogHistogram,
}

impl Staleness {
    /// Adds the measurements of `other`.
    pub fn add(&mut self, other: &Self) {
        let mut delays = DelayHistogram::from_counts(&self.delay);
        delays.merge(&DelayHistogram::from_counts(&other.delay));
        self.delay = delays.counts().to_vec();
        self.distance.merge(&other.distance);
        self.age.merge(&other.age);
    }
}
