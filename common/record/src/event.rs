//! The lines of `metrics.jsonl`.
//!
//! Each line is a JSON object. Its `event` field names one of these structs. `wall` is Unix time in
//! seconds. `seconds` is the writer's training clock: it starts with the worker's first step and pauses
//! while the worker evaluates, so modes are compared by training time.
//!
//! Old files stay readable: a new field gets a default, no field is renamed, and unknown fields and kinds
//! are ignored (`tests/samples/v1.jsonl` is such an old file). JSON has no NaN. A loss that is NaN is
//! written as `null` and read as NaN, because a diverged run must still have a record.

use paraft_common::{ServerId, Step, WorkerId};
use serde::{Deserialize, Deserializer, Serialize};
use std::collections::BTreeMap;

mod incident;
mod run;
mod shard;
mod summary;

pub use incident::{Incident, IncidentKind, SwitchedBy};
pub use run::{Run, SCRIPT};
pub use shard::{Shard, Staleness, Wait};
pub use summary::Summary;

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
    /// A failure, an election, or an order to the fleet.
    Incident(Incident),
    /// The training failed or was interrupted.
    End(End),
    /// The totals of the whole run: the last line.
    Summary(Summary),
    /// A kind of a later version. Readers of the file skip it.
    #[serde(other)]
    Unknown,
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

/// Training ended before its end, without a summary. The launcher writes this line; one that was killed writes none.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct End {
    /// Unix time, seconds.
    pub wall: f64,
    /// How it ended.
    pub how: EndKind,
    /// Why, for people.
    pub reason: String,
}

/// How training ended before its end.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EndKind {
    /// A process failed, and the others could not continue.
    #[default]
    Failed,
    /// A user or a scheduler sent the launcher a signal.
    Interrupted,
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
    /// Further values by name, each the mean since the previous line: [`LEARNING_RATE`], [`GRADIENT_NORM`], and those
    /// that a script has named.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub values: BTreeMap<String, f64>,
}

/// The learning rate of the worker's gradients.
pub const LEARNING_RATE: &str = "learning_rate";
/// The norm of the worker's whole gradient, before any clipping.
pub const GRADIENT_NORM: &str = "gradient_norm";

/// A held-out evaluation. Several workers may log the same one; the first line counts.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Eval {
    /// Unix time, seconds.
    pub wall: f64,
    /// Finished passes over the data.
    pub epoch: u64,
    /// The step that it follows, if the job evaluates within epochs (`eval.every_steps`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub step: Option<Step>,
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
    /// Further metrics by name: `auc` and `normalized_entropy` of clicks, `rmse` of numbers to predict.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub metrics: BTreeMap<String, f64>,
    /// Whether this evaluation follows the last push of the fleet.
    #[serde(rename = "final", default)]
    pub is_final: bool,
}

impl Eval {
    /// Tells the run's evaluations apart; a later one has a higher number.
    pub fn number(&self) -> u64 {
        evaluation_number(self.epoch, self.step)
    }
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
    /// As in [`Eval`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub step: Option<Step>,
    /// Held-out samples evaluated so far.
    pub done: u64,
    /// Held-out samples in this worker's share.
    pub of: u64,
}

impl Evaluating {
    /// As of [`Eval::number`].
    pub fn number(&self) -> u64 {
        evaluation_number(self.epoch, self.step)
    }
}

fn evaluation_number(epoch: u64, step: Option<Step>) -> u64 {
    step.map_or(epoch, |step| step.0)
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
