//! A worker's side of the protocol, as `paraft_client` speaks it: sessions, pushes that are kept until their ack, pulls,
//! breaks, sessions that are lost.
//!
//! It differs from the real client where time is concerned: a task of the simulator waits, no thread does. Not here:
//! bounds on what may be pushed without an ack (`proto/src/limits.rs`), which no small model reaches; chunks; checkpoints.
//! A dial reaches whoever leads; to look for a leader costs retries, no redirects.

use crate::{
    SimError,
    chance::{Chance, Draws},
    clock::nanos,
    stream::{Heard, Process, Stream},
    world::World,
};
use bytes::Bytes;
use paraft_client::{Encoders, HANDOVER, Norms, Pulled};
use paraft_common::{
    BucketId, Mode, Seq, SessionId, ShardId, Step, TensorKind, Version, WorkerId, encoding::sum_of_squares,
    modes::Modes, placement, retry::RetryPolicy,
};
use paraft_proto::{Advice, RefusalKind};
use paraft_server::shard::{
    command::{EvalSums, Evaluated, InitPart},
    leader::{Message, Reply, Weights},
};
use paraft_trace::Moment;
use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};
use tokio::sync::mpsc;

const RETRY_BASE: Duration = Duration::from_millis(10);
const RETRY_MAX: Duration = Duration::from_millis(100);

#[derive(Clone)]
struct Push {
    seq: Seq,
    step: Step,
    bucket: BucketId,
    pulled: Version,
    sum_of_squares: f64,
    samples: u32,
    payload: Bytes,
}

/// What is sent again after a break, since applying it twice changes nothing.
#[derive(Clone, Copy)]
enum Sticky {
    Advance(Step),
    Report(u64, EvalSums),
    Finish,
}

/// A shard, as this worker knows it.
struct Link {
    shard: ShardId,
    stream: Option<Arc<Stream>>,
    open: bool,
    session: Option<SessionId>,
    term: u64,
    seq: u64,
    unacked: BTreeMap<Seq, Push>,
    asked: Option<(Step, bool, Vec<BucketId>)>,
    /// The weights that this worker has are what this leader's last answer on this stream was.
    holds: bool,
    sticky: Vec<Sticky>,
    /// Since when, and how often, no leader was reached.
    trouble: Option<(u64, u32)>,
    buckets: Vec<BucketId>,
}

enum Told {
    Opened {
        shard: ShardId,
        clock: Step,
        new: bool,
    },
    Weights(ShardId, Box<Weights>),
    /// A push is in, or was passed over.
    Settled,
    SessionLost,
}

/// A worker's session with all shards of a job.
pub(crate) struct Client {
    world: Arc<World>,
    worker: WorkerId,
    process: Arc<Process>,
    heard: mpsc::UnboundedReceiver<Heard>,
    hears: mpsc::UnboundedSender<Heard>,
    links: BTreeMap<ShardId, Link>,
    /// The weights' versions, by bucket.
    versions: Vec<Version>,
    norms: Norms,
    /// The step whose weights are asked for already, and of which buckets; none: of all.
    ahead: Option<(Step, Vec<BucketId>)>,
    /// Pushes of this step that wait for the norm of the whole gradient.
    held: Vec<Push>,
    evaluated: Vec<Evaluated>,
    retries: Chance,
    encoders: Encoders,
    /// That the next pushes are computed from.
    samples: u32,
    /// What each shard has said of the mode.
    modes: Modes,
    /// Of the step that the next pull comes behind.
    pub loss: Option<f32>,
    pub bytes_pushed: u64,
    pub bytes_pulled: u64,
}

