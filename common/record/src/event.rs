//! The lines of `metrics.jsonl`.
//!
//! Each line is a JSON object whose `event` says which of these structs it is. `wall` is unix time in seconds.
//! `seconds` is the writer's training clock: it starts with the worker's first step and stands still while
//! the worker evaluates, so two modes are compared by the time they trained.
//!
//! Old files stay readable: a new field gets a default, a field is never renamed, an unknown field is ignored
//! (`tests/samples/v1.jsonl` is such an old file). JSON has no NaN; a loss that is no longer a number is
//! written as `null` and read as NaN, because a run that diverged must still have a record.

use paraft_common::histogram::{DelayHistogram, LogHistogram};
use paraft_common::{ServerId, ShardId, Step, Version, WorkerId};
use serde::{Deserialize, Deserializer, Serialize};

/// One line of `metrics.jsonl`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum Event {
    /// What was run: the first line.
    Run(Run),
    /// A worker's progress since its line before.
    Train(Train),
    /// A held-out evaluation.
    Eval(Eval),
    /// A worker's totals, written when it ends.
    Worker(Worker),
    /// A server's totals for a shard.
    Shard(Shard),
    /// A worker left, or its lease ended.
    Leave(Leave),
    /// What a server process has used, at its end.
    Server(Server),
    /// A checkpoint was written, or was not.
    Checkpoint(Checkpoint),
    /// A worker has trained a chunk of the leased sampler.
    Chunk(Chunk),
    /// An evaluation takes long.
    Evaluating(Evaluating),
    /// The mode was switched.
    Mode(ModeSwitch),
    /// The loss or a gradient became no number, which ended the training.
    Diverged(Diverged),
    /// The numbers of the whole run: the last line.
    Summary(Summary),
}

/// Training ended before its time, since the loss or a gradient became no number. Written by who launched it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Diverged {
    /// Unix time, seconds.
    pub wall: f64,
    /// What the worker said that saw it first.
    pub reason: String,
}

/// A worker has trained a chunk of the leased sampler. One that was trained by a worker that died before it could say so
/// is trained again, and has two lines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Chunk {
    /// Unix time, seconds.
    pub wall: f64,
    /// Who.
    pub worker: WorkerId,
    /// Of which epoch, from 1.
    pub epoch: u64,
    /// Which of the epoch, from 0.
    pub chunk: u64,
    /// Samples in it.
    pub samples: u64,
}

/// A worker goes on in another mode: it has heard of the switch with the pull after `step`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ModeSwitch {
    /// Unix time, seconds.
    pub wall: f64,
    /// Who.
    pub worker: WorkerId,
    /// Its last finished step.
    pub step: Step,
    /// Samples it has trained on so far.
    pub samples: u64,
    /// Its training clock.
    pub seconds: f64,
    /// Counts the switches of the job.
    pub number: u64,
    /// The mode in force: `bsp`, `ssp:4`, `asp`.
    pub mode: String,
}

/// Stands where a user's script decides: the launcher knows neither its data nor its optimizer.
pub const SCRIPT: &str = "script";

/// What was run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Run {
    /// Unix time, seconds.
    pub wall: f64,
    /// The run's name, which is also its folder's.
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
    /// Trainable numbers in the model; 0 where only a program of the user's knows.
    pub parameters: u64,
    /// Samples the whole fleet is to train on; likewise.
    pub samples_budget: u64,
    /// Optimizer name.
    pub optimizer: String,
    /// Learning rate.
    pub lr: f64,
    /// What is done about late gradients: `asgd`, `dc-asgd-c`, ...; empty in files of before there was a choice.
    #[serde(default)]
    pub algorithm: String,
    /// How pushes carry gradients: `f32`, `top-k:0.001`, ...; likewise.
    #[serde(default)]
    pub encoding: String,
    /// When lock-step rounds close: `all` or `backup`; likewise.
    #[serde(default)]
    pub round: String,
    /// The accuracy (0 to 1) the run is measured against, if any.
    #[serde(default)]
    pub target_accuracy: Option<f64>,
    /// The step of the checkpoint that the run goes on from, if it does. All other figures count from there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resumed_step: Option<Step>,
    /// What the servers know this beginning of the job by, where a worker has written this line: no launcher has.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub founding: String,
    /// Nothing ran but a simulation (`paraft simulate`): all times are simulated, and `wall` counts from its begin.
    #[serde(default, skip_serializing_if = "is_false")]
    pub simulated: bool,
}

impl Run {
    /// Whether a user's script decides what is trained, on what and how.
    pub fn of_script(&self) -> bool {
        self.data == SCRIPT
    }

