//! The I/O of a session: streams to the shards' leaders, on its own thread, so pushes go out during the backward
//! pass.
//!
//! Training thread and I/O thread share the session under one lock. Neither holds the lock while it waits. The
//! thread that gives the session an input also carries out the effects. The training thread wakes only for the
//! event that it waits for.

use crate::{
    acks::Acked,
    connect::{self, Channels},
    error::ClientError,
    initial::Initial,
    interrupt::Interrupt,
    outgoing::{Outgoing, OutgoingMessage},
};
use futures::{FutureExt, Stream, StreamExt, TryStreamExt, stream};
use paraft_common::{BucketId, BucketSpec, ShardId, Step, WorkerId};
use paraft_lanes::{LaneError, Pool, Receiver, Sender, shared::Memory};
use paraft_proto::{
    Advice, FromShard, Heartbeat, Incoming, Refused, ToShard, WireKind, WithBulk, from_shard, limits,
    services, to_shard::Kind,
};
use paraft_session::{Effect, Event, Input, Session};
use paraft_trace::{Moment, Span, Stage, Stages};
use std::{
    collections::BTreeMap,
    sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, mpsc},
    thread,
    time::{Duration, Instant},
};
use tokio::{
    runtime::Handle,
    sync::{Notify, oneshot},
    task::AbortHandle,
    time::MissedTickBehavior,
};
use tokio_stream::wrappers::UnboundedReceiverStream;

/// How often a waiting thread checks for an interrupt.
const INTERRUPT_POLL_INTERVAL: Duration = Duration::from_millis(20);
/// A server answers a new stream at once, whatever it sends later.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(2);

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
    streams: BTreeMap<ShardId, Open>,
    /// Additional streams, which ask other servers about a silent leader.
    beside: BTreeMap<ShardId, Open>,
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

/// A shard without a leader is logged after this delay, then at this interval. An election takes less.
const NO_LEADER_WARNING_DELAY: Duration = Duration::from_secs(2);
const NO_LEADER_WARNING_INTERVAL: Duration = Duration::from_secs(10);

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

/// A stream that is open or connecting.
struct Open {
    out: Arc<Outgoing>,
    task: AbortHandle,
    /// Its server's address.
    address: String,
    /// The stream's connection, if other streams share it.
    connection: Arc<OnceLock<connect::Connecting>>,
}

