//! The API of a training loop. Calls block; the network runs on its own thread, so pushes go out during the
//! backward pass.

mod pulls;
mod pushes;

pub use pulls::{Norm, Places, RestOfResults, Shares, address};

use crate::{
    connect::{Channels, Transport},
    error::ClientError,
    initial::Initial,
    interrupt::Interrupt,
    io::{Io, IoOptions},
    pool::Pool,
};
use paraft_common::{
    BucketId, BucketSpec, Layout, Mode, ShardId, Step, TensorKind, WorkerId, codec::F32_BYTES,
    config::ServerJob, placement, retry::RetryPolicy,
};
use paraft_lanes::shared::Memory;
use paraft_proto::limits;
use paraft_session::{Encoders, Event, Next, Reported, Session};
use paraft_trace::{Moment, Span, Stage, Stages};
use pushes::{Measured, push_memory};
use std::{
    ops::Range,
    sync::Arc,
    time::{Duration, Instant},
};

/// Number of a bucket's buffers that the client keeps for later pushes.
const POOLED: usize = 16;

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
    /// While the norm of a step's gradient is measured.
    measured: Option<Measured>,
    /// Ends every wait once it is set.
    interrupt: Option<Arc<dyn Interrupt>>,
}

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
        check_initial(&initial, &options, &layout).map_err(bad)?;
        let job_text = options.job.to_toml().map_err(|e| bad(e.to_string()))?;
        let session = session_of(&options, job_text);
        let brings = initial != Initial::default();
        let initial = Arc::new(initial);
        let shards = session.shards();
        let of_shard = |shard| placement::buckets_of(&layout, shard, options.shards).into_iter();
        // A partition without rows of a checkpoint is not initialised by messages.
        let needs = |(id, spec): &(BucketId, BucketSpec)| {
            spec.kind != TensorKind::Rows || initial.rows.contains_key(id)
        };
        let buckets = |shard| of_shard(shard).filter(needs).collect();
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
            measured: None,
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

    /// Continues from `step`, where the worker's other processes are. Shards that are behind count it as done.
    pub fn advance_to(&mut self, step: Step) {
        self.io.session().advance_to(step);
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

    /// The mode in force at the last pull, and the number of switches so far.
    pub fn mode(&self) -> (u64, Mode) {
        self.io.session().mode()
    }

    /// The mean training loss of the step before the next pull, for the rule that chooses the staleness bound.
    pub fn note_loss(&mut self, loss: f32) {
        self.io.session().note_loss(loss);
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

    /// Reports this worker's share of the held-out evaluation with this number to shard 0, which adds the shares.
    pub fn report(&mut self, number: u64, loss_sum: f64, correct: u64, count: u64) {
        self.io.session().report(number, loss_sum, correct, count);
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

/// Checks the initial state against the model; the error is for people.
fn check_initial(initial: &Initial, options: &ClientOptions, layout: &Layout) -> Result<(), String> {
    if *initial != Initial::default() && initial.weights.len() != layout.len() {
        let (given, len) = (initial.weights.len(), layout.len());
        return Err(format!("{given} initial weights for a model of {len}"));
    }
    let (slots, params) = (options.job.slots(), layout.params_len());
    if !initial.slots.is_empty()
        && (initial.slots.len() != slots || initial.slots.iter().any(|s| s.len() != params))
    {
        return Err(format!("the initial state is not that of {slots} slots of {params} values"));
    }
    Ok(())
}

fn session_of(options: &ClientOptions, job_text: String) -> Session {
    Session::new(paraft_session::Options {
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
    })
}
