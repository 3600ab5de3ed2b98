//! What goes between a worker's stream and its shard's leader. Converted from and to the wire in `rpc/`.

use super::{Wanted, progress::Progress};
use crate::shard::{
    bucket::{BucketData, Shared, pulled_bytes, vector_bytes},
    chunks::Answer,
    command::{Closed, EvalSums, InitPart},
    queued::Room,
    staleness::Staleness,
    state::{Configured, Meta, Shard},
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

/// What streams send the leader.
#[derive(Debug)]
pub enum Event {
    /// A stream's first message.
    Open {
        /// The stream.
        conn: ConnId,
        /// Where its answers go; bounded.
        tx: mpsc::Sender<Reply>,
        /// Who.
        worker: WorkerId,
        /// The session to take up again, or none.
        session: Option<SessionId>,
        /// The job as it is running, or, where none is, as it goes to the log: checked, and admitted by the servers.
        job: String,
        /// What its reader hears.
        liveness: Arc<Liveness>,
    },
    /// A later message.
    Message(ConnId, Message),
    /// As [`Self::Message`], of one with a payload, which is counted among those that wait until it is taken.
    Bulk(ConnId, Message, Room),
    /// The stream ended or broke.
    Closed(ConnId),
    /// The job is to go on in another mode.
    SwitchMode {
        /// The switch's number; `None`: the next.
        number: Option<u64>,
        /// The mode, or who chooses it.
        wanted: Wanted,
        /// Hears what is in force, once the switch has taken effect here.
        tx: Option<oneshot::Sender<Result<InForce, RefusalKind>>>,
    },
    /// The job is to end where it is.
    Stop,
    /// Who writes a checkpoint asks for the shard's part of it.
    Fetch {
        /// Of which step.
        step: Step,
        /// One of this moment, and no other.
        now: bool,
        /// Gets the part; only the receiver keeps it from then on.
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
        /// At which it is to be applied, in the place of the job's own rate.
        rate: Option<f64>,
        /// There is nothing for this step: no payload.
        skip: bool,
        /// When it had arrived whole.
        arrived: Moment,
    },
    Pull {
        done: Step,
        last: bool,
        checkpoint: bool,
        /// Whatever the mode, once every member has done the step.
        barrier: bool,
        have: Vec<Version>,
        /// The mean training loss of the step, where the worker has said it.
        loss: Option<f32>,
        /// Local buckets, by rising number; empty: all.
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
    /// A worker has heard of a switch on another shard.
    SwitchMode {
        number: u64,
        mode: Mode,
    },
    Pause,
    Resume {
        level: bool,
    },
    Finish,
    /// The worker goes before it is done.
    Leave,
}

/// Signs of life of a stream. They are noted where they are read, so that a busy leader takes nobody for dead.
#[derive(Debug, Default)]
pub struct Liveness {
    heard: AtomicBool,
    /// The reader has a message that the leader's queue has no room for.
    waiting: AtomicBool,
}

impl Liveness {
    /// A message has come.
    pub fn heard(&self) {
        self.heard.store(true, Relaxed);
    }

    /// The reader waits for the leader, or no more.
    pub fn waits(&self, waits: bool) {
        self.waiting.store(waits, Relaxed);
    }

    /// Whether there was a sign of life since the last call.
    pub(super) fn take(&self) -> bool {
        self.heard.swap(false, Relaxed) || self.waiting.load(Relaxed)
    }
}

impl Message {
    /// The bytes that it holds beside its few fields.
    pub fn payload_bytes(&self) -> usize {
        match self {
            Message::Init { payload, .. } | Message::Push { payload, .. } => payload.len(),
            _ => 0,
        }
    }
}

/// What the leader answers. Converted to the wire in `rpc/`.
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

/// One bucket of a pull's answer.
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
    /// The worker's own clock: beyond `done` where rounds were closed without it.
    pub clock: Step,
    pub finishers: Vec<WorkerId>,
    pub checkpoint: bool,
    /// This worker is to write a checkpoint of now.
    pub save: bool,
    /// Of the session's steps, those that were skipped here.
    pub skipped: u64,
    /// With `last`, from shard 0: what this worker evaluates behind an epoch.
    pub share: Option<Share>,
    /// Since when it may go.
    pub since: Moment,
    /// Counted among the answers of its stream that hold weights, until it is sent.
    pub unread: Option<Arc<()>>,
    /// Where the weights are taken from when the worker's stream has room for them; until then `payload` is empty.
    pub later: Option<Later>,
}

/// A bucket of which the weights are taken when they can go: a worker that does not read its answers holds no weights, and an update copies
/// nothing for it. The weights may be newer than those that its pull waited for, never older.
#[derive(Debug)]
pub struct Later {
    /// The shard, which it does not keep.
    pub shard: Weak<Shard>,
    /// Its buckets at the time, likewise.
    pub conf: Weak<Configured>,
    /// The leader's term: a worker gets what a later leader has applied from that leader.
    pub term: u64,
    /// Which; local.
    pub bucket: usize,
    /// The worker that pulls.
    pub worker: WorkerId,
    /// The version that it has.
    pub have: Option<Version>,
    /// It gets what the algorithm looks ahead to, where it does.
    pub ahead: bool,
    /// Its staleness is measured.
    pub measured: bool,
    /// Of the shard.
    pub counters: Arc<Counters>,
}

impl Later {
    /// The buckets, where they are those of the time and this replica still leads.
    fn conf(&self) -> Option<Arc<Configured>> {
        let (shard, conf) = (self.shard.upgrade()?, self.conf.upgrade()?);
        let same = shard.configured().is_some_and(|now| Arc::ptr_eq(&now, &conf));
        (same && shard.term() <= self.term).then_some(conf)
    }

    /// The weights of `data`, or those that the log says that the worker got (`logged`).
    pub(super) fn take(&self, conf: &Configured, data: &BucketData, logged: Option<Logged>) -> Taken {
        let version = logged.as_ref().map_or(data.version, |(version, _)| *version);
        if self.measured {
            let weights = logged.as_ref().map_or(&*data.weights, |(_, weights)| weights.as_slice());
            self.counters.staleness.pulled(self.worker, self.bucket, version, weights);
        }
        // What the worker has already is not sent again.
        let not_modified = self.have == Some(version);
        let payload = match logged {
            _ if not_modified => Bytes::new(),
            Some((_, weights)) => value_bytes(Shared(weights)),
            None if self.ahead => pulled_bytes(&conf.job, conf.buckets[self.bucket].spec, data),
            None => vector_bytes(data, 0),
        };
        self.counters.pulled(payload.len(), not_modified);
        Taken { version, not_modified, payload }
    }
}

/// Weights that the log says that a worker got, and their version.
type Logged = (Version, Arc<Vec<f32>>);

/// The weights of one bucket, as they are sent.
pub(super) struct Taken {
    pub version: Version,
    pub not_modified: bool,
    pub payload: Bytes,
}

impl Weights {
    /// With the weights, as they are now where they are taken only now; `None`: this replica has them no more.
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
    /// As it goes: with the weights, where they were to be taken only now. Where this replica has them no more its worker asks again.
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

/// A consistent copy of what a checkpoint keeps of a shard.
#[derive(Debug)]
pub struct CheckpointImage {
    /// The step it was asked for. In BSP the state is that of this step.
    pub step: Step,
    /// TOML of the job.
    pub job: String,
    /// Hears that they are let go.
    conf: Arc<Configured>,
    /// The buckets, by rising id; those that were fetched are gone.
    buckets: Vec<(BucketId, Mutex<Option<Arc<BucketData>>>)>,
    /// Each member's clock, and whether it has finished. In SSP and ASP one bucket may hold a push more.
    pub members: Vec<(WorkerId, Step, bool)>,
    /// Early stopping (shard 0).
    pub stopping: Stopping,
}

impl CheckpointImage {
    /// Of a shard that is at `step`; `state` is that of `conf`. Shares the buckets.
    pub(super) fn of(step: Step, conf: &Arc<Configured>, state: &Meta) -> Self {
        let buckets = conf.buckets.iter().map(|b| (b.id, Mutex::new(Some(b.image())))).collect();
        let members = state.members.iter().map(|(w, m)| (w, m.clock(), m.finished)).collect();
        let (stopping, job) = (state.stopping(conf.job.early_stop), state.job.clone());
        Self { step, job, conf: conf.clone(), buckets, members, stopping }
    }

    /// Buckets that it has or had.
    pub fn buckets(&self) -> usize {
        self.buckets.len()
    }

    /// The bucket at a place among the shard's, unless it was let go.
    pub fn bucket(&self, place: usize) -> Option<(BucketId, Arc<BucketData>)> {
        let (id, data) = self.buckets.get(place)?;
        Some((*id, data.lock().clone()?))
    }

    /// The bucket at a place is fetched: from now on an update need not copy it.
    pub fn let_go(&self, place: usize) {
        if let Some((_, data)) = self.buckets.get(place) {
            data.lock().take();
            self.conf.let_go();
        }
    }

    pub(super) fn is_whole(&self) -> bool {
        self.buckets.iter().all(|(_, data)| data.lock().is_some())
    }
}

/// What people want to know of a worker, as it has said it.
#[derive(Clone, Debug, Default)]
pub struct About {
    /// Where it runs.
    pub host: String,
    /// What it computes on.
    pub device: String,
    /// The last lines of its log.
    pub said: Vec<String>,
}

/// What only the leader counts, but for the bytes of readers, whom any replica serves; starts at zero with the process.
#[derive(Debug, Default)]
#[allow(missing_docs)]
pub struct Counters {
    pub pulls: AtomicU64,
    pub pulls_waited: AtomicU64,
    pub bytes_pulled: AtomicU64,
    pub not_modified: AtomicU64,
    /// Messages, for what they are.
    pub refused: AtomicU64,
    /// Messages that were sent to the leader, or are to come again.
    pub redirected: AtomicU64,
    /// It leads, and serves workers.
    pub leads: AtomicBool,
    pub max_step_lead: AtomicU64,
    pub streams: AtomicU64,
    /// Payload of entries proposed to the log.
    pub bytes_logged: AtomicU64,
    pub deltas: AtomicU64,
    /// Bytes of pushes that the leader holds, in open rounds and otherwise; looked at four times a lease.
    pub queued: AtomicU64,
    /// What the rule goes by that chooses the mode; see [`Self::take_auto`].
    pub auto: Mutex<Option<auto::Report>>,
    /// What is left of each member's lease, to a quarter of it; empty where this replica does not lead.
    pub leases: Mutex<BTreeMap<WorkerId, Duration>>,
    /// What people see of the training.
    pub progress: Mutex<Progress>,
    /// Somebody wants a checkpoint of now; of shard 0, until its writer is told.
    pub save: AtomicBool,
    /// What workers have said of themselves.
    pub about: Mutex<BTreeMap<WorkerId, About>>,
    /// How late the pushes were that were applied while this replica led.
    pub staleness: Arc<Staleness>,
    /// The process's, for all its shards.
    pub stages: Arc<Stages>,
}

impl Counters {
    /// A worker gets a bucket, with so many bytes of weights.
    pub fn pulled(&self, bytes: usize, not_modified: bool) {
        self.bytes_pulled.fetch_add(bytes as u64, Relaxed);
        self.not_modified.fetch_add(u64::from(not_modified), Relaxed);
    }

    /// Takes what a worker says of itself. Those that are no members of `shard` any more go.
    pub fn take_about(&self, shard: &Shard, worker: WorkerId, about: About) {
        let mut all = self.about.lock();
        all.insert(worker, about);
        shard.read(|m| all.retain(|w, _| *w == worker || m.members.get(*w).is_some()));
    }

    /// What the rule goes by that chooses the mode of `shard`, where one does and this replica leads. The leads in it are told
    /// once.
    pub fn take_auto(&self, shard: &Shard) -> Option<auto::Report> {
        let in_force = shard.read(|m| m.in_force);
        in_force.auto?;
        let mut told = self.auto.lock();
        let report = told.filter(|t| t.number == in_force.number)?;
        *told = Some(auto::Report { counted: auto::Counted { lead: 0, ..report.counted }, ..report });
        Some(report)
    }
}
