//! The job file: what to train, on what, how, and on which fleet.
//!
//! TOML; every key has a default but `[model] kind` and `[data] kind`. Unknown keys are refused. Parsed once,
//! validated once; afterwards nothing about it can fail. docs/configuration.md lists every key.

use crate::device::DeviceConfig;
use paraft_common::{
    AutoConfig, Encoding, Layout, Mode, ModeChoice, TensorKind, TensorSpec,
    algorithm::{AlgorithmConfig, AlgorithmError},
    codec::F32_BYTES,
    config::{EarlyStop, MAX_GRACE_MS, ServerJob, overlay},
    durability,
    group::MAX_RANKS,
    local::LocalConfig,
    optim::{ClipConfig, Descent, OptimizerConfig, ScheduleConfig},
    placement,
    round::RoundConfig,
};
use paraft_data::{DataConfig, DataDigest};
use paraft_models::{ModelConfig, Precision};
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};
use toml::Table;

mod cluster;
mod fingerprint;
mod local;
mod problem;

pub use cluster::{ClusterConfig, TransportConfig};
use problem::Problem;

/// What a shard should have, where there are too few buckets for as many as were asked for.
const SHARD_BYTES: usize = 1 << 20;

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
    /// Held-out evaluation.
    #[serde(default)]
    pub eval: EvalConfig,
    /// Checkpoints; none are written without this table.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub checkpoint: Option<CheckpointConfig>,
    /// The fleet.
    #[serde(default)]
    pub cluster: ClusterConfig,
    /// The folder of the job file; relative paths start there.
    #[serde(skip)]
    pub base_dir: PathBuf,
}

/// `[train]`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TrainConfig {
    /// Workers, 1 to 65536; each a process, or a group of them.
    pub workers: u32,
    /// Ranks of each worker, 1 to 1024: processes that average their gradients among themselves and act as one worker.
    #[serde(skip_serializing_if = "is_one")]
    pub group_size: u32,
    /// Who applies the gradients.
    #[serde(skip_serializing_if = "is_default")]
    pub exchange: Exchange,
    /// `bsp`, `ssp:S`, `asp`, or `auto`.
    pub mode: ModeChoice,
    /// Samples in a minibatch of each worker, or of each rank of its group.
    pub batch: usize,
    /// Passes over the training data.
    pub epochs: u64,
    /// Stop each worker after this many steps, before the last epoch's end.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_steps: Option<u64>,
    /// Reshuffle the samples each epoch.
    pub shuffle: bool,
    /// Drop the last samples of an epoch that fill no whole minibatch on every worker (else the share is
    /// padded from its start, as PyTorch's DistributedSampler does, and the last minibatch may be short).
    pub drop_last: bool,
    /// Who sees which sample: each worker a share of its own, or chunks that the servers lease out.
    #[serde(skip_serializing_if = "is_default")]
    pub sampler: SamplerKind,
    /// Samples of a chunk, 1 to 2^32 - 1; leased sampler only. Default: 16 minibatches.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub chunk: Option<u32>,
    /// How pushes carry the gradients of trained values.
    #[serde(skip_serializing_if = "is_default")]
    pub encoding: Encoding,
    /// What an encoding leaves out of a push goes with a later one. Default: where it leaves most of a gradient out.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error_feedback: Option<bool>,
    /// Threads of each worker's kernels; 1 in this version.
    pub threads: usize,
    /// On what workers compute: `auto` (a GPU where there is one), `cpu`, `cuda` or `cuda:N`. Need not be the same on all.
    #[serde(skip_serializing_if = "is_default")]
    pub device: DeviceConfig,
    /// In which numbers a GPU computes.
    #[serde(skip_serializing_if = "is_default")]
    pub precision: Precision,
    /// A safetensors file with PyTorch's names to take the initial weights from, instead of the seed's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub init: Option<PathBuf>,
}

impl Default for TrainConfig {
    fn default() -> Self {
        Self {
            workers: 2,
            group_size: 1,
            exchange: Exchange::Servers,
            mode: Mode::Bsp.into(),
            batch: 64,
            epochs: 1,
            max_steps: None,
            shuffle: true,
            drop_last: true,
            sampler: SamplerKind::Static,
            chunk: None,
            encoding: Encoding::F32,
            error_feedback: None,
            threads: 1,
            device: DeviceConfig::Auto,
            precision: Precision::Tf32,
            init: None,
        }
    }
}

