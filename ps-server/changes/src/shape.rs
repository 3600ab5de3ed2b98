//! The shape of a fleet and of a job.

use paraft_common::Durability;
use serde::{Deserialize, Serialize};
use std::fmt;

/// The shape of a job's groups, fixed when the job begins; and the shape of a fleet, fixed when it is
/// founded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shape {
    /// Raft groups that share the model. For a fleet: those of the job that it is founded for; 0 without one.
    pub shards: u32,
    /// Replicas of each group.
    pub replicas: u32,
    /// What an acknowledged push survives.
    pub durability: Durability,
}

impl Shape {
    /// Describes each difference to `now`.
    pub fn differences(&self, now: &Shape) -> Vec<String> {
        let all = [
            ("--shards", self.shards.to_string(), now.shards.to_string()),
            ("--replicas", self.replicas.to_string(), now.replicas.to_string()),
            ("--durability", self.durability.to_string(), now.durability.to_string()),
        ];
        let differ = all.into_iter().filter(|(_, was, is)| was != is);
        differ.map(|(what, was, is)| format!("{what} {is} (its fleet: {was})")).collect()
    }

    /// Fails with the differences, for a server that was started with `self` in a fleet that was founded with
    /// `fleets`.
    pub fn must_be(&self, fleets: Shape) -> Result<(), String> {
        match fleets.differences(self)[..] {
            [] => Ok(()),
            ref all => Err(format!(
                "this server's fleet was founded with other settings: {}. Start it as the others run",
                all.join("; ")
            )),
        }
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "shards {}, replicas {}, durability {}", self.shards, self.replicas, self.durability)
    }
}
