//! A job: its sections, what follows from them, and the order in which they are checked.

use crate::{
    CheckpointConfig, ClusterConfig, Constraints, DeviceConfig, EvalConfig, MemoryConfig, ParallelConfig,
    TrackConfig, TrainConfig,
    check::{Check, Unfit, bad},
    constraints, is_default, sections,
};
use paraft_common::{
    AutoConfig,
    algorithm::AlgorithmConfig,
    config::check_name,
    local::LocalConfig,
    optim::{ClipConfig, OptimizerConfig, ScheduleConfig},
    round::RoundConfig,
};
use paraft_data::DataConfig;
use paraft_models::{ModelConfig, Precision};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// A job.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Job {
    /// Names the run; default: the file's name.
    #[serde(default)]
    pub name: String,
    /// Seeds the initial weights and the order of the samples.
    #[serde(default = "one")]
    pub seed: u64,
    /// What to train; absent where a binary of the user's brings its own model.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model: Option<ModelConfig>,
    /// What to train on; likewise.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub data: Option<DataConfig>,
    /// How long, in which steps, how consistent.
    #[serde(default)]
    pub train: TrainConfig,
    /// The rule of `train.mode = "auto"`.
    #[serde(default, skip_serializing_if = "is_default")]
    pub auto: AutoConfig,
    /// What is done about gradients that come late.
    #[serde(default, skip_serializing_if = "is_default")]
    pub algorithm: AlgorithmConfig,
    /// When a lock-step round closes.
    #[serde(default, skip_serializing_if = "is_default")]
    pub round: RoundConfig,
    /// What a worker does between two pushes.
    #[serde(default, skip_serializing_if = "is_default")]
    pub local: LocalConfig,
    /// How gradients change weights: on the servers, or on workers that make local steps.
    #[serde(default = "default_optimizer")]
    pub optimizer: OptimizerConfig,
    /// How the rate changes.
    #[serde(default)]
    pub schedule: ScheduleConfig,
    /// Clipping of gradients.
    #[serde(default)]
    pub clip: ClipConfig,
    /// What the servers hold parameters to behind each update, by their names.
    #[serde(default, skip_serializing_if = "is_default")]
    pub constraints: Constraints,
    /// Held-out evaluation.
    #[serde(default)]
    pub eval: EvalConfig,
    /// Checkpoints; none are written without this table.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub checkpoint: Option<CheckpointConfig>,
    /// How much of the model a worker holds.
    #[serde(default, skip_serializing_if = "is_default")]
    pub memory: MemoryConfig,
    /// How the ranks of a worker share its model.
    #[serde(default, skip_serializing_if = "is_default")]
    pub parallel: ParallelConfig,
    /// Where the run is followed; without this table nowhere but in its folder.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub track: Option<TrackConfig>,
    /// The fleet.
    #[serde(default)]
    pub cluster: ClusterConfig,
    /// The folder of the job file; relative paths start there.
    #[serde(skip)]
    pub base_dir: PathBuf,
}

fn one() -> u64 {
    1
}

pub(crate) fn default_optimizer() -> OptimizerConfig {
    OptimizerConfig::sgd(0.1)
}

impl Job {
    /// Whether a fleet can begin it. The first thing that does not fit is what is said.
    pub(crate) fn check(&self) -> Check {
        if let Err(why) = check_name(&self.name) {
            return bad("name", why, "choose such a `name`; without one it is that of the job file");
        }
        sections::model(self)?;
        self.train.check(self)?;
        self.eval.check()?;
        self.checkpoint.as_ref().map_or(Ok(()), |c| c.check(self))?;
        self.track.as_ref().map_or(Ok(()), TrackConfig::check)?;
        self.cluster.check(self)?;
        sections::auto(self)?;
        sections::optimizer(self)?;
        sections::round(self)?;
        sections::algorithm(self)?;
        self.check_local()?;
        self.memory.check(self)?;
        self.parallel.check(self)?;
        sections::schedule_and_clip(self)?;
        constraints::check(self)
    }

    /// Whether its model says of a sample to which class it belongs, where the data has classes.
    pub fn classifies(&self) -> bool {
        !matches!(self.model, Some(ModelConfig::Autoencoder { .. }))
    }

    /// Processes that train: the ranks of all workers.
    pub fn ranks(&self) -> u32 {
        self.train.workers.saturating_mul(self.ranks_of_worker())
    }

    /// Servers of the fleet.
    pub fn servers(&self) -> u32 {
        if self.cluster.addresses.is_empty() {
            self.cluster.servers
        } else {
            self.cluster.addresses.len() as u32
        }
    }

    /// On what its workers compute: `train.device`, where `auto` is the CPU if what else the job wants is only there.
    pub fn device(&self) -> DeviceConfig {
        match self.train.device {
            DeviceConfig::Auto if self.by_layers() && self.train.precision == Precision::F16 => {
                DeviceConfig::Cpu
            }
            device => device,
        }
    }

    /// Whether a worker's process has some layers of the model at a time.
    pub fn by_layers(&self) -> bool {
        self.parallel.is_cut() || self.memory.resident.is_some()
    }

    /// On a GPU a gradient that leaves layer by layer can't be scaled and tried again.
    pub(crate) fn check_by_layers(&self) -> Check {
        match self.device() {
            DeviceConfig::Cpu => Ok(()),
            _ if self.train.precision != Precision::F16 => Ok(()),
            _ => bad(
                "train.precision",
                "f16 scales the whole gradient, and with [memory] or [parallel] it leaves layer by layer",
                "set train.precision = \"bf16\", or train.device = \"cpu\"",
            ),
        }
    }

    /// They are to compute on this instead, by a flag.
    ///
    /// # Errors
    /// What else the job wants is not there; for people.
    pub fn compute_on(&mut self, device: DeviceConfig) -> Result<(), String> {
        self.train.device = device;
        self.refused().map_or(Ok(()), Err)
    }

    /// Why it would be refused, as it is now; for people.
    pub fn refused(&self) -> Option<String> {
        self.check().err().map(|Unfit { key, message, remedy }| format!("{key}: {message}; {remedy}"))
    }

    /// Raft groups.
    pub fn shards(&self) -> u32 {
        self.cluster.shards.unwrap_or_else(|| self.servers().min(8).max(self.parallel.pipeline))
    }

    /// The text written into the run's folder: every key with the value that was used.
    pub fn to_toml(&self) -> String {
        toml::to_string_pretty(self).unwrap_or_else(|e| format!("# cannot be written: {e}\n"))
    }
}