/// Who applies the gradients, and keeps weights and optimizer state while training goes on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Exchange {
    /// The servers: workers push and pull.
    #[default]
    Servers,
    /// Every rank of the one group that the job is, for itself. The servers keep who is there and which checkpoints there are.
    AllReduce,
}

/// Who sees which sample when.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SamplerKind {
    /// Each worker has its share of every epoch, whoever else is there.
    #[default]
    Static,
    /// Workers take chunks of an epoch from the servers; what one leaves behind, another takes.
    Leased,
}

impl TrainConfig {
    /// Whether what an encoding leaves out of a push goes with a later one.
    pub fn feeds_back(&self) -> bool {
        self.error_feedback.unwrap_or_else(|| self.encoding.feeds_back())
    }

    /// Samples of a chunk of the leased sampler.
    pub fn chunk(&self) -> usize {
        self.chunk.map_or_else(|| self.batch.saturating_mul(16), |c| c as usize)
    }
}

fn is_one(n: &u32) -> bool {
    *n == 1
}

fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

/// `[eval]`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct EvalConfig {
    /// Evaluate after each epoch (the final weights are evaluated in any case).
    pub every_epoch: bool,
    /// The accuracy whose time is reported, above 0, at most 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub target_accuracy: Option<f64>,
    /// Stop when the held-out loss has not fallen for a while.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub early_stop: Option<EarlyStop>,
}

impl Default for EvalConfig {
    fn default() -> Self {
        Self { every_epoch: true, target_accuracy: None, early_stop: None }
    }
}

/// `[checkpoint]`
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct CheckpointConfig {
    /// Each time so many steps are done, from 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub every_steps: Option<u64>,
    /// Each time so many epochs are done, from 1. Where neither key is given: 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub every_epochs: Option<u64>,
    /// How many stay, from 1; the latest and the best stay in any case.
    pub num_to_keep: usize,
    /// Where they go. Default: `checkpoints` in the run's folder.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dir: Option<PathBuf>,
}

impl Default for CheckpointConfig {
    fn default() -> Self {
        Self { every_steps: None, every_epochs: None, num_to_keep: 3, dir: None }
    }
}

impl CheckpointConfig {
    /// Epochs between two checkpoints, if epochs count.
    pub fn epochs(&self) -> Option<u64> {
        self.every_epochs.or_else(|| self.every_steps.is_none().then_some(1))
    }
}

/// Why a text is no job: which file, which line, what to do.
#[derive(Debug, thiserror::Error)]
#[error("{}{}: {message}{}", file.display(), line.map(|l| format!(":{l}")).unwrap_or_default(), remedy.as_deref().map(|r| format!("\n  help: {r}")).unwrap_or_default())]
pub struct JobError {
    /// The job file.
    pub file: PathBuf,
    /// The line, from 1, where one is to blame.
    pub line: Option<usize>,
    /// What is wrong.
    pub message: String,
    /// What to do.
    pub remedy: Option<String>,
}

fn one() -> u64 {
    1
}

/// The longest job file: people write them.
const MAX_FILE_BYTES: u64 = 1 << 20;
/// Layers of a model that is a list of widths.
const MAX_LAYERS: usize = 1024;

fn default_optimizer() -> OptimizerConfig {
    OptimizerConfig::sgd(0.1)
}

impl Job {
    /// Reads a job file and lays `--set` assignments over it.
    pub fn load(path: &Path, set: &[String]) -> Result<Self, JobError> {
        let wrong = |message: String| JobError {
            file: path.to_path_buf(),
            line: None,
            message,
            remedy: Some("give the path of a job file; examples/ has some".into()),
        };
        let read = || {
            let mut text = String::new();
            let file = std::fs::File::open(path)?;
            std::io::Read::read_to_string(&mut std::io::Read::take(file, MAX_FILE_BYTES + 1), &mut text)?;
            Ok(text)
        };
        let text: String = read().map_err(|e: std::io::Error| wrong(format!("cannot be read: {e}")))?;
        if text.len() as u64 > MAX_FILE_BYTES {
            return Err(wrong(format!("it is longer than {MAX_FILE_BYTES} bytes: that is no job file")));
        }
        Self::parse(&text, path, set)
    }

