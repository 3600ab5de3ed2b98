//! The part of a job that the servers need. It travels as TOML, the language of the job file, so one
//! parser and one validation serve both. It is part of the replicated state.

mod tensors;

use super::{EarlyStop, Start, check_name, fingerprint::MAX_FINGERPRINT};
use crate::{
    algorithm::{AlgorithmConfig, Keeps},
    auto::{AutoConfig, ModeChoice},
    consistency::Mode,
    constraint::{self, Constraint},
    durability::{self, Durability, LeaderWindow},
    encoding::Encoding,
    layout::{
        self, BucketSpec, Cuts, Layout, Lengths, MAX_BUCKET_LEN, MAX_BUCKETS, ParamGroup, TensorKind,
        TensorSpec,
    },
    optim::{ClipConfig, OptimizerConfig, ScheduleConfig},
    round::RoundConfig,
    table::{MAX_TABLES, TableSpec},
};
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// The servers' part of a job.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ServerJob {
    /// The job's name.
    pub name: String,
    /// The model and everything else that the weights depend on. Workers with different fingerprints do
    /// not train together.
    pub fingerprint: String,
    /// Workers that must have joined before the first update.
    pub workers: u32,
    /// BSP, SSP(s), ASP, or `auto`.
    pub mode: ModeChoice,
    /// The options of `auto`.
    #[serde(default)]
    pub auto: AutoConfig,
    /// The ranks of the single worker apply the gradients themselves, so the servers apply no mode.
    #[serde(default)]
    pub all_reduce: bool,
    /// Number of trained values.
    pub params_len: usize,
    /// Number of running statistics, which lie after the trained values.
    pub buffers_len: usize,
    /// Number of results of the workers' own optimizer, which lie last. With any, the trained values take the mean of
    /// each round's pushes, and `optimizer` and `schedule` apply to nothing.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub results_len: usize,
    /// Values in a bucket.
    pub bucket_len: usize,
    /// The lease of a member in milliseconds: a member that is silent for this long is removed. See
    /// [`Self::lease`].
    pub grace_ms: u64,
    /// The promise of an acknowledgement.
    #[serde(default)]
    pub durability: Durability,
    /// How many pushes may be acknowledged before a majority holds them; read at the level `leader`.
    #[serde(default)]
    pub leader_window: LeaderWindow,
    /// The encoding of gradients in pushes.
    #[serde(default)]
    pub encoding: Encoding,
    /// Stop before the last epoch.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub early_stop: Option<EarlyStop>,
    /// The treatment of late gradients.
    #[serde(default)]
    pub algorithm: AlgorithmConfig,
    /// When a lock-step round closes.
    #[serde(default)]
    pub round: RoundConfig,
    /// How gradients change weights.
    pub optimizer: OptimizerConfig,
    /// How the rate changes with the fleet's progress.
    pub schedule: ScheduleConfig,
    /// Clipping of gradients.
    pub clip: ClipConfig,
    /// The source of the weights if it is not the seed: a checkpoint, a model file or another job.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub start: Option<Start>,
    /// Parameter groups with their own rate, decay and optimizer, in the order of the flat vector. They
    /// cover all parameters, or the list is empty and all parameters use `optimizer`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub groups: Vec<ParamGroup>,
    /// For workers of several processes that each hold a pipeline stage: the number of values of each
    /// stage, in the order of the flat vector. Each stage has its own shards, so there are at least as
    /// many shards as stages. Empty: one stage.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub stages: Vec<usize>,
    /// Constraints on parameters after each update, in the order of the flat vector. Those of one
    /// tensor are in the order of the entries' names.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub constraints: Vec<Constraint>,
    /// With the leased sampler: the chunks that shard 0 leases. Without it, every worker knows its
    /// share.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub chunks: Option<ChunkPlan>,
    /// Sparse tables, whose partitions are the last buckets.
    #[serde(default, rename = "table", skip_serializing_if = "Vec::is_empty")]
    pub tables: Vec<TableSpec>,
    /// The model's tensors in the order of the flat vector, for readers. Empty: the servers do not know them.
    #[serde(default, with = "tensors::names", skip_serializing_if = "Vec::is_empty")]
    pub tensors: Vec<TensorSpec>,
}

