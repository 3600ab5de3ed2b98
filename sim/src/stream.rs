//! A worker's process, and its stream to a shard's leader.

use crate::clock::{Moment, NEVER};
use paraft_common::{ShardId, WorkerId};
use paraft_server::shard::leader::{ConnId, Event, Liveness, Message, Reply};
use parking_lot::Mutex;
use std::sync::{
    Arc, OnceLock,
    atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
};
use tokio::sync::{Notify, mpsc};

/// What a worker hears.
#[derive(Debug)]
pub(crate) enum FromServer {
    /// An answer on a stream.
    Reply(ShardId, ConnId, Reply),
    /// A stream has ended.
    Closed(ShardId, ConnId),
    /// The session has something to do without being told.
    Tick,
}

/// One run of a worker process.
pub(crate) struct Process {
    pub worker: WorkerId,
    ended: AtomicU64,
    /// Those that it has open.
    streams: Mutex<Vec<Arc<Stream>>>,
    begins: Notify,
    finishing: AtomicBool,
}

impl Process {
    pub fn new(worker: WorkerId) -> Arc<Self> {
        Arc::new(Self {
            worker,
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
    /// The shard's leader, once the stream is open.
    pub leader: OnceLock<mpsc::Sender<Event>>,
    /// The worker has let it go, and the leader's side knows.
    pub gone: AtomicBool,
    /// When the last message of each direction arrives: later ones do not come before it.
    pub up: AtomicU64,
    pub down: AtomicU64,
}

impl Stream {
    /// Gives a message to the leader. One that is gone hears nothing.
    pub fn deliver(&self, message: Message) {
        self.tell(Event::Message(self.conn, message));
    }

    pub fn tell(&self, event: Event) {
        if let Some(leader) = self.leader.get() {
            // Nothing else happens before the leader has taken it, so there is room; a leader that is gone has none.
            let _ = leader.try_send(event);
        }
    }

    /// The worker's side is gone: no more signs of life, and the leader hears the end.
    pub fn ended(&self) {
        self.liveness.waits(false);
        self.gone.store(true, Relaxed);
        self.tell(Event::Closed(self.conn));
    }
}
