//! A worker's process, and its stream to a shard's leader.

use crate::clock::{Moment, NEVER};
use paraft_common::{ShardId, WorkerId};
use paraft_server::shard::leader::{ConnId, Liveness, Reply};
use parking_lot::Mutex;
use std::sync::{
    Arc, OnceLock,
    atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
};
use tokio::sync::{Notify, mpsc};

/// A message to a worker.
#[derive(Debug)]
pub(crate) enum FromServer {
    /// An answer on a stream.
    Reply(ShardId, ConnId, Reply),
    /// A stream has ended.
    Closed(ShardId, ConnId),
    /// The session has something to do without being told.
    Tick,
}

/// One run of a worker's process, or of one of its ranks'.
pub(crate) struct Process {
    pub worker: WorkerId,
    /// Among all processes that train.
    pub place: usize,
    /// Of the model, where ranks have one each.
    pub stage: Option<usize>,
    ended: AtomicU64,
    /// Those that it has open.
    streams: Mutex<Vec<Arc<Stream>>>,
    begins: Notify,
    finishing: AtomicBool,
}

impl Process {
    /// The rank at `at` of so many that have stages of the model; of one, which has all of it.
    pub fn new(worker: WorkerId, at: usize, ranks: usize) -> Arc<Self> {
        Arc::new(Self {
            worker,
            place: worker.0 as usize * ranks + at,
            stage: (ranks > 1).then_some(at),
            ended: AtomicU64::new(NEVER),
            streams: Mutex::default(),
            begins: Notify::new(),
            finishing: AtomicBool::new(false),
        })
    }

    /// It has its first weights.
    pub fn begins(&self) {
        self.begins.notify_one();
    }

    /// Returns when it has them.
    pub async fn begun(&self) {
        self.begins.notified().await;
    }

    /// It has done all its steps.
    pub fn finishes(&self) {
        self.finishing.store(true, Relaxed);
    }

    /// Whether it has.
    pub fn is_finishing(&self) -> bool {
        self.finishing.load(Relaxed)
    }

    /// When it ended, or the moment that never comes.
    pub fn ended(&self) -> Moment {
        self.ended.load(Relaxed)
    }

    /// It dies. Gives the streams that break with it.
    pub fn ends(&self, now: Moment) -> Vec<Arc<Stream>> {
        self.ended.store(now, Relaxed);
        std::mem::take(&mut self.streams.lock())
    }

    pub fn opens(&self, stream: &Arc<Stream>) {
        self.streams.lock().push(stream.clone());
    }

    pub fn closes(&self, conn: ConnId) {
        self.streams.lock().retain(|s| s.conn != conn);
    }
}

/// A stream. It belongs to the leader that it was opened to, and ends with it.
pub(crate) struct Stream {
    pub conn: ConnId,
    pub shard: ShardId,
    /// On which the leader is.
    pub server: usize,
    pub process: Arc<Process>,
    pub liveness: Arc<Liveness>,
    pub heard: mpsc::UnboundedSender<FromServer>,
    /// The term of the leader that has taken it, once one has.
    pub term: OnceLock<u64>,
    /// The worker has let it go, and the leader's side knows.
    pub gone: AtomicBool,
    /// When the last message of each direction arrives: later ones do not come before it.
    pub up: AtomicU64,
    pub down: AtomicU64,
}
