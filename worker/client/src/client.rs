//! What a training loop calls. Blocking; the network runs on a thread of its own, so pushes go out while the
//! backward pass goes on.

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

/// Buffers of a bucket that a client keeps for its next pushes.
const POOLED: usize = 16;

/// Shards that wait for the norm of a step, where not all parts of it are known to this worker's processes, wait so long for
/// another worker, which may know them.
const NORM_TIMEOUT: Duration = Duration::from_secs(2);

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
    /// What it computes on, for people: `cpu`, `cuda:0`.
    pub device: String,
    /// TCP, or Unix sockets where they are.
    pub transport: Transport,
    /// Give up after this long without a leader.
    pub timeout: Duration,
    /// How long another process may be connected as this worker before that is an error: one that has just ended, or whose
    /// lease has to end first.
    pub handover: Duration,
    /// The stages of the model that this process has, where others of the same worker have the rest; all.
    pub stages: Option<Range<usize>>,
}

/// A worker's session with all shards of a job.
pub struct Client {
    options: ClientOptions,
    layout: Layout,
    io: Io,
    pool: Arc<Pool>,
    /// Where a server of this host may read pushes.
    memory: Option<Arc<Memory>>,
    encoders: Encoders,
    /// The buffer that the last pull filled: where it is, and its length.
    holds: Option<(usize, usize)>,
    stages: Arc<Stages>,
    counters: Counters,
    /// Set to end what waits.
    interrupt: Option<Arc<dyn Interrupt>>,
}

/// Where pulled weights go.
pub trait Places {
    /// The values of a bucket; `None`: they are not wanted.
    fn place(&mut self, bucket: BucketId) -> Option<&mut [f32]>;
    /// They were written there, or are as the pull before left them.
    fn placed(&mut self, bucket: BucketId, changed: bool) {
        let _ = (bucket, changed);
    }
}

/// Which buffer this is: a bucket that has not changed since a pull into the same one is not sent again.
pub fn address(buffer: &[f32]) -> (usize, usize) {
    (buffer.as_ptr() as usize, buffer.len())
}

/// Nothing is wanted: the pull is to be answered.
impl Places for () {
    fn place(&mut self, _: BucketId) -> Option<&mut [f32]> {
        None
    }
}

/// Of a norm, what the processes of a worker know together.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Norm {
    /// Of what they know.
    pub sum_of_squares: f64,
    /// Whether that is all of the gradient.
    pub whole: bool,
}

/// Called once in a pull: with the parts of the step's norm that this process's shards have said, and that they are all of it. Where the pull
/// is answered without, with the squares of what this process has pushed, as far as it knows them: they are all where the
/// shards apply pushes one by one. Gives what this worker's processes know together.
pub type Shares<'a> = dyn FnMut(&[(ShardId, f64)], bool) -> Result<Norm, ClientError> + 'a;

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
    pub dropped: u64,
    /// Steps that were skipped, by this worker ([`Client::skip`]) or, where they were rounds, by anybody: of those up to the
    /// last pull.
    pub skipped: u64,
}

/// Memory for what may be pushed and not acknowledged; `None`: payloads travel.
fn push_memory(layout: &Layout, transport: Transport) -> Option<Arc<Memory>> {
    let bytes = layout.len() * F32_BYTES;
    if transport != Transport::Auto || bytes < SHARED_BYTES {
        return None;
    }
    // Two steps of a small model may be on their way; of a bucket a page may be left over.
    let bytes = (2 * bytes).min(limits::PUSH_WINDOW_BYTES) + 2 * layout.buckets().len().min(1024) * 4096;
    Memory::new(bytes).inspect_err(|error| tracing::debug!(%error, "no shared memory: pushes travel")).ok()
}

impl Client {
    /// As [`Self::join_from`], with fresh weights.
    pub fn join(options: ClientOptions, initial: &[f32]) -> Result<(Self, Step), ClientError> {
        Self::join_from(options, Initial::fresh(initial.to_vec()))
    }

