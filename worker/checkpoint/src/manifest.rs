//! `checkpoint.json`: what a checkpoint says of itself.

use paraft_common::{
    Layout, ModeChoice, ParamGroup, TensorSpec,
    config::{LastEvaluation, Stopping},
    constraint::Constraint,
    layout::{Cuts, LayoutError},
    optim::OptimizerConfig,
};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The latest version of the format that this code writes and reads.
pub const FORMAT: u32 = 1;

/// The content of `checkpoint.json`. Unknown keys are ignored: a later version may add some.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    /// [`FORMAT`].
    pub format: u32,
    /// The version of Paraft that wrote it.
    pub paraft: String,
    /// When, unix time in seconds.
    pub written: f64,
    /// The job's name.
    pub name: String,
    /// The step it was cut at. In BSP everything in it is exactly that of this step; in SSP and ASP it is the step
    /// of the worker that wrote it, and [`Self::clocks`] say how far each worker had come.
    pub step: u64,
    /// The step that training goes on from: the slowest worker's.
    pub resume_step: u64,
    /// The mode it was trained in.
    pub mode: ModeChoice,
    /// Workers of the job.
    pub workers: u32,
    /// Samples in a worker's minibatch.
    pub batch: u64,
    /// Steps of a worker in one epoch.
    pub steps_per_epoch: u64,
    /// Whole epochs that are done, where the leased sampler counted them: a worker's steps do not tell.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub epochs_done: Option<u64>,
    /// Raft groups that shared the model.
    pub shards: u32,
    /// Values in a bucket.
    pub bucket_len: usize,
    /// The groups of parameters that buckets do not cross, with their rates and decays; none: all parameters are one.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub groups: Vec<ParamGroup>,
    /// The stages that buckets do not cross, by their values; none: the model is one.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub stages: Vec<usize>,
    /// What the servers held parameters to; buckets do not cut rows that are held to a norm.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub constraints: Vec<Constraint>,
    /// The optimizer and its options.
    pub optimizer: OptimizerConfig,
    /// Names of the optimizer's state vectors, as in the tensors of `optimizer.safetensors`.
    pub slots: Vec<String>,
    /// The model, in the order of the flat vector.
    pub tensors: Vec<TensorSpec>,
    /// For each bucket of the job.
    pub buckets: Vec<Stamp>,
    /// For each shard and worker.
    pub clocks: Vec<Clock>,
    /// Early stopping.
    pub early_stop: EarlyStopState,
    /// The rate of each group, where the writer had said one; empty: the job's schedule.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub rates: Vec<f64>,
    /// What a training loop of a user's own says of itself, in its own words.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub note: String,
    /// The job file, as it was resolved (TOML).
    pub job: String,
    /// Size and checksum of the other files.
    pub files: BTreeMap<String, FileStamp>,
    /// CRC-32 of this file, in hexadecimal, taken with eight zeros in this place.
    pub seal: String,
}

const NO_SEAL: &str = "\"seal\": \"00000000\"";

/// The text of `checkpoint.json`, with its seal.
pub(crate) fn to_json(manifest: &Manifest) -> Result<String, serde_json::Error> {
    let open = Manifest { seal: "0".repeat(8), ..manifest.clone() };
    let text = serde_json::to_string_pretty(&open)?;
    let seal = format!("\"seal\": \"{:08x}\"", crc32fast::hash(text.as_bytes()));
    // The last of its kind: names of tensors and the job's text come before it.
    let at = text.rfind(NO_SEAL).unwrap_or(text.len());
    Ok([&text[..at], &seal, text.get(at + NO_SEAL.len()..).unwrap_or_default()].concat())
}

/// Whether the text is as [`to_json`] wrote it.
pub(crate) fn is_sealed(text: &str) -> bool {
    let Some((before, rest)) = text.rsplit_once("\"seal\": \"") else { return false };
    let (Some(seal), Some(after)) = (rest.get(..8), rest.get(9..)) else { return false };
    let open = [before, NO_SEAL, after].concat();
    seal == format!("{:08x}", crc32fast::hash(open.as_bytes()))
}

