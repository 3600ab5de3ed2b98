//! Messages between a worker's stream and its shard's leader. `rpc/` converts them from and to the wire format.

use super::{
    RequestedMode, Weights,
    answers::{EditResult, FetchResult},
};
use crate::shard::{
    chunks::Answer,
    command::{Closed, EvalSums, InitPart, Proposal},
    payload_queue::Room,
};
use paraft_common::{
    BucketId, InForce, Mode, Payload, Seq, SessionId, Step, Version, WorkerId, optim::Overrides,
};
use paraft_proto::{Refusal, RefusalKind};
use paraft_trace::Moment;
use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering::Relaxed},
};
use tokio::sync::{mpsc, oneshot};

/// A stream of one worker to this shard, unique in this process.
pub type ConnId = u64;

/// What streams send to the leader.
#[derive(Debug)]
pub enum Event {
    /// A stream's first message.
    Open {
        /// The stream.
        conn: ConnId,
        /// Channel for the replies; bounded.
        tx: mpsc::Sender<Reply>,
        /// The worker.
        worker: WorkerId,
        /// The session to resume, or none.
        session: Option<SessionId>,
        /// The job that runs, or the job to write to the log: checked, and admitted by the servers.
        job: String,
        /// Signs of life that the stream's reader notes.
        liveness: Arc<Liveness>,
    },
    /// A later message.
    Message(ConnId, Message),
    /// As [`Self::Message`], with a payload. It holds its room among the waiting payloads until the leader takes
    /// it.
    Bulk(ConnId, Message, Room),
    /// The stream ended or broke.
    Closed(ConnId),
    /// Request to run the job in another mode.
    SwitchMode {
        /// Number of the switch; `None`: the next.
        number: Option<u64>,
        /// The mode, or that the rule chooses it.
        wanted: RequestedMode,
        /// Gets the mode in force, once the switch has taken effect here.
        tx: Option<oneshot::Sender<Result<InForce, RefusalKind>>>,
    },
    /// Request to end the job now.
    Stop,
    /// Request to change rows of a table: the command with its payload.
    EditRows(Proposal, oneshot::Sender<EditResult>),
    /// A checkpoint writer requests the shard's part.
    Fetch {
        /// The checkpoint's step.
        step: Step,
        /// Requires an image of this moment.
        now: bool,
        /// Gets the part. From then on only the receiver holds it.
        tx: oneshot::Sender<FetchResult>,
    },
}

/// A checked message: the bucket is this shard's, the payload has its length and is finite.
#[derive(Debug)]
#[allow(missing_docs)] // as in shard.proto
pub enum Message {
    Init {
        bucket: BucketId,
        part: InitPart,
        payload: Payload,
    },
    Push {
        seq: Seq,
        step: Step,
        bucket: usize,
        pulled: Version,
        samples: u32,
        sum_of_squares: f64,
        payload: Payload,
        /// What the worker sets in place of the job's options.
        overrides: Overrides,
        /// The step has no gradient: no payload.
        skip: bool,
        /// The script clips the step by its norm.
        clipped: bool,
        /// When the push had arrived completely.
        arrived: Moment,
    },
    Pull {
        done: Step,
        last: bool,
        checkpoint: bool,
        /// In every mode, answer only once every member has done the step.
        barrier: bool,
        have: Vec<Version>,
        /// Mean training loss of the step, if the worker reports it.
        loss: Option<f32>,
        /// Local buckets, ascending; empty: all.
        only: Vec<usize>,
        /// The rows that the worker wants of these buckets, which are partitions of tables; or empty.
        rows: Vec<Vec<u64>>,
    },
    Norm {
        step: Step,
        sum_of_squares: f64,
        /// The script's bound.
        bound: Option<f64>,
    },
    Report {
        epoch: u64,
        sums: EvalSums,
    },
    Advance {
        step: Step,
    },
    Acquire {
        request: u64,
        epoch: u64,
        done: Option<u64>,
    },
    /// A worker has learned of a switch on another shard.
    SwitchMode {
        number: u64,
        mode: Mode,
    },
    Pause,
    Resume {
        level: bool,
    },
    Finish,
    /// The worker leaves before it is done.
    Leave,
}

/// Signs of life of a stream. The reader notes them as messages arrive, so a busy leader takes no live worker for
/// dead.
#[derive(Debug, Default)]
pub struct Liveness {
    heard: AtomicBool,
    /// The reader has a message that the leader's queue has no room for.
    waiting: AtomicBool,
}

impl Liveness {
    /// Records that a message arrived.
    pub fn heard(&self) {
        self.heard.store(true, Relaxed);
    }

    /// Records whether the reader waits for the leader.
    pub fn waits(&self, waits: bool) {
        self.waiting.store(waits, Relaxed);
    }

    /// Whether there was a sign of life since the last call.
    pub(super) fn take(&self) -> bool {
        self.heard.swap(false, Relaxed) || self.waiting.load(Relaxed)
    }
}

impl Message {
    /// Payload bytes of the message.
    pub fn payload_bytes(&self) -> usize {
        match self {
            Message::Init { payload, .. } | Message::Push { payload, .. } => payload.len(),
            _ => 0,
        }
    }
}

/// Replies of the leader. `rpc/` converts them to the wire format.
#[derive(Debug)]
#[allow(missing_docs)] // as in shard.proto
pub enum Reply {
    Opened {
        session: SessionId,
        last_seq: Seq,
        clock: Step,
        initialised: bool,
        term: u64,
        founding: u64,
    },
    Ack {
        seq: Seq,
        version: Version,
    },
    /// The push came too late for its round, and was dropped.
    Dropped {
        seq: Seq,
    },
    Weights(Box<Weights>),
    RoundNorm {
        step: Step,
        sum_of_squares: f64,
    },
    Evaluated(Closed),
    Acquired {
        request: u64,
        answer: Answer,
    },
    Resumed {
        clock: Step,
    },
    Left,
    Refused(Refusal),
}

impl Reply {
    /// The reply as sent; deferred weights are taken now. If this replica no longer has them, the reply asks the
    /// worker to retry.
    pub fn taken(self) -> Self {
        let gone = || RefusalKind::Unavailable("this server has handed the shard over meanwhile".into());
        match self {
            Self::Weights(w) => {
                w.taken().map_or_else(|| Self::Refused(gone().into()), |w| Self::Weights(Box::new(w)))
            }
            other => other,
        }
    }
}
