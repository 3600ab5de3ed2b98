//! Messages between a worker's stream and its shard's leader. `rpc/` converts them from and to the wire format.

use super::{RequestedMode, progress::Progress};
use crate::shard::{
    bucket::{BucketData, Shared, pulled_bytes, vector_bytes},
    chunks::Answer,
    command::{Closed, EvalSums, InitPart},
    payload_queue::Room,
    staleness::Staleness,
    state::{Meta, Shard, ShardConfig},
};
use bytes::Bytes;
use paraft_common::{
    BucketId, InForce, Mode, Payload, Seq, SessionId, Share, Step, Version, WorkerId, auto,
    codec::value_bytes, config::Stopping,
};
use paraft_proto::{Refusal, RefusalKind};
use paraft_trace::{Moment, Stages};
use parking_lot::Mutex;
use std::{
    collections::BTreeMap,
    sync::{
        Arc, Weak,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
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
    /// A checkpoint writer requests the shard's part.
    Fetch {
        /// The checkpoint's step.
        step: Step,
        /// Requires an image of this moment.
        now: bool,
        /// Gets the part. From then on only the receiver holds it.
        tx: oneshot::Sender<Result<Arc<CheckpointImage>, RefusalKind>>,
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
        /// Learning rate of this update, instead of the job's own.
        rate: Option<f64>,
        /// The step has no gradient: no payload.
        skip: bool,
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
    },
    Norm {
        step: Step,
        sum_of_squares: f64,
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

/// One bucket of a pull's reply.
#[derive(Debug)]
#[allow(missing_docs)] // as in shard.proto
pub struct Weights {
    pub bucket: BucketId,
    pub version: Version,
    pub payload: Bytes,
    pub not_modified: bool,
    pub last: bool,
    pub done: Step,
    pub slowest: Step,
    pub stop: bool,
    pub in_force: InForce,
    /// The worker's own clock. It is beyond `done` if rounds closed without the worker.
    pub clock: Step,
    pub finishers: Vec<WorkerId>,
    pub checkpoint: bool,
    /// This worker must write a checkpoint of this moment.
    pub save: bool,
    /// The session's steps that were skipped here.
    pub skipped: u64,
    /// With `last`, from shard 0: the samples that this worker evaluates after an epoch.
    pub share: Option<Share>,
    /// Since when the pull may be answered.
    pub since: Moment,
    /// Counts as an unsent reply with weights of its stream, until it is sent.
    pub unread: Option<Arc<()>>,
    /// Where the weights are taken from once the stream has room; until then `payload` is empty.
    pub later: Option<DeferredWeights>,
}

/// A bucket whose weights are taken only when they can be sent. So a worker that does not read its replies holds no
/// weights, and an update copies nothing for it. The weights may be newer than those that the pull waited for,
/// never older.
#[derive(Debug)]
pub struct DeferredWeights {
    /// The shard. A weak reference, so a reply does not keep it alive.
    pub shard: Weak<Shard>,
    /// The configuration of its buckets at that time; also weak.
    pub conf: Weak<ShardConfig>,
    /// The leader's term: updates of a later leader are served by that leader only.
    pub term: u64,
    /// The local bucket.
    pub bucket: usize,
    /// The worker that pulls.
    pub worker: WorkerId,
    /// The version that the worker has.
    pub have: Option<Version>,
    /// Send the algorithm's look-ahead weights, if it has them.
    pub ahead: bool,
    /// Measure the staleness of this worker's pushes.
    pub measured: bool,
    /// The shard's counters.
    pub counters: Arc<Counters>,
}

impl DeferredWeights {
    /// The configuration, if it is unchanged and this replica still leads.
    fn conf(&self) -> Option<Arc<ShardConfig>> {
        let (shard, conf) = (self.shard.upgrade()?, self.conf.upgrade()?);
        let same = shard.configured().is_some_and(|now| Arc::ptr_eq(&now, &conf));
        (same && shard.term() <= self.term).then_some(conf)
    }

    /// The weights of `data`, or the weights that the log assigned to the worker (`logged`).
    pub(super) fn take(
        &self,
        conf: &ShardConfig,
        data: &BucketData,
        logged: Option<LoggedWeights>,
    ) -> BucketWeights {
        let version = logged.as_ref().map_or(data.version, |(version, _)| *version);
        if self.measured {
            let weights = logged.as_ref().map_or(&*data.weights, |(_, weights)| weights.as_slice());
            self.counters.staleness.pulled(self.worker, self.bucket, version, weights);
        }
        // A version that the worker already has is not sent again.
        let not_modified = self.have == Some(version);
        let payload = match logged {
            _ if not_modified => Bytes::new(),
            Some((_, weights)) => value_bytes(Shared(weights)),
            None if self.ahead => pulled_bytes(&conf.job, conf.buckets[self.bucket].spec, data),
            None => vector_bytes(data, 0),
        };
        self.counters.pulled(payload.len(), not_modified);
        BucketWeights { version, not_modified, payload }
    }
}

/// Weights that the log assigned to a worker, and their version.
type LoggedWeights = (Version, Arc<Vec<f32>>);

/// The weights of one bucket, ready to send.
pub(super) struct BucketWeights {
    pub version: Version,
    pub not_modified: bool,
    pub payload: Bytes,
}

impl Weights {
    /// The reply with its weights; deferred weights are taken now. `None`: this replica no longer has them.
    fn taken(mut self) -> Option<Self> {
        let Some(later) = self.later.take() else { return Some(self) };
        let conf = later.conf()?;
        let bucket = &conf.buckets[later.bucket];
        if let Some(memory) = conf.shared() {
            bucket.share(memory);
        }
        let taken = later.take(&conf, &bucket.image(), None);
        (self.version, self.not_modified, self.payload) = (taken.version, taken.not_modified, taken.payload);
        Some(self)
    }
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

/// A consistent copy of what a checkpoint stores of a shard.
#[derive(Debug)]
pub struct CheckpointImage {
    /// The requested step. In BSP the state is that of this step.
    pub step: Step,
    /// The job as TOML.
    pub job: String,
    /// Notified when the buckets are released.
    conf: Arc<ShardConfig>,
    /// The buckets, by ascending id. Fetched buckets are `None`.
    buckets: Vec<(BucketId, Mutex<Option<Arc<BucketData>>>)>,
    /// Each member's clock, and whether it has finished. In SSP and ASP a bucket may hold one push more.
    pub members: Vec<(WorkerId, Step, bool)>,
    /// Early stopping (shard 0).
    pub stopping: Stopping,
}

impl CheckpointImage {
    /// Creates the image of a shard that is at `step`; `state` belongs to `conf`. Shares the buckets.
    pub(super) fn of(step: Step, conf: &Arc<ShardConfig>, state: &Meta) -> Self {
        let buckets = conf.buckets.iter().map(|b| (b.id, Mutex::new(Some(b.image())))).collect();
        let members = state.members.iter().map(|(w, m)| (w, m.clock(), m.finished)).collect();
        let (stopping, job) = (state.stopping(conf.job.early_stop), state.job.clone());
        Self { step, job, conf: conf.clone(), buckets, members, stopping }
    }

    /// Number of buckets, including the released ones.
    pub fn buckets(&self) -> usize {
        self.buckets.len()
    }

    /// The bucket at a place among the shard's, unless it was released.
    pub fn bucket(&self, place: usize) -> Option<(BucketId, Arc<BucketData>)> {
        let (id, data) = self.buckets.get(place)?;
        Some((*id, data.lock().clone()?))
    }

    /// Releases the bucket at a place: it was fetched, and an update need no longer copy it.
    pub fn release(&self, place: usize) {
        if let Some((_, data)) = self.buckets.get(place) {
            data.lock().take();
            self.conf.note_release();
        }
    }

    pub(super) fn is_whole(&self) -> bool {
        self.buckets.iter().all(|(_, data)| data.lock().is_some())
    }
}

/// What a worker reports about itself, for people.
#[derive(Clone, Debug, Default)]
pub struct WorkerInfo {
    /// Where it runs.
    pub host: String,
    /// What it computes on.
    pub device: String,
    /// The last lines of its log.
    pub said: Vec<String>,
}

/// Counts of the leader, and the bytes of readers (which every replica serves). They start at zero with the
/// process.
#[derive(Debug, Default)]
#[allow(missing_docs)]
pub struct Counters {
    pub pulls: AtomicU64,
    pub pulls_waited: AtomicU64,
    pub bytes_pulled: AtomicU64,
    pub not_modified: AtomicU64,
    /// Refused messages, by kind.
    pub refused: AtomicU64,
    /// Messages that were redirected to the leader, or that the worker must repeat.
    pub redirected: AtomicU64,
    /// This replica leads and serves workers.
    pub leads: AtomicBool,
    pub max_step_lead: AtomicU64,
    pub streams: AtomicU64,
    /// Payload of the entries proposed to the log.
    pub bytes_logged: AtomicU64,
    pub deltas: AtomicU64,
    /// Bytes of pushes that the leader holds, in open rounds and otherwise. Updated four times a lease.
    pub queued: AtomicU64,
    /// Input of the rule that chooses the mode; see [`Self::take_auto`].
    pub auto: Mutex<Option<auto::Report>>,
    /// What is left of each member's lease, to a quarter of it; empty if this replica does not lead.
    pub leases: Mutex<BTreeMap<WorkerId, Duration>>,
    /// Training progress, for people.
    pub progress: Mutex<Progress>,
    /// A checkpoint of this moment is requested. On shard 0, until its writer gets the request.
    pub save: AtomicBool,
    /// What workers report about themselves.
    pub about: Mutex<BTreeMap<WorkerId, WorkerInfo>>,
    /// Delays of the pushes that were applied while this replica led.
    pub staleness: Arc<Staleness>,
    /// The process's spans, for all its shards.
    pub stages: Arc<Stages>,
}

impl Counters {
    /// Counts a bucket sent to a worker, with `bytes` of weights.
    pub fn pulled(&self, bytes: usize, not_modified: bool) {
        self.bytes_pulled.fetch_add(bytes as u64, Relaxed);
        self.not_modified.fetch_add(u64::from(not_modified), Relaxed);
    }

    /// Stores what a worker reports about itself. Drops the reports of workers that are not members of `shard` any
    /// more.
    pub fn take_about(&self, shard: &Shard, worker: WorkerId, about: WorkerInfo) {
        let mut all = self.about.lock();
        all.insert(worker, about);
        shard.read(|m| all.retain(|w, _| *w == worker || m.members.get(*w).is_some()));
    }

    /// Takes the input of the rule that chooses the mode of `shard`, if one does and this replica leads. Each lead
    /// is reported once.
    pub fn take_auto(&self, shard: &Shard) -> Option<auto::Report> {
        let in_force = shard.read(|m| m.in_force);
        in_force.auto?;
        let mut told = self.auto.lock();
        let report = told.filter(|t| t.number == in_force.number)?;
        *told = Some(auto::Report { counted: auto::Counted { lead: 0, ..report.counted }, ..report });
        Some(report)
    }
}
