//! The API of a training loop. Calls block; the network runs on its own thread, so pushes go out during the
//! backward pass.

use crate::{
    acks::Acked,
    connect::{Channels, Transport},
    error::ClientError,
    initial::Initial,
    interrupt::Interrupt,
    io::{self, Io, IoOptions},
    pool::Pool,
};
use bytes::Bytes;
use paraft_common::{
    BucketId, Encoding, Layout, Mode, ShardId, Step, WorkerId,
    codec::{F32_BYTES, copy_f32_le},
    config::ServerJob,
    placement,
    retry::RetryPolicy,
};
use paraft_lanes::shared::{Memory, SHARED_BYTES};
use paraft_proto::limits;
use paraft_session::{
    Arrived, Encoders, Event, Next, Pull, Pulled, Reported, Session, SessionError, sum_of_parts,
};
use paraft_trace::{Moment, Span, Stage, Stages};
use std::{
    ops::Range,
    sync::{Arc, mpsc},
    time::{Duration, Instant},
};

/// Number of a bucket's buffers that the client keeps for later pushes.
const POOLED: usize = 16;

/// How long the client waits for another worker to supply the missing parts of a step's gradient norm, when this
/// worker's processes do not know all parts.
const NORM_TIMEOUT: Duration = Duration::from_secs(2);

/// Options for joining a job.
#[derive(Clone, Debug)]
pub struct ClientOptions {
    /// All servers, in the servers' own order.
    pub servers: Vec<String>,
    /// Number of the fleet's shards.
    pub shards: u32,
    /// Number of each shard's replicas.
    pub replicas: u32,
    /// This worker's rank.
    pub worker: WorkerId,
    /// The servers' form of the job.
    pub job: ServerJob,
    /// The device that the worker computes on, for display: `cpu`, `cuda:0`.
    pub device: String,
    /// TCP, or Unix sockets where available.
    pub transport: Transport,
    /// How long the client waits for a leader before it fails.
    pub timeout: Duration,
    /// How long the client tolerates another process connected as this worker. That process may have just ended, or
    /// its lease may have to expire first.
    pub handover: Duration,
    /// The model stages that this process holds, when other processes of the worker hold the rest. `None`: all
    /// stages.
    pub stages: Option<Range<usize>>,
}

/// A worker's session with all shards of a job.
pub struct Client {
    options: ClientOptions,
    layout: Layout,
    io: Io,
    pool: Arc<Pool>,
    /// Shared memory from which a server on this host reads pushes.
    memory: Option<Arc<Memory>>,
    encoders: Encoders,
    /// The buffer that the last pull filled: address and length.
    holds: Option<(usize, usize)>,
    stages: Arc<Stages>,
    counters: Counters,
    /// Ends every wait once it is set.
    interrupt: Option<Arc<dyn Interrupt>>,
}

/// The destination of pulled weights.
pub trait Places {
    /// The destination of a bucket's values; `None`: the caller does not want them.
    fn place(&mut self, bucket: BucketId) -> Option<&mut [f32]>;
    /// The values at this place are complete. `changed`: the client wrote them; otherwise they equal those of the
    /// previous pull.
    fn placed(&mut self, bucket: BucketId, changed: bool) {
        let _ = (bucket, changed);
    }
}

/// Identifies a buffer. The servers do not send a bucket again if it is unchanged since the last pull into the same
/// buffer.
pub fn address(buffer: &[f32]) -> (usize, usize) {
    (buffer.as_ptr() as usize, buffer.len())
}

/// Wants no values: the caller only waits for the pull's answer.
impl Places for () {
    fn place(&mut self, _: BucketId) -> Option<&mut [f32]> {
        None
    }
}

/// The part of a gradient norm that the worker's processes know together.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Norm {
    /// The sum of squares of that part.
    pub sum_of_squares: f64,
    /// Whether that part is the whole gradient.
    pub whole: bool,
}

/// Shares the parts of a step's norm between the worker's processes. The client calls it once in each pull, with
/// the parts that this process's shards have sent and `true`. If the pull is answered without them, the client
/// passes the squares of what this process has pushed, as far as it knows them; the list is complete where shards
/// apply pushes one by one. Returns what the worker's processes know together.
pub type Shares<'a> = dyn FnMut(&[(ShardId, f64)], bool) -> Result<Norm, ClientError> + 'a;

