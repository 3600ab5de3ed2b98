//! Typed refusals: what was wrong, and what the caller should do about it.
//!
//! Each mistake has one variant, one text and one value of the wire's `RefusalKind`. Programs decide by
//! advice and kind; the texts may change at any time.

use crate::{Advice, FromShard, Refused, WireKind, from_shard};
use paraft_common::{BucketId, JobId, ServerId, SessionId, ShardId, Step, WorkerId};

/// Why a message was refused.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[allow(missing_docs)] // the texts explain them
pub enum RefusalKind {
    #[error("{}", not_leader(*shard, leader.as_deref(), stopped.as_deref()))]
    NotLeader {
        shard: ShardId,
        leader: Option<String>,
        /// Why this server's replica does not run, if it has one.
        stopped: Option<String>,
    },
    #[error("{shard} is not on this server; check the list of servers")]
    WrongShard { shard: ShardId },
    #[error(
        "the client speaks protocol {client}, this server speaks {server}: use the same paraft on both sides"
    )]
    Protocol { client: u32, server: u32 },
    #[error("{0}")]
    BadJob(String),
    #[error("{0}")]
    NoRoom(String),
    #[error("{}", other_job(running, asked, difference.as_deref()))]
    OtherJob { running: String, asked: String, difference: Option<String> },
    #[error("the first message of a stream must be Open")]
    NotOpened,
    #[error("the stream is open already")]
    AlreadyOpen,
    #[error("worker {0} is connected from another process: give each worker its own --rank")]
    RankTaken(WorkerId),
    #[error(
        "worker {worker} has no {session} on this shard: it was taken out of the job; open a new session"
    )]
    UnknownSession { worker: WorkerId, session: SessionId },
    #[error("{bucket} is not on {shard}")]
    WrongBucket { bucket: BucketId, shard: ShardId },
    #[error("{bucket} holds {expected} bytes, the message brought {got}")]
    BucketLength { bucket: BucketId, expected: usize, got: usize },
    #[error("the push of {bucket} cannot be read: {why}; use the same paraft on both sides")]
    BadPayload { bucket: BucketId, why: String },
    #[error(
        "the gradient of {bucket} holds a NaN or an infinity at {step} and was not applied (lower the rate, clip, or look at the batch)"
    )]
    NotFinite { bucket: BucketId, step: Step },
    #[error("{bucket} was pushed for {got}; this session's next is {expected}")]
    WrongStep { bucket: BucketId, expected: Step, got: Step },
    #[error("{bucket} was pulled at version {got}, but has only reached {current}")]
    FutureVersion { bucket: BucketId, got: u64, current: u64 },
    /// Of a bucket that is a partition of a table.
    #[error("partition {partition} of table `{table}`: {of}")]
    OfTable { table: String, partition: u32, of: Box<RefusalKind> },
    #[error("the shard has no weights yet")]
    NotInitialised,
    #[error(
        "{shard} keeps no image of {step}: it was fetched, replaced by a later one, or lost with its leader, or not \
         every worker is at it"
    )]
    NoPart { shard: ShardId, step: Step },
    #[error(
        "{shard} has no version {} here: it is at {}, and versions are kept only while a reader has them or waits for them",
        step.0, reached.0
    )]
    NoVersion { shard: ShardId, step: Step, reached: Step },
    #[error("{0}")]
    Overloaded(String),
    #[error(
        "{0} has lost its state: a majority of its servers failed at the same time. Resume the job from its latest checkpoint"
    )]
    StateLost(ShardId),
    #[error("not to be had at present: {0}")]
    Unavailable(String),
    #[error("a message cannot be read: {0}")]
    Unreadable(String),
    #[error(
        "a message without a kind, or of a kind that this server does not know; use the same paraft on both sides"
    )]
    NoKind,
    #[error("a push of {bucket} has the {option} {got}: {why}")]
    BadRate { bucket: BucketId, option: &'static str, got: f64, why: &'static str },
    #[error("a push of {bucket} has seq 0: they count from 1")]
    BadSeq { bucket: BucketId },
    #[error("{message} names {got}: steps go up to 2^53")]
    BadStep { message: &'static str, got: Step },
    #[error(
        "the initial state of {bucket} has a part {part}: the weights are part 0, and it has {slots} state vectors"
    )]
    BadInitPart { bucket: BucketId, part: u32, slots: usize },
    #[error("the initial state of {bucket} has version {version} and clock {clock}: both are from 0 to 2^53")]
    BadInitStamp { bucket: BucketId, version: u64, clock: f64 },
    #[error(
        "a pull has {got} versions in `{field}`, and {shard} has {buckets} buckets: name one for each, or none"
    )]
    BadVersions { field: &'static str, shard: ShardId, buckets: usize, got: usize },
    #[error("a pull's `only` does not rise strictly")]
    BadOnly,
    #[error("a pull has `only` beside `{beside}`, which is of all buckets")]
    OnlyOfWhole { beside: &'static str },
    #[error("the sum of squares of {step} is {got}, which is no number from 0")]
    BadNorm { step: Step, got: f64 },
    #[error("{message}: {why}")]
    NoChunks { message: &'static str, why: &'static str },
    #[error("an ask for a chunk has request 0: they count from 1")]
    BadRequest,
    #[error("`{0}` is no mode: it is bsp, ssp:S or asp (and auto, asked of shard 0)")]
    BadMode(String),
    #[error("{0}")]
    BadSwitch(String),
    #[error(
        "this replica of {0} is of another founding than the one asked for: the leader knows which is the shard's"
    )]
    OtherFounding(ShardId),
    #[error("{}", no_job(asked, there))]
    NoJob { asked: String, there: Vec<String> },
    #[error("{0}")]
    Denied(String),
    #[error("{}", not_control_leader(leader.as_deref()))]
    NotControlLeader { leader: Option<String> },
    #[error("the control group cannot agree at present: {0}")]
    NotAgreed(String),
    #[error("{0}")]
    BadName(String),
    #[error("{job} has the name `{name}` already, and is {state}: choose another name, or delete that job")]
    NameTaken { job: JobId, name: String, state: &'static str },
    #[error("{}", no_such_job(asked, there))]
    NoSuchJob { asked: String, there: Vec<String> },
    #[error("there is no {0}; `paraft status` shows the fleet's servers")]
    NoSuchServer(ServerId),
    #[error("{0}")]
    BadOrder(String),
}