impl Drop for Open {
    fn drop(&mut self) {
        self.task.abort();
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
    /// # Errors The thread or its runtime cannot start.
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

    fn carry_out(self: &Arc<Self>, state: &mut State) {
        while let Some(effect) = state.session.next_effect() {
            match effect {
                Effect::Send(shard, message) => {
                    if let Some(stream) = state.streams.get(&shard) {
                        stream.out.send(message.into());
                    }
                }
                Effect::SendInitial(shard) => {
                    let (stream, initial) = (state.streams.get(&shard), state.initial.get(&shard));
                    if let Some((stream, (initial, buckets))) = stream.zip(initial) {
                        stream.out.send(OutgoingMessage::Initial(initial.clone().messages(buckets.clone())));
                    }
                }
                Effect::InitialKnown(shard) => drop(state.initial.remove(&shard)),
                Effect::HangUp { shard, broken } => {
                    let stream = state.streams.remove(&shard).filter(|_| broken);
                    if let Some((stream, connecting)) =
                        stream.as_ref().and_then(|s| Some((s, s.connection.get()?)))
                    {
                        self.channels.broken(&stream.address, connecting);
                    }
                }
                Effect::Dial { shard, dial, address, open } => {
                    let stream = self.dial((shard, dial), address, *open, false);
                    state.streams.insert(shard, stream);
                }
                Effect::Ask { shard, dial, address, open } => {
                    let stream = self.dial((shard, dial), address, *open, true);
                    state.beside.insert(shard, stream);
                }
                Effect::AskNoMore(shard) => drop(state.beside.remove(&shard)),
                Effect::Turn(shard) => {
                    if let Some(stream) = state.beside.remove(&shard) {
                        let (worker, address) = (self.worker, &stream.address);
                        tracing::info!(%worker, %shard, %address, "the leader says nothing, and here is its successor");
                        state.said.remove(&shard);
                        state.streams.insert(shard, stream);
                    }
                }
                Effect::Acked(a) => self.acked(state, &a),
            }
        }
        if state.session.deadline() != state.armed {
            self.deadline.notify_one();
        }
    }

    /// Opens a stream. `beside`: an additional stream of the shard, for a question.
    fn dial(
        self: &Arc<Self>,
        (shard, dial): (ShardId, u64),
        address: String,
        open: paraft_proto::Open,
        beside: bool,
    ) -> Open {
        let out = Outgoing::new(ToShard { kind: Some(Kind::Open(open)) }.into());
        let connection = Arc::new(OnceLock::new());
        let reader =
            Reader { io: self.clone(), shard, dial, address: address.clone(), beside, out: out.clone() };
        let task = self.runtime.spawn(reader.run(connection.clone())).abort_handle();
        Open { out, task, address, connection }
    }

    fn acked(&self, state: &State, a: &paraft_session::Acked) {
        self.note(Stage::Push, (moment(a.pushed), Moment::now()), a.shard, (a.step, a.bucket, a.bytes));
        if let Some(watcher) = state.watcher.as_ref().filter(|_| !a.dropped) {
            let (epoch, then) = self.epoch;
            let _ = watcher.send(Acked {
                shard: a.shard,
                bucket: a.bucket,
                seq: a.seq,
                leader: a.leader,
                opened: epoch + a.opened.saturating_sub(then),
                at: Instant::now(),
            });
        }
    }

    fn note(
        &self,
        stage: Stage,
        (begin, end): (Moment, Moment),
        shard: ShardId,
        (step, bucket, bytes): (Step, BucketId, usize),
    ) {
        let (bucket, worker) = (Some(bucket), Some(self.worker));
        self.stages.note(Span {
            stage,
            begin,
            end,
            step,
            shard,
            bucket,
            worker,
            bytes: bytes as u64,
            pass: None,
        });
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

/// The reader of a stream.
struct Reader {
    io: Arc<Inner>,
    shard: ShardId,
    dial: u64,
    address: String,
    /// Whether it runs beside another stream of its shard.
    beside: bool,
    /// The stream's sender, for heartbeats.
    out: Arc<Outgoing>,
}

impl Reader {
    async fn run(self, connection: Arc<OnceLock<connect::Connecting>>) {
        let cause = match self.io.channels.lane(&self.address).await {
            Ok((read, write, shared)) => {
                self.log_connected(if shared.is_some() {
                    "a Unix socket, bulk in shared memory"
                } else {
                    "TCP"
                });
                if let Some((shared, memory)) = shared.as_ref().zip(self.io.memory.as_ref()) {
                    shared.offer(memory);
                }
                let inbound =
                    Receiver::<FromShard>::new(read, limits::MAX_MESSAGE_BYTES, self.io.pool.clone());
                let read = self.read(inbound.map_err(|e| e.to_string()));
                let sender = Arc::new(Sender::new(write, shared));
                self.out.lane(sender.clone());
                tokio::select! {
                    cause = read => cause,
                    Err(e) = sender.run() => e.to_string(),
                }
            }
            Err(LaneError::NoLanes) => {
                match self.dial(&connection).await.inspect(|_| self.log_connected("HTTP/2")) {
                    Ok(inbound) => self.read(inbound.map_err(|s| s.message().to_string())).await,
                    Err(cause) => cause,
                }
            }
            // If this worker was admitted before, its certificate may be about to be renewed.
            Err(LaneError::Refused(why)) if !self.io.lock().said.contains_key(&self.shard) => {
                let message = format!("{}: {why}", self.address);
                let (advice, kind) = (Advice::Fix as i32, WireKind::Denied as i32);
                let refused = Refused { advice, kind, message, ..Refused::default() };
                let message = FromShard { kind: Some(from_shard::Kind::Refused(refused)) }.into();
                self.io.handle(Input::Message { shard: self.shard, dial: self.dial, message });
                why
            }
            Err(e) => e.to_string(),
        };
        if !self.beside {
            self.log_no_leader(&cause);
        }
        self.io.handle(Input::Broken { shard: self.shard, dial: self.dial, cause });
    }

    /// Logs that the shard has no stream, after a delay.
    fn log_no_leader(&self, cause: &str) {
        let now = Instant::now();
        let mut state = self.io.lock();
        let (since, said) = state.down.entry(self.shard).or_insert((now, None));
        let seconds = (now - *since).as_secs();
        if now - *since >= NO_LEADER_WARNING_DELAY
            && said.is_none_or(|at| now - at >= NO_LEADER_WARNING_INTERVAL)
        {
            *said = Some(now);
            let (worker, shard, address) = (self.io.worker, self.shard, &self.address);
            tracing::warn!(%worker, %shard, %address, seconds, cause, "no leader of this shard is reachable");
        }
    }

    /// Logs the connection kind of a shard; once, even if the client asks a server repeatedly whether it leads.
    fn log_connected(&self, over: &str) {
        if self.beside {
            return; // not known yet to work
        }
        let (worker, shard, address) = (self.io.worker, self.shard, &self.address);
        let way = format!("{address} {over}");
        if self.io.lock().said.insert(shard, way.clone()) != Some(way) {
            tracing::info!(%worker, %shard, %address, over, "connected");
        }
    }

    async fn dial(&self, connection: &OnceLock<connect::Connecting>) -> Result<Incoming<FromShard>, String> {
        let (channel, connecting) = self.io.channels.get(&self.address).await?;
        let _ = connection.set(connecting);
        // The kernel accepts connections for a process that hangs, so only an answer shows that it runs.
        let sent = UnboundedReceiverStream::new(self.out.http()).flat_map(stream::iter);
        let exchange = services::exchange(&channel, sent);
        let stream = tokio::time::timeout(ANSWER_TIMEOUT, exchange).await;
        let stream = stream.map_err(|_| format!("no answer within {ANSWER_TIMEOUT:?}"))?;
        stream.map_err(|s| s.message().to_string())
    }

    /// A heartbeat. For shard 0 it has the worker's new log lines; `said`: how many lines the shard has.
    fn heartbeat(&self, said: &mut Option<u64>) -> Heartbeat {
        let new = paraft_host::logs::recent(*said).filter(|_| self.shard == ShardId(0));
        let Some((number, lines)) = new else { return Heartbeat::default() };
        *said = Some(number);
        Heartbeat { host: self.io.host.clone(), device: self.io.device.clone(), said: lines }
    }

    /// Reads until the stream ends; returns the cause.
    async fn read(
        &self,
        mut inbound: impl Stream<Item = Result<WithBulk<FromShard>, String>> + Unpin,
    ) -> String {
        let (mut open, mut said) = (false, None);
        let mut heartbeat = tokio::time::interval(self.io.heartbeat);
        heartbeat.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                biased;
                // First: a busy stream of weights must not delay heartbeats.
                _ = heartbeat.tick(), if open => {
                    let heartbeat = self.heartbeat(&mut said);
                    self.out.send(ToShard { kind: Some(Kind::Heartbeat(heartbeat)) }.into());
                }
                message = self.io.room().then(|()| inbound.next()) => match message {
                    Some(Ok(message)) => {
                        // The first message is Opened, or a refusal that ends the stream.
                        if !open && matches!(message.message.kind, Some(from_shard::Kind::Opened(_))) {
                            self.io.lock().down.remove(&self.shard);
                        }
                        open = true;
                        self.io.handle(Input::Message { shard: self.shard, dial: self.dial, message });
                    }
                    Some(Err(cause)) => return cause,
                    None => return "the server closed the stream".into(),
                },
            }
        }
    }
}
