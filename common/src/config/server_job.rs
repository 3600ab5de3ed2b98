//! What the servers need to know of a job. It travels as TOML, the language of the job file, so that there is
//! one parser and one validation, and lives in the replicated state.

use crate::{
    algorithm::{AlgorithmConfig, Keeps},
    auto::{AutoConfig, ModeChoice},
    consistency::Mode,
    durability::{self, Durability, LeaderWindow, LogForm},
    encoding::Encoding,
    layout::{Layout, LayoutError, MAX_BUCKETS, TensorKind, TensorSpec},
    optim::{ClipConfig, OptimizerConfig, ScheduleConfig},
    round::RoundConfig,
};
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// The servers' part of a job.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ServerJob {
    /// The job's name.
    pub name: String,
    /// The model and everything else that the weights depend on; two workers with different ones do not
    /// train together.
    pub fingerprint: String,
    /// Workers that must have joined before the first update.
    pub workers: u32,
    /// BSP, SSP(s), ASP, or the rule that chooses.
    pub mode: ModeChoice,
    /// That rule.
    #[serde(default, skip_serializing_if = "is_usual")]
    pub auto: AutoConfig,
    /// The ranks of the one worker apply the gradients themselves: nothing of the mode acts on the servers.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub all_reduce: bool,
    /// Trained values.
    pub params_len: usize,
    /// Running statistics, after the trained values.
    pub buffers_len: usize,
    /// Values in a bucket.
    pub bucket_len: usize,
    /// The lease of a member in milliseconds: without a sign of life for so long it is taken out. See [`Self::lease`].
    pub grace_ms: u64,
    /// What an acknowledgement promises.
    #[serde(default)]
    pub durability: Durability,
    /// Which way into the log.
    #[serde(default)]
    pub log: LogForm,
    /// How much may be acknowledged before a majority holds it; read at the level `leader`.
    #[serde(default)]
    pub leader_window: LeaderWindow,
    /// How pushes carry the gradients of trained values.
    #[serde(default)]
    pub encoding: Encoding,
    /// Stop before the last epoch.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub early_stop: Option<EarlyStop>,
    /// What is done about gradients that come late.
    #[serde(default, skip_serializing_if = "is_plain")]
    pub algorithm: AlgorithmConfig,
    /// When a lock-step round closes.
    #[serde(default, skip_serializing_if = "waits_for_all")]
    pub round: RoundConfig,
    /// How gradients change weights.
    pub optimizer: OptimizerConfig,
    /// How the rate changes with the fleet's progress.
    pub schedule: ScheduleConfig,
    /// Clipping of gradients.
    pub clip: ClipConfig,
    /// Where the weights come from when the seed does not give them: a checkpoint or a model file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub start: Option<Start>,
    /// With the leased sampler: the chunks that shard 0 gives out. Without: every worker knows its share.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub chunks: Option<ChunkPlan>,
}

/// What the leased sampler gives out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ChunkPlan {
    /// Chunks of an epoch, 1 to 2^32.
    pub per_epoch: u64,
    /// Epochs of the job, 1 to 2^32.
    pub epochs: u64,
}

/// What a job begins with, beside the bulk that the workers send.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Start {
    /// Which file, by its content: workers that read different files do not train together.
    pub from: String,
    /// Steps that are done: workers go on from here.
    pub step: u64,
    /// Epochs that are done, where the leased sampler counts them.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub epochs: u64,
    /// Early stopping, as far as it had come.
    #[serde(default)]
    pub stopping: Stopping,
}

fn is_plain(algorithm: &AlgorithmConfig) -> bool {
    *algorithm == AlgorithmConfig::default()
}

fn is_usual(auto: &AutoConfig) -> bool {
    *auto == AutoConfig::default()
}

fn waits_for_all(round: &RoundConfig) -> bool {
    !round.passes_over()
}

fn is_zero(n: &u64) -> bool {
    *n == 0
}

/// How far a job's early stopping has come, and its latest complete evaluation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Stopping {
    /// The best mean held-out loss so far; infinity before the first.
    pub best_loss: f64,
    /// Evaluations since.
    pub bad: u32,
    /// The rule has fired.
    pub stop: bool,
    /// The latest complete evaluation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub evaluated: Option<LastEvaluation>,
}

impl Default for Stopping {
    fn default() -> Self {
        Self { best_loss: f64::INFINITY, bad: 0, stop: false, evaluated: None }
    }
}

