//! The I/O of a session: streams to the shards' leaders, on its own thread, so pushes go out during the backward
//! pass.
//!
//! Training thread and I/O thread share the session under one lock. Neither holds the lock while it waits. The
//! thread that gives the session an input also carries out the effects. The training thread wakes only for the
//! event that it waits for.

mod effects;
mod stream;

use crate::{acks::Acked, connect::Channels, error::ClientError, initial::Initial, interrupt::Interrupt};
use paraft_common::{BucketId, BucketSpec, ShardId, WorkerId};
use paraft_lanes::{Pool, shared::Memory};
use paraft_session::{Event, Input, Session};
use paraft_trace::{Moment, Stages};
use std::{
    collections::BTreeMap,
    sync::{Arc, Condvar, Mutex, MutexGuard, mpsc},
    thread,
    time::{Duration, Instant},
};
use stream::OpenStream;
use tokio::{
    runtime::Handle,
    sync::{Notify, oneshot},
};

/// How often a waiting thread checks for an interrupt.
const INTERRUPT_POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Bytes of receive buffers that the client reuses: about as much as is in flight between a socket and its reader.
const RECEIVED_BYTES: usize = 16 << 20;

/// The session's clock: the host's monotonic clock.
pub(crate) fn now() -> Duration {
    Duration::from_nanos(Moment::now().0)
}

/// The same time as trace spans use it.
pub(crate) fn moment(at: Duration) -> Moment {
    Moment(at.as_nanos() as u64)
}

/// The job's initial state, and the place of each shard's buckets in it.
pub(crate) type Initials = BTreeMap<ShardId, (Arc<Initial>, Arc<[(BucketId, BucketSpec)]>)>;

/// Options of a session's I/O.
pub(crate) struct IoOptions {
    pub worker: WorkerId,
    pub channels: Channels,
    /// The interval of heartbeats, whatever the training loop does.
    pub heartbeat: Duration,
    /// The device that the worker computes on, for display.
    pub device: String,
    /// The initial state for shards that may have none.
    pub initial: Initials,
    /// Bytes of weights that may wait for the training thread. Beyond it the client stops reading streams. A caller
    /// that sets a bound must take weights whenever they may arrive, because acks wait behind them.
    pub untaken: usize,
    /// Records the spans.
    pub stages: Arc<Stages>,
    /// Shared memory that holds pushes for servers on this host.
    pub memory: Option<Arc<Memory>>,
}

/// A session and its I/O thread. Dropping it ends the thread.
pub(crate) struct Io {
    inner: Arc<Inner>,
    /// Ends the I/O thread, even while it connects.
    end: Option<oneshot::Sender<()>>,
    thread: Option<thread::JoinHandle<()>>,
}

struct Inner {
    worker: WorkerId,
    channels: Channels,
    heartbeat: Duration,
    host: String,
    device: String,
    untaken: usize,
    stages: Arc<Stages>,
    memory: Option<Arc<Memory>>,
    pool: Arc<Pool>,
    runtime: Handle,
    state: Mutex<State>,
    /// The training thread has an event.
    changed: Condvar,
    /// The session has a new deadline.
    deadline: Notify,
    /// The training thread took weights.
    taken: Notify,
    /// One moment on both clocks.
    epoch: (Instant, Duration),
}

struct State {
    session: Session,
    streams: BTreeMap<ShardId, OpenStream>,
    /// Additional streams, which ask other servers about a silent leader.
    beside: BTreeMap<ShardId, OpenStream>,
    initial: Initials,
    /// Receives every ack.
    watcher: Option<mpsc::Sender<Acked>>,
    /// The deadline that the I/O thread waits for.
    armed: Option<Duration>,
    /// What the training thread waits for. Only this wakes it: otherwise every push's ack would.
    waits: Option<WaitReason>,
    /// The connection kind that was last logged for each shard.
    said: BTreeMap<ShardId, String>,
    /// For each shard without a stream: since when, and when that was last logged.
    down: BTreeMap<ShardId, (Instant, Option<Instant>)>,
    /// The I/O thread has ended.
    ended: bool,
}

#[derive(Clone, Copy)]
enum WaitReason {
    /// An event to poll.
    News,
    /// Room for a push of this many bytes.
    Room(usize),
}

impl State {
    fn is_due(&self) -> bool {
        match self.waits {
            None => false,
            Some(WaitReason::News) => self.session.has_news(),
            Some(WaitReason::Room(len)) => self.session.has_room(len),
        }
    }
}

/// Access to the session for the training thread. Dropping it carries out the effects of what the caller told the
/// session.
pub(crate) struct SessionGuard<'a> {
    inner: &'a Arc<Inner>,
    state: MutexGuard<'a, State>,
}

impl std::ops::Deref for SessionGuard<'_> {
    type Target = Session;

    fn deref(&self) -> &Session {
        &self.state.session
    }
}

impl std::ops::DerefMut for SessionGuard<'_> {
    fn deref_mut(&mut self) -> &mut Session {
        &mut self.state.session
    }
}

impl Drop for SessionGuard<'_> {
    fn drop(&mut self) {
        self.inner.carry_out(&mut self.state);
        // Weights that the session has dropped make room for new ones.
        self.inner.taken.notify_waiters();
    }
}

