//! The configuration of a run.

use paraft_common::Step;
use serde::{Deserialize, Serialize};

/// The value of fields that a user's script decides: the launcher knows neither its data nor its
/// optimizer.
pub const SCRIPT: &str = "script";

/// The configuration of a run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Run {
    /// Unix time, seconds.
    pub wall: f64,
    /// The run's name, also the name of its folder.
    pub name: String,
    /// The consistency mode as users write it: `bsp`, `ssp:4`, `asp`.
    pub mode: String,
    /// Model name.
    pub model: String,
    /// Data set name.
    pub data: String,
    /// Workers at the start.
    pub workers: u32,
    /// Servers.
    pub servers: u32,
    /// Shards.
    pub shards: u32,
    /// Replicas of each shard.
    pub replicas: u32,
    /// Samples in a worker's step; 0 where a script decides.
    pub batch: u64,
    /// Seed of weights and sample order.
    pub seed: u64,
    /// Passes over the training data; 0 where a script decides.
    pub epochs: u64,
    /// Trainable values in the model; 0 if only the user's script knows.
    pub parameters: u64,
    /// Samples that the whole fleet trains on; 0 if only the user's script knows.
    pub samples_budget: u64,
    /// Optimizer name.
    pub optimizer: String,
    /// Learning rate.
    pub lr: f64,
    /// The algorithm for late gradients: `asgd`, `dc-asgd-c`, ...; empty in files from before this
    /// option.
    #[serde(default)]
    pub algorithm: String,
    /// The encoding of pushed gradients: `f32`, `top-k:0.001`, ...; empty in files from before this
    /// option.
    #[serde(default)]
    pub encoding: String,
    /// When lock-step rounds close: `all` or `backup`; empty in files from before this option.
    #[serde(default)]
    pub round: String,
    /// The target accuracy (0 to 1) of the run, if any.
    #[serde(default)]
    pub target_accuracy: Option<f64>,
    /// The step of the checkpoint that the run resumes from, if any. All other figures count from
    /// there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resumed_step: Option<Step>,
    /// Numbers up to `resumed_step` that no step of this job has: the checkpoint's job had fewer samples in a step.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub steps_left_out: u64,
    /// The servers' identifier of this start of the job. Empty if the launcher wrote this line.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub founding: String,
    /// The run is a simulation (`paraft simulate`): all times are simulated, and `wall` counts from its
    /// start.
    #[serde(default, skip_serializing_if = "is_false")]
    pub simulated: bool,
}

impl Run {
    /// Whether a user's script defines the model, the data and the optimizer.
    pub fn of_script(&self) -> bool {
        self.data == SCRIPT
    }

    /// The model and its data set, for people.
    pub fn what(&self) -> String {
        match self.of_script() {
            true => self.model.clone(),
            false => format!("{} on {}", self.model, self.data),
        }
    }
}

fn is_zero(n: &u64) -> bool {
    *n == 0
}

fn is_false(b: &bool) -> bool {
    !*b
}
