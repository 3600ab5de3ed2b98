//! What a training loop calls. Blocking; the network runs on a thread of its own, so pushes go out while the
//! backward pass goes on.

use crate::{
    acks::Acked,
    backlog::Backlog,
    connect::{Channels, Transport},
    encoders::Encoders,
    error::ClientError,
    initial::Initial,
    link::{self, LinkOptions},
    norms::Norms,
    pool::Pool,
    window::Window,
};
use bytes::Bytes;
use paraft_common::{
    BucketId, Encoding, Layout, Mode, Payload, ShardId, Step, TensorKind, Version, WorkerId,
    codec::F32_BYTES, config::ServerJob, encoding::sum_of_squares, modes::Modes, placement,
    retry::RetryPolicy,
};
use paraft_proto::{
    Advance, Finish, Leave, Norm, Pull, Push, Report, SwitchMode, Take, Taken, ToShard, Weights, limits,
    to_shard,
};
use paraft_trace::{Moment, Span, Stage, Stages};
use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering::Relaxed},
        mpsc::{self, RecvTimeoutError},
    },
    thread,
    time::{Duration, Instant},
};

/// Buffers of a bucket that a client keeps for its next pushes.
const POOLED: usize = 16;

/// Who waits looks so often whether it is interrupted.
const INTERRUPT_LOOK: Duration = Duration::from_millis(50);

/// Right after a worker's end its stream may still be there on the server's side.
pub const HANDOVER: Duration = Duration::from_secs(3);

/// How to take part in a job.
#[derive(Clone, Debug)]
pub struct ClientOptions {
    /// All servers, the same list as theirs.
    pub servers: Vec<String>,
    /// Shards of the fleet.
    pub shards: u32,
    /// Replicas of each shard.
    pub replicas: u32,
    /// This worker's rank.
    pub worker: WorkerId,
    /// The job as the servers need it.
    pub job: ServerJob,
    /// TCP, or Unix sockets where they are.
    pub transport: Transport,
    /// Give up after this long without a leader.
    pub patience: Duration,
    /// How long another process may be connected as this worker before that is an error: one that has just ended, or whose
    /// lease has to end first.
    pub handover: Duration,
}

/// To a link.
#[derive(Clone, Debug)]
pub(crate) enum Command {
    /// Handed over at this moment.
    Push(Push, Moment),
    /// Asked for at this moment.
    Pull(Pull, Moment),
    Norm(Norm),
    /// A report, Finish or Leave.
    Sticky(ToShard),
    /// What is worth saying only where the stream is open.
    Once(ToShard),
    /// Say when every push is acknowledged.
    Flush,
    /// To shard 0.
    Take(Take),
    Rest,
    Resume {
        level: bool,
    },
    /// Tell this channel of every ack from now on.
    Watch(mpsc::Sender<Acked>),
    /// Forget the session and open a new one.
    Reset,
}

/// From a link.
pub(crate) enum Event {
    Opened {
        shard: ShardId,
        clock: u64,
        new: bool,
        origin: u64,
    },
    /// A bucket, and its values.
    Weights(ShardId, Weights, Payload),
    Reported(Reported),
    Flushed(ShardId),
    Taken(Taken),
    Resumed(ShardId, u64),
    /// The session is over, as this worker has asked.
    Left(ShardId),
    /// So many pushes came too late for their rounds, and were dropped.
    PassedOver(u64),
    SessionLost,
    Failed(ClientError),
}

/// A complete held-out evaluation, summed over the members.
pub type Reported = paraft_proto::Reported;

/// What a pull brought.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Pulled {
    /// The step the worker is at. More than was asked for when it had lost its session and joined anew.
    pub done: Step,
    /// The slowest member over all shards.
    pub slowest: Step,
    /// The job has stopped early.
    pub stop: bool,
    /// After [`Client::pull_final`]: who finished.
    pub finishers: Vec<WorkerId>,
    /// After [`Client::pull_for_checkpoint`]: every shard keeps an image of this step, and this worker is to write the
    /// checkpoint ([`crate::section::Sections`]).
    pub section: bool,
    /// Some shards keep one and others do not: there will be no checkpoint of this step, and this worker is to let
    /// them go ([`crate::section::Sections::release`]).
    pub section_in_part: bool,
    /// The session was lost; the worker has joined anew and holds no chunk any more.
    pub rejoined: bool,
    /// Buckets whose weights were written; the others are as the last pull left them.
    pub changed: BTreeSet<BucketId>,
}