/// Payload bytes in both directions, and waiting time.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Counters {
    /// Payload bytes pushed.
    pub bytes_pushed: u64,
    /// Payload bytes pulled.
    pub bytes_pulled: u64,
    /// Time spent in [`Client::pull`], and in [`Client::push`] while its window was full.
    pub waited: Duration,
    /// Sessions that were lost and reopened.
    pub rejoins: u64,
    /// Pushes that were dropped because they arrived after the end of their rounds.
    pub dropped: u64,
    /// Skipped steps up to the last pull: skipped by this worker ([`Client::skip`]) or, in rounds, by any worker.
    pub skipped: u64,
}

/// Shared memory for unacknowledged pushes; `None`: the socket carries the payloads.
fn push_memory(layout: &Layout, transport: Transport) -> Option<Arc<Memory>> {
    let bytes = layout.len() * F32_BYTES;
    if transport != Transport::Auto || bytes < SHARED_BYTES {
        return None;
    }
    // Two steps of a small model may be in flight. Each bucket may leave a partial page.
    let bytes = (2 * bytes).min(limits::PUSH_WINDOW_BYTES) + 2 * layout.buckets().len().min(1024) * 4096;
    Memory::new(bytes).inspect_err(|error| tracing::debug!(%error, "no shared memory for pushes")).ok()
}

impl Client {
    /// Like [`Self::join_from`], with fresh weights.
    pub fn join(options: ClientOptions, initial: &[f32]) -> Result<(Self, Step), ClientError> {
        Self::join_from(options, Initial::fresh(initial.to_vec()))
    }

    /// Joins the job on every shard that holds buckets. The servers take `initial` if they have no weights yet.
    /// Returns the client and the step to continue from.
    ///
    /// Waits up to `timeout` for leaders. An error names each address and its cause.
    pub fn join_from(options: ClientOptions, initial: Initial) -> Result<(Self, Step), ClientError> {
        Self::join_until(options, initial, None)
    }

    /// Like [`Self::join_from`], but this call and every later wait end with [`ClientError::Interrupted`] once
    /// `interrupt` is set. `initial` may be empty if another worker supplies the weights.
    pub fn join_until(
        options: ClientOptions,
        initial: Initial,
        interrupt: Option<Arc<dyn Interrupt>>,
    ) -> Result<(Self, Step), ClientError> {
        let bad = |m: String| ClientError::Options(m);
        if options.servers.is_empty() {
            return Err(bad("the list of servers is empty".into()));
        }
        let layout = options.job.layout();
        let brings = initial != Initial::default();
        if brings && initial.weights.len() != layout.len() {
            let (given, len) = (initial.weights.len(), layout.len());
            return Err(bad(format!("{given} initial weights for a model of {len}")));
        }
        let (slots, params) = (options.job.slots(), layout.params_len());
        if !initial.slots.is_empty()
            && (initial.slots.len() != slots || initial.slots.iter().any(|s| s.len() != params))
        {
            return Err(bad(format!("the initial state is not that of {slots} slots of {params} values")));
        }
        let job_text = options.job.to_toml().map_err(|e| bad(e.to_string()))?;
        let session = Session::new(paraft_session::Options {
            servers: options.servers.clone(),
            shards: options.shards,
            replicas: options.replicas,
            worker: options.worker,
            job: options.job.clone(),
            job_text,
            retry: RetryPolicy {
                base: Duration::from_millis(10),
                max: Duration::from_millis(100),
                deadline: options.timeout,
            },
            handover: options.handover,
            stages: options.stages.clone(),
            draw: Box::new(rand::random),
        });
        let initial = Arc::new(initial);
        let shards = session.shards();
        let buckets = |shard| placement::buckets_of(&layout, shard, options.shards).into();
        let initial =
            shards.filter(|_| brings).map(|shard| (shard, (initial.clone(), buckets(shard)))).collect();
        // Weights asked for ahead wait in memory until the pull. Larger models are received bucket by bucket.
        let own_len = session.own_len();
        let ahead = own_len * F32_BYTES <= limits::PULL_AHEAD_BYTES;
        let stages = Arc::new(Stages::default());
        let memory = push_memory(&layout, options.transport);
        let io = Io::start(
            session,
            IoOptions {
                worker: options.worker,
                channels: Channels::new(options.transport),
                heartbeat: options.job.heartbeat(),
                device: options.device.clone(),
                initial,
                untaken: if ahead { usize::MAX } else { limits::PULL_AHEAD_BYTES },
                stages: stages.clone(),
                memory: memory.clone(),
            },
        );
        let mut client = Self {
            pool: Pool::new(POOLED),
            memory,
            encoders: Encoders::new(&options.job, &layout, options.worker),
            io: io.map_err(|e| bad(format!("no I/O thread: {e}")))?,
            options,
            layout,
            holds: None,
            stages,
            counters: Counters::default(),
            interrupt,
        };
        client.io.session().join();
        loop {
            if let Event::Joined(start) = client.next()? {
                return Ok((client, start));
            }
        }
    }