/// The chunks of the leased sampler.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ChunkPlan {
    /// Chunks of an epoch, 1 to 2^32.
    pub per_epoch: u64,
    /// Epochs of the job, 1 to 2^32.
    pub epochs: u64,
}

/// Why a text is not a valid server job.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the job that was sent is not valid: {0}")]
pub struct ServerJobError(String);

impl ServerJob {
    /// A job with one worker, plain SGD at rate 1 and no buffers. All other values are the defaults of
    /// a job file. For callers without a job file.
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
            results_len: 0,
            bucket_len,
            grace_ms: 1000,
            durability: Durability::default(),
            leader_window: LeaderWindow::default(),
            encoding: Encoding::default(),
            early_stop: None,
            algorithm: AlgorithmConfig::default(),
            round: RoundConfig::default(),
            optimizer: OptimizerConfig::sgd(1.0),
            schedule: ScheduleConfig::default(),
            clip: ClipConfig::default(),
            start: None,
            groups: Vec::new(),
            stages: Vec::new(),
            constraints: Vec::new(),
            chunks: None,
            tables: Vec::new(),
            tensors: Vec::new(),
        }
    }

    /// Parses and validates the text; afterwards [`Self::layout`] cannot fail. Use it to admit a job.
    /// Use [`Self::decode`] for a job that is already in the log.
    pub fn from_toml(text: &str) -> Result<Self, ServerJobError> {
        let job = Self::decode(text)?;
        job.validate()?;
        Ok(job)
    }

    /// Parses a job that was admitted earlier, without today's admission rules. It refuses only a text
    /// that is no job: one with names that this version does not know, or with lengths that no layout
    /// has. No later release may refuse more: what one replica has applied, every replica must be able
    /// to apply.
    pub fn decode(text: &str) -> Result<Self, ServerJobError> {
        let bad = |m: String| Err(ServerJobError(m));
        let job: ServerJob = toml::from_str(text).map_err(|e| ServerJobError(e.to_string()))?;
        let total = job.params_len.saturating_add(job.buffers_len).saturating_add(job.results_len);
        if job.params_len == 0 || total > MAX_VALUES {
            return bad(format!("{total} values; a job has from 1 to {MAX_VALUES}"));
        }
        if job.bucket_len == 0 || job.bucket_len > MAX_BUCKET_LEN {
            return bad(format!("bucket_len {} is not within 1 to {MAX_BUCKET_LEN}", job.bucket_len));
        }
        let dense = layout::count(job.lengths(), job.cuts(), job.bucket_len)
            .map_err(|e| ServerJobError(e.to_string()))?;
        if job.tables.len() > MAX_TABLES {
            return bad(format!("{} tables; a job has at most {MAX_TABLES}", job.tables.len()));
        }
        job.tables
            .iter()
            .try_for_each(TableSpec::check_lengths)
            .map_err(|e| ServerJobError(e.to_string()))?;
        let buckets = dense + job.partitions();
        if buckets > MAX_BUCKETS {
            return bad(format!("{buckets} buckets and partitions; a job has at most {MAX_BUCKETS}"));
        }
        if job.workers == 0 || job.workers > 65_536 {
            return bad(format!("{} workers; a job has from 1 to 65536", job.workers));
        }
        if let Some(c) = job.chunks
            && (c.per_epoch == 0 || c.epochs == 0 || c.per_epoch.max(c.epochs) > MAX_CHUNKS)
        {
            let (n, epochs) = (c.per_epoch, c.epochs);
            return bad(format!("{n} chunks in each of {epochs} epochs; both are from 1 to {MAX_CHUNKS}"));
        }
        Ok(job)
    }

    /// Whether this version admits the job.
    pub fn validate(&self) -> Result<(), ServerJobError> {
        let bad = |m: String| Err(ServerJobError(m));
        let failed = |e: &dyn std::fmt::Display| ServerJobError(e.to_string());
        self.optimizer.validate().map_err(|e| failed(&e))?;
        self.algorithm.algorithm().validate(&self.optimizer).map_err(|e| failed(&e))?;
        self.round.validate(self.workers).map_err(|e| failed(&e))?;
        self.schedule.validate().map_err(|e| failed(&e))?;
        self.clip.validate().map_err(|e| failed(&e))?;
        self.auto.validate().map_err(|e| failed(&e))?;
        durability::check(self.first_mode(), self.durability, self.leader_window).map_err(|e| failed(&e))?;
        if self.keeps().of_workers() && self.durability.is_leader() {
            return bad(format!(
                "[algorithm] kind = \"{}\" keeps something of each worker, which replicas do not get at durability leader",
                self.algorithm.kind()
            ));
        }
        if self.start.as_ref().is_some_and(|s| s.step > MAX_STEP || s.from.len() > 200) {
            return bad(format!("its start is not within {MAX_STEP} steps, or has too long a name"));
        }
        check_name(&self.name).map_err(ServerJobError)?;
        if self.fingerprint.len() > MAX_FINGERPRINT || self.fingerprint.chars().any(char::is_control) {
            return bad(format!(
                "its fingerprint has {} bytes, or control characters; at most {MAX_FINGERPRINT}, printable",
                self.fingerprint.len()
            ));
        }
        if self.start.as_ref().is_some_and(|s| s.from.chars().any(char::is_control)) {
            return bad("what it starts from has control characters in its name".into());
        }
        if self.grace_ms > MAX_GRACE_MS {
            return bad(format!(
                "grace_ms {} is more than a day: a member that is gone would hold the others up for so long",
                self.grace_ms
            ));
        }
        for group in 0..self.groups.len() {
            let (optimizer, of) = (self.optimizer_of(group as u16), |e: &dyn std::fmt::Display| {
                ServerJobError(format!("group {group} of the parameters: {e}"))
            });
            optimizer.validate().map_err(|e| of(&e))?;
            self.algorithm.algorithm().validate(&optimizer).map_err(|e| of(&e))?;
        }
        if self.algorithm != AlgorithmConfig::default()
            && self.optimizers().any(|o| o.kind() != self.optimizer.kind())
        {
            return bad(format!(
                "parameter groups with several kinds of optimizers go with the default [algorithm], and not with {}",
                self.algorithm.kind()
            ));
        }
        if self.takes_means()
            && (self.first_mode() != Mode::Bsp
                || self.round.drops_late()
                || self.all_reduce
                || self.chunks.is_some()
                || self.algorithm != AlgorithmConfig::default()
                || !self.groups.is_empty()
                || !self.constraints.is_empty())
        {
            return bad("workers that run the optimizer on the mean gradient train in mode bsp, without backup workers, all-reduce, leased chunks, an algorithm, groups and constraints".into());
        }
        self.validate_tables().map_err(ServerJobError)?;
        self.validate_tensors()?;
        if self.all_reduce && !self.constraints.is_empty() {
            return bad("an all-reduce job's ranks apply their gradients themselves, and the servers hold its weights to nothing".into());
        }
        if let Some(e) = self.early_stop {
            if e.patience == 0 {
                return bad(
                    "early_stop.patience 0 would stop before the first evaluation; it is from 1".into()
                );
            }
            if !e.min_delta.is_finite() || e.min_delta < 0.0 {
                return bad(format!("early_stop.min_delta {} is no finite number from 0", e.min_delta));
            }
        }
        Ok(())
    }

    fn validate_tables(&self) -> Result<(), String> {
        let Some(first) = self.tables.first() else { return Ok(()) };
        for (i, table) in self.tables.iter().enumerate() {
            table.validate().map_err(|e| e.to_string())?;
            if self.tables[..i].iter().any(|other| other.name == table.name) {
                return Err(format!("two tables are named `{}`", table.name));
            }
        }
        let excluded = [
            (self.durability.is_leader(), "durability leader"),
            (self.all_reduce, "all-reduce"),
            (!self.stages.is_empty(), "pipeline stages"),
            (self.takes_means(), "an optimizer that runs on the workers"),
            (self.algorithm != AlgorithmConfig::default(), "an [algorithm]"),
            (self.clip.value.is_some(), "clip.value, which would leave the rows out"),
            (self.start.as_ref().is_some_and(|s| !s.rows), "a start from weights without rows"),
        ];
        match excluded.iter().find(|(set, _)| *set) {
            Some((_, what)) => Err(format!("a job with tables (`{}`) cannot have {what}", first.name)),
            None => Ok(()),
        }
    }

    /// The encoding of pushes to a bucket of this kind. Running statistics are sent as `f32`: they are
    /// few, and a rounding error in them would remain (a rounded gradient is corrected by the next
    /// step).
    pub fn encoding(&self, kind: TensorKind) -> Encoding {
        match kind {
            TensorKind::Param => self.encoding,
            TensorKind::Buffer | TensorKind::Result | TensorKind::Rows => Encoding::F32,
        }
    }

    /// A member's lease. Every message of the member renews it; when it expires, the member is removed.
    /// It is `grace_ms`, and at least [`MIN_LEASE`] for a connection that is open but silent.
    pub fn lease(&self) -> Duration {
        Duration::from_millis(self.grace_ms).max(MIN_LEASE)
    }

    /// How often an idle worker sends a heartbeat: eight times per lease, twice as often as leaders
    /// check.
    pub fn heartbeat(&self) -> Duration {
        self.lease() / 8
    }

    /// The mode at the start of the job.
    pub fn first_mode(&self) -> Mode {
        self.mode.first(&self.auto)
    }

    /// Whether the job may switch to `mode`.
    pub fn may_switch(&self, mode: Mode) -> Result<(), durability::DurabilityError> {
        if self.all_reduce {
            let message = "an all-reduce job's ranks apply their gradients themselves, in lock-step".into();
            let (key, remedy) = ("exchange", "set train.exchange = \"servers\"");
            return Err(durability::DurabilityError { key, message, remedy });
        }
        if self.takes_means() && mode != Mode::Bsp {
            let message =
                "this job's workers run the optimizer on the mean gradient of each round, in lock-step"
                    .into();
            let (key, remedy) =
                ("mode", "prepare(..., apply=\"worker\") runs it on each worker's own gradients");
            return Err(durability::DurabilityError { key, message, remedy });
        }
        durability::check(mode, self.durability, self.leader_window)
    }

    /// What the algorithm stores for a bucket of trained values.
    pub fn keeps(&self) -> Keeps {
        self.algorithm.algorithm().keeps()
    }

    /// The optimizers of all parameter groups, before the algorithm.
    fn optimizers(&self) -> impl Iterator<Item = OptimizerConfig> {
        (0..self.groups.len().max(1)).map(|group| self.optimizer_of(group as u16))
    }

    /// Names of the state vectors of a bucket of trained values: those of the optimizer (unless each worker has its own),
    /// then those of the algorithm. If groups have optimizers of several kinds, the names are of the first with the most
    /// vectors. All buckets have as many; those that a bucket's optimizer does not use stay zero.
    pub fn slot_names(&self) -> Vec<&'static str> {
        let mut names = if self.keeps().own_slots { Vec::new() } else { self.most_slots().slot_names() };
        names.extend(self.keeps().slots);
        names
    }

    /// The optimizer with the most state vectors: the first of these.
    fn most_slots(&self) -> OptimizerConfig {
        let first = self.on_shard();
        let all = self.optimizers().map(|o| self.algorithm.algorithm().on_shard(&o));
        all.fold(first, |most, o| if o.slots() > most.slots() { o } else { most })
    }

    /// The number of state vectors.
    pub fn slots(&self) -> usize {
        let optimizer = if self.keeps().own_slots { 0 } else { self.most_slots().slots() };
        optimizer + self.keeps().slots.len()
    }

    /// The initial state vectors of a bucket of `len` trained values of a group.
    pub fn new_slots(&self, group: u16, len: usize) -> Vec<Vec<f32>> {
        let mut slots = match self.keeps().own_slots {
            true => Vec::new(),
            false => self.algorithm.algorithm().on_shard(&self.optimizer_of(group)).new_slots(len),
        };
        slots.resize_with(self.slots(), || vec![0.0; len]);
        slots
    }

    /// The optimizer of a parameter group, before the algorithm.
    pub fn optimizer_of(&self, group: u16) -> OptimizerConfig {
        match self.groups.get(usize::from(group)) {
            Some(g) => g.optimizer.as_ref().unwrap_or(&self.optimizer).with(g.lr, g.weight_decay),
            None => self.optimizer.clone(),
        }
    }

    /// The factor of a group's gradient: -1 if its optimizer maximizes, else 1.
    pub fn sign_of(&self, group: u16) -> f32 {
        let maximizes = self.groups.get(usize::from(group)).is_some_and(|g| g.maximize);
        if maximizes { -1.0 } else { 1.0 }
    }

    /// Applies the job's constraints to the values of a bucket.
    pub fn constrain(&self, bucket: BucketSpec, values: &mut [f32]) {
        constraint::apply(&self.constraints, bucket.range(), values);
    }

    /// The parts of the flat vector. No bucket crosses the edge of a part.
    pub(crate) fn parts(&self) -> impl Iterator<Item = layout::Part> {
        layout::parts(self.lengths(), self.cuts())
    }

    fn lengths(&self) -> Lengths {
        Lengths { params: self.params_len, buffers: self.buffers_len, results: self.results_len }
    }

    /// Whether the workers run the optimizer, each on the mean gradient, and write its results.
    pub fn takes_means(&self) -> bool {
        self.results_len > 0
    }

    /// The number of buckets.
    pub fn buckets(&self) -> usize {
        let dense = self.parts().map(|part| part.values.div_ceil(part.bucket_len(self.bucket_len)));
        dense.sum::<usize>() + self.partitions()
    }

    /// The number of partitions of all tables.
    fn partitions(&self) -> usize {
        self.tables.iter().map(|t| t.partitions as usize).sum()
    }

    /// How the parameters are divided into stages, groups and constrained rows.
    pub fn cuts(&self) -> Cuts<'_> {
        Cuts { groups: &self.groups, stages: &self.stages, constraints: &self.constraints }
    }

    /// The optimizer that the shards run.
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
    ///
    /// Never for a job that [`Self::from_toml`] returned.
    pub fn layout(&self) -> Layout {
        let mut tensors = vec![TensorSpec::param("params", &[self.params_len])];
        if self.buffers_len > 0 {
            tensors.push(TensorSpec::buffer("buffers", &[self.buffers_len]));
        }
        if self.results_len > 0 {
            tensors.push(TensorSpec::result("results", &[self.results_len]));
        }
        let dense = Layout::cut(tensors, self.cuts(), self.bucket_len);
        dense.and_then(|l| l.with_tables(&self.tables)).expect("from_toml has checked the lengths")
    }
}

fn is_zero(len: &usize) -> bool {
    *len == 0
}

/// The largest step of any job: `f64` holds step numbers exactly up to here.
pub const MAX_STEP: u64 = 1 << 53;
/// A busy host may pause a process for a large part of a second; that is not a failure.
pub const MIN_LEASE: Duration = Duration::from_secs(1);
/// One day in milliseconds: a longer lease would detect no failure.
pub const MAX_GRACE_MS: u64 = 24 * 60 * 60 * 1000;
/// The maximal number of samples in a data set.
const MAX_CHUNKS: u64 = 1 << 32;
/// 2^34 values are 64 GiB of weights. Whether the fleet's memory suffices is a separate check
/// ([`crate::need`]).
const MAX_VALUES: usize = 1 << 34;

#[cfg(test)]
#[path = "server_job_tests.rs"]
mod tests;