fn not_control_leader(leader: Option<&str>) -> String {
    match leader {
        Some(leader) => format!("this server does not lead the control group; {leader} does"),
        None => "this server does not lead the control group".into(),
    }
}

fn no_such_job(asked: &str, there: &[String]) -> String {
    let there = if there.is_empty() { "none".to_string() } else { there.join(", ") };
    format!("this fleet has no job `{asked}`; it has {there}")
}

fn not_leader(shard: ShardId, leader: Option<&str>, stopped: Option<&str>) -> String {
    match (leader, stopped) {
        (Some(leader), None) => format!("this server does not lead {shard}; {leader} does"),
        (None, None) => format!("this server does not lead {shard}"),
        (_, Some(why)) => format!("this server's replica of {shard} has stopped: {why}"),
    }
}

fn no_job(asked: &str, there: &[String]) -> String {
    let there = match there {
        [] => "it has none".to_string(),
        some => format!("it has {}", some.join(", ")),
    };
    format!(
        "this fleet has no job `{asked}` to train ({there}): it was deleted, or has yet to be submitted (`paraft submit`)"
    )
}

fn other_job(running: &str, asked: &str, difference: Option<&str>) -> String {
    let difference = difference.map(|d| format!(" ({d})")).unwrap_or_default();
    match running == asked {
        true => format!(
            "this fleet trains another job `{running}` than this one: use the same job file, model and data in every worker, or \
             other servers{difference}"
        ),
        false => format!(
            "this fleet trains job `{running}`, not `{asked}`: start other servers for another job, or use the same job in \
             every worker{difference}"
        ),
    }
}

/// A refusal of one push (`seq` > 0) or of the whole stream (`seq` 0).
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("{kind}")]
pub struct Refusal {
    /// Why.
    pub kind: RefusalKind,
    /// The refused push, or 0.
    pub seq: u64,
}

impl RefusalKind {
    /// What the caller should do.
    pub fn advice(&self) -> Advice {
        use RefusalKind as K;
        match self {
            K::OfTable { of, .. } => of.advice(),
            K::NotLeader { .. } | K::NotControlLeader { .. } => Advice::Redirect,
            K::NotAgreed(_)
            | K::Overloaded(_)
            | K::Unavailable(_)
            | K::NotInitialised
            | K::NoVersion { .. }
            | K::OtherFounding(_) => Advice::Retry,
            K::UnknownSession { .. } => Advice::Stop,
            K::StateLost(_) => Advice::Lost,
            _ => Advice::Fix,
        }
    }