    /// As [`Self::load`], for a text in hand; `path` names it in messages and is where relative paths start.
    pub fn parse(text: &str, path: &Path, set: &[String]) -> Result<Self, JobError> {
        let error = |line, message: String, remedy: Option<String>| JobError {
            file: path.to_path_buf(),
            line,
            message,
            remedy,
        };
        let mut table: Table = toml::from_str(text).map_err(|e| {
            let at = e.span().map(|s| text[..s.start.min(text.len())].lines().count().max(1));
            error(at, e.message().trim().to_string(), None)
        })?;
        for s in set {
            overlay::apply(&mut table, s).map_err(|e| error(None, e.to_string(), None))?;
        }
        let mut job: Job = table.clone().try_into().map_err(|e: toml::de::Error| {
            let Problem { key, message, remedy } = problem::explain(&table, &e);
            let key = key.unwrap_or_default();
            let from_set = set.iter().find(|s| s.split('=').next().is_some_and(|p| p.trim() == key));
            match from_set {
                Some(s) => error(None, format!("--set {s}: {message}"), remedy),
                None => error(problem::line_of(text, &key), message, remedy),
            }
        })?;
        if job.name.is_empty() {
            job.name = path.file_stem().map_or("job".into(), |s| s.to_string_lossy().into_owned());
        }
        job.base_dir = path.parent().map(Path::to_path_buf).unwrap_or_default();
        job.validate().map_err(|(key, message, remedy)| {
            let from_set = set.iter().any(|s| s.split('=').next().is_some_and(|p| p.trim() == key));
            let line = overlay::line_of(text, key).filter(|_| !from_set);
            error(line, format!("{key}: {message}"), Some(remedy))
        })?;
        Ok(job)
    }