/// A worker's session with all shards of a job.
pub struct Client {
    options: ClientOptions,
    layout: Layout,
    /// Shards that hold buckets.
    pub(crate) links: BTreeMap<ShardId, tokio::sync::mpsc::UnboundedSender<Command>>,
    events: mpsc::Receiver<Event>,
    /// Events that came while only evaluations were looked for.
    pending: VecDeque<Event>,
    /// Dropped first: ends the I/O thread, even while a link is dialling.
    end: Option<tokio::sync::oneshot::Sender<()>>,
    io: Option<thread::JoinHandle<()>>,
    seq: BTreeMap<ShardId, u64>,
    window: Arc<Window>,
    backlog: Arc<Backlog>,
    pool: Arc<Pool>,
    encoders: Encoders,
    /// The founding of shard 0.
    origin: u64,
    /// Asks for chunks so far.
    pub(crate) takes: u64,
    versions: Vec<u64>,
    /// The buffer that the last pull filled: where it is, and its length.
    holds: Option<(usize, usize)>,
    /// The step whose weights are asked for already, and of which buckets; none: of all.
    ahead: Option<(Step, Vec<BucketId>)>,
    /// Pushes of this step that wait for the norm of the whole gradient.
    held: Vec<(Push, Moment)>,
    /// That the next pushes are computed from.
    samples: u32,
    /// What each shard has said of the mode.
    modes: Modes,
    /// Of the step that the next pull comes behind.
    loss: Option<f32>,
    stages: Arc<Stages>,
    evaluations: Vec<Reported>,
    /// Epochs of all evaluations so far.
    reported: BTreeSet<u64>,
    pub(crate) counters: Counters,
    /// Set to end what waits.
    interrupt: Option<Arc<AtomicBool>>,
}

/// Bytes of payload, both ways, and time spent waiting.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Counters {
    /// Payload pushed.
    pub bytes_pushed: u64,
    /// Payload pulled.
    pub bytes_pulled: u64,
    /// Time in [`Client::pull`], and in [`Client::push`] for room.
    pub waited: Duration,
    /// Sessions that were lost and opened anew.
    pub rejoins: u64,
    /// Pushes that came too late for their rounds, and were dropped.
    pub passed_over: u64,
}

impl Client {
    /// As [`Self::join_from`], with fresh weights.
    pub fn join(options: ClientOptions, initial: &[f32]) -> Result<(Self, Step), ClientError> {
        Self::join_from(options, Initial::fresh(initial.to_vec()))
    }

