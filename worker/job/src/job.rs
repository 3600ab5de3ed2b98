//! A job: its sections, their consequences, and the order of checks.

use crate::{
    CheckpointConfig, ClusterConfig, Constraints, DeviceConfig, EvalConfig, MemoryConfig, ParallelConfig,
    TrackConfig, TrainConfig,
    check::{Check, Unfit, bad},
    constraints, is_default, sections, tables,
};
use paraft_common::{
    TableSpec,
    algorithm::AlgorithmConfig,
    config::check_name,
    local::LocalConfig,
    optim::{ClipConfig, OptimizerConfig, ScheduleConfig},
};
use paraft_data::{DataConfig, Task};
use paraft_models::{ModelConfig, Precision};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// A job.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Job {
    /// The run's name; default: the file's name.
    #[serde(default)]
    pub name: String,
    /// The seed of the initial weights and the sample order.
    #[serde(default = "one")]
    pub seed: u64,
    /// The model; absent if a user's binary supplies its own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model: Option<ModelConfig>,
    /// The data; likewise.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub data: Option<DataConfig>,
    /// The sparse tables of a built-in model.
    #[serde(default, rename = "table", skip_serializing_if = "Vec::is_empty")]
    pub tables: Vec<TableSpec>,
    /// Length, steps and consistency of training.
    #[serde(default)]
    pub train: TrainConfig,
    /// How late gradients are treated.
    #[serde(default, skip_serializing_if = "is_default")]
    pub algorithm: AlgorithmConfig,
    /// A worker's work between two pushes, if it is more than a minibatch.
    #[serde(default, skip_serializing_if = "is_default")]
    pub local: LocalConfig,
    /// How gradients change weights: on the servers, or on workers with local steps.
    #[serde(default = "default_optimizer")]
    pub optimizer: OptimizerConfig,
    /// How the learning rate changes.
    #[serde(default)]
    pub schedule: ScheduleConfig,
    /// Clipping of gradients.
    #[serde(default)]
    pub clip: ClipConfig,
    /// Constraints on parameters after each update, by name.
    #[serde(default, skip_serializing_if = "is_default")]
    pub constraints: Constraints,
    /// Held-out evaluation.
    #[serde(default)]
    pub eval: EvalConfig,
    /// Checkpoints; see [`Job::checkpoints`] and [`Job::checkpoint_by_default`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub checkpoint: Option<CheckpointConfig>,
    /// How much of the model a worker holds.
    #[serde(default, skip_serializing_if = "is_default")]
    pub memory: MemoryConfig,
    /// How the ranks of a worker share its model.
    #[serde(default, skip_serializing_if = "is_default")]
    pub parallel: ParallelConfig,
    /// Where the run is tracked; without this table only in its folder.
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
    /// Whether a fleet can start it. Reports the first fault.
    pub(crate) fn check(&self) -> Check {
        if let Err(why) = check_name(&self.name) {
            return bad("name", why, "choose such a `name`; without one it is that of the job file");
        }
        sections::model(self)?;
        sections::data(self)?;
        tables::check(self)?;
        self.train.check(self)?;
        self.eval.check(self)?;
        self.checkpoint.as_ref().map_or(Ok(()), |c| c.check(self))?;
        self.track.as_ref().map_or(Ok(()), TrackConfig::check)?;
        self.cluster.check(self)?;
        self.check_ways()?;
        sections::optimizer(self)?;
        sections::algorithm(self)?;
        self.check_local()?;
        self.memory.check(self)?;
        self.parallel.check(self)?;
        sections::schedule_and_clip(self)?;
        constraints::check(self)
    }

    /// Whether its model classifies, if the data has classes.
    pub fn classifies(&self) -> bool {
        if self.is_sparse() {
            let pairs = matches!(self.model, Some(ModelConfig::TwoTower { .. }));
            return !pairs && self.data.as_ref().is_some_and(DataConfig::has_two_classes);
        }
        let predicts_numbers = matches!(self.data, Some(DataConfig::Csv { task: Task::Regression, .. }));
        !predicts_numbers && !matches!(self.model, Some(ModelConfig::Autoencoder { .. }))
    }

    /// Training processes: the ranks of all workers.
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

    /// The workers' device: `train.device`, but `auto` is the CPU if other options require it.
    pub fn device(&self) -> DeviceConfig {
        match self.train.device {
            DeviceConfig::Auto if self.by_layers() && self.train.precision == Precision::F16 => {
                DeviceConfig::Cpu
            }
            DeviceConfig::Auto if self.is_sparse() => DeviceConfig::Cpu,
            device => device,
        }
    }

    /// Whether a worker holds some layers of the model at a time.
    pub fn by_layers(&self) -> bool {
        self.parallel.is_cut() || self.memory.resident.is_some()
    }

    /// On a GPU a gradient that leaves layer by layer cannot be scaled and repeated.
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

    /// Overrides the workers' device, by a flag.
    ///
    /// # Errors
    /// Other options of the job do not support it; the text is for users.
    pub fn compute_on(&mut self, device: DeviceConfig) -> Result<(), String> {
        self.train.device = device;
        self.refused().map_or(Ok(()), Err)
    }

    /// Why the job would be refused now, for users.
    pub fn refused(&self) -> Option<String> {
        self.check().err().map(|Unfit { key, message, remedy }| format!("{key}: {message}; {remedy}"))
    }

    /// Number of Raft groups.
    pub fn shards(&self) -> u32 {
        self.cluster.shards.unwrap_or_else(|| self.servers().min(8).max(self.parallel.pipeline))
    }

    /// The text in the run's folder: every key with its value.
    pub fn to_toml(&self) -> String {
        toml::to_string_pretty(self).unwrap_or_else(|e| format!("# cannot be written: {e}\n"))
    }
}