impl Client {
    /// Joins the job on every shard; gives the step to go on from.
    pub async fn join(world: &Arc<World>, process: &Arc<Process>) -> Result<(Self, Step), SimError> {
        let (hears, heard) = mpsc::unbounded_channel();
        let (worker, layout) = (process.worker, &world.layout);
        let shards = world.shards;
        let link = |shard: &ShardId| {
            let buckets = placement::buckets_of(layout, *shard, shards).into_iter().map(|(b, _)| b).collect();
            let link = Link {
                shard: *shard,
                stream: None,
                open: false,
                session: None,
                term: 0,
                seq: 0,
                unacked: BTreeMap::new(),
                asked: None,
                holds: false,
                sticky: Vec::new(),
                trouble: None,
                buckets,
            };
            (*shard, link)
        };
        let links: BTreeMap<ShardId, Link> = world.servers.hosts.keys().map(link).collect();
        let trained = |b: &BucketId| layout.buckets()[b.0 as usize].kind == TensorKind::Param;
        let trained = links.values().filter(|l| l.buckets.iter().any(trained)).map(|l| l.shard).collect();
        let mut client = Self {
            worker,
            process: process.clone(),
            heard,
            hears,
            links,
            versions: vec![Version(0); layout.buckets().len()],
            norms: Norms::new(trained),
            ahead: None,
            held: Vec::new(),
            evaluated: Vec::new(),
            // A process that is started again waits as long as it did before: it is the same seed's same stream.
            retries: Chance::new(world.seed, Draws::Retries(worker.0)),
            encoders: Encoders::new(&world.job, layout, worker, world.file.train.feeds_back()),
            samples: 1,
            modes: Modes::new(world.job.first_mode()),
            loss: None,
            bytes_pushed: 0,
            bytes_pulled: 0,
            world: world.clone(),
        };
        client.shards().into_iter().for_each(|s| client.dial(s));
        let start = client.opened().await?;
        Ok((client, start))
    }

    fn shards(&self) -> Vec<ShardId> {
        self.links.keys().copied().collect()
    }

    fn shard_of(&self, bucket: BucketId) -> ShardId {
        placement::shard_of(bucket, self.world.shards)
    }

    // ---- streams ----

    fn dial(&mut self, shard: ShardId) {
        let Some(link) = self.links.get_mut(&shard) else { return };
        let open = (self.worker, link.session, self.world.job_text.clone());
        link.open = false;
        link.holds = false;
        link.stream = self.world.servers.dial(shard, &self.process, &self.hears, open);
    }

    /// Lets a stream go and dials again after a pause, unless the patience is over.
    fn redial(&mut self, shard: ShardId, why: &str) -> Result<(), SimError> {
        let now = self.world.clock.now();
        let Some(link) = self.links.get_mut(&shard) else { return Ok(()) };
        if let Some(stream) = link.stream.take() {
            self.world.servers.hang_up(&stream);
        }
        link.open = false;
        let (since, attempt) = link.trouble.get_or_insert((now, 0));
        *attempt += 1;
        let policy = RetryPolicy { base: RETRY_BASE, max: RETRY_MAX, deadline: self.world.patience };
        let elapsed = Duration::from_nanos(now - *since);
        let Some(pause) = policy.delay(*attempt, elapsed, self.retries.uniform()) else {
            return Err(SimError::Unreachable { worker: self.worker, shard, why: why.into() });
        };
        let hears = self.hears.clone();
        self.world.clock.at(now + nanos(pause.as_secs_f64()), move || _ = hears.send(Heard::Again(shard)));
        Ok(())
    }

    fn send(&self, shard: ShardId, bytes: u64, message: Message) {
        let stream = self.links.get(&shard).filter(|l| l.open).and_then(|l| l.stream.as_ref());
        if let Some(stream) = stream {
            self.world.servers.send(stream, bytes, message);
        }
    }

    fn send_push(&self, shard: ShardId, p: &Push) {
        let Some(link) = self.links.get(&shard) else { return };
        let Ok(bucket) = link.buckets.binary_search(&p.bucket) else { return };
        let message = Message::Push {
            seq: p.seq,
            step: p.step,
            bucket,
            pulled: p.pulled,
            samples: p.samples,
            sum_of_squares: p.sum_of_squares,
            payload: p.payload.clone().into(),
            arrived: Moment::default(),
        };
        self.send(shard, p.payload.len() as u64, message);
    }