    /// Joins the job on every shard that holds buckets; `initial` is what the servers get if they have no
    /// weights yet. Returns the client and the step to go on from.
    ///
    /// Waits up to `patience` for leaders; errors name each address and its cause.
    pub fn join_from(options: ClientOptions, initial: Initial) -> Result<(Self, Step), ClientError> {
        let bad = |m: String| ClientError::Options(m);
        if options.servers.is_empty() {
            return Err(bad("the list of servers is empty".into()));
        }
        let layout = options.job.layout();
        if initial.weights.len() != layout.len() {
            let (given, len) = (initial.weights.len(), layout.len());
            return Err(bad(format!("{given} initial weights for a model of {len}")));
        }
        let (slots, params) = (options.job.slots(), layout.params_len());
        if !initial.slots.is_empty()
            && (initial.slots.len() != slots || initial.slots.iter().any(|s| s.len() != params))
        {
            return Err(bad(format!("the initial state is not that of {slots} slots of {params} values")));
        }
        let initial = Arc::new(initial);
        let text = options.job.to_toml().map_err(|e| bad(e.to_string()))?;
        let (event_tx, events) = mpsc::channel();
        let mut links = BTreeMap::new();
        let mut receivers = Vec::new();
        let mut trained = BTreeSet::new();
        for (i, b) in (0u32..).zip(layout.buckets()) {
            let shard = placement::shard_of(BucketId(i), options.shards);
            if b.kind == TensorKind::Param {
                trained.insert(shard);
            }
            links.entry(shard).or_insert_with(|| {
                let (tx, rx) = tokio::sync::mpsc::unbounded_channel();
                receivers.push((shard, rx));
                tx
            });
        }
        let norms = Arc::new(Mutex::new(Norms::new(trained.into_iter().collect())));
        let siblings: Vec<_> = links.iter().map(|(s, tx)| (*s, tx.clone())).collect();
        // Where the norm of a whole gradient decides about its first bucket, no ack comes before the last push.
        let limit = if options.job.clip.norm.is_some() { usize::MAX } else { limits::PUSH_WINDOW_BYTES };
        let window = Arc::new(Window::new(limit));
        // A model that is asked for ahead is not taken before it is pulled; of a larger one this thread waits for each bucket.
        let ahead = layout.len() * F32_BYTES <= limits::PULL_AHEAD_BYTES;
        let backlog = Arc::new(Backlog::new(if ahead { usize::MAX } else { limits::PULL_AHEAD_BYTES }));
        let channels = Arc::new(Channels::new(options.transport));
        let stages = Arc::new(Stages::default());
        let started = receivers
            .into_iter()
            .map(|(shard, rx)| {
                let link = LinkOptions {
                    shard,
                    replicas: options.replicas,
                    worker: options.worker.0,
                    servers: options.servers.clone(),
                    job: text.clone(),
                    channels: channels.clone(),
                    retry: RetryPolicy {
                        base: Duration::from_millis(10),
                        max: Duration::from_millis(100),
                        deadline: options.patience,
                    },
                    handover: options.handover,
                    heartbeat: options.job.heartbeat(),
                    init: Some(initial.clone()),
                    buckets: placement::buckets_of(&layout, shard, options.shards).into(),
                    window: window.clone(),
                    backlog: backlog.clone(),
                    stages: stages.clone(),
                };
                link::run(link, rx, event_tx.clone(), norms.clone(), siblings.clone())
            })
            .collect::<Vec<_>>();
        drop((siblings, initial)); // the links let it go when the servers have it
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(|e| bad(format!("no I/O runtime: {e}")))?;
        let (end, ended) = tokio::sync::oneshot::channel::<()>();
        let io = thread::Builder::new()
            .name("paraft-io".into())
            .spawn(move || {
                runtime.block_on(async move {
                    let all = futures::future::join_all(started);
                    tokio::select! { _ = all => {}, _ = ended => {} }
                });
            })
            .map_err(|e| bad(format!("no I/O thread: {e}")))?;
        let buckets = layout.buckets().len();
        let modes = Modes::new(options.job.first_mode());
        let mut client = Self {
            seq: links.keys().map(|s| (*s, 0)).collect(),
            window,
            backlog,
            pool: Pool::new(POOLED),
            encoders: Encoders::new(&options.job, &layout, options.worker, options.job.encoding.feeds_back()),
            origin: 0,
            takes: 0,
            options,
            layout,
            links,
            events,
            pending: VecDeque::new(),
            end: Some(end),
            io: Some(io),
            versions: vec![0; buckets],
            holds: None,
            ahead: None,
            held: Vec::new(),
            samples: 1,
            modes,
            loss: None,
            stages,
            evaluations: Vec::new(),
            reported: BTreeSet::new(),
            counters: Counters::default(),
            interrupt: None,
        };
        let start = client.opened()?;
        Ok((client, start))
    }

    /// The job's buckets.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// This worker's rank.
    pub fn worker(&self) -> WorkerId {
        self.options.worker
    }

    /// What names the job to the control group: the founding of shard 0 that it runs in.
    pub fn origin(&self) -> u64 {
        self.origin
    }

    /// The shard that holds a bucket.
    pub fn shard_of(&self, bucket: BucketId) -> ShardId {
        placement::shard_of(bucket, self.options.shards)
    }

    /// What this worker spends in the stages of its gradients' road. Who has the model notes `ready`, the client the
    /// others.
    pub fn stages(&self) -> &Arc<Stages> {
        &self.stages
    }

    /// What was moved and waited for so far.
    pub fn counters(&self) -> Counters {
        self.counters
    }

    /// Waits until every link has a session; gives the step to go on from.
    pub(crate) fn opened(&mut self) -> Result<Step, ClientError> {
        let mut clocks = BTreeMap::new();
        while clocks.len() < self.links.len() {
            match self.next()? {
                Event::Opened { shard, clock, origin, .. } => {
                    clocks.insert(shard, clock);
                    if shard == ShardId(0) {
                        self.origin = origin;
                    }
                }
                Event::Failed(e) => return Err(e),
                Event::SessionLost => {
                    clocks.clear();
                    self.reset();
                }
                Event::Reported(r) => self.reported(r),
                // Of the sessions before.
                Event::Weights(..)
                | Event::PassedOver(_)
                | Event::Flushed(_)
                | Event::Taken(_)
                | Event::Resumed(..)
                | Event::Left(_) => {}
            }
        }
        Ok(self.advance(clocks))
    }