    /// The job's buckets.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// This worker's rank.
    pub fn worker(&self) -> WorkerId {
        self.options.worker
    }

    /// The founding number of shard 0, which identifies the job to the control group.
    pub fn founding(&self) -> u64 {
        self.io.session().founding()
    }

    /// The shard that holds a bucket.
    pub fn shard_of(&self, bucket: BucketId) -> ShardId {
        placement::shard_of(&self.layout, bucket, self.options.shards)
    }

    /// The time that this worker spends in the stages of its gradients. The model's owner records `ready`, the
    /// client the other stages.
    pub fn stages(&self) -> &Arc<Stages> {
        &self.stages
    }

    /// Bytes moved and time waited so far.
    pub fn counters(&self) -> Counters {
        let session = self.io.session();
        let (rejoins, dropped, skipped) = (session.rejoins(), session.dropped(), session.skipped());
        Counters { rejoins, dropped, skipped, ..self.counters }
    }

    /// The session's next event.
    fn next(&mut self) -> Result<Event, ClientError> {
        loop {
            if let Some(event) = self.io.next(self.interrupt.as_deref(), None)? {
                return Ok(event);
            }
        }
    }

    /// The number of samples behind the next pushes' gradients. The servers count them.
    pub fn weigh(&mut self, samples: usize) {
        self.io.session().weigh(samples);
    }

    /// Sets the learning rates for the next pushes: one per parameter group, or one if the job has no groups. They
    /// replace the optimizer's rates times the schedule's factor. Empty: the job's own rates. A round uses the mean
    /// of its pushes' rates.
    ///
    /// # Panics If the number of rates is not the number of groups.
    pub fn rates(&mut self, rates: Vec<f64>) {
        self.io.session().rates(rates);
    }

    /// The versions of the last pull, as [`Self::computed_at`] takes them.
    pub fn versions(&self) -> Vec<u64> {
        self.io.session().versions()
    }

    /// States that the next pushes' gradients are computed at these weight versions, which are older than the last
    /// pull. The servers measure the delay from them. `None`: the versions of the last pull, which is the default.
    pub fn computed_at(&mut self, versions: Option<Vec<u64>>) {
        self.io.session().computed_at(versions);
    }

    /// Pushes one bucket's gradient for `step`. Returns at once unless more than
    /// [`PUSH_WINDOW_BYTES`](limits::PUSH_WINDOW_BYTES) wait for their acks. The client copies the payload once,
    /// into the bytes that it sends, in the job's encoding of the bucket.
    ///
    /// # Panics If `gradient` does not have the bucket's length.
    pub fn push(&mut self, bucket: BucketId, step: Step, gradient: &[f32]) {
        let spec = self.layout.buckets()[bucket.0 as usize];
        assert_eq!(gradient.len(), spec.len, "the gradient of {bucket} has the wrong length");
        let encoding = self.encoding(bucket);
        let encoder = self.encoders.of(bucket);
        let len = encoder.map_or_else(|| encoding.encoded_len(gradient.len()), |e| e.encoded_len());
        // Wait first: the room becomes available together with a free buffer.
        self.counters.waited += self.io.room(len, self.interrupt.as_deref());
        let begin = Moment::now();
        let slot = self.memory.as_ref().filter(|_| encoding == Encoding::F32).and_then(|m| m.slot(len));
        let payload = match slot {
            Some(mut slot) => {
                copy_f32_le(gradient, slot.as_mut());
                slot.freeze()
            }
            None => self.pool.bytes(len, |out| {
                self.encoders.encode(bucket, step, gradient, encoding, out);
            }),
        };
        let stage = if encoding == Encoding::F32 { Stage::Copy } else { Stage::Encode };
        let there = Moment::now();
        self.note(stage, (begin, there), step, bucket, len);
        self.send(bucket, step, payload, there);
    }