    /// The model, and on what it is trained.
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
    /// Who was to write it.
    pub worker: WorkerId,
    /// Of which step.
    pub step: Step,
    /// How long it took, beside training.
    pub seconds: f64,
    /// Weights and optimizer state.
    pub bytes: u64,
    /// Its folder; empty where there is none.
    pub path: String,
    /// Why there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// A worker's progress since its line before.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Train {
    /// Unix time, seconds.
    pub wall: f64,
    /// Who.
    pub worker: WorkerId,
    /// Its last finished step.
    pub step: Step,
    /// The pass over the data it is in, from 1.
    pub epoch: u64,
    /// Samples it has trained on so far.
    pub samples: u64,
    /// Its training clock.
    pub seconds: f64,
    /// Mean training loss since its line before.
    #[serde(deserialize_with = "null_as_nan")]
    pub loss: f64,
    /// Its throughput since its line before.
    #[serde(deserialize_with = "null_as_nan")]
    pub samples_per_s: f64,
    /// Seconds it has spent in pulls so far: waiting for others, and the network.
    pub wait_seconds: f64,
    /// Mean delay, in versions, of its pushes since its line before.
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
    /// Share of held-out samples classified rightly, 0 to 1; `None` where the model does not classify.
    #[serde(default)]
    pub accuracy: Option<f64>,
    /// Held-out samples.
    pub count: u64,
    /// Whether this is the evaluation after the last push of the fleet.
    #[serde(rename = "final", default)]
    pub is_final: bool,
}

/// How far a worker is with its share of an evaluation that takes longer than a second.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Evaluating {
    /// Unix time, seconds.
    pub wall: f64,
    /// Who.
    pub worker: WorkerId,
    /// Finished passes over the data.
    pub epoch: u64,
    /// Held-out samples that it has evaluated.
    pub done: u64,
    /// Of so many.
    pub of: u64,
}

/// A worker's totals.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Worker {
    /// Unix time, seconds.
    pub wall: f64,
    /// Who.
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
    /// Processor time of its process, all cores, user and system.
    pub cpu_seconds: f64,
    /// Largest memory of its process.
    pub peak_rss_bytes: u64,
}

/// What one server counted for one shard while it led it. A later line of the same server and shard replaces
/// the earlier one; counts of several leaders of a shard add up.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Shard {
    /// Unix time, seconds.
    pub wall: f64,
    /// Which shard.
    pub shard: ShardId,
    /// Who counted.
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
    /// Acknowledged pushes that went down with a leader.
    #[serde(default)]
    pub pushes_lost: u64,
    /// Pushes that lock-step rounds were closed without.
    #[serde(default, alias = "passed_over")]
    pub dropped: u64,
    /// How late the pushes of each worker were, as far as this server led while they were applied.
    #[serde(default, alias = "lateness", skip_serializing_if = "Vec::is_empty")]
    pub staleness: Vec<Staleness>,
    /// Who has waited for whom, as far as this server led.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub waits: Vec<Wait>,
}

/// How long a worker was held up by another.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Wait {
    /// Who waited.
    pub worker: WorkerId,
    /// For whose push.
    #[serde(rename = "for")]
    pub of: WorkerId,
    /// Together.
    pub seconds: f64,
}

/// How late a worker's pushes were, bucket by bucket.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Staleness {
    /// Whose.
    pub worker: WorkerId,
    /// `delay[d]` pushes were applied `d` versions after their weights were pulled.
    pub delay: Vec<u64>,
    /// Average steps between the weights that were pulled and those that the push was applied to: upper bounds and counts.
    #[serde(alias = "gap")]
    pub distance: LogHistogram,
    /// Seconds between the answer of the pull and the push being applied, likewise.
    pub age: LogHistogram,
}

impl Staleness {
    /// Adds what was measured of other pushes.
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

/// A worker left, or a rank of one.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Leave {
    /// Unix time, seconds.
    pub wall: f64,
    /// Who.
    pub worker: WorkerId,
    /// A rank of the worker's group, which goes on without it; none: the worker.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rank: Option<u32>,
    /// Why, in words.
    pub reason: String,
}

/// The numbers of a whole run, computed by [`RunRecord::summarize`](crate::RunRecord::summarize).
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Summary {
    /// The consistency mode that the run began in.
    pub mode: String,
    /// The mode that somebody has switched it to last.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub switched_to: Option<String>,
    /// Workers at the start.
    pub workers: u32,
    /// Samples trained on by all workers.
    pub samples: u64,
    /// From the run's beginning to the first step that a worker has written down: processes, data, shards and their leaders; `None`
    /// in simulated time, and where nothing was trained.
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
    /// What the next two are measured against.
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
    /// How often a worker left before it had written its totals; one that came back may leave again.
    pub workers_lost: u32,
    /// How often a rank left its group; 0 but for jobs with groups.
    #[serde(default)]
    pub ranks_lost: u32,
    /// Acknowledged pushes that went down with a leader; 0 but for jobs with durability `leader`.
    #[serde(default)]
    pub pushes_lost: u64,
    /// Pushes that lock-step rounds were closed without; 0 but for jobs whose `[round]` does so.
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

/// `server`: what a server process used between the start of the workers and their end.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Server {
    /// Unix time, seconds.
    pub wall: f64,
    /// Which server.
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