    /// Whether the caller made no mistake: it should ask another server, or this one again.
    pub fn is_for_now(&self) -> bool {
        matches!(self.advice(), Advice::Redirect | Advice::Retry)
    }

    /// The kind's wire value. Programs decide by it.
    pub fn wire(&self) -> WireKind {
        use RefusalKind as K;
        use WireKind as W;
        match self {
            K::OfTable { of, .. } => of.wire(),
            K::NotLeader { .. } => W::NotLeader,
            K::WrongShard { .. } => W::WrongShard,
            K::Protocol { .. } => W::Protocol,
            K::BadJob(_) => W::BadJob,
            K::OtherJob { .. } => W::OtherJob,
            K::NotOpened => W::NotOpened,
            K::AlreadyOpen => W::AlreadyOpen,
            K::RankTaken(_) => W::RankTaken,
            K::UnknownSession { .. } => W::UnknownSession,
            K::WrongBucket { .. } => W::WrongBucket,
            K::BucketLength { .. } => W::BucketLength,
            K::BadPayload { .. } => W::BadPayload,
            K::NotFinite { .. } => W::NotFinite,
            K::WrongStep { .. } => W::WrongStep,
            K::FutureVersion { .. } => W::FutureVersion,
            K::NotInitialised => W::NotInitialised,
            K::NoPart { .. } => W::NoPart,
            K::NoVersion { .. } => W::NoVersion,
            K::Overloaded(_) => W::Overloaded,
            K::StateLost(_) => W::StateLost,
            K::Unavailable(_) => W::Unavailable,
            K::Unreadable(_) => W::Unreadable,
            K::NoKind => W::NoKind,
            K::BadRate { .. } => W::BadRate,
            K::BadSeq { .. } => W::BadSeq,
            K::BadStep { .. } => W::BadStep,
            K::BadInitPart { .. } => W::BadInitPart,
            K::BadInitStamp { .. } => W::BadInitStamp,
            K::BadVersions { .. } => W::BadVersions,
            K::BadOnly => W::BadOnly,
            K::OnlyOfWhole { .. } => W::OnlyOfWhole,
            K::BadNorm { .. } => W::BadNorm,
            K::NoChunks { .. } => W::NoChunks,
            K::BadRequest => W::BadRequest,
            K::BadMode(_) => W::BadMode,
            K::BadSwitch(_) => W::BadSwitch,
            K::OtherFounding(_) => W::OtherFounding,
            K::NoRoom(_) => W::NoRoom,
            K::NoJob { .. } => W::NoJob,
            K::Denied(_) => W::Denied,
            K::NotControlLeader { .. } => W::NotControlLeader,
            K::NotAgreed(_) => W::NotAgreed,
            K::BadName(_) => W::BadName,
            K::NameTaken { .. } => W::NameTaken,
            K::NoSuchJob { .. } => W::NoSuchJob,
            K::NoSuchServer(_) => W::NoSuchServer,
            K::BadOrder(_) => W::BadOrder,
        }
    }
}

impl From<RefusalKind> for Refusal {
    fn from(kind: RefusalKind) -> Self {
        Refusal { kind, seq: 0 }
    }
}

impl From<Refusal> for Refused {
    fn from(r: Refusal) -> Self {
        let leader = match &r.kind {
            RefusalKind::NotLeader { leader: Some(l), .. }
            | RefusalKind::NotControlLeader { leader: Some(l) } => l.clone(),
            _ => String::new(),
        };
        let kind = r.kind.wire() as i32;
        Refused { advice: r.kind.advice() as i32, message: r.kind.to_string(), leader, seq: r.seq, kind }
    }
}

impl Refused {
    /// Whether the same request would be refused again. Any other refusal is temporary: ask another server,
    /// or this one again.
    pub fn is_final(&self) -> bool {
        matches!(self.advice(), Advice::Fix | Advice::Stop | Advice::Lost)
    }

    /// The refusal for a server that was not reached, or has not answered: the outcome of the request is
    /// unknown.
    pub fn unheard(why: impl Into<String>) -> Self {
        Self { advice: Advice::Retry as i32, message: why.into(), ..Self::default() }
    }
}

impl From<RefusalKind> for Refused {
    fn from(kind: RefusalKind) -> Self {
        Refusal::from(kind).into()
    }
}

impl From<Refusal> for FromShard {
    fn from(r: Refusal) -> Self {
        FromShard { kind: Some(from_shard::Kind::Refused(r.into())) }
    }
}