    fn send_sticky(&self, shard: ShardId, sticky: Sticky) {
        let message = match sticky {
            Sticky::Advance(step) => Message::Advance { step },
            Sticky::Report(epoch, sums) => Message::Report { epoch, sums },
            Sticky::Finish => Message::Finish,
        };
        self.send(shard, 0, message);
    }

    fn stick(&mut self, shard: ShardId, sticky: Sticky) {
        if let Some(link) = self.links.get_mut(&shard) {
            link.sticky.push(sticky);
        }
        self.send_sticky(shard, sticky);
    }

    /// Sends the pull that a link waits for. It says which versions this worker has where they are of this stream.
    fn send_pull(&self, shard: ShardId) {
        let Some(link) = self.links.get(&shard) else { return };
        let Some((done, last, only)) = &link.asked else { return };
        let (done, last) = (*done, *last);
        // As the shard counts them.
        let place = |b: &BucketId| link.buckets.iter().position(|own| own == b);
        let only: Vec<usize> = only.iter().filter_map(place).collect();
        let have = match link.holds && only.is_empty() {
            true => link.buckets.iter().map(|b| self.versions[b.0 as usize]).collect(),
            false => Vec::new(),
        };
        let loss = self.loss.filter(|_| shard == ShardId(0));
        let message = Message::Pull { done, last, section: false, have, loss, only };
        self.send(shard, 0, message);
    }

    // ---- what is heard ----

    /// The next thing that the worker must know; what only concerns a link is done meanwhile.
    async fn next(&mut self) -> Result<Told, SimError> {
        loop {
            // The worker holds a sender itself, so there is always one.
            let Some(heard) = self.heard.recv().await else { std::future::pending().await };
            let current = |link: &Link, conn| link.stream.as_ref().is_some_and(|s| s.conn == conn);
            match heard {
                Heard::Again(shard) => {
                    if self.links.get(&shard).is_some_and(|l| l.stream.is_none()) {
                        self.dial(shard);
                    }
                }
                Heard::Closed(shard, conn) => {
                    if self.links.get(&shard).is_some_and(|l| current(l, conn)) {
                        self.redial(shard, "the server closed the stream")?;
                    }
                }
                Heard::Reply(shard, conn, reply) => {
                    if self.links.get(&shard).is_some_and(|l| current(l, conn))
                        && let Some(told) = self.reply(shard, reply)?
                    {
                        return Ok(told);
                    }
                }
            }
        }
    }

    fn reply(&mut self, shard: ShardId, reply: Reply) -> Result<Option<Told>, SimError> {
        let Some(link) = self.links.get_mut(&shard) else { return Ok(None) };
        match reply {
            Reply::Opened { session, clock, initialised, term, .. } => {
                if term < link.term {
                    self.redial(shard, "it leads an earlier term than another server")?;
                    return Ok(None);
                }
                link.trouble = None;
                link.term = term;
                link.open = true;
                let new = link.session != Some(session);
                link.session = Some(session);
                self.opened_link(shard, initialised);
                return Ok(Some(Told::Opened { shard, clock, new }));
            }
            Reply::Ack { seq, .. } | Reply::PassedOver { seq } => {
                link.unacked.remove(&seq);
                return Ok(Some(Told::Settled));
            }
            Reply::Weights(w) => {
                // An answer to an earlier pull (before a rejoin) is not wanted any more.
                if link.asked.as_ref().is_some_and(|(done, ..)| *done == w.done) {
                    if w.last {
                        let part = link.asked.take().is_some_and(|(_, _, only)| !only.is_empty());
                        link.holds |= !part;
                    }
                    return Ok(Some(Told::Weights(shard, w)));
                }
            }
            Reply::RoundNorm { step, sum_of_squares } => {
                if let Some((sum, tell)) = self.norms.add(step.0, shard, sum_of_squares) {
                    for shard in tell {
                        self.send(shard, 0, Message::Norm { step, sum_of_squares: sum });
                    }
                }
            }
            Reply::Evaluated(e) => {
                link.sticky.retain(|s| !matches!(s, Sticky::Report(epoch, _) if *epoch == e.epoch));
                self.evaluated.push(e);
            }
            Reply::Refused(r) => {
                let since = link.trouble.map_or(0, |(since, _)| self.world.clock.now() - since);
                match r.kind.advice() {
                    Advice::Redirect | Advice::Retry => self.redial(shard, &r.to_string())?,
                    Advice::Stop => {
                        link.unacked.clear();
                        return Ok(Some(Told::SessionLost));
                    }
                    // The stream of the process before may still be there.
                    Advice::Fix
                        if matches!(r.kind, RefusalKind::RankTaken(_))
                            && Duration::from_nanos(since) < HANDOVER =>
                    {
                        self.redial(shard, &r.to_string())?;
                    }
                    _ => {
                        let why = r.to_string();
                        return Err(SimError::Refused { worker: self.worker, shard, why });
                    }
                }
            }
            Reply::Taken { .. } | Reply::Resumed { .. } | Reply::Left => {}
        }
        Ok(None)
    }