/// How far a bucket was.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Stamp {
    /// Updates that are in it.
    pub version: u64,
    /// The schedule's clock, in steps of the fleet.
    pub clock: f64,
}

/// How far a worker had come on a shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Clock {
    /// Which shard.
    pub shard: u32,
    /// Which worker.
    pub worker: u32,
    /// Its last step that the shard had fully applied.
    pub step: u64,
    /// It had done all its steps.
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

/// Early stopping, in JSON, which has no infinity.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct EarlyStopState {
    /// The best mean held-out loss so far.
    pub best_loss: Option<f64>,
    /// Evaluations since.
    pub bad: u32,
    /// The rule has fired.
    pub stop: bool,
    /// The latest complete evaluation.
    pub evaluated: Option<Evaluated>,
}

/// A complete evaluation, as sums over the held-out samples.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Evaluated {
    /// Which epoch.
    pub epoch: u64,
    /// Sum of the loss; `None` where it was no number.
    pub loss_sum: Option<f64>,
    /// Samples classified right.
    pub correct: u64,
    /// Samples seen.
    pub count: u64,
}

fn finite(v: f64) -> Option<f64> {
    Some(v).filter(|v| v.is_finite())
}

impl From<&Stopping> for EarlyStopState {
    fn from(s: &Stopping) -> Self {
        let evaluated = s.evaluated.map(|e| Evaluated {
            epoch: e.epoch,
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
            epoch: e.epoch,
            loss_sum: e.loss_sum.unwrap_or(f64::NAN),
            correct: e.correct,
            count: e.count,
        });
        Self { best_loss: s.best_loss.unwrap_or(f64::INFINITY), bad: s.bad, stop: s.stop, evaluated }
    }
}

impl Manifest {
    /// The checkpoint's step in a job whose epochs have `steps_per_epoch` steps and whose steps have `samples`
    /// samples over all workers: whole epochs stay, within one the position is rounded down. The same for the
    /// same job.
    pub fn step_in(&self, steps_per_epoch: u64, samples: u64) -> u64 {
        if let Some(epochs) = self.epochs_done {
            return epochs.saturating_mul(steps_per_epoch);
        }
        let old = self.steps_per_epoch.max(1);
        let same = old == steps_per_epoch && samples == u64::from(self.workers) * self.batch;
        if same {
            return self.resume_step;
        }
        let (epochs, within) = (self.resume_step / old, self.resume_step % old);
        let within = u128::from(within) * u128::from(steps_per_epoch) / u128::from(old);
        epochs.saturating_mul(steps_per_epoch).saturating_add(within as u64)
    }

    /// Whole epochs that are done: where a job with the leased sampler goes on, which begins an epoch anew.
    pub fn epochs(&self) -> u64 {
        self.epochs_done.unwrap_or(self.resume_step / self.steps_per_epoch.max(1))
    }

    /// The stamp of each bucket of another cut of the same vector. A bucket that spans several of the old ones
    /// takes the latest version and clock of them: they differ in SSP and ASP only, by the pushes that were on
    /// the way, and Adam's bias correction is the better for the larger.
    pub fn stamps_for(&self, layout: &Layout) -> Vec<Stamp> {
        let old = self.old_buckets();
        layout
            .buckets()
            .iter()
            .map(|b| {
                let over =
                    old.iter().filter(|(range, _)| range.start < b.range().end && range.end > b.offset);
                over.fold(Stamp::default(), |a, (_, s)| Stamp {
                    version: a.version.max(s.version),
                    clock: a.clock.max(s.clock),
                })
            })
            .collect()
    }

    /// The vector as it was cut.
    pub(crate) fn layout(&self) -> Result<Layout, LayoutError> {
        let cuts = Cuts { groups: &self.groups, stages: &self.stages, constraints: &self.constraints };
        Layout::cut(self.tensors.clone(), cuts, self.bucket_len.max(1))
    }

    fn old_buckets(&self) -> Vec<(std::ops::Range<usize>, Stamp)> {
        let buckets = self.layout().map(|l| l.buckets().to_vec()).unwrap_or_default();
        buckets.iter().zip(&self.buckets).map(|(b, s)| (b.range(), *s)).collect()
    }
}
