//! What the servers need to know of a job. It travels as TOML, the language of the job file, so that there is
//! one parser and one validation, and lives in the replicated state.

use crate::{
    algorithm::{AlgorithmConfig, Keeps},
    auto::{AutoConfig, ModeChoice},
    consistency::Mode,
    constraint::{self, Constraint},
    durability::{self, Durability, LeaderWindow},
    encoding::Encoding,
    layout::{self, BucketSpec, Cuts, Layout, ParamGroup, TensorKind, TensorSpec},
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
    #[serde(default)]
    pub auto: AutoConfig,
    /// The ranks of the one worker apply the gradients themselves: nothing of the mode acts on the servers.
    #[serde(default)]
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
    /// Where the weights come from when the seed does not give them: a checkpoint, a model file or another job.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub start: Option<Start>,
    /// Parameters with rates and decays of their own, in the order of the flat vector: all parameters, or none (then all have
    /// the optimizer's).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub groups: Vec<ParamGroup>,
    /// Where each worker is several processes that hold a stage of the model each: the values of each stage, in the order of the flat
    /// vector. Each has shards of its own: there are at least as many. Empty: all is one.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub stages: Vec<usize>,
    /// What parameters are held to behind each update; in the order of the flat vector, those of one tensor in the order of the entries' names.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub constraints: Vec<Constraint>,
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
    /// Which file, by its content: workers that read different files do not train together. `job:NAME`: another job of the fleet.
    pub from: String,
    /// Steps that are done: workers go on from here.
    pub step: u64,
    /// Epochs that are done, where the leased sampler counts them.
    #[serde(default)]
    pub epochs: u64,
    /// Early stopping, as far as it had come.
    #[serde(default)]
    pub stopping: Stopping,
}

/// What [`Start::from`], and `train.init` of a job file, begin with where they name a job.
pub const OF_JOB: &str = "job:";

impl Start {
    /// With the weights of another job of the fleet, which the servers copy; everything else begins anew.
    pub fn of_job(name: &str) -> Self {
        Self { from: format!("{OF_JOB}{name}"), step: 0, epochs: 0, stopping: Stopping::default() }
    }

    /// The job whose weights it begins with.
    pub fn job(&self) -> Option<&str> {
        self.from.strip_prefix(OF_JOB).filter(|name| !name.is_empty())
    }
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
        }
    }

    /// Reads and checks the text; afterwards [`Self::layout`] cannot fail. For who admits a job: what is in the log
    /// already is read by [`Self::decode`].
    pub fn from_toml(text: &str) -> Result<Self, ServerJobError> {
        let job = Self::decode(text)?;
        job.validate()?;
        Ok(job)
    }

    /// Reads the text without asking whether such a job should be admitted: it was. What it refuses is no job at all: a
    /// text that names what this version does not know, or lengths that no layout has. Nothing is added to this by a later
    /// release: what one replica has applied, another must be able to.
    pub fn decode(text: &str) -> Result<Self, ServerJobError> {
        let bad = |m: String| Err(ServerJobError(m));
        let job: ServerJob = toml::from_str(text).map_err(|e| ServerJobError(e.to_string()))?;
        let total = job.params_len.saturating_add(job.buffers_len);
        if job.params_len == 0 || total > MAX_VALUES {
            return bad(format!("{total} values; a job has from 1 to {MAX_VALUES}"));
        }
        if job.bucket_len == 0 || job.bucket_len > MAX_BUCKET_LEN {
            return bad(format!("bucket_len {} is not within 1 to {MAX_BUCKET_LEN}", job.bucket_len));
        }
        layout::count(job.params_len, job.buffers_len, job.cuts(), job.bucket_len)
            .map_err(|e| ServerJobError(e.to_string()))?;
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

    /// Whether the job may begin, by all rules of this version.
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
        }
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
        durability::check(mode, self.durability, self.leader_window)
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

    /// The job's optimizer as a group of parameters has it, before the algorithm.
    pub fn optimizer_of(&self, group: u16) -> OptimizerConfig {
        match self.groups.get(usize::from(group)) {
            Some(g) => self.optimizer.with(g.lr, g.weight_decay),
            None => self.optimizer.clone(),
        }
    }

    /// Holds the values of a bucket to the job's constraints.
    pub fn constrain(&self, bucket: BucketSpec, values: &mut [f32]) {
        constraint::apply(&self.constraints, bucket, values);
    }

    /// The parts of the flat vector whose edges no bucket crosses.
    pub(crate) fn parts(&self) -> impl Iterator<Item = layout::Part> {
        layout::parts(self.params_len, self.buffers_len, self.cuts())
    }

    /// How many buckets it has.
    pub fn buckets(&self) -> usize {
        self.parts().map(|part| part.values.div_ceil(part.bucket_len(self.bucket_len))).sum()
    }

    /// How its parameters are divided.
    pub fn cuts(&self) -> Cuts<'_> {
        Cuts { groups: &self.groups, stages: &self.stages, constraints: &self.constraints }
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
        Layout::cut(tensors, self.cuts(), self.bucket_len).expect("from_toml has checked the lengths")
    }
}