impl Io {
    /// Starts the thread. Nothing connects before the session is told to join.
    ///
    /// # Errors
    /// The thread or its runtime cannot start.
    pub fn start(session: Session, options: IoOptions) -> std::io::Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let inner = Arc::new(Inner {
            worker: options.worker,
            channels: options.channels,
            heartbeat: options.heartbeat,
            host: paraft_host::name(),
            device: options.device,
            untaken: options.untaken,
            stages: options.stages,
            memory: options.memory,
            pool: Pool::new(RECEIVED_BYTES),
            runtime: runtime.handle().clone(),
            state: Mutex::new(State {
                session,
                streams: BTreeMap::new(),
                beside: BTreeMap::new(),
                initial: options.initial,
                watcher: None,
                armed: None,
                waits: None,
                said: BTreeMap::new(),
                down: BTreeMap::new(),
                ended: false,
            }),
            changed: Condvar::new(),
            deadline: Notify::new(),
            taken: Notify::new(),
            epoch: (Instant::now(), now()),
        });
        let (end, ended) = oneshot::channel::<()>();
        let ticks = inner.clone();
        let thread = thread::Builder::new().name("paraft-io".into()).spawn(move || {
            let says = EndOnDrop(ticks.clone());
            runtime.block_on(async move {
                tokio::select! { () = ticks.ticks() => {}, _ = ended => {} }
            });
            drop(runtime); // drops all streams
            drop(says);
        })?;
        Ok(Self { inner, end: Some(end), thread: Some(thread) })
    }

    /// Locks the session for queries and inputs.
    pub fn session(&self) -> SessionGuard<'_> {
        SessionGuard { inner: &self.inner, state: self.inner.lock() }
    }

    /// Sends every later ack to `watcher` too.
    pub fn watch(&self, watcher: mpsc::Sender<Acked>) {
        self.inner.lock().watcher = Some(watcher);
    }

    /// The next event that the session waits for. Fails early once `interrupt` is set; returns `None` after
    /// `until`.
    pub fn next(
        &self,
        interrupt: Option<&dyn Interrupt>,
        until: Option<Instant>,
    ) -> Result<Option<Event>, ClientError> {
        let mut found = None;
        self.wait(WaitReason::News, interrupt, until, |session| match session.poll(now()) {
            Ok(None) => Ok(false),
            Ok(event) => {
                found = event;
                Ok(true)
            }
            Err(e) => Err(e.into()),
        })?;
        if let Some(Event::Weights(_)) = &found {
            self.inner.taken.notify_waiters();
        }
        Ok(found)
    }

    /// The caller has written weights of this shard and dropped their buffer.
    pub fn give_back(&self, shard: ShardId) {
        if let Some(stream) = self.inner.lock().streams.get(&shard) {
            stream.out.give_back();
        }
    }

    /// Waits until there is room for a push of `len` bytes or `interrupt` is set; returns the time spent.
    pub fn room(&self, len: usize, interrupt: Option<&dyn Interrupt>) -> Duration {
        if self.inner.lock().session.has_room(len) {
            return Duration::ZERO;
        }
        let began = Instant::now();
        // A failed or ended session has room. An interrupted worker sends this push and no more.
        let _ = self.wait(WaitReason::Room(len), interrupt, None, |session| Ok(session.has_room(len)));
        began.elapsed()
    }

    fn wait(
        &self,
        what: WaitReason,
        interrupt: Option<&dyn Interrupt>,
        until: Option<Instant>,
        mut is_over: impl FnMut(&mut Session) -> Result<bool, ClientError>,
    ) -> Result<(), ClientError> {
        let inner = &self.inner;
        let mut state = inner.lock();
        loop {
            let over = is_over(&mut state.session);
            inner.carry_out(&mut state);
            if over? {
                return Ok(());
            }
            if state.ended {
                return Err(ClientError::Options("the I/O thread ended unexpectedly".into()));
            }
            let left = until.map(|u| u.saturating_duration_since(Instant::now()));
            if left.is_some_and(|l| l.is_zero()) {
                return Ok(());
            }
            state.waits = Some(what);
            let look = interrupt.map(|_| INTERRUPT_POLL_INTERVAL);
            state = match left.into_iter().chain(look).min() {
                None => inner.changed.wait(state).unwrap_or_else(|e| e.into_inner()),
                Some(most) => {
                    let waited = inner.changed.wait_timeout(state, most);
                    let (state, late) = waited.unwrap_or_else(|e| e.into_inner());
                    match interrupt.filter(|_| late.timed_out()) {
                        None => state,
                        Some(interrupt) => {
                            // Unlock: the interrupt's check may take a while, and the I/O continues meanwhile.
                            drop(state);
                            if interrupt.is_set() {
                                return Err(ClientError::Interrupted);
                            }
                            inner.lock()
                        }
                    }
                }
            };
            state.waits = None;
        }
    }
}

impl Drop for Io {
    fn drop(&mut self) {
        self.end.take();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Marks the I/O thread as ended, however it ends, so that no caller waits for it.
struct EndOnDrop(Arc<Inner>);

impl Drop for EndOnDrop {
    fn drop(&mut self) {
        self.0.lock().ended = true;
        self.0.changed.notify_all();
    }
}

impl Inner {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Ticks the session at its deadlines.
    async fn ticks(self: Arc<Self>) {
        loop {
            let next = {
                let mut state = self.lock();
                state.armed = state.session.deadline();
                state.armed
            };
            match next.map(|at| at.saturating_sub(now())) {
                None => self.deadline.notified().await,
                Some(left) => tokio::select! {
                    () = tokio::time::sleep(left) => self.handle(Input::Tick),
                    () = self.deadline.notified() => {}
                },
            }
        }
    }

    fn handle(self: &Arc<Self>, input: Input) {
        let mut state = self.lock();
        state.session.handle(now(), input);
        self.carry_out(&mut state);
        if state.is_due() {
            self.changed.notify_all();
        }
    }

    /// Returns when the received weights leave room for more.
    async fn room(&self) {
        loop {
            let taken = self.taken.notified(); // registers before the check, so no wake-up is missed
            if self.lock().session.untaken() <= self.untaken {
                return;
            }
            taken.await;
        }
    }
}