    /// Brings shards that are behind to the latest of their clocks, and gives it.
    pub(crate) fn advance(&mut self, clocks: BTreeMap<ShardId, u64>) -> Step {
        let start = clocks.values().copied().max().unwrap_or(0);
        for (shard, clock) in clocks {
            if clock < start {
                self.send(shard, Command::Sticky(wrap(to_shard::Kind::Advance(Advance { step: start }))));
            }
        }
        Step(start)
    }

    pub(crate) fn reset(&mut self) {
        self.held.clear();
        self.encoders.forget();
        self.ahead = None;
        self.counters.rejoins += 1;
        for link in self.links.values() {
            let _ = link.send(Command::Reset);
        }
    }

    pub(crate) fn next(&mut self) -> Result<Event, ClientError> {
        // Links report their own failures; a closed channel means that their thread died.
        let died = || ClientError::Options("the I/O thread ended unexpectedly".into());
        let event = match (self.pending.pop_front(), &self.interrupt) {
            (Some(event), _) => event,
            (None, None) => self.events.recv().map_err(|_| died())?,
            (None, Some(interrupt)) => loop {
                match self.events.recv_timeout(INTERRUPT_LOOK) {
                    Ok(event) => break event,
                    Err(RecvTimeoutError::Disconnected) => return Err(died()),
                    Err(RecvTimeoutError::Timeout) if interrupt.load(Relaxed) => {
                        return Err(ClientError::Interrupted);
                    }
                    Err(RecvTimeoutError::Timeout) => {}
                }
            },
        };
        if let Event::Weights(.., payload) = &event {
            self.backlog.taken(payload.len());
        }
        Ok(event)
    }

    pub(crate) fn send(&self, shard: ShardId, command: Command) {
        if let Some(link) = self.links.get(&shard) {
            let _ = link.send(command);
        }
    }

    /// From how many samples the gradients of the next pushes are computed: where rounds weigh by samples, it counts.
    pub fn weigh(&mut self, samples: usize) {
        self.samples = u32::try_from(samples).unwrap_or(u32::MAX);
    }

    /// Pushes one bucket's gradient for `step`. Returns at once unless more than
    /// [`PUSH_WINDOW_BYTES`](limits::PUSH_WINDOW_BYTES) wait for their acks. The payload is copied once, into the
    /// bytes that go to the network, in the encoding that the job has for the bucket.
    ///
    /// # Panics
    /// When `gradient` is not as long as the bucket.
    pub fn push(&mut self, bucket: BucketId, step: Step, gradient: &[f32]) {
        let spec = self.layout.buckets()[bucket.0 as usize];
        assert_eq!(gradient.len(), spec.len, "the gradient of {bucket} has the wrong length");
        let encoding = self.encoding(bucket);
        let encoder = self.encoders.of(bucket);
        let len = encoder.map_or_else(|| encoding.encoded_len(gradient.len()), |e| e.encoded_len());
        // First: the room that it waits for comes with a buffer that is free again.
        self.counters.waited += self.window.enter(len);
        let begin = Moment::now();
        let encoders = &mut self.encoders;
        let payload = self.pool.bytes(len, |out| {
            encoders.encode((bucket, spec.kind), step, gradient, encoding, out);
        });
        let stage = if encoding == Encoding::F32 { Stage::Copy } else { Stage::Encode };
        let there = Moment::now();
        self.note(stage, (begin, there), step, bucket, len);
        self.push_payload(bucket, step, payload, there);
    }

    /// Says how this worker encodes; to be called before its first push. `layout` has the model's tensors, in which
    /// powersgd finds its matrices; without this call it finds none. `feedback`: what a push leaves out goes with a later one
    /// (error feedback); without this call the job's encoding decides ([`Encoding::feeds_back`]). What is held back is let go
    /// when this worker's session is lost: it goes on as one that begins anew.
    ///
    /// # Panics
    /// When the layout has other buckets than the job.
    pub fn encode_by(&mut self, layout: &Layout, feedback: bool) {
        assert_eq!(layout.buckets(), self.layout.buckets(), "the model's layout is not the job's");
        self.encoders = Encoders::new(&self.options.job, layout, self.options.worker, feedback);
    }