/// A complete held-out evaluation, as sums over the samples.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LastEvaluation {
    /// Which epoch.
    pub epoch: u64,
    /// Sum of the loss.
    pub loss_sum: f64,
    /// Samples classified right.
    pub correct: u64,
    /// Samples seen.
    pub count: u64,
}

/// Stop when the held-out loss has not fallen for a while.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EarlyStop {
    /// Evaluations without improvement before stopping, from 1.
    pub patience: u32,
    /// An improvement is a fall of the mean held-out loss by more than this, from 0.
    #[serde(default)]
    pub min_delta: f64,
}

/// Why a text is no server job.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the job that was sent is not valid: {0}")]
pub struct ServerJobError(String);

impl ServerJob {
    /// A job of one worker that trains by plain SGD at rate 1, without buffers; everything else as where a job file is
    /// silent. For who has no job file.
    pub fn new(name: &str, mode: Mode, params_len: usize, bucket_len: usize) -> Self {
        Self {
            name: name.into(),
            fingerprint: String::new(),
            workers: 1,
            mode: mode.into(),
            auto: AutoConfig::default(),
            all_reduce: false,
            params_len,
            buffers_len: 0,
            bucket_len,
            grace_ms: 1000,
            durability: Durability::default(),
            log: LogForm::default(),
            leader_window: LeaderWindow::default(),
            encoding: Encoding::default(),
            early_stop: None,
            algorithm: AlgorithmConfig::default(),
            round: RoundConfig::default(),
            optimizer: OptimizerConfig::sgd(1.0),
            schedule: ScheduleConfig::default(),
            clip: ClipConfig::default(),
            start: None,
            chunks: None,
        }
    }

    /// Reads and checks the text; afterwards [`Self::layout`] cannot fail.
    pub fn from_toml(text: &str) -> Result<Self, ServerJobError> {
        let bad = |m: String| ServerJobError(m);
        let job: ServerJob = toml::from_str(text).map_err(|e| bad(e.to_string()))?;
        job.optimizer.validate().map_err(|e| bad(e.to_string()))?;
        job.algorithm.algorithm().validate(&job.optimizer).map_err(|e| bad(e.to_string()))?;
        job.round.rule().validate(job.workers).map_err(|e| bad(e.to_string()))?;
        job.schedule.validate().map_err(|e| bad(e.to_string()))?;
        job.clip.validate().map_err(|e| bad(e.to_string()))?;
        job.auto.validate().map_err(|e| bad(e.to_string()))?;
        durability::check(job.first_mode(), job.log, job.durability, job.leader_window)
            .map_err(|e| bad(e.to_string()))?;
        if job.keeps().of_workers() && job.begins_with_images() {
            return Err(bad(format!(
                "[algorithm] kind = \"{}\" keeps something of each worker, and image cuts do not hold it",
                job.algorithm.kind()
            )));
        }
        let total = job.params_len.saturating_add(job.buffers_len);
        if job.params_len == 0 || total > MAX_VALUES {
            return Err(bad(format!("{total} values; a job has from 1 to {MAX_VALUES}")));
        }
        if job.bucket_len == 0 || job.bucket_len > (1 << 20) / 4 {
            return Err(bad(format!("bucket_len {} is not within 1 to {}", job.bucket_len, (1 << 20) / 4)));
        }
        let buckets = job.params_len.div_ceil(job.bucket_len) + job.buffers_len.div_ceil(job.bucket_len);
        if buckets > MAX_BUCKETS {
            return Err(bad(LayoutError::TooManyBuckets(buckets).to_string()));
        }
        if job.workers == 0 || job.workers > 65_536 {
            return Err(bad(format!("{} workers; a job has from 1 to 65536", job.workers)));
        }
        if let Some(c) = job.chunks
            && (c.per_epoch == 0 || c.epochs == 0 || c.per_epoch.max(c.epochs) > MAX_CHUNKS)
        {
            let (n, epochs) = (c.per_epoch, c.epochs);
            return Err(bad(format!(
                "{n} chunks in each of {epochs} epochs; both are from 1 to {MAX_CHUNKS}"
            )));
        }
        if job.start.as_ref().is_some_and(|s| s.step > MAX_STEP || s.from.len() > 200) {
            return Err(bad(format!("its start is not within {MAX_STEP} steps, or has too long a name")));
        }
        Ok(job)
    }