    /// Skips `step`, in place of its pushes, for example because the gradient is not finite. The step counts as
    /// pushed. If any worker skips a round, the round changes no weights. Where pushes are applied one by one, only
    /// this worker's push is missing. [`Counters::skipped`] counts it after the step's pull. Encoders keep the
    /// residuals that they hold.
    ///
    /// If the servers refused a push that is not finite, the next pull returns [`Refused`](SessionError::Refused)
    /// with [`WireKind::NotFinite`](paraft_proto::WireKind::NotFinite). The worker can then skip the step and pull
    /// again: the servers skip the buckets of the refused pushes, in rounds too, and apply the others. To skip all
    /// buckets, check the gradient before the first push.
    ///
    /// # Panics If the client pushed something for this step and no push was refused.
    pub fn skip(&mut self, step: Step) {
        self.io.session().skip(io::now(), step);
    }

    /// Sets this worker's encoders. Call it before the first push. `layout` has the model's tensors, in which
    /// powersgd finds its matrices; without this call it finds none.
    ///
    /// # Panics If the layout's buckets differ from the job's.
    pub fn encode_by(&mut self, layout: &Layout) {
        assert_eq!(layout.buckets(), self.layout.buckets(), "the model's layout is not the job's");
        self.encoders = Encoders::new(&self.options.job, layout, self.options.worker);
    }

    /// The encoding in which a device should write a bucket's values for [`Self::push_encoded`]. `None`: pass plain
    /// values to [`Self::push`], because this worker keeps a residual of each push.
    pub fn device_encoding(&self, bucket: BucketId) -> Option<Encoding> {
        self.encoders.of(bucket).is_none().then(|| self.encoding(bucket))
    }

    /// The encoding of a bucket's values.
    pub fn encoding(&self, bucket: BucketId) -> Encoding {
        self.options.job.encoding(self.layout.buckets()[bucket.0 as usize].kind)
    }

    /// Like [`Self::push`], for a gradient that is already encoded in [`Self::encoding`]. Nothing is copied: the
    /// client sends the bytes from where they are, and drops them at their ack.
    ///
    /// # Panics If the payload's length does not match the bucket.
    pub fn push_encoded(&mut self, bucket: BucketId, step: Step, payload: Bytes) {
        let spec = self.layout.buckets()[bucket.0 as usize];
        let len = self.encoding(bucket).encoded_len(spec.len);
        assert_eq!(payload.len(), len, "the gradient of {bucket} has the wrong length");
        self.counters.waited += self.io.room(len, self.interrupt.as_deref());
        self.send(bucket, step, payload, Moment::now());
    }

    fn send(&mut self, bucket: BucketId, step: Step, payload: Bytes, there: Moment) {
        self.counters.bytes_pushed += payload.len() as u64;
        self.io.session().push(Duration::from_nanos(there.0), bucket, step, payload);
    }

    /// All acks from now on, in the order of each shard's stream. If the caller subscribes before the first push,
    /// the acks name exactly the pushes for which the servers have taken responsibility.
    pub fn acks(&self) -> mpsc::Receiver<Acked> {
        let (tell, acks) = mpsc::channel();
        self.io.watch(tell);
        acks
    }

    /// Asks for the weights after step `done` before its pushes go out. The servers can then send a bucket's
    /// weights while the client still pushes others. The weights wait in memory for the [`Self::pull`] of `done`,
    /// which must follow.
    ///
    /// Does nothing if it would not help or would change the result: for a model that would fill the memory, and in
    /// modes where a later pull reads fresher weights.
    pub fn ask_ahead(&mut self, done: Step) {
        let mut session = self.io.session();
        let bytes = session.own_len() * F32_BYTES;
        if session.mode().1.averages() && bytes <= limits::PULL_AHEAD_BYTES {
            session.ask_ahead(io::now(), Pull::of(done), self.holds.is_some());
        }
    }

