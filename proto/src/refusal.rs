//! Typed refusals: what was wrong, and what the caller should do about it.

use crate::{Advice, FromShard, Refused, from_shard};
use paraft_common::{BucketId, SessionId, ShardId, Step, WorkerId};

/// Why a message was refused.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[allow(missing_docs)] // the texts say it
pub enum RefusalKind {
    #[error("this server does not lead {shard}{}", leader.as_deref().map(|l| format!("; {l} does")).unwrap_or_default())]
    NotLeader { shard: ShardId, leader: Option<String> },
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
    #[error("this fleet trains job `{running}`, not `{asked}`: start other servers for another job, or use the same job file on every host{}", difference.as_deref().map(|d| format!(" ({d})")).unwrap_or_default())]
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
    #[error("a push has number {got}, and {why}")]
    WrongSeq { got: u64, why: String },
    #[error("the message is empty or of an unknown kind")]
    Malformed,
    #[error("the shard has no weights yet")]
    NotInitialised,
    #[error(
        "{shard} keeps no image of {step}: it was fetched, replaced by a later one, or lost with its leader"
    )]
    NoSection { shard: ShardId, step: Step },
    #[error("{0}")]
    Overloaded(String),
    #[error(
        "{0} has lost its state: a majority of its servers failed at the same time. Resume the job from its latest checkpoint"
    )]
    StateLost(ShardId),
    #[error("the shard cannot commit at present: {0}")]
    Unavailable(String),
}

/// A refusal of one push (`seq` > 0) or of the whole stream (`seq` 0).
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("{kind}")]
pub struct Refusal {
    /// Why.
    pub kind: RefusalKind,
    /// Which push, or 0.
    pub seq: u64,
}

impl RefusalKind {
    /// What the caller should do.
    pub fn advice(&self) -> Advice {
        use RefusalKind as K;
        match self {
            K::NotLeader { .. } => Advice::Redirect,
            K::Overloaded(_) | K::Unavailable(_) | K::NotInitialised => Advice::Retry,
            K::UnknownSession { .. } => Advice::Stop,
            K::StateLost(_) => Advice::Lost,
            _ => Advice::Fix,
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
            RefusalKind::NotLeader { leader: Some(l), .. } => l.clone(),
            _ => String::new(),
        };
        Refused { advice: r.kind.advice() as i32, message: r.kind.to_string(), leader, seq: r.seq }
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