    /// A stream is open: what the leader may not have is sent again.
    fn opened_link(&mut self, shard: ShardId, initialised: bool) {
        let Some(link) = self.links.get(&shard) else { return };
        if !initialised {
            for bucket in &link.buckets {
                let payload = self.world.initial[bucket.0 as usize].clone();
                let bytes = payload.len() as u64;
                let payload = payload.into();
                self.send(shard, bytes, Message::Init { bucket: *bucket, part: InitPart::FRESH, payload });
            }
        }
        let unacked: Vec<Push> = link.unacked.values().cloned().collect();
        let sticky = link.sticky.clone();
        unacked.iter().for_each(|p| self.send_push(shard, p));
        self.send_pull(shard);
        sticky.into_iter().for_each(|s| self.send_sticky(shard, s));
    }

    /// Waits until every link has a session; gives the step to go on from.
    async fn opened(&mut self) -> Result<Step, SimError> {
        let mut clocks = BTreeMap::new();
        while clocks.len() < self.links.len() {
            match self.next().await? {
                Told::Opened { shard, clock, .. } => _ = clocks.insert(shard, clock),
                Told::SessionLost => {
                    clocks.clear();
                    self.reset();
                }
                Told::Weights(..) | Told::Settled => {} // of the sessions before
            }
        }
        let start = clocks.values().copied().max().unwrap_or_default();
        for (shard, clock) in clocks {
            if clock < start {
                self.stick(shard, Sticky::Advance(start));
            }
        }
        Ok(start)
    }

    /// Forgets all sessions and opens new ones.
    fn reset(&mut self) {
        self.held.clear();
        self.encoders.forget();
        self.ahead = None;
        for shard in self.shards() {
            let Some(link) = self.links.get_mut(&shard) else { continue };
            link.session = None;
            link.unacked.clear();
            link.asked = None;
            link.sticky.retain(|s| !matches!(s, Sticky::Advance(_)));
            if let Some(stream) = link.stream.take() {
                self.world.servers.hang_up(&stream);
            }
            self.dial(shard);
        }
    }

    // ---- what a training loop calls ----

    /// From how many samples the next pushes are computed.
    pub fn weigh(&mut self, samples: usize) {
        self.samples = u32::try_from(samples).unwrap_or(u32::MAX);
    }

    /// Writes a bucket's gradient as this worker pushes it.
    pub fn encode(&mut self, bucket: BucketId, step: Step, gradient: &[f32]) -> Bytes {
        let kind = self.world.layout.buckets()[bucket.0 as usize].kind;
        let mut out = Vec::new();
        self.encoders.encode((bucket, kind), step, gradient, self.world.job.encoding(kind), &mut out);
        out.into()
    }

    /// Whether a shard applies pushes as they come.
    fn any_asynchronous(&self) -> bool {
        self.links.keys().any(|shard| !self.modes.of(*shard).averages())
    }