    /// Asks for weights ahead of a [`Self::pull_by`] with the same argument. Does nothing if the weights would fill
    /// the memory that they wait in.
    pub fn ask(&mut self, pull: Pull) {
        let len = |b: &BucketId| self.layout.bucket(*b).map_or(0, |s| s.len);
        let only = pull.only.iter().map(len).sum();
        let mut session = self.io.session();
        let values = if pull.only.is_empty() { session.own_len() } else { only };
        if values * F32_BYTES <= limits::PULL_AHEAD_BYTES {
            session.ask_ahead(io::now(), pull, false);
        }
    }

    /// The next pull brings every bucket. Call it after changing `weights`.
    pub fn forget(&mut self) {
        self.holds = None;
    }

    /// Waits until the consistency rule lets a worker that has finished `done` steps continue, and writes the
    /// weights.
    ///
    /// The servers do not send a bucket that is unchanged since the last pull into the same buffer. So `weights`
    /// must be as that pull left it; otherwise call [`Self::forget`] before.
    pub fn pull(&mut self, done: Step, weights: &mut [f32]) -> Result<Pulled, ClientError> {
        self.pull_by(Pull::of(done), weights)
    }

    /// Like [`Self::pull`], at a step with a checkpoint: the shards keep an image of the step before any worker
    /// continues. Every worker of the job must ask for the same steps.
    pub fn pull_for_checkpoint(&mut self, done: Step, weights: &mut [f32]) -> Result<Pulled, ClientError> {
        self.pull_by(Pull { checkpoint: true, ..Pull::of(done) }, weights)
    }

    /// Continues from `step`, where the worker's other processes are. Shards that are behind count it as done.
    pub fn advance_to(&mut self, step: Step) {
        self.io.session().advance_to(step);
    }

    /// Waits until all pushes are acknowledged, for a worker that continues without a pull: a server refuses a push
    /// until it has the push of the previous step. If the session was lost meanwhile, the worker joins again;
    /// returns the step from which it continues after a pull.
    pub fn wait_for_acks(&mut self) -> Result<Option<Step>, ClientError> {
        let began = Instant::now();
        self.io.session().settle();
        let settled = loop {
            if let Event::Settled(joined) = self.next()? {
                break joined;
            }
        };
        if settled.is_some() {
            self.encoders.forget();
        }
        self.counters.waited += began.elapsed();
        Ok(settled)
    }

    /// Reports the trained chunk (`done`) and asks for the next one, for a worker that is ready for `epoch` (from
    /// 0).
    ///
    /// Waits until the chunk's pushes are acknowledged, then for the answer. While other workers hold the last
    /// chunks of an epoch, this worker rests: no worker waits for it, and it receives a chunk that is returned.
    pub fn take_chunk(&mut self, epoch: u64, done: Option<u64>) -> Result<Next, ClientError> {
        let began = Instant::now();
        self.io.session().take_chunk(epoch, done);
        let next = loop {
            if let Event::Chunk(next) = self.next()? {
                break next;
            }
        };
        if matches!(next, Next::Rejoined(_)) {
            self.encoders.forget();
        }
        self.counters.waited += began.elapsed();
        Ok(next)
    }

    /// Waits until every member has finished, then writes the final weights.
    pub fn pull_final(&mut self, done: Step, weights: &mut [f32]) -> Result<Pulled, ClientError> {
        self.pull_by(Pull { last: true, ..Pull::of(done) }, weights)
    }

    /// Like [`Self::pull`], with the options of `pull`. A pull of only some buckets writes to the buffer of the
    /// previous pull.
    pub fn pull_by(&mut self, pull: Pull, weights: &mut [f32]) -> Result<Pulled, ClientError> {
        self.pull_held(pull, address(weights), None, |client, arrived| {
            let spec = client.layout.bucket(BucketId(arrived.weights.bucket));
            let into = spec.and_then(|spec| weights.get_mut(spec.range()));
            client.take(arrived, into)
        })
    }

