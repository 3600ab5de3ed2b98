//! The lines of `metrics.jsonl`.
//!
//! Each line is a JSON object. Its `event` field names one of these structs. `wall` is Unix time in
//! seconds. `seconds` is the writer's training clock: it starts with the worker's first step and pauses
//! while the worker evaluates, so modes are compared by training time.
//!
//! Old files stay readable: a new field gets a default, no field is renamed, and unknown fields are
//! ignored (`tests/samples/v1.jsonl` is such an old file). JSON has no NaN. A loss that is NaN is
//! written as `null` and read as NaN, because a diverged run must still have a record.

use paraft_common::histogram::{DelayHistogram, LogHistogram};
use paraft_common::{ServerId, ShardId, Step, Version, WorkerId};
use serde::{Deserialize, Deserializer, Serialize};

/// One line of `metrics.jsonl`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum Event {
    /// The configuration of the run: the first line.
    Run(Run),
    /// A worker's progress since its previous line.
    Train(Train),
    /// A held-out evaluation.
    Eval(Eval),
    /// A worker's totals, written when it ends.
    Worker(Worker),
    /// A server's totals for a shard.
    Shard(Shard),
    /// A worker left, or its lease expired.
    Leave(Leave),
    /// The resources that a server process used, written at its end.
    Server(Server),
    /// A checkpoint was written, or failed.
    Checkpoint(Checkpoint),
    /// A worker finished a chunk of the leased sampler.
    Chunk(Chunk),
    /// A long evaluation is in progress.
    Evaluating(Evaluating),
    /// The mode was switched.
    Mode(ModeSwitch),
    /// The loss or a gradient became NaN or infinite, which ended the training.
    Diverged(Diverged),
    /// The totals of the whole run: the last line.
    Summary(Summary),
}

/// Training ended early because the loss or a gradient became NaN or infinite. The launcher writes this
/// line.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Diverged {
    /// Unix time, seconds.
    pub wall: f64,
    /// The message of the worker that detected it first.
    pub reason: String,
}

/// A worker finished a chunk of the leased sampler. If a worker dies before it reports a chunk, another
/// worker trains the chunk again, and the chunk has two lines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Chunk {
    /// Unix time, seconds.
    pub wall: f64,
    /// The worker.
    pub worker: WorkerId,
    /// The epoch, from 1.
    pub epoch: u64,
    /// The chunk's number in the epoch, from 0.
    pub chunk: u64,
    /// Samples in the chunk.
    pub samples: u64,
}

/// A worker continues in another mode: the pull after `step` carried the switch.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ModeSwitch {
    /// Unix time, seconds.
    pub wall: f64,
    /// The worker.
    pub worker: WorkerId,
    /// Its last finished step.
    pub step: Step,
    /// Samples it has trained on so far.
    pub samples: u64,
    /// Its training clock.
    pub seconds: f64,
    /// The number of this switch in the job.
    pub number: u64,
    /// The mode in force: `bsp`, `ssp:4`, `asp`.
    pub mode: String,
}

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

fn is_false(b: &bool) -> bool {
    !*b
}

/// A checkpoint that was due.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Checkpoint {
    /// Unix time, seconds.
    pub wall: f64,
    /// The worker that was to write it.
    pub worker: WorkerId,
    /// The step.
    pub step: Step,
    /// Seconds that the write took, in parallel with training.
    pub seconds: f64,
    /// Bytes of weights and optimizer state.
    pub bytes: u64,
    /// Its folder; empty if the write failed.
    pub path: String,
    /// Why the write failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// A worker's progress since its previous line.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Train {
    /// Unix time, seconds.
    pub wall: f64,
    /// The worker.
    pub worker: WorkerId,
    /// Its last finished step.
    pub step: Step,
    /// The current pass over the data, from 1.
    pub epoch: u64,
    /// Samples it has trained on so far.
    pub samples: u64,
    /// Its training clock.
    pub seconds: f64,
    /// Mean training loss since the previous line.
    #[serde(deserialize_with = "null_as_nan")]
    pub loss: f64,
    /// Samples per second since the previous line.
    #[serde(deserialize_with = "null_as_nan")]
    pub samples_per_s: f64,
    /// Seconds spent in pulls so far: the wait for other workers, and the network.
    pub wait_seconds: f64,
    /// Mean delay, in versions, of the pushes since the previous line.
    #[serde(default)]
    pub delay_mean: Option<f64>,
}

/// A held-out evaluation. Several workers may log the same one; the first line of an epoch counts.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Eval {
    /// Unix time, seconds.
    pub wall: f64,
    /// Finished passes over the data.
    pub epoch: u64,
    /// Samples the fleet has trained on.
    pub samples: u64,
    /// The training clock of the worker that evaluated.
    pub seconds: f64,
    /// Mean held-out loss.
    #[serde(deserialize_with = "null_as_nan")]
    pub loss: f64,
    /// Share of held-out samples classified correctly, 0 to 1; `None` if the model does not classify.
    #[serde(default)]
    pub accuracy: Option<f64>,
    /// Held-out samples.
    pub count: u64,
    /// Whether this evaluation follows the last push of the fleet.
    #[serde(rename = "final", default)]
    pub is_final: bool,
}

