//! `checkpoint.json`: a checkpoint's description of itself.

use paraft_common::{
    BucketSpec, Layout, ModeChoice, ParamGroup, TableSpec, TensorKind, TensorSpec,
    config::{LastEvaluation, Stopping},
    constraint::Constraint,
    layout::{Cuts, LayoutError},
    optim::OptimizerConfig,
};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The format version that this code writes, and the latest that it reads.
pub const FORMAT: u32 = 1;

/// The content of `checkpoint.json`. Unknown keys are ignored: later versions may add some.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    /// [`FORMAT`].
    pub format: u32,
    /// The version of Paraft that wrote it.
    pub paraft: String,
    /// Time of writing, as Unix time in seconds.
    pub written: f64,
    /// The job's name.
    pub name: String,
    /// The step of the checkpoint. In BSP the content is exactly that of this step. In SSP and ASP it is the
    /// writer's step, and [`Self::clocks`] has each worker's progress.
    pub step: u64,
    /// The step from which training resumes: the slowest worker's.
    pub resume_step: u64,
    /// The mode in force.
    pub mode: ModeChoice,
    /// Workers of the job.
    pub workers: u32,
    /// Samples in a worker's minibatch.
    pub batch: u64,
    /// Steps of a worker in one epoch.
    pub steps_per_epoch: u64,
    /// Numbers up to [`Self::resume_step`] that no step of this job has: it resumed from a checkpoint of a job with fewer
    /// samples in a step, and so with more steps.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub steps_left_out: u64,
    /// Finished epochs, if the leased sampler counted them: a worker's steps do not determine them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub epochs_done: Option<u64>,
    /// Raft groups that shared the model.
    pub shards: u32,
    /// Values in a bucket.
    pub bucket_len: usize,
    /// The parameter groups, with their rates and decays. Buckets do not cross them. Empty: one group.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub groups: Vec<ParamGroup>,
    /// The number of values of each stage. Buckets do not cross stages. Empty: one stage.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub stages: Vec<usize>,
    /// The constraints on parameters. Buckets do not split rows with a norm constraint.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub constraints: Vec<Constraint>,
    /// The optimizer and its options.
    pub optimizer: OptimizerConfig,
    /// Names of the optimizer's state vectors, as in the tensors of `optimizer.safetensors`.
    pub slots: Vec<String>,
    /// The model, in the order of the flat vector.
    pub tensors: Vec<TensorSpec>,
    /// The sparse tables. Each has a file of its rows, and its partitions are the last buckets.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tables: Vec<TableSpec>,
    /// One stamp per bucket of the job.
    pub buckets: Vec<Stamp>,
    /// One clock per shard and worker.
    pub clocks: Vec<Clock>,
    /// Early stopping.
    pub early_stop: EarlyStopState,
    /// Each group's learning rate, if the writer had set one; empty: the job's schedule.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub rates: Vec<f64>,
    /// A user's training loop's own description.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub note: String,
    /// The resolved job file (TOML).
    pub job: String,
    /// Size and checksum of the other files.
    pub files: BTreeMap<String, FileStamp>,
    /// CRC-32 of this file, in hexadecimal, computed with eight zeros in this place.
    pub seal: String,
}

const NO_SEAL: &str = "\"seal\": \"00000000\"";

/// The text of `checkpoint.json`, with its seal.
pub(crate) fn to_json(manifest: &Manifest) -> Result<String, serde_json::Error> {
    let open = Manifest { seal: "0".repeat(8), ..manifest.clone() };
    let text = serde_json::to_string_pretty(&open)?;
    let seal = format!("\"seal\": \"{:08x}\"", crc32fast::hash(text.as_bytes()));
    // The last occurrence: tensor names and the job's text precede it.
    let at = text.rfind(NO_SEAL).unwrap_or(text.len());
    Ok([&text[..at], &seal, text.get(at + NO_SEAL.len()..).unwrap_or_default()].concat())
}

/// Whether the text is unchanged since [`to_json`].
pub(crate) fn is_sealed(text: &str) -> bool {
    let Some((before, rest)) = text.rsplit_once("\"seal\": \"") else { return false };
    let (Some(seal), Some(after)) = (rest.get(..8), rest.get(9..)) else { return false };
    let open = [before, NO_SEAL, after].concat();
    seal == format!("{:08x}", crc32fast::hash(open.as_bytes()))
}

/// A bucket's progress.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Stamp {
    /// Number of updates that it contains.
    pub version: u64,
    /// The schedule's clock, in steps of the fleet.
    pub clock: f64,
}

/// A worker's progress on a shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Clock {
    /// Which shard.
    pub shard: u32,
    /// Which worker.
    pub worker: u32,
    /// Its last step that the shard had fully applied.
    pub step: u64,
    /// Whether it had finished all its steps.
    pub finished: bool,
}