    /// How a device should write a bucket's values for [`Self::push_encoded`]; `None` where they must come to
    /// [`Self::push`] as they are, since this worker keeps something of each push.
    pub fn device_encoding(&self, bucket: BucketId) -> Option<Encoding> {
        let kind = self.layout.buckets()[bucket.0 as usize].kind;
        (!self.encoders.keeps(bucket, kind)).then(|| self.encoding(bucket))
    }

    /// How a bucket's values are written.
    pub fn encoding(&self, bucket: BucketId) -> Encoding {
        self.options.job.encoding(self.layout.buckets()[bucket.0 as usize].kind)
    }

    /// As [`Self::push`], of a gradient that is written already, in [`Self::encoding`]. Nothing is copied: the bytes go to the
    /// network from where they are, and are dropped with their ack.
    ///
    /// # Panics
    /// When there are not as many bytes as the bucket's values take.
    pub fn push_encoded(&mut self, bucket: BucketId, step: Step, payload: Bytes) {
        let spec = self.layout.buckets()[bucket.0 as usize];
        let len = self.encoding(bucket).encoded_len(spec.len);
        assert_eq!(payload.len(), len, "the gradient of {bucket} has the wrong length");
        self.counters.waited += self.window.enter(len);
        self.push_payload(bucket, step, payload, Moment::now());
    }

    fn push_payload(&mut self, bucket: BucketId, step: Step, payload: Bytes, there: Moment) {
        self.counters.bytes_pushed += payload.len() as u64;
        let shard = placement::shard_of(bucket, self.options.shards);
        let Some(seq) = self.seq.get_mut(&shard) else { return };
        *seq += 1;
        let version = self.versions[bucket.0 as usize];
        let push = Push {
            seq: *seq,
            step: step.0,
            bucket: bucket.0,
            version,
            sum_of_squares: 0.0,
            payload,
            samples: self.samples,
        };
        // Applied on arrival and clipped by the norm of the worker's whole gradient: nothing can go out before
        // the last bucket is known. (BSP clips the mean; there the servers exchange the norm.)
        if self.options.job.clip.norm.is_some() && self.any_asynchronous() {
            self.held.push((push, there));
            if self.held.len() == self.layout.buckets().len() {
                self.release();
            }
        } else {
            self.send(shard, Command::Push(push, there));
        }
    }

    /// Every ack from now on, in the order of each shard's stream. Watched from before the first push, they say
    /// exactly which pushes the servers have taken responsibility for.
    pub fn acks(&self) -> mpsc::Receiver<Acked> {
        let (tell, acks) = mpsc::channel();
        for link in self.links.values() {
            let _ = link.send(Command::Watch(tell.clone()));
        }
        acks
    }

    fn release(&mut self) {
        let buckets = self.layout.buckets();
        let trained = |p: &&Push| buckets[p.bucket as usize].kind == TensorKind::Param;
        // Of the values as the servers decode them.
        let squares = |p: &Push| {
            let spec = buckets[p.bucket as usize];
            sum_of_squares(&p.payload.clone().into(), self.options.job.encoding(spec.kind), spec.len)
                .expect("this client has encoded it")
        };
        // Added up as the servers do for BSP, by shard and in it by bucket, whatever order the backward pass has:
        // the last bit of the sum depends on it, and one worker must get the same bits in every mode.
        let mut parts = BTreeMap::<ShardId, BTreeMap<u32, f64>>::new();
        for p in self.held.iter().map(|(p, _)| p).filter(trained) {
            let shard = placement::shard_of(BucketId(p.bucket), self.options.shards);
            parts.entry(shard).or_default().insert(p.bucket, squares(p));
        }
        let total: f64 = parts.values().map(|buckets| buckets.values().sum::<f64>()).sum();
        for (mut p, there) in std::mem::take(&mut self.held) {
            p.sum_of_squares = total;
            self.send(placement::shard_of(BucketId(p.bucket), self.options.shards), Command::Push(p, there));
        }
    }

