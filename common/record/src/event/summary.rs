//! The totals of a whole run.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The numbers of a whole run, computed by [`RunRecord::summarize`](crate::RunRecord::summarize).
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Summary {
    /// The consistency mode that the run began in.
    pub mode: String,
    /// The mode of the last switch, if any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub switched_to: Option<String>,
    /// Workers at the start.
    pub workers: u32,
    /// Samples trained on by all workers.
    pub samples: u64,
    /// Seconds from the start of the run to the first step in the record: start of processes, data,
    /// shards and leaders. `None` in simulated time, and if no step was trained.
    #[serde(default)]
    pub first_step_seconds: Option<f64>,
    /// The longest training clock of a worker.
    pub seconds: f64,
    /// `samples / seconds`; 0 when nothing was trained.
    pub samples_per_s: f64,
    /// Held-out loss at the end; without an evaluation, the mean of the workers' last training losses.
    pub final_loss: Option<f64>,
    /// Held-out accuracy at the end, 0 to 1.
    pub final_accuracy: Option<f64>,
    /// Further metrics of the final evaluation, by name.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub final_metrics: BTreeMap<String, f64>,
    /// The target of the next two fields.
    pub target_accuracy: Option<f64>,
    /// Training clock at the first evaluation at or above the target; `None` when there was none.
    pub seconds_to_target: Option<f64>,
    /// Fleet samples at that evaluation.
    pub samples_to_target: Option<u64>,
    /// Half of all pushes had at most this delay, in versions.
    pub delay_p50: Option<u64>,
    /// 99 of 100 pushes had at most this delay.
    pub delay_p99: Option<u64>,
    /// The largest delay.
    pub delay_max: Option<u64>,
    /// Gradient bytes, workers to servers.
    pub bytes_pushed: u64,
    /// Weight bytes, servers to workers.
    pub bytes_pulled: u64,
    /// CPU time of workers and servers for 1000 samples, over the workers that reported theirs.
    pub cpu_seconds_per_1000_samples: Option<f64>,
    /// Seconds spent in pulls, summed over workers.
    pub wait_seconds: f64,
    /// How often a worker left before it wrote its totals; a worker that rejoins may leave again.
    pub workers_lost: u32,
    /// How often a rank left its group; 0 for jobs without groups.
    #[serde(default)]
    pub ranks_lost: u32,
    /// How often the process of a server ended during the run, as the launcher saw it.
    #[serde(default)]
    pub servers_lost: u32,
    /// How often a shard got a new leader while workers trained.
    #[serde(default)]
    pub leaders_elected: u32,
    /// The longest time, in seconds, that a shard was without a leader after its leader's process had ended.
    #[serde(default)]
    pub longest_stall_seconds: Option<f64>,
    /// Acknowledged pushes that were lost with a leader; 0 unless the durability is `leader`.
    #[serde(default)]
    pub pushes_lost: u64,
    /// Pushes that closed lock-step rounds left out; 0 without `train.backup_workers`.
    #[serde(default)]
    pub dropped: u64,
    /// Half of all pushes had at most this distance, in average steps (an upper bound, to a factor of 1.42).
    #[serde(default)]
    pub distance_p50: Option<f64>,
    /// 99 of 100 pushes had at most this distance.
    #[serde(default)]
    pub distance_p99: Option<f64>,
    /// Half of all pushes had at most this age, in seconds.
    #[serde(default)]
    pub age_p50: Option<f64>,
    /// 99 of 100 pushes had at most this age.
    #[serde(default)]
    pub age_p99: Option<f64>,
}