    /// Joins the job on every shard that holds buckets; `initial` is what the servers get if they have no
    /// weights yet. Returns the client and the step to go on from.
    ///
    /// Waits up to `timeout` for leaders; errors name each address and its cause.
    pub fn join_from(options: ClientOptions, initial: Initial) -> Result<(Self, Step), ClientError> {
        Self::join_until(options, initial, None)
    }

    /// As [`Self::join_from`], given up with [`ClientError::Interrupted`] once `interrupt` is set, as is everything that waits
    /// later. `initial` may be empty where another worker brings the weights.
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
        // A model that is asked for ahead is not taken before it is pulled; of a larger one this thread waits for each bucket.
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

    /// What names the job to the control group: the founding of shard 0 that it runs in.
    pub fn founding(&self) -> u64 {
        self.io.session().founding()
    }

    /// The shard that holds a bucket.
    pub fn shard_of(&self, bucket: BucketId) -> ShardId {
        placement::shard_of(&self.layout, bucket, self.options.shards)
    }

    /// What this worker spends in the stages of its gradients' road. Who has the model notes `ready`, the client the
    /// others.
    pub fn stages(&self) -> &Arc<Stages> {
        &self.stages
    }

    /// What was moved and waited for so far.
    pub fn counters(&self) -> Counters {
        let session = self.io.session();
        let (rejoins, dropped, skipped) = (session.rejoins(), session.dropped(), session.skipped());
        Counters { rejoins, dropped, skipped, ..self.counters }
    }

    /// The next thing that comes of what is waited for.
    fn next(&mut self) -> Result<Event, ClientError> {
        loop {
            if let Some(event) = self.io.next(self.interrupt.as_deref(), None)? {
                return Ok(event);
            }
        }
    }

    /// From how many samples the gradients of the next pushes are computed: where rounds weigh by samples, it counts.
    pub fn weigh(&mut self, samples: usize) {
        self.io.session().weigh(samples);
    }

    /// The rates at which the next pushes are to be applied, one for each group of parameters (one where the job has none), in the
    /// place of the optimizer's times the schedule's factor. None: at the job's own. A round takes the mean of its pushes'.
    ///
    /// # Panics
    /// When they are not as many as the groups.
    pub fn rates(&mut self, rates: Vec<f64>) {
        self.io.session().rates(rates);
    }

    /// The versions of the last pull, as [`Self::computed_at`] takes them.
    pub fn versions(&self) -> Vec<u64> {
        self.io.session().versions()
    }