    /// Asks for the weights after step `done` before its pushes go out, so that a bucket's weights come back while others
    /// are still pushed. What comes waits in memory for the [`Self::pull`] of `done`, which must follow.
    ///
    /// Does nothing where it would not pay or change what is read: for a model that would fill the memory, and in the
    /// modes in which a pull that comes later reads fresher weights.
    pub fn ask_ahead(&mut self, done: Step) {
        let bytes = self.layout.len() * F32_BYTES;
        if self.mode().1.averages() && bytes <= limits::PULL_AHEAD_BYTES {
            self.ahead = Some((done, Vec::new()));
            self.ask(done, false, false, self.holds.is_some(), &[]);
        }
    }

    /// Asks for the weights of these buckets after step `done`, for the [`Self::pull_buckets`] of the same that comes later.
    /// Does nothing where they would fill the memory that they wait in.
    pub fn ask_for_buckets(&mut self, done: Step, only: &[BucketId]) {
        let len = |b: &BucketId| self.layout.bucket(*b).map_or(0, |s| s.len);
        if only.iter().map(len).sum::<usize>() * F32_BYTES <= limits::PULL_AHEAD_BYTES {
            self.ahead = Some((done, only.to_vec()));
            self.ask(done, false, false, false, only);
        }
    }

    /// Asks every shard, or those that have buckets of `only`. `holds`: the buffer of the last pull is to be filled, and is as
    /// that pull left it.
    fn ask(&mut self, done: Step, last: bool, section: bool, holds: bool, only: &[BucketId]) {
        let now = Moment::now();
        let said = self.loss.take();
        for (shard, link) in &self.links {
            let of_shard =
                |b: &usize| placement::shard_of(BucketId(*b as u32), self.options.shards) == *shard;
            let here: Vec<u32> = only.iter().map(|b| b.0).filter(|b| of_shard(&(*b as usize))).collect();
            if here.is_empty() && !only.is_empty() {
                continue;
            }
            let versions: Vec<u64> =
                (0..self.versions.len()).filter(of_shard).map(|b| self.versions[b]).collect();
            let have = if holds { versions } else { Vec::new() };
            let loss = said.filter(|_| *shard == ShardId(0));
            let pull = Pull { done: done.0, r#final: last, section, have, loss, only: here };
            let _ = link.send(Command::Pull(pull, now));
        }
    }

    /// The next pull brings every bucket: to be called where `weights` was changed since the last one.
    pub fn forget(&mut self) {
        self.holds = None;
    }

    /// Waits until the consistency rule lets a worker that finished `done` steps go on, and writes the weights.
    ///
    /// A bucket that has not changed since the last pull into the same buffer is not sent again: `weights` must be as
    /// that pull left it, or [`Self::forget`] be called before.
    pub fn pull(&mut self, done: Step, weights: &mut [f32]) -> Result<Pulled, ClientError> {
        self.pull_any(done, false, false, weights, &[])
    }

    /// As [`Self::pull`], of these buckets only, by rising id: the rule is that of their own steps. Into the buffer of the
    /// pull before.
    pub fn pull_buckets(
        &mut self,
        done: Step,
        only: &[BucketId],
        weights: &mut [f32],
    ) -> Result<Pulled, ClientError> {
        self.pull_any(done, false, false, weights, only)
    }

    /// As [`Self::pull`], at a step of which a checkpoint is due: the shards keep an image of it before anyone
    /// goes on. Every worker of the job must ask for the same steps.
    pub fn pull_for_checkpoint(&mut self, done: Step, weights: &mut [f32]) -> Result<Pulled, ClientError> {
        self.pull_any(done, false, true, weights, &[])
    }

    /// Waits until every push is acknowledged, for a worker that goes on without a pull: a push is refused until the one of
    /// the step before is in. Where the session was lost meanwhile, the worker has joined anew; gives the step that it goes
    /// on from, once it has pulled.
    pub fn settle(&mut self) -> Result<Option<Step>, ClientError> {
        let began = Instant::now();
        let settled = self.flush();
        self.counters.waited += began.elapsed();
        settled
    }

    /// The smallest version over the buckets of the last pull: so many updates are in every weight.
    pub fn version(&self) -> Version {
        Version(self.versions.iter().copied().min().unwrap_or(0))
    }

    /// Waits until every member has finished, and writes the final weights.
    pub fn pull_final(&mut self, done: Step, weights: &mut [f32]) -> Result<Pulled, ClientError> {
        self.pull_any(done, true, false, weights, &[])
    }

    fn pull_any(
        &mut self,
        mut done: Step,
        last: bool,
        mut section: bool,
        weights: &mut [f32],
        only: &[BucketId],
    ) -> Result<Pulled, ClientError> {
        let began = Instant::now();
        let mut pulled = Pulled { done, slowest: Step(u64::MAX), section, ..Pulled::default() };
        let into = Some((weights.as_ptr() as usize, weights.len()));
        let holds = self.holds == into;
        let asked = self.ahead.take();
        let ahead = asked.is_some_and(|(step, of)| step == done && of == only) && !last && !section;
        if ahead && self.holds.is_some() && !holds {
            let why = "weights that are asked for ahead are pulled into the buffer of the pull before";
            return Err(ClientError::Options(why.into()));
        }
        if !ahead {
            self.ask(done, last, section, holds && only.is_empty(), only);
        }
        let before = self.holds.take(); // until it is filled
        let mut waiting: BTreeSet<ShardId> = match only {
            [] => self.links.keys().copied().collect(),
            some => some.iter().map(|b| self.shard_of(*b)).collect(),
        };
        // What it has of the others does not change, unless it must join anew.
        let mut into = if only.is_empty() { into } else { before };
        let mut clock = Step(u64::MAX);
        while !waiting.is_empty() {
            match self.next()? {
                Event::Weights(shard, w, payload) => {
                    if w.last {
                        waiting.remove(&shard);
                        self.note_mode(shard, &w);
                        clock = clock.min(Step(w.clock));
                        pulled.slowest = pulled.slowest.min(Step(w.slowest));
                        pulled.stop |= w.stop;
                        pulled.section &= w.section;
                        pulled.section_in_part |= w.section;
                        pulled.finishers = w.finishers.iter().map(|w| WorkerId(*w)).collect();
                    }
                    if self.take(shard, &w, &payload, weights)? {
                        pulled.changed.insert(BucketId(w.bucket));
                    }
                }
                Event::Reported(r) => self.reported(r),
                // A new leader: the link has asked again.
                Event::Opened { new: false, .. } => {}
                Event::Opened { new: true, .. } | Event::SessionLost => {
                    self.reset();
                    done = self.opened()?;
                    let changed = std::mem::take(&mut pulled.changed);
                    pulled = Pulled {
                        done,
                        slowest: Step(u64::MAX),
                        rejoined: true,
                        changed,
                        ..Pulled::default()
                    };
                    waiting = self.links.keys().copied().collect();
                    clock = Step(u64::MAX);
                    section = false; // it went on from another step
                    self.ask(done, last, section, false, &[]);
                    into = Some((weights.as_ptr() as usize, weights.len()));
                }
                Event::PassedOver(n) => self.counters.passed_over += n,
                Event::Flushed(_) | Event::Taken(_) | Event::Resumed(..) | Event::Left(_) => {}
                Event::Failed(e) => return Err(e),
            }
        }
        self.tell_mode();
        if self.options.job.round.passes_over() && !last && clock < Step(u64::MAX) {
            // Rounds were closed without this worker: it goes on where all its shards are.
            pulled.done = pulled.done.max(clock);
        }
        self.holds = into;
        pulled.section_in_part &= !pulled.section;
        self.counters.waited += began.elapsed();
        Ok(pulled)
    }

    /// The mode in force, as the shards have said with the last pull, and how often it was switched.
    pub fn mode(&self) -> (u64, Mode) {
        self.modes.latest()
    }

    /// The mean training loss of the step that the next pull comes behind, for the rule that chooses the staleness bound.
    pub fn note_loss(&mut self, loss: f32) {
        self.loss = Some(loss);
    }

    /// Whether a shard applies pushes as they come.
    fn any_asynchronous(&self) -> bool {
        self.links.keys().any(|shard| !self.modes.of(*shard).averages())
    }

    fn note_mode(&mut self, shard: ShardId, w: &Weights) {
        // One that this version does not know is none that it could follow: the servers' rules hold all the same.
        if let Ok(mode) = w.mode.parse() {
            self.modes.hear(shard, w.mode_number, mode);
        }
    }

    /// Tells the shards that have not come to the last switch.
    fn tell_mode(&self) {
        let (number, mode) = self.mode();
        for shard in self.modes.behind() {
            let switch = SwitchMode { number, mode: mode.to_string() };
            self.send(shard, Command::Once(wrap(to_shard::Kind::SwitchMode(switch))));
        }
    }

    /// Writes what has come; false where it is there already.
    fn take(
        &mut self,
        shard: ShardId,
        w: &Weights,
        payload: &Payload,
        weights: &mut [f32],
    ) -> Result<bool, ClientError> {
        let broken = |what: String| ClientError::Protocol { shard, what };
        let spec = self
            .layout
            .bucket(BucketId(w.bucket))
            .ok_or_else(|| broken(format!("weights of bucket {}, which the model has not", w.bucket)))?;
        if w.not_modified {
            return Ok(false); // it is there
        }
        let into = weights
            .get_mut(spec.range())
            .filter(|into| into.len() * F32_BYTES == payload.len())
            .ok_or_else(|| broken(format!("{} bytes for bucket {}", payload.len(), w.bucket)))?;
        let begin = Moment::now();
        payload.reader().values(into).map_err(|e| broken(e.to_string()))?;
        self.note(Stage::Decode, (begin, Moment::now()), Step(w.done), BucketId(w.bucket), payload.len());
        self.versions[w.bucket as usize] = w.version;
        self.counters.bytes_pulled += payload.len() as u64;
        Ok(true)
    }

    fn note(&self, stage: Stage, (begin, end): (Moment, Moment), step: Step, bucket: BucketId, bytes: usize) {
        let shard = self.shard_of(bucket);
        let (bucket, worker) = (Some(bucket), Some(self.options.worker));
        self.stages.note(Span { stage, begin, end, step, shard, bucket, worker, bytes: bytes as u64 });
    }

    /// Gives this worker's share of a held-out evaluation to shard 0, which adds the shares up.
    pub fn report(&mut self, epoch: u64, loss_sum: f64, correct: u64, count: u64) {
        let report = Report { epoch, loss_sum, correct, count };
        self.send(ShardId(0), Command::Sticky(wrap(to_shard::Kind::Report(report))));
    }

    /// Evaluations that became complete since the last call.
    pub fn evaluations(&mut self) -> Vec<Reported> {
        while let Ok(e) = self.events.try_recv() {
            match e {
                Event::Reported(r) => self.reported(r),
                // A lost session or a failure, say: the next pull must hear of it, or it waits for ever.
                other => self.pending.push_back(other),
            }
        }
        std::mem::take(&mut self.evaluations)
    }

    /// A new leader repeats the latest one, since the answer may have been lost with the old.
    pub(crate) fn reported(&mut self, r: Reported) {
        if self.reported.insert(r.epoch) {
            self.evaluations.push(r);
        }
    }

    /// From now on what waits (for weights, for acks, for a chunk) ends with [`ClientError::Interrupted`] once this is set.
    pub fn interrupted_by(&mut self, interrupt: Arc<AtomicBool>) {
        self.interrupt = Some(interrupt);
    }

    /// Ends this worker's session before it has done all its steps: the others need not wait for its lease to end. Waits
    /// at most so long for every shard's word; false where one has not given it, whose lease then ends by itself. Nothing
    /// can be asked of this client afterwards.
    pub fn leave(&mut self, patience: Duration) -> bool {
        let until = Instant::now() + patience;
        for shard in self.links.keys() {
            self.send(*shard, Command::Sticky(wrap(to_shard::Kind::Leave(Leave {}))));
        }
        let mut waiting: BTreeSet<ShardId> = self.links.keys().copied().collect();
        while !waiting.is_empty() {
            match self.events.recv_timeout(until.saturating_duration_since(Instant::now())) {
                Ok(Event::Left(shard)) => drop(waiting.remove(&shard)),
                // Links hold back weights that nobody takes, and say nothing else meanwhile.
                Ok(Event::Weights(_, _, payload)) => self.backlog.taken(payload.len()),
                Ok(_) => {}
                Err(_) => return false,
            }
        }
        true
    }

    /// Tells every shard that this worker has done all its steps.
    pub fn finish(&mut self) {
        for shard in self.links.keys() {
            self.send(*shard, Command::Sticky(wrap(to_shard::Kind::Finish(Finish {}))));
        }
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        self.end.take();
        if let Some(io) = self.io.take() {
            let _ = io.join();
        }
    }
}

fn wrap(kind: to_shard::Kind) -> ToShard {
    ToShard { kind: Some(kind) }
}