    /// Like [`Self::pull_by`], for weights in the buffer with this [address]; `places` gives the destination of
    /// each bucket.
    ///
    /// If other processes of the worker use the other shards and the job clips by the norm of the whole gradient,
    /// `shares` exchanges the parts of the norm. Those processes pull the same steps in the same order. If `shares`
    /// fails, the pull ends with its error and can be repeated.
    ///
    /// # Errors See [`Self::pull`].
    pub fn pull_parts(
        &mut self,
        pull: Pull,
        buffer: (usize, usize),
        places: &mut dyn Places,
        shares: Option<&mut Shares<'_>>,
    ) -> Result<Pulled, ClientError> {
        self.pull_held(pull, buffer, shares, |client, arrived| {
            let (bucket, changed) = (BucketId(arrived.weights.bucket), !arrived.weights.not_modified);
            client.take(arrived, places.place(bucket))?;
            places.placed(bucket, changed);
            Ok(())
        })
    }

    fn pull_held(
        &mut self,
        pull: Pull,
        buffer: (usize, usize),
        shares: Option<&mut Shares<'_>>,
        take: impl FnMut(&mut Self, &Arrived) -> Result<(), ClientError>,
    ) -> Result<Pulled, ClientError> {
        let (began, step) = (Instant::now(), pull.done);
        let into = Some(buffer);
        let (holds, whole) = (self.holds == into, pull.only.is_empty());
        {
            let mut session = self.io.session();
            if session.is_asked(&pull) && self.holds.is_some() && !holds {
                let why = "weights that are asked for ahead are pulled into the buffer of the pull before";
                return Err(ClientError::Options(why.into()));
            }
            session.pull(io::now(), pull, holds);
        }
        let before = self.holds.take(); // until the pull has filled it
        let pulled = self.receive((began, step), shares, take)?;
        // A partial pull leaves the other buckets as they are, unless the worker had to join again.
        self.holds = if whole || pulled.rejoined { into } else { before };
        Ok(pulled)
    }

    /// The worker has changed its weights since the last pull. The next pull brings all weights, including buckets
    /// without updates.
    pub fn forget_weights(&mut self) {
        self.holds = None;
    }

    /// Whether an interrupted pull has received something. The same pull then brings only the rest.
    pub fn has_begun(&self) -> bool {
        self.io.session().has_begun()
    }

    /// Like [`Self::pull_by`]; `places` gives the destination of each bucket, and unwanted buckets are dropped. The
    /// next pull brings everything that it asks for.
    ///
    /// # Errors See [`Self::pull`].
    pub fn pull_to(&mut self, pull: Pull, places: &mut dyn Places) -> Result<Pulled, ClientError> {
        let (began, step) = (Instant::now(), pull.done);
        self.holds = None;
        self.io.session().pull(io::now(), pull, false);
        self.receive((began, step), None, |client, arrived| {
            let into = places.place(BucketId(arrived.weights.bucket));
            if into.is_none() {
                client.counters.bytes_pulled += arrived.payload.len() as u64;
                return Ok(());
            }
            client.take(arrived, into)
        })
    }

    /// Waits until the pull that started at `began` is answered, and takes each bucket when it arrives.
    fn receive(
        &mut self,
        (began, step): (Instant, Step),
        mut shares: Option<&mut Shares<'_>>,
        mut take: impl FnMut(&mut Self, &Arrived) -> Result<(), ClientError>,
    ) -> Result<Pulled, ClientError> {
        // When part of a norm is unknown: the deadline at which the shards receive the known part.
        let mut late: Option<(Instant, f64)> = None;
        let pulled = loop {
            match self.io.next(self.interrupt.as_deref(), late.map(|(at, _)| at))? {
                Some(Event::Weights(arrived)) => {
                    take(self, &arrived)?;
                    let shard = arrived.shard;
                    drop(arrived);
                    self.io.give_back(shard);
                }
                Some(Event::NormParts(parts)) => {
                    let norm = match shares.take() {
                        Some(shares) => shares(&parts, true)?,
                        None => Norm { sum_of_squares: sum_of_parts(parts), whole: false },
                    };
                    match norm.whole {
                        true => self.io.session().tell_norm(step, norm.sum_of_squares),
                        false => late = Some((Instant::now() + NORM_TIMEOUT, norm.sum_of_squares)),
                    }
                }
                Some(Event::Pulled(pulled)) => break pulled,
                Some(_) => {}
                // The unknown part of the norm was lost with its worker, so the step is clipped by the known part.
                None => {
                    if let Some((_, sum_of_squares)) = late.take() {
                        tracing::warn!(%step, "part of a step's norm is unknown: clipping by the known part");
                        self.io.session().tell_norm(step, sum_of_squares);
                    }
                }
            }
        };
        if pulled.rejoined {
            self.encoders.forget();
        }
        if let Some(shares) = shares.take() {
            let own = self.pushed_squares(step);
            let whole = own.is_some() && self.io.session().is_one_by_one(step);
            shares(own.as_deref().unwrap_or_default(), whole)?;
        }
        self.counters.waited += began.elapsed();
        Ok(pulled)
    }