    /// The gradients of the next pushes are computed at weights of these versions, which were pulled before the ones that the worker has:
    /// their delay is counted from there. None: at those of the last pull, as at first.
    pub fn computed_at(&mut self, versions: Option<Vec<u64>>) {
        self.io.session().computed_at(versions);
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

    /// Says that this worker has nothing for `step`, in the place of its pushes: its gradient was not finite, say. It counts as
    /// pushed. A round in which anybody skips changes nothing, for nobody; where pushes are applied one by one only this
    /// worker's is left out. [`Counters::skipped`] tells after the step's pull. What encoders hold back stays.
    ///
    /// A pull says [`Refused`](SessionError::Refused) with [`WireKind::NotFinite`](paraft_proto::WireKind::NotFinite) where a
    /// push was refused that is not finite. Whoever skips the step then, and pulls again, goes on: the buckets of these pushes
    /// are skipped, in rounds too, and those of the others are not. To leave all of them as they are, look before the first push.
    ///
    /// # Panics
    /// When something was pushed for this step, and nothing of it refused.
    pub fn skip(&mut self, step: Step) {
        self.io.session().skip(io::now(), step);
    }

    /// Says how this worker encodes; to be called before its first push. `layout` has the model's tensors, in which
    /// powersgd finds its matrices; without this call it finds none.
    ///
    /// # Panics
    /// When the layout has other buckets than the job.
    pub fn encode_by(&mut self, layout: &Layout) {
        assert_eq!(layout.buckets(), self.layout.buckets(), "the model's layout is not the job's");
        self.encoders = Encoders::new(&self.options.job, layout, self.options.worker);
    }

    /// How a device should write a bucket's values for [`Self::push_encoded`]; `None` where they must come to
    /// [`Self::push`] as they are, since this worker keeps something of each push.
    pub fn device_encoding(&self, bucket: BucketId) -> Option<Encoding> {
        self.encoders.of(bucket).is_none().then(|| self.encoding(bucket))
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
        self.counters.waited += self.io.room(len, self.interrupt.as_deref());
        self.send(bucket, step, payload, Moment::now());
    }

    fn send(&mut self, bucket: BucketId, step: Step, payload: Bytes, there: Moment) {
        self.counters.bytes_pushed += payload.len() as u64;
        self.io.session().push(Duration::from_nanos(there.0), bucket, step, payload);
    }

    /// Every ack from now on, in the order of each shard's stream. Watched from before the first push, they say
    /// exactly which pushes the servers have taken responsibility for.
    pub fn acks(&self) -> mpsc::Receiver<Acked> {
        let (tell, acks) = mpsc::channel();
        self.io.watch(tell);
        acks
    }

    /// Asks for the weights after step `done` before its pushes go out, so that a bucket's weights come back while others
    /// are still pushed. What comes waits in memory for the [`Self::pull`] of `done`, which must follow.
    ///
    /// Does nothing where it would not pay or change what is read: for a model that would fill the memory, and in the
    /// modes in which a pull that comes later reads fresher weights.
    pub fn ask_ahead(&mut self, done: Step) {
        let mut session = self.io.session();
        let bytes = session.own_len() * F32_BYTES;
        if session.mode().1.averages() && bytes <= limits::PULL_AHEAD_BYTES {
            session.ask_ahead(io::now(), Pull::of(done), self.holds.is_some());
        }
    }

    /// Asks for weights ahead of a [`Self::pull_by`] of the same. Does nothing where they would fill the memory that they wait
    /// in.
    pub fn ask(&mut self, pull: Pull) {
        let len = |b: &BucketId| self.layout.bucket(*b).map_or(0, |s| s.len);
        let only = pull.only.iter().map(len).sum();
        let mut session = self.io.session();
        let values = if pull.only.is_empty() { session.own_len() } else { only };
        if values * F32_BYTES <= limits::PULL_AHEAD_BYTES {
            session.ask_ahead(io::now(), pull, false);
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
        self.pull_by(Pull::of(done), weights)
    }

    /// As [`Self::pull`], at a step of which a checkpoint is due: the shards keep an image of it before anyone
    /// goes on. Every worker of the job must ask for the same steps.
    pub fn pull_for_checkpoint(&mut self, done: Step, weights: &mut [f32]) -> Result<Pulled, ClientError> {
        self.pull_by(Pull { checkpoint: true, ..Pull::of(done) }, weights)
    }

    /// The worker goes on from `step`, where others of its processes are: shards that are behind count it as done.
    pub fn advance_to(&mut self, step: Step) {
        self.io.session().advance_to(step);
    }

    /// Waits until every push is acknowledged, for a worker that goes on without a pull: a push is refused until the one of
    /// the step before is in. Where the session was lost meanwhile, the worker has joined anew; gives the step that it goes
    /// on from, once it has pulled.
    pub fn settle(&mut self) -> Result<Option<Step>, ClientError> {
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

    /// Says which chunk is trained (`done`), and asks for the next, for a worker that is ready for `epoch` (from 0).
    ///
    /// Waits until the pushes of the chunk are acknowledged, then until there is an answer. While others hold the last
    /// chunks of an epoch the worker rests: it holds nobody up, and gets a chunk that is given back.
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

    /// Waits until every member has finished, and writes the final weights.
    pub fn pull_final(&mut self, done: Step, weights: &mut [f32]) -> Result<Pulled, ClientError> {
        self.pull_by(Pull { last: true, ..Pull::of(done) }, weights)
    }

    /// As [`Self::pull`], of what `pull` says. Of some buckets only: into the buffer of the pull before.
    pub fn pull_by(&mut self, pull: Pull, weights: &mut [f32]) -> Result<Pulled, ClientError> {
        self.pull_held(pull, address(weights), None, |client, arrived| {
            let spec = client.layout.bucket(BucketId(arrived.weights.bucket));
            let into = spec.and_then(|spec| weights.get_mut(spec.range()));
            client.take(arrived, into)
        })
    }

    /// As [`Self::pull_by`], of weights that lie in a buffer at this [address], to where `places` wants each bucket.
    ///
    /// Where other processes of the worker have more shards and the job clips by the norm of the whole gradient, `shares` is how they give each
    /// other the parts. They pull the same steps in the same order. Where it says an error the pull ends with that, and can be made again.
    ///
    /// # Errors
    /// As of [`Self::pull`].
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
        let before = self.holds.take(); // until it is filled
        let pulled = self.receive((began, step), shares, take)?;
        // What it has of the other buckets does not change, unless it had to join anew.
        self.holds = if whole || pulled.rejoined { into } else { before };
        Ok(pulled)
    }

    /// The worker has changed its weights since the last pull: the next brings all of them, also buckets without an update.
    pub fn forget_weights(&mut self) {
        self.holds = None;
    }

    /// Whether a pull that was broken off has brought something. The same pull would bring the rest only.
    pub fn has_begun(&self) -> bool {
        self.io.session().has_begun()
    }

    /// As [`Self::pull_by`], to where `places` wants each bucket; what it does not want is not kept. The next pull brings everything that
    /// it asks for.
    ///
    /// # Errors
    /// As of [`Self::pull`].
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

    /// Waits until the pull of this step that `began` then is answered, and has each bucket taken as it comes.
    fn receive(
        &mut self,
        (began, step): (Instant, Step),
        mut shares: Option<&mut Shares<'_>>,
        mut take: impl FnMut(&mut Self, &Arrived) -> Result<(), ClientError>,
    ) -> Result<Pulled, ClientError> {
        // A norm of which not all is known: when the shards are told what is.
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
                // What of the norm went down with whoever knew it, nobody will say: the step is clipped by the rest of it.
                None => {
                    if let Some((_, sum_of_squares)) = late.take() {
                        tracing::warn!(%step, "the norm of a step is not known whole, and is taken to be that of what is");
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

    /// Of a step that this process has pushed whole, where other processes of the worker have the rest of the gradient and the
    /// job clips by its norm: the sums of squares by shard. `None`: its session has not pushed all of it.
    pub fn pushed_squares(&self, step: Step) -> Option<Vec<(ShardId, f64)>> {
        self.io.session().pushed_squares(step)
    }

    /// What those of all its processes come to ([`sum_of_parts`]). In modes that apply pushes one by one none of the step
    /// goes out before.
    pub fn clip_by(&mut self, step: Step, sum_of_squares: f64) {
        self.io.session().clip_by(io::now(), step, sum_of_squares);
    }

    /// The mode in force, as the shards have said with the last pull, and how often it was switched.
    pub fn mode(&self) -> (u64, Mode) {
        self.io.session().mode()
    }

    /// The mean training loss of the step that the next pull comes behind, for the rule that chooses the staleness bound.
    pub fn note_loss(&mut self, loss: f32) {
        self.io.session().note_loss(loss);
    }

    /// Writes what has come; what the worker has is not sent.
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

    /// Gives this worker's share of a held-out evaluation to shard 0, which adds the shares up.
    pub fn report(&mut self, epoch: u64, loss_sum: f64, correct: u64, count: u64) {
        self.io.session().report(epoch, loss_sum, correct, count);
    }

    /// Evaluations that became complete since the last call.
    pub fn evaluations(&mut self) -> Vec<Reported> {
        self.io.session().evaluations()
    }

    /// Ends this worker's session before it has done all its steps: the others need not wait for its lease to end. Waits
    /// at most so long for every shard's word; false where one has not given it, whose lease then ends by itself. Nothing
    /// can be asked of this client afterwards.
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