    fn validate(&self) -> Result<(), (&'static str, String, String)> {
        let bad = |key, message: String, remedy: &str| Err((key, message, remedy.to_string()));
        let t = &self.train;
        let c = &self.cluster;
        let unfit = |c: char| c.is_control() || c == '/' || c == '\\';
        if self.name.is_empty() || self.name.len() > 100 || self.name.contains(unfit) {
            let shown: String = self.name.chars().take(100).collect();
            return bad(
                "name",
                format!("`{}` is no name", shown.escape_debug()),
                "use 1 to 100 characters without slashes and control characters",
            );
        }
        if c.grace_ms > MAX_GRACE_MS {
            return bad(
                "cluster.grace_ms",
                format!("{} ms is more than a day", c.grace_ms),
                "use at most 86400000: the others wait so long for a worker that is gone",
            );
        }
        if let Some(ModelConfig::Mlp { hidden } | ModelConfig::Autoencoder { hidden }) = &self.model
            && hidden.len() > MAX_LAYERS
        {
            return bad(
                "model.hidden",
                format!("{} layers", hidden.len()),
                "use at most 1024 layers: each costs a step of every pass",
            );
        }
        if t.workers == 0 || t.workers > 65_536 {
            return bad("train.workers", format!("{} workers", t.workers), "use 1 to 65536");
        }
        if t.batch == 0 || t.batch > 1 << 20 {
            return bad("train.batch", format!("a minibatch of {}", t.batch), "use 1 to 1048576 samples");
        }
        if t.epochs == 0 || t.epochs > 1_000_000 {
            return bad("train.epochs", format!("{} epochs", t.epochs), "use 1 to 1000000");
        }
        if t.max_steps == Some(0) {
            return bad("train.max_steps", "no steps".into(), "use 1 or more, or leave it out");
        }
        if t.threads != 1 {
            return bad(
                "train.threads",
                format!("{} threads", t.threads),
                "a worker computes on one thread; use more workers",
            );
        }
        let leased = t.sampler == SamplerKind::Leased;
        if t.group_size == 0 || t.group_size > MAX_RANKS || self.ranks() > 65_536 {
            let why = format!("{} workers of {} ranks", t.workers, t.group_size);
            return bad("train.group_size", why, "use 1 to 1024, and 65536 ranks in all at most");
        }
        if leased && t.group_size > 1 {
            let why = "a group's ranks each have their share of an epoch";
            return bad(
                "train.sampler",
                why.into(),
                "set train.sampler = \"static\", or train.group_size = 1",
            );
        }
        if t.chunk == Some(0) {
            return bad("train.chunk", "no samples".into(), "use 1 or more, best a multiple of train.batch");
        }
        if t.chunk.is_some() && !leased {
            let why = "the static sampler has no chunks";
            return bad("train.chunk", why.into(), "set train.sampler = \"leased\", or take train.chunk out");
        }
        if leased && t.max_steps.is_some() {
            let why = "with the leased sampler a worker's steps are as many as it gets chunks for";
            return bad("train.max_steps", why.into(), "use train.epochs");
        }
        if leased && self.checkpoint.as_ref().is_some_and(|k| k.every_steps.is_some()) {
            let why = "with the leased sampler checkpoints are cut between epochs, when nobody trains";
            return bad("checkpoint.every_steps", why.into(), "use checkpoint.every_epochs");
        }
        if t.error_feedback == Some(true) && t.encoding == Encoding::F32 {
            let why = "f32 leaves nothing out of a push";
            return bad("train.error_feedback", why.into(), "choose another train.encoding, or take it out");
        }
        if t.exchange == Exchange::AllReduce {
            let why = |what: &str| format!("with train.exchange = \"all-reduce\" {what}");
            if t.workers != 1 {
                let all = "all ranks are one group";
                return bad(
                    "train.workers",
                    why(all),
                    "set train.workers = 1, and train.group_size to the number of ranks",
                );
            }
            if t.mode != Mode::Bsp.into() {
                return bad("train.mode", why("all ranks go in lock-step"), "set train.mode = \"bsp\"");
            }
            if leased {
                let share = "each rank has its share of an epoch";
                return bad("train.sampler", why(share), "set train.sampler = \"static\"");
            }
            if t.encoding != Encoding::F32 {
                let sums = "gradients are summed as f32";
                return bad("train.encoding", why(sums), "set train.encoding = \"f32\", or take it out");
            }
            if self.eval.early_stop.is_some() {
                let nobody = "the servers see no evaluation and stop nobody";
                return bad("eval.early_stop", why(nobody), "take [eval.early_stop] out");
            }
        }
        if let Some(a) = self.eval.target_accuracy
            && !(a > 0.0 && a <= 1.0)
        {
            return bad("eval.target_accuracy", format!("{a}"), "use a share above 0 and at most 1");
        }
        if let Some(e) = self.eval.early_stop {
            if e.patience == 0 || !e.min_delta.is_finite() || e.min_delta < 0.0 {
                return bad("eval.early_stop", format!("{e:?}"), "use patience from 1 and min_delta from 0");
            }
            if !self.eval.every_epoch {
                return bad(
                    "eval.every_epoch",
                    "early stopping needs an evaluation each epoch".into(),
                    "set eval.every_epoch = true",
                );
            }
        }
        if let Some(k) = &self.checkpoint {
            for (key, every) in
                [("checkpoint.every_steps", k.every_steps), ("checkpoint.every_epochs", k.every_epochs)]
            {
                if every == Some(0) {
                    return bad(key, "every 0".into(), "use 1 or more, or leave it out");
                }
            }
            if k.num_to_keep == 0 {
                return bad("checkpoint.num_to_keep", "0 checkpoints".into(), "use 1 or more");
            }
        }
        let servers = self.servers();
        if servers == 0 || servers > 1024 {
            return bad("cluster.servers", format!("{servers} servers"), "use 1 to 1024");
        }
        for (i, a) in c.addresses.iter().enumerate() {
            let port = a.rsplit_once(':').and_then(|(h, p)| p.parse::<u16>().ok().filter(|_| !h.is_empty()));
            if port.is_none_or(|p| p == 0) || c.addresses[..i].contains(a) {
                return bad(
                    "cluster.addresses",
                    format!("`{a}` is no address of its own"),
                    "write distinct \"host:port\", the same list on every host",
                );
            }
        }
        if c.replicas == 0 || c.replicas > servers {
            return bad(
                "cluster.replicas",
                format!("{} replicas on {servers} servers", c.replicas),
                "use as many replicas as servers or fewer (cluster.replicas = 1 keeps one copy)",
            );
        }
        if c.replicas.is_multiple_of(2) {
            return bad(
                "cluster.replicas",
                format!("{} replicas survive no more failures than {}", c.replicas, c.replicas - 1),
                "use an odd number",
            );
        }
        if self.shards() == 0 || self.shards() > 64 {
            return bad("cluster.shards", format!("{} shards", self.shards()), "use 1 to 64");
        }
        if let Some(b) = c.bucket_bytes
            && (!(4..=1 << 20).contains(&b) || !b.is_multiple_of(4))
        {
            return bad(
                "cluster.bucket_bytes",
                format!("{b} bytes"),
                "use a multiple of 4 from 4 to 1048576",
            );
        }
        if !(50..=60_000).contains(&c.election_ms) {
            return bad("cluster.election_ms", format!("{} ms", c.election_ms), "use 50 to 60000");
        }
        if !(c.parity_ms == 0 || (100..=86_400_000).contains(&c.parity_ms)) {
            return bad(
                "cluster.parity_ms",
                format!("{} ms", c.parity_ms),
                "use 100 to 86400000, or 0 for never",
            );
        }
        if c.replace_ms < 10 * c.election_ms {
            return bad(
                "cluster.replace_ms",
                format!("{} ms is less than ten elections", c.replace_ms),
                "a server that is merely slow must not lose its replicas: use at least 10 x cluster.election_ms",
            );
        }
        if c.patience_ms < 2 * c.election_ms {
            return bad(
                "cluster.patience_ms",
                format!("{} ms is less than an election", c.patience_ms),
                "use at least twice cluster.election_ms",
            );
        }
        for (key, window) in [
            ("cluster.leader_window_ms", c.leader_window_ms),
            ("cluster.leader_window_pushes", c.leader_window_pushes),
        ] {
            if window.is_some() && !c.durability.is_leader() {
                let why = format!("durability {} acknowledges nothing that no majority holds", c.durability);
                return bad(key, why, "set cluster.durability = \"leader\", or take the key out");
            }
        }
        self.auto.validate().or_else(|e| bad(e.key, e.to_string(), "see docs/consistency.md"))?;
        durability::check(t.mode.first(&self.auto), c.durability, c.leader_window()).or_else(|e| {
            let key = match e.key {
                "durability" => "cluster.durability",
                "leader_window_ms" => "cluster.leader_window_ms",
                _ => "cluster.leader_window_pushes",
            };
            bad(key, e.message, e.remedy)
        })?;
        let option = |e: &dyn std::fmt::Display| e.to_string();
        self.optimizer
            .validate()
            .or_else(|e| bad("optimizer.kind", option(&e), "see docs/configuration.md"))?;
        self.round.rule().validate(t.workers).or_else(|e| {
            let key = match e.key {
                "spare" => "round.spare",
                "quorum" => "round.quorum",
                _ => "round.grace_ms",
            };
            bad(key, option(&e), "see docs/configuration.md")
        })?;
        if self.round.passes_over() && (leased || t.exchange == Exchange::AllReduce) {
            let why = "a worker that a round was closed without goes on where the others are, which needs train.sampler = \
                       \"static\" and train.exchange = \"servers\"";
            return bad("round.kind", why.into(), "change those, or take [round] out");
        }
        let bad_algorithm = |message, remedy| bad("algorithm.kind", message, remedy);
        self.algorithm.algorithm().validate(&self.optimizer).or_else(|e| match e {
            AlgorithmError::Option(e) => bad_algorithm(option(&e), "see docs/configuration.md"),
            AlgorithmError::Optimizer { .. } => {
                bad("optimizer.kind", option(&e), "change optimizer.kind, or algorithm.kind")
            }
        })?;
        let (kind, keeps) = (self.algorithm.kind(), self.algorithm.algorithm().keeps());
        if keeps.of_workers() && c.durability.is_leader() {
            let why = format!(
                "{kind} keeps something of each worker on the shards, which replicas do not get at durability leader"
            );
            return bad_algorithm(why, "use a quorum durability, or another algorithm");
        }
        if t.exchange == Exchange::AllReduce {
            if self.algorithm != AlgorithmConfig::default() {
                let why = "with train.exchange = \"all-reduce\" no gradient comes late";
                return bad_algorithm(why.into(), "take [algorithm] out");
            }
            if matches!(self.optimizer, OptimizerConfig::DelayedNesterov(_)) {
                let why =
                    "delayed-nesterov is for gradients that come late, and in an all-reduce job none does";
                return bad("optimizer.kind", why.into(), "set optimizer.kind = \"nesterov\"");
            }
        }
        self.check_local()?;
        self.schedule
            .validate()
            .or_else(|e| bad("schedule.kind", option(&e), "see docs/configuration.md"))?;
        self.clip.validate().or_else(|e| bad("clip.norm", option(&e), "see docs/configuration.md"))?;
        Ok(())
    }