    /// The sums of squares by shard of a step that this process has pushed completely, if other processes of the
    /// worker hold the rest of the gradient and the job clips by its norm. `None`: this session has not pushed the
    /// whole step.
    pub fn pushed_squares(&self, step: Step) -> Option<Vec<(ShardId, f64)>> {
        self.io.session().pushed_squares(step)
    }

    /// Passes on the sum over all processes of the worker ([`sum_of_parts`]). In modes that apply pushes one by
    /// one, the client sends no push of the step before this call.
    pub fn clip_by(&mut self, step: Step, sum_of_squares: f64) {
        self.io.session().clip_by(io::now(), step, sum_of_squares);
    }

    /// The mode in force at the last pull, and the number of switches so far.
    pub fn mode(&self) -> (u64, Mode) {
        self.io.session().mode()
    }

    /// The mean training loss of the step before the next pull, for the rule that chooses the staleness bound.
    pub fn note_loss(&mut self, loss: f32) {
        self.io.session().note_loss(loss);
    }

    /// Writes the received weights. Servers do not send what the worker already has.
    fn take(&mut self, arrived: &Arrived, into: Option<&mut [f32]>) -> Result<(), ClientError> {
        let (shard, w, payload) = (arrived.shard, &arrived.weights, &arrived.payload);
        let broken = |what: String| -> ClientError { SessionError::Protocol { shard, what }.into() };
        let (step, bucket, len) = (Step(w.done), BucketId(w.bucket), payload.len());
        self.note(Stage::Pull, (io::moment(arrived.asked), io::moment(arrived.at)), step, bucket, len);
        if w.not_modified {
            return Ok(());
        }
        let into = into
            .filter(|into| into.len() * F32_BYTES == len)
            .ok_or_else(|| broken(format!("{len} bytes for {bucket}")))?;
        let begin = Moment::now();
        payload.reader().values(into).map_err(|e| broken(e.to_string()))?;
        self.note(Stage::Decode, (begin, Moment::now()), step, bucket, len);
        self.counters.bytes_pulled += len as u64;
        Ok(())
    }

    fn note(&self, stage: Stage, (begin, end): (Moment, Moment), step: Step, bucket: BucketId, bytes: usize) {
        let shard = self.shard_of(bucket);
        let (bucket, worker) = (Some(bucket), Some(self.options.worker));
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

    /// Reports this worker's share of a held-out evaluation to shard 0, which adds the shares.
    pub fn report(&mut self, epoch: u64, loss_sum: f64, correct: u64, count: u64) {
        self.io.session().report(epoch, loss_sum, correct, count);
    }

    /// Evaluations that became complete since the last call.
    pub fn evaluations(&mut self) -> Vec<Reported> {
        self.io.session().evaluations()
    }

    /// Ends this worker's session before its last step, so that the other workers need not wait for its lease to
    /// expire. Waits up to `timeout` for every shard's confirmation. Returns false if a shard has not confirmed;
    /// there the lease expires by itself. The client must not be used afterwards.
    pub fn leave(&mut self, timeout: Duration) -> bool {
        let until = Instant::now() + timeout;
        self.io.session().leave();
        loop {
            match self.io.next(None, Some(until)) {
                Ok(Some(Event::Left)) => return true,
                Ok(Some(_)) => {}
                Ok(None) | Err(_) => return false,
            }
        }
    }

    /// Tells every shard that this worker has done all its steps.
    pub fn finish(&mut self) {
        self.io.session().finish();
    }
}