/// No job has more steps; a clock beyond it could not be counted on.
pub const MAX_STEP: u64 = 1 << 53;
/// A busy host may hold a process up for a good part of a second; that is not death.
pub const MIN_LEASE: Duration = Duration::from_secs(1);
/// A lease of more than a day is none. In milliseconds.
pub const MAX_GRACE_MS: u64 = 24 * 60 * 60 * 1000;
/// The longest name of a job.
pub const MAX_NAME_CHARS: usize = 128;
/// What a worker derives from its job file has a few hundred bytes.
const MAX_FINGERPRINT: usize = 4096;

/// The facts of one fingerprint that another has not, for people. It is a text of a worker's choice: so much of it is shown.
pub fn facts_missing(of: &str, from: &str) -> String {
    const MOST: usize = 8;
    const CHARS: usize = 120;
    let others: Vec<&str> = from.split(", ").collect();
    let facts = of.split(", ").filter(|f| !others.contains(f));
    let facts: Vec<String> = facts.take(MOST).map(|f| f.chars().take(CHARS).collect()).collect();
    facts.join(", ")
}
/// Values of the longest bucket: 1 MiB.
pub const MAX_BUCKET_LEN: usize = (1 << 20) / 4;
/// As many as a data set may have samples.
const MAX_CHUNKS: u64 = 1 << 32;
/// 2^34 values are 64 GiB of weights. Whether a fleet can hold them is asked of its servers ([`crate::need`]).
const MAX_VALUES: usize = 1 << 34;

/// Whether it may be the name of a job. It stands in paths, labels, roles of certificates (`worker:NAME`, `worker:BEGINNING*`), flags and logs, so
/// it has nothing that means something else in one of them. Every beginning of a name is a name.
///
/// # Errors
/// What a name may have, for people.
pub fn check_name(name: &str) -> Result<(), String> {
    let fits = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
    let shown: String = name.chars().take(MAX_NAME_CHARS).collect();
    let wrong = match name.chars().next() {
        None => "is empty".to_string(),
        Some(first @ ('.' | '-')) => format!("begins with `{first}`"),
        _ => match (name.chars().find(|c| !fits(*c)), name.len()) {
            (Some(c), _) => format!("has {c:?}"),
            (None, long) if long > MAX_NAME_CHARS => format!("has {long} characters"),
            _ => return Ok(()),
        },
    };
    Err(format!(
        "`{}` cannot be a job's name: it {wrong}. A name has 1 to {MAX_NAME_CHARS} letters, digits, `.`, `_` and `-`, and begins \
         with neither `.` nor `-`",
        shown.escape_debug()
    ))
}