/// A file of the checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileStamp {
    /// Its length.
    pub bytes: u64,
    /// CRC-32 (IEEE, as of zlib and PNG) of all its bytes, in hexadecimal.
    pub crc32: String,
}

/// The state of early stopping, for JSON, which has no infinity.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct EarlyStopState {
    /// The best mean held-out loss so far.
    pub best_loss: Option<f64>,
    /// Number of evaluations since.
    pub bad: u32,
    /// Whether the rule has fired.
    pub stop: bool,
    /// The latest complete evaluation.
    pub evaluated: Option<Evaluated>,
}

/// A complete evaluation, as sums over the held-out samples.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Evaluated {
    /// The epoch; the step, if the job's `eval.every_steps` is set. The file has it as `epoch`.
    #[serde(rename = "epoch")]
    pub number: u64,
    /// Sum of the loss; `None` if it was not finite.
    pub loss_sum: Option<f64>,
    /// Correctly classified samples.
    pub correct: u64,
    /// Number of samples.
    pub count: u64,
}

fn is_zero(n: &u64) -> bool {
    *n == 0
}

fn finite(v: f64) -> Option<f64> {
    Some(v).filter(|v| v.is_finite())
}

impl From<&Stopping> for EarlyStopState {
    fn from(s: &Stopping) -> Self {
        let evaluated = s.evaluated.map(|e| Evaluated {
            number: e.number,
            loss_sum: finite(e.loss_sum),
            correct: e.correct,
            count: e.count,
        });
        Self { best_loss: finite(s.best_loss), bad: s.bad, stop: s.stop, evaluated }
    }
}

impl From<&EarlyStopState> for Stopping {
    fn from(s: &EarlyStopState) -> Self {
        let evaluated = s.evaluated.map(|e| LastEvaluation {
            number: e.number,
            loss_sum: e.loss_sum.unwrap_or(f64::NAN),
            correct: e.correct,
            count: e.count,
        });
        Self { best_loss: s.best_loss.unwrap_or(f64::INFINITY), bad: s.bad, stop: s.stop, evaluated }
    }
}

impl Manifest {
    /// The checkpoint's place, in steps of a job with `steps_per_epoch` steps per epoch and `samples` samples per step
    /// over all workers. Whole epochs are kept; within an epoch the place is rounded down. For the same job it is
    /// unchanged.
    pub fn step_in(&self, steps_per_epoch: u64, samples: u64) -> u64 {
        if let Some(epochs) = self.epochs_done {
            return epochs.saturating_mul(steps_per_epoch);
        }
        let old = self.steps_per_epoch.max(1);
        let same = old == steps_per_epoch && samples == u64::from(self.workers) * self.batch;
        let place = self.place();
        if same {
            return place;
        }
        let (epochs, within) = (place / old, place % old);
        let within = u128::from(within) * u128::from(steps_per_epoch) / u128::from(old);
        epochs.saturating_mul(steps_per_epoch).saturating_add(within as u64)
    }

    /// Finished epochs: a job with the leased sampler resumes at the start of an epoch.
    pub fn epochs(&self) -> u64 {
        self.epochs_done.unwrap_or(self.place() / self.steps_per_epoch.max(1))
    }

    /// The steps of a worker up to [`Self::resume_step`], had it trained all in this job.
    pub fn place(&self) -> u64 {
        self.resume_step.saturating_sub(self.steps_left_out)
    }

    /// The stamp of each bucket of another layout of the same vector. A bucket that spans several old ones takes
    /// their latest version and clock. These differ only in SSP and ASP, by pushes in flight, and the larger is
    /// better for Adam's bias correction.
    pub fn stamps_for(&self, layout: &Layout) -> Vec<Stamp> {
        let old = self.old_buckets();
        layout
            .buckets()
            .iter()
            .map(|b| {
                let over = old.iter().filter(|(o, _)| match b.kind {
                    TensorKind::Rows => (o.kind, o.group) == (b.kind, b.group),
                    _ => o.range().start < b.range().end && o.range().end > b.offset,
                });
                over.fold(Stamp::default(), |a, (_, s)| Stamp {
                    version: a.version.max(s.version),
                    clock: a.clock.max(s.clock),
                })
            })
            .collect()
    }

    /// The layout of the checkpoint's vector.
    pub(crate) fn layout(&self) -> Result<Layout, LayoutError> {
        let cuts = Cuts { groups: &self.groups, stages: &self.stages, constraints: &self.constraints };
        Layout::cut(self.tensors.clone(), cuts, self.bucket_len.max(1))?.with_tables(&self.tables)
    }

    fn old_buckets(&self) -> Vec<(BucketSpec, Stamp)> {
        let buckets = self.layout().map(|l| l.buckets().to_vec()).unwrap_or_default();
        buckets.iter().zip(&self.buckets).map(|(b, s)| (*b, *s)).collect()
    }
}