    /// Whether its model says of a sample to which class it belongs, where the data has classes.
    pub fn classifies(&self) -> bool {
        !matches!(self.model, Some(ModelConfig::Autoencoder { .. }))
    }

    /// Processes that train: the ranks of all workers.
    pub fn ranks(&self) -> u32 {
        self.train.workers.saturating_mul(self.train.group_size)
    }

    /// Servers of the fleet.
    pub fn servers(&self) -> u32 {
        if self.cluster.addresses.is_empty() {
            self.cluster.servers
        } else {
            self.cluster.addresses.len() as u32
        }
    }

    /// Raft groups.
    pub fn shards(&self) -> u32 {
        self.cluster.shards.unwrap_or_else(|| self.servers().min(8))
    }

    /// The text written into the run's folder: every key with the value that was used.
    pub fn to_toml(&self) -> String {
        toml::to_string_pretty(self).unwrap_or_else(|e| format!("# cannot be written: {e}\n"))
    }

    /// As [`Self::server_job`], for this data: workers with other data are refused.
    pub fn server_job_on(&self, tensors: &[TensorSpec], data: &DataDigest) -> ServerJob {
        let mut job = self.server_job(tensors);
        job.fingerprint = format!("{}, {data}", job.fingerprint);
        job
    }

    /// Takes shards back where this model has too few buckets for them: what is left has about a MiB in each, since a
    /// Raft group costs more than a small bucket. Buckets stay as long as they were.
    pub fn only_shards_with_buckets(&mut self, layout: &Layout) {
        let buckets = layout.buckets().len() as u32;
        if buckets > 0 && buckets < self.shards() {
            let full = (layout.len() * F32_BYTES).div_ceil(SHARD_BYTES) as u32;
            self.cluster.bucket_bytes = Some(self.bucket_len(layout.params_len()) * F32_BYTES);
            self.cluster.shards = Some(full.clamp(1, buckets));
        }
    }