/// Whether a certificate may name jobs so: a name, the beginning of names with a `*` behind it, or `*`.
///
/// # Errors
/// What it may be, for people.
pub fn check_names(pattern: &str) -> Result<(), String> {
    let beginning = pattern.strip_suffix('*');
    match beginning.unwrap_or(pattern) {
        "" if beginning.is_some() => Ok(()),
        name => check_name(name)
            .map_err(|why| format!("{why}; behind a beginning of names stands one `*` (alice-*)")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn job() -> ServerJob {
        ServerJob::new("rules", Mode::Bsp, 10, 4)
    }

    #[test]
    fn what_a_worker_must_not_send_is_refused_with_the_value() {
        let stop = |patience, min_delta| Some(EarlyStop { patience, min_delta });
        let cases = [
            (ServerJob { name: String::new(), ..job() }, "it is empty. A name has 1 to 128 letters"),
            (ServerJob { name: "n".repeat(129), ..job() }, "129 characters"),
            (ServerJob { name: "a\0b".into(), ..job() }, "'\\0'"),
            (ServerJob { name: "a\u{1b}[2J".into(), ..job() }, "'\\u{1b}'"),
            (ServerJob { fingerprint: "f".repeat(5000), ..job() }, "5000 bytes"),
            (ServerJob { fingerprint: "\u{1b}".into(), ..job() }, "control characters"),
            (ServerJob { grace_ms: i64::MAX as u64, ..job() }, "more than a day"),
            (ServerJob { early_stop: stop(0, 0.0), ..job() }, "patience 0"),
            (ServerJob { early_stop: stop(1, f64::NAN), ..job() }, "NaN"),
            (ServerJob { early_stop: stop(1, -0.5), ..job() }, "-0.5"),
        ];
        for (job, word) in cases {
            let text = job.to_toml().expect("written");
            let why = ServerJob::from_toml(&text).expect_err(word).to_string();
            assert!(why.contains(word), "`{word}` is not in: {why}");
            ServerJob::decode(&text).expect("its log may hold it, and is replayed");
        }
        let of = |lr, weight_decay| ParamGroup { values: 5, lr, weight_decay };
        let in_groups = |second| ServerJob { groups: vec![of(0.1, 0.0), second], ..job() };
        let cases = [
            (in_groups(of(-0.1, 0.0)), "group 1 of the parameters: [optimizer] lr = -0.1"),
            (in_groups(of(0.1, f64::NAN)), "weight_decay = NaN"),
        ];
        for (job, word) in cases {
            let why = job.validate().expect_err(word).to_string();
            assert!(why.contains(word), "`{word}` is not in: {why}");
        }
        let most =
            ServerJob { name: "n".repeat(128), grace_ms: MAX_GRACE_MS, early_stop: stop(1, 0.0), ..job() };
        most.validate().expect("at the bounds");
    }

    #[test]
    fn job_names_have_one_rule() {
        for name in ["a", "A9", "_x", "0", "mnist.v2-final_3", &"n".repeat(128)] {
            assert_eq!(check_name(name), Ok(()), "{name}");
        }
        for name in [
            "",
            "*",
            "a*",
            ".",
            "..",
            ".a",
            "-x",
            " a",
            "a b",
            "a/b",
            "a\\b",
            "a:b",
            "a,b",
            "a%b",
            "a$b",
            "a\n",
            "\u{202e}a",
            "\u{e9}",
            &"n".repeat(129),
        ] {
            let why = check_name(name).expect_err(name);
            assert!(why.contains("1 to 128 letters, digits, `.`, `_` and `-`"), "{why}");
            assert!(!why.chars().any(|c| c.is_control() || c == '\u{202e}'), "{why:?}");
        }
    }

    #[test]
    fn pattern_of_names_has_one_star_behind_a_name() {
        for pattern in ["*", "a", "alice-*", "a.*"] {
            assert_eq!(check_names(pattern), Ok(()), "{pattern}");
        }
        for pattern in ["", "**", "a**", "*a", "a*b", ".*", "-*", "a b*", "..", "\u{202e}*"] {
            assert!(check_names(pattern).is_err(), "{pattern}");
        }
    }

    #[test]
    fn what_is_no_job_at_all_is_never_decoded() {
        let cases = [
            ServerJob { params_len: 0, ..job() },
            ServerJob { params_len: MAX_VALUES + 1, ..job() },
            ServerJob { bucket_len: 0, ..job() },
            ServerJob { bucket_len: MAX_BUCKET_LEN + 1, ..job() },
            ServerJob { params_len: 1 << 20, bucket_len: 1, ..job() },
            ServerJob { workers: 0, ..job() },
            ServerJob { groups: vec![ParamGroup { values: 9, lr: 0.1, weight_decay: 0.0 }], ..job() },
            ServerJob { chunks: Some(ChunkPlan { per_epoch: 0, epochs: 1 }), ..job() },
        ];
        for job in cases {
            ServerJob::decode(&job.to_toml().expect("written")).expect_err("no layout has it");
        }
    }

    #[test]
    fn a_logged_job_names_every_key_so_defaults_may_change() {
        let text = job().to_toml().expect("written");
        let table: toml::Table = toml::from_str(&text).expect("a table");
        for key in [
            "name",
            "fingerprint",
            "workers",
            "mode",
            "auto",
            "all_reduce",
            "params_len",
            "buffers_len",
            "bucket_len",
            "grace_ms",
            "durability",
            "leader_window",
            "encoding",
            "algorithm",
            "round",
            "optimizer",
            "schedule",
            "clip",
        ] {
            assert!(table.contains_key(key), "`{key}` is missing in {text}");
        }
        assert_eq!(ServerJob::decode(&text), Ok(job()));
        let group = |values, lr| ParamGroup { values, lr, weight_decay: 1e-4 };
        let in_groups = ServerJob { groups: vec![group(3, 0.5), group(7, 0.0)], ..job() };
        assert_eq!(ServerJob::from_toml(&in_groups.to_toml().expect("written")), Ok(in_groups));
    }
}