/// A worker's progress in an evaluation that takes longer than a second.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Evaluating {
    /// Unix time, seconds.
    pub wall: f64,
    /// The worker.
    pub worker: WorkerId,
    /// Finished passes over the data.
    pub epoch: u64,
    /// Held-out samples evaluated so far.
    pub done: u64,
    /// Held-out samples in this worker's share.
    pub of: u64,
}

/// A worker's totals.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Worker {
    /// Unix time, seconds.
    pub wall: f64,
    /// The worker.
    pub worker: WorkerId,
    /// Steps finished.
    pub steps: u64,
    /// Samples trained on.
    pub samples: u64,
    /// Its training clock.
    pub seconds: f64,
    /// Seconds it spent in pulls.
    pub wait_seconds: f64,
    /// Gradient bytes it sent, as encoded.
    pub bytes_pushed: u64,
    /// Weight bytes it received, as encoded.
    pub bytes_pulled: u64,
    /// CPU time of its process, all cores, user and system.
    pub cpu_seconds: f64,
    /// Peak resident set of its process.
    pub peak_rss_bytes: u64,
}

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
    #[serde(default, alias = "passed_over")]
    pub dropped: u64,
    /// The lateness of each worker's pushes, counted while this server led.
    #[serde(default, alias = "lateness", skip_serializing_if = "Vec::is_empty")]
    pub staleness: Vec<Staleness>,
    /// Which worker waited for which, counted while this server led.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub waits: Vec<Wait>,
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
    #[serde(alias = "gap")]
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

impl Shard {
    /// The delays as a histogram.
    pub fn delays(&self) -> DelayHistogram {
        DelayHistogram::from_counts(&self.delay)
    }
}

/// A worker, or one rank of a worker, left.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Leave {
    /// Unix time, seconds.
    pub wall: f64,
    /// The worker.
    pub worker: WorkerId,
    /// The rank of the worker's group that left, while the group continues; `None`: the whole worker
    /// left.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rank: Option<u32>,
    /// Why, for people.
    pub reason: String,
}

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
    /// Acknowledged pushes that were lost with a leader; 0 unless the durability is `leader`.
    #[serde(default)]
    pub pushes_lost: u64,
    /// Pushes that closed lock-step rounds left out; 0 unless `[round]` allows it.
    #[serde(default, alias = "passed_over")]
    pub dropped: u64,
    /// Half of all pushes had at most this distance, in average steps (an upper bound, to a factor of 1.42).
    #[serde(default, alias = "gap_p50")]
    pub distance_p50: Option<f64>,
    /// 99 of 100 pushes had at most this distance.
    #[serde(default, alias = "gap_p99")]
    pub distance_p99: Option<f64>,
    /// Half of all pushes had at most this age, in seconds.
    #[serde(default)]
    pub age_p50: Option<f64>,
    /// 99 of 100 pushes had at most this age.
    #[serde(default)]
    pub age_p99: Option<f64>,
}

/// `server`: the resources of a server process between the start of the workers and their end.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Server {
    /// Unix time, seconds.
    pub wall: f64,
    /// The server.
    pub server: ServerId,
    /// CPU time of all threads, user and system.
    pub cpu_seconds: f64,
    /// Peak resident set.
    pub peak_rss_bytes: u64,
}

fn null_as_nan<'de, D: Deserializer<'de>>(d: D) -> Result<f64, D::Error> {
    Ok(Option::<f64>::deserialize(d)?.unwrap_or(f64::NAN))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_diverged_loss_survives_the_file() {
        let line =
            serde_json::to_string(&Event::Train(Train { loss: f64::NAN, ..Train::default() })).unwrap();
        assert!(line.starts_with(r#"{"event":"train","#) && line.contains(r#""loss":null"#), "{line}");
        let Event::Train(back) = serde_json::from_str(&line).unwrap() else { panic!("{line}") };
        assert!(back.loss.is_nan());
    }

    #[test]
    fn lines_of_the_first_version_are_still_read() {
        let kinds: Vec<Event> = include_str!("../tests/samples/v1.jsonl")
            .lines()
            .map(|l| serde_json::from_str(l).unwrap_or_else(|e| panic!("{l}: {e}")))
            .collect();
        assert_eq!(kinds.len(), 7, "one line of each kind");
        assert!(matches!(&kinds[0], Event::Run(Run { simulated: false, .. })));
        let Event::Eval(eval) = &kinds[2] else { panic!("{:?}", kinds[2]) };
        assert_eq!((eval.epoch, eval.accuracy, eval.is_final), (1, Some(0.5), false));
    }
}
