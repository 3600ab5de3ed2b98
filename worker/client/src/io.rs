//! The I/O of a session: streams to the shards' leaders, on a thread of its own, so that pushes go out while the backward pass
//! goes on.
//!
//! Training thread and I/O thread share the session under one lock, and nobody holds it while waiting. Whoever gives the session
//! an input carries out the effects. The training thread is woken only for what it waits for.

use crate::{
    acks::Acked,
    connect::{self, Channels},
    error::ClientError,
    initial::Initial,
    interrupt::Interrupt,
    out::{Outgoing, OutgoingMessage},
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

/// Who waits looks so often whether it is interrupted.
const INTERRUPT_POLL_INTERVAL: Duration = Duration::from_millis(20);
/// A server answers a new stream at once, whatever it then says on it.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(2);

/// Buffers for weights that come, kept for the next: as much as is on its way between a socket and its reader.
const RECEIVED_BYTES: usize = 16 << 20;

/// The time that a session is told: that of the host's monotonic clock.
pub(crate) fn now() -> Duration {
    Duration::from_nanos(Moment::now().0)
}

/// The same as spans have it.
pub(crate) fn moment(at: Duration) -> Moment {
    Moment(at.as_nanos() as u64)
}

/// The initial state of the job, and where each shard's buckets lie in it.
pub(crate) type Initials = BTreeMap<ShardId, (Arc<Initial>, Arc<[(BucketId, BucketSpec)]>)>;

/// What a session's I/O needs to know.
pub(crate) struct IoOptions {
    pub worker: WorkerId,
    pub channels: Channels,
    /// A sign of life goes out this often, whatever the training loop does.
    pub heartbeat: Duration,
    /// What the worker computes on, for people.
    pub device: String,
    /// Of the shards that may not have it yet.
    pub initial: Initials,
    /// Bytes of weights that may wait to be taken: beyond it streams are not read on. Who sets a bound must take weights
    /// whenever any may come: acks wait behind them.
    pub untaken: usize,
    /// Where spans are noted.
    pub stages: Arc<Stages>,
    /// Where pushes lie that servers of this host may read there.
    pub memory: Option<Arc<Memory>>,
}

/// A session and its I/O, which ends with this.
pub(crate) struct Io {
    inner: Arc<Inner>,
    /// Ends the I/O thread, even while it dials.
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
    /// There is something for the training thread.
    changed: Condvar,
    /// The session has another deadline.
    deadline: Notify,
    /// Weights were taken.
    taken: Notify,
    /// A moment on both clocks.
    epoch: (Instant, Duration),
}

struct State {
    session: Session,
    streams: BTreeMap<ShardId, Open>,
    /// Beside them, to ask others about a silent leader.
    beside: BTreeMap<ShardId, Open>,
    initial: Initials,
    /// Is told of every ack.
    watcher: Option<mpsc::Sender<Acked>>,
    /// The deadline that the I/O thread waits for.
    armed: Option<Duration>,
    /// What the training thread waits for: it is woken for nothing else, since acks alone would wake it for every push.
    waits: Option<WaitReason>,
    /// By which way each shard was reached last.
    said: BTreeMap<ShardId, String>,
    /// Of each shard without a stream: since when, and when that was said last.
    down: BTreeMap<ShardId, (Instant, Option<Instant>)>,
    /// The I/O thread has ended.
    ended: bool,
}

/// A shard without a leader for longer than this is said, and so often: an election takes less.
const NO_LEADER_WARNING_DELAY: Duration = Duration::from_secs(2);
const NO_LEADER_WARNING_INTERVAL: Duration = Duration::from_secs(10);

#[derive(Clone, Copy)]
enum WaitReason {
    /// Something to poll.
    News,
    /// Room for a push of so many bytes.
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

/// A stream, or one that is dialled.
struct Open {
    out: Arc<Outgoing>,
    task: AbortHandle,
    /// Its server's.
    address: String,
    /// The connection that it is on, where others are on it, too.
    connection: Arc<OnceLock<connect::Connecting>>,
}

impl Drop for Open {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// The session, for the training thread. What it is told is carried out when this is let go.
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
        // What the session has given up makes room for what comes.
        self.inner.taken.notify_waiters();
    }
}

impl Io {
    /// Starts the thread; nothing is dialled before the session is told to join.
    ///
    /// # Errors
    /// There is no thread or runtime to be had.
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
            drop(runtime); // and with it all streams
            drop(says);
        })?;
        Ok(Self { inner, end: Some(end), thread: Some(thread) })
    }

    /// The session, to ask and to tell.
    pub fn session(&self) -> SessionGuard<'_> {
        SessionGuard { inner: &self.inner, state: self.inner.lock() }
    }

    /// Every ack from now on goes there too.
    pub fn watch(&self, watcher: mpsc::Sender<Acked>) {
        self.inner.lock().watcher = Some(watcher);
    }

    /// What comes next of what the session waits for. Ends early where `interrupt` is set, and with `None` after `until`.
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

    /// Weights that came from this shard were written, and let go.
    pub fn give_back(&self, shard: ShardId) {
        if let Some(stream) = self.inner.lock().streams.get(&shard) {
            stream.out.give_back();
        }
    }

    /// Waits until there is room for a push of `len` bytes, or `interrupt` is set; gives the time that it took.
    pub fn room(&self, len: usize, interrupt: Option<&dyn Interrupt>) -> Duration {
        if self.inner.lock().session.has_room(len) {
            return Duration::ZERO;
        }
        let began = Instant::now();
        // Who has failed or ended has room, and who is interrupted pushes this and nothing more.
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
                            // Who is asked may take a while, and the I/O goes on meanwhile.
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

/// The I/O thread ends, however it does: nobody may wait for it.
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

    /// Gives the session its ticks.
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

    /// Opens a stream; `beside` another one of its shard, to ask.
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

    /// Returns when weights that have come leave room for more.
    async fn room(&self) {
        loop {
            let taken = self.taken.notified(); // from here on nothing is missed
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
    /// It was begun beside another.
    beside: bool,
    /// Of the stream, for signs of life.
    out: Arc<Outgoing>,
}

impl Reader {
    async fn run(self, connection: Arc<OnceLock<connect::Connecting>>) {
        let cause = match self.io.channels.lane(&self.address).await {
            Ok((read, write, shared)) => {
                self.goes(if shared.is_some() { "a Unix socket, bulk in shared memory" } else { "TCP" });
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
            Err(LaneError::NoLanes) => match self.dial(&connection).await.inspect(|_| self.goes("HTTP/2")) {
                Ok(inbound) => self.read(inbound.map_err(|s| s.message().to_string())).await,
                Err(cause) => cause,
            },
            // Where it was let in before, its certificate may be about to be renewed.
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
            self.is_down(&cause);
        }
        self.io.handle(Input::Broken { shard: self.shard, dial: self.dial, cause });
    }

    /// Says that the shard has no stream, where it has had none for a while.
    fn is_down(&self, cause: &str) {
        let now = Instant::now();
        let mut state = self.io.lock();
        let (since, said) = state.down.entry(self.shard).or_insert((now, None));
        let seconds = (now - *since).as_secs();
        if now - *since >= NO_LEADER_WARNING_DELAY
            && said.is_none_or(|at| now - at >= NO_LEADER_WARNING_INTERVAL)
        {
            *said = Some(now);
            let (worker, shard, address) = (self.io.worker, self.shard, &self.address);
            tracing::warn!(%worker, %shard, %address, seconds, cause, "no leader of this shard is reached");
        }
    }

    /// Says by which way the shard is reached; once, where a server is asked again and again whether it leads by now.
    fn goes(&self, over: &str) {
        if self.beside {
            return; // whether anything goes there is not known yet
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
        // The kernel accepts connections for a process that hangs, so only an answer tells that it lives.
        let sent = UnboundedReceiverStream::new(self.out.http()).flat_map(stream::iter);
        let exchange = services::exchange(&channel, sent);
        let stream = tokio::time::timeout(ANSWER_TIMEOUT, exchange).await;
        let stream = stream.map_err(|_| format!("no answer within {ANSWER_TIMEOUT:?}"))?;
        stream.map_err(|s| s.message().to_string())
    }

    /// A sign of life; to shard 0 with what it has not heard of this worker. `said`: how many lines it has.
    fn heartbeat(&self, said: &mut Option<u64>) -> Heartbeat {
        let new = paraft_host::logs::recent(*said).filter(|_| self.shard == ShardId(0));
        let Some((number, lines)) = new else { return Heartbeat::default() };
        *said = Some(number);
        Heartbeat { host: self.io.host.clone(), device: self.io.device.clone(), said: lines }
    }

    /// Reads until the stream ends; says why it did.
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
                // First: a stream of weights that keeps this loop busy must not look like silence on the other side.
                _ = heartbeat.tick(), if open => {
                    let heartbeat = self.heartbeat(&mut said);
                    self.out.send(ToShard { kind: Some(Kind::Heartbeat(heartbeat)) }.into());
                }
                message = self.io.room().then(|()| inbound.next()) => match message {
                    Some(Ok(message)) => {
                        // The first is Opened, or a refusal that ends the stream.
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