    /// How pushes of such a bucket carry their values. Running statistics are sent as they are: they are few, and what a
    /// push loses of them would stay lost (a gradient that is rounded goes the same way down at the next step).
    pub fn encoding(&self, kind: TensorKind) -> Encoding {
        match kind {
            TensorKind::Param => self.encoding,
            TensorKind::Buffer => Encoding::F32,
        }
    }

    /// A member's lease: it is renewed by every message of the member, and when it ends the member is taken out. It is
    /// `grace_ms`, and for a connection that is open but silent at least [`MIN_LEASE`].
    pub fn lease(&self) -> Duration {
        Duration::from_millis(self.grace_ms).max(MIN_LEASE)
    }

    /// How often a worker that has nothing to say gives a sign of life: eight times in a lease, twice as often
    /// as leaders look.
    pub fn heartbeat(&self) -> Duration {
        self.lease() / 8
    }

    /// Whether the job begins with image cuts: where it asks for them, and at the level `leader`, whose
    /// acknowledgements are about the working copies that only image cuts have.
    pub fn begins_with_images(&self) -> bool {
        self.log == LogForm::Images || self.durability == Durability::Leader
    }

    /// Whether the leader may change between update entries and image cuts, in the mode in force.
    pub fn may_change_form(&self, mode: Mode) -> bool {
        self.log == LogForm::Auto
            && self.durability != Durability::Leader
            && !mode.averages()
            && !self.keeps().of_workers()
    }

    /// The mode that the job begins with.
    pub fn first_mode(&self) -> Mode {
        self.mode.first(&self.auto)
    }

    /// Whether the job may go on in another mode.
    pub fn may_switch(&self, mode: Mode) -> Result<(), durability::DurabilityError> {
        if self.all_reduce {
            let message = "an all-reduce job's ranks apply their gradients themselves, in lock-step".into();
            let (key, remedy) = ("exchange", "set train.exchange = \"servers\"");
            return Err(durability::DurabilityError { key, message, remedy });
        }
        durability::check(mode, self.log, self.durability, self.leader_window)
    }

    /// What the algorithm keeps of a bucket of trained values.
    pub fn keeps(&self) -> Keeps {
        self.algorithm.algorithm().keeps()
    }

    /// Names of the state vectors of a bucket of trained values: those of the optimizer (unless each worker has its own),
    /// then those of the algorithm.
    pub fn slot_names(&self) -> Vec<&'static str> {
        let mut names = if self.keeps().own_slots { Vec::new() } else { self.on_shard().slot_names() };
        names.extend(self.keeps().slots);
        names
    }

    /// How many they are.
    pub fn slots(&self) -> usize {
        let optimizer = if self.keeps().own_slots { 0 } else { self.on_shard().slots() };
        optimizer + self.keeps().slots.len()
    }

    /// They, for a bucket of `len` trained values that nothing was applied to.
    pub fn new_slots(&self, len: usize) -> Vec<Vec<f32>> {
        let mut slots = if self.keeps().own_slots { Vec::new() } else { self.on_shard().new_slots(len) };
        slots.extend(self.keeps().slots.iter().map(|_| vec![0.0; len]));
        slots
    }

    /// The optimizer that the shards apply.
    pub fn on_shard(&self) -> OptimizerConfig {
        self.algorithm.algorithm().on_shard(&self.optimizer)
    }

    /// The text that [`Self::from_toml`] reads back.
    pub fn to_toml(&self) -> Result<String, ServerJobError> {
        toml::to_string(self).map_err(|e| ServerJobError(e.to_string()))
    }

    /// The buckets, as every process of the job computes them. The servers know lengths, not tensors.
    ///
    /// # Panics
    /// Never for a job that came from [`Self::from_toml`].
    pub fn layout(&self) -> Layout {
        let mut tensors = vec![TensorSpec::param("params", &[self.params_len])];
        if self.buffers_len > 0 {
            tensors.push(TensorSpec::buffer("buffers", &[self.buffers_len]));
        }
        Layout::new(tensors, self.bucket_len).expect("from_toml has checked the lengths")
    }
}

/// No job has more steps; a clock beyond it could not be counted on.
pub const MAX_STEP: u64 = 1 << 53;
/// A busy host may hold a process up for a good part of a second; that is not death.
pub const MIN_LEASE: Duration = Duration::from_secs(1);
/// As many as a data set may have samples.
const MAX_CHUNKS: u64 = 1 << 32;
/// 2^34 values are 64 GiB of weights: more than a fleet of this version holds.
const MAX_VALUES: usize = 1 << 34;