    /// Pushes a bucket's gradient, encoded.
    pub fn push(&mut self, bucket: BucketId, step: Step, payload: Bytes) {
        self.bytes_pushed += payload.len() as u64;
        let shard = self.shard_of(bucket);
        let Some(link) = self.links.get_mut(&shard) else { return };
        link.seq += 1;
        let (seq, pulled) = (Seq(link.seq), self.versions[bucket.0 as usize]);
        let (samples, sum_of_squares) = (self.samples, 0.0);
        let push = Push { seq, step, bucket, pulled, sum_of_squares, samples, payload };
        // As the real client: where a push is clipped by the norm of its whole gradient, nothing goes before all is known.
        if self.world.job.clip.norm.is_some() && self.any_asynchronous() {
            self.held.push(push);
            if self.held.len() == self.world.layout.buckets().len() {
                self.release();
            }
        } else {
            self.keep(shard, push);
        }
    }

    fn keep(&mut self, shard: ShardId, push: Push) {
        self.send_push(shard, &push);
        if let Some(link) = self.links.get_mut(&shard) {
            link.unacked.insert(push.seq, push);
        }
    }

    /// The norm is added up as the real client does it: by shard, in it by bucket.
    fn release(&mut self) {
        let buckets = self.world.layout.buckets();
        let mut parts = BTreeMap::<ShardId, BTreeMap<BucketId, f64>>::new();
        for p in &self.held {
            let spec = buckets[p.bucket.0 as usize];
            if spec.kind == TensorKind::Param {
                let squares =
                    sum_of_squares(&p.payload.clone().into(), self.world.job.encoding(spec.kind), spec.len);
                // What was encoded here has the bucket's length.
                parts
                    .entry(self.shard_of(p.bucket))
                    .or_default()
                    .insert(p.bucket, squares.unwrap_or(f64::NAN));
            }
        }
        let total: f64 = parts.values().map(|buckets| buckets.values().sum::<f64>()).sum();
        for mut push in std::mem::take(&mut self.held) {
            push.sum_of_squares = total;
            self.keep(self.shard_of(push.bucket), push);
        }
    }

    /// `only`: of these buckets; none: of all.
    fn ask(&mut self, done: Step, last: bool, only: &[BucketId]) {
        for shard in self.shards_of(only) {
            if let Some(link) = self.links.get_mut(&shard) {
                let here = only.iter().copied().filter(|b| link.buckets.contains(b)).collect();
                link.asked = Some((done, last, here));
            }
            self.send_pull(shard);
        }
    }

    /// The shards that have these buckets; none: all.
    fn shards_of(&self, only: &[BucketId]) -> BTreeSet<ShardId> {
        match only {
            [] => self.shards().into_iter().collect(),
            some => some.iter().map(|b| self.shard_of(*b)).collect(),
        }
    }

    /// Asks for the weights of these buckets after a step, for the pull that comes later.
    pub fn ask_for_buckets(&mut self, done: Step, only: &[BucketId]) {
        self.ahead = Some((done, only.to_vec()));
        self.ask(done, false, only);
    }

    /// Asks for the weights after a step before its pushes go out, where rounds are averaged.
    pub fn ask_ahead(&mut self, done: Step) {
        if !self.any_asynchronous() {
            self.ahead = Some((done, Vec::new()));
            self.ask(done, false, &[]);
        }
    }

    /// Waits until the rule lets a worker go on that has finished `done` steps, and writes the weights.
    pub async fn pull(&mut self, done: Step, last: bool, weights: &mut [f32]) -> Result<Pulled, SimError> {
        self.pull_any(done, last, &[], weights).await
    }

    /// Likewise, of these buckets.
    pub async fn pull_buckets(
        &mut self,
        done: Step,
        only: &[BucketId],
        weights: &mut [f32],
    ) -> Result<Pulled, SimError> {
        self.pull_any(done, false, only, weights).await
    }