    /// The longest bucket of a model with so many trained values, in values.
    fn bucket_len(&self, params_len: usize) -> usize {
        let of_shards = || placement::default_bucket_len(params_len, self.shards());
        self.cluster.bucket_bytes.map_or_else(of_shards, |bytes| bytes / F32_BYTES)
    }

    /// What the servers need to know, for a model with these tensors.
    pub fn server_job(&self, tensors: &[TensorSpec]) -> ServerJob {
        let len = |kind| tensors.iter().filter(|t| t.kind == kind).map(TensorSpec::len).sum();
        let params_len: usize = len(TensorKind::Param);
        let bucket_len = self.bucket_len(params_len);
        let Descent { optimizer, schedule, clip } = self.on_servers();
        ServerJob {
            name: self.name.clone(),
            fingerprint: fingerprint::of(self, tensors),
            workers: self.train.workers,
            mode: self.train.mode,
            auto: self.auto,
            all_reduce: self.train.exchange == Exchange::AllReduce,
            params_len,
            buffers_len: len(TensorKind::Buffer),
            bucket_len,
            grace_ms: self.cluster.grace_ms,
            durability: self.cluster.durability,
            leader_window: self.cluster.leader_window(),
            algorithm: self.algorithm,
            round: self.round,
            encoding: self.train.encoding,
            early_stop: self.eval.early_stop,
            optimizer,
            schedule,
            clip,
            start: None,
            chunks: None,
        }
    }

    /// The layout that [`Self::server_job`] describes, with the model's tensor names.
    pub fn layout(&self, tensors: Vec<TensorSpec>) -> Result<Layout, paraft_common::layout::LayoutError> {
        let bucket_len = self.server_job(&tensors).bucket_len;
        Layout::new(tensors, bucket_len)
    }
}