    async fn pull_any(
        &mut self,
        mut done: Step,
        last: bool,
        only: &[BucketId],
        weights: &mut [f32],
    ) -> Result<Pulled, SimError> {
        let mut pulled = Pulled { done, slowest: Step(u64::MAX), ..Pulled::default() };
        let ahead = self.ahead.take().is_some_and(|(step, of)| step == done && of == only);
        if !ahead || last {
            self.ask(done, last, only);
        }
        let mut waiting = self.shards_of(only);
        let mut clock = Step(u64::MAX);
        while !waiting.is_empty() {
            match self.next().await? {
                Told::Weights(shard, w) => {
                    if w.last {
                        waiting.remove(&shard);
                        pulled.slowest = pulled.slowest.min(w.slowest);
                        pulled.stop |= w.stop;
                        clock = clock.min(w.clock);
                        self.modes.hear(shard, w.in_force.number, w.in_force.mode);
                        pulled.finishers = w.finishers.clone();
                    }
                    self.take(&w, weights)?;
                }
                Told::Opened { new: false, .. } | Told::Settled => {}
                Told::Opened { new: true, .. } | Told::SessionLost => {
                    self.reset();
                    done = self.opened().await?;
                    pulled = Pulled { done, slowest: Step(u64::MAX), rejoined: true, ..Pulled::default() };
                    waiting = self.shards().into_iter().collect();
                    clock = Step(u64::MAX);
                    self.ask(done, last, &[]);
                }
            }
        }
        // Shards that have not heard of a switch hear of it from those that pull.
        let (number, mode) = self.modes.latest();
        for shard in self.modes.behind() {
            self.send(shard, 0, Message::SwitchMode { number, mode });
        }
        if self.world.job.round.passes_over() && !last && clock < Step(u64::MAX) {
            pulled.done = pulled.done.max(clock);
        }
        Ok(pulled)
    }

    /// Waits until every push is acknowledged. Where the session was lost meanwhile, the worker has joined anew; gives the
    /// step that it goes on from, once it has pulled.
    pub async fn settle(&mut self) -> Result<Option<Step>, SimError> {
        while self.links.values().any(|l| !l.unacked.is_empty()) {
            match self.next().await? {
                Told::Opened { new: false, .. } | Told::Settled | Told::Weights(..) => {}
                Told::Opened { new: true, .. } | Told::SessionLost => {
                    self.reset();
                    return Ok(Some(self.opened().await?));
                }
            }
        }
        Ok(None)
    }

    /// The smallest version over the buckets of the last pull.
    pub fn version(&self) -> Version {
        self.versions.iter().copied().min().unwrap_or_default()
    }

    /// The mode in force, as the shards have said with the last pull, and how often it was switched.
    pub fn mode(&self) -> (u64, Mode) {
        self.modes.latest()
    }

    fn take(&mut self, w: &Weights, weights: &mut [f32]) -> Result<(), SimError> {
        if w.not_modified {
            return Ok(());
        }
        let spec = self.world.layout.buckets()[w.bucket.0 as usize];
        let payload = paraft_common::Payload::from(w.payload.clone());
        let read = payload.reader().values(&mut weights[spec.range()]);
        read.map_err(|e| SimError::Refused {
            worker: self.worker,
            shard: self.shard_of(w.bucket),
            why: format!("the weights of {}: {e}", w.bucket),
        })?;
        self.versions[w.bucket.0 as usize] = w.version;
        self.bytes_pulled += w.payload.len() as u64;
        Ok(())
    }

    /// Gives this worker's share of a held-out evaluation to shard 0.
    pub fn report(&mut self, epoch: u64, sums: EvalSums) {
        self.stick(ShardId(0), Sticky::Report(epoch, sums));
    }

    /// Evaluations that became complete since the last call.
    pub fn evaluations(&mut self) -> Vec<Evaluated> {
        std::mem::take(&mut self.evaluated)
    }

    /// This worker has done all its steps.
    pub fn finish(&mut self) {
        self.shards().into_iter().for_each(|s| self.stick(s, Sticky::Finish));
    }

    /// It goes in order: its streams end.
    pub fn leave(self) {
        for link in self.links.into_values() {
            if let Some(stream) = link.stream {
                self.world.servers.hang_up(&stream);
            }
        }
    }
}
