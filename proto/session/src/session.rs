//! A worker's session with all shards of a job.
//!
//! The worker waits for one thing at a time: a join, a pull, acks, a chunk, or a leave. A call starts the
//! wait, and [`Session::poll`] returns its events until the wait ends. Pushes and early pull requests need no
//! wait.
//!
//! When a session is lost, the worker joins again within its next wait. What it waited for then restarts from
//! the step at which it continues.

mod chunks;
mod pulls;

pub use chunks::Next;
pub use pulls::{Pull, Pulled};

use crate::{
    error::SessionError,
    io::{Effect, Input},
    link::{Link, LinkEvent, LinkSettings, SessionOutput},
    norms::{Norms, sum_of_parts},
};
use bytes::Bytes;
use chunks::ChunkWait;
use paraft_common::{
    BucketId, Layout, Mode, Payload, ShardId, Step, TensorKind, WorkerId, config::ServerJob,
    encoding::sum_of_squares, modes::Modes, placement, retry::RetryPolicy,
};
use paraft_proto::{Advance, Finish, Leave, Push, Report, SwitchMode, Weights, limits, to_shard::Kind};
use pulls::PullState;
use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    ops::Range,
    time::Duration,
};

/// A complete held-out evaluation, summed over the workers.
pub type Reported = paraft_proto::Reported;

/// Right after a worker ends, the server may still hold its stream.
pub const HANDOVER: Duration = Duration::from_secs(3);

/// Options of a session.
pub struct Options {
    /// All servers, in the same order as in the servers' own list.
    pub servers: Vec<String>,
    /// Shards of the fleet.
    pub shards: u32,
    /// Replicas of each shard.
    pub replicas: u32,
    /// This worker's rank.
    pub worker: WorkerId,
    /// The job, as the servers need it.
    pub job: ServerJob,
    /// The job, as text to send.
    pub job_text: String,
    /// How to search for a leader. Its deadline bounds a search without success.
    pub retry: RetryPolicy,
    /// How long another process may be connected as this worker before that is an error. The other process
    /// may have just ended, or its lease may have to expire first.
    pub handover: Duration,
    /// The stages of the model that this process holds, if other processes of the same worker hold the rest;
    /// `None`: all.
    pub stages: Option<Range<usize>>,
    /// Random numbers, uniform in 0..1, for the pauses between tries.
    pub draw: Box<dyn FnMut() -> f64 + Send>,
}

/// What a worker receives while it waits.
#[derive(Debug)]
pub enum Event {
    /// Every shard has given a session: the worker continues from this step.
    Joined(Step),
    /// Weights of one bucket.
    Weights(Arrived),
    /// At most once in a pull, if other processes of the worker hold more shards: the parts of the norm of
    /// the pulled step from this process's shards. The shards wait for the sum of all parts
    /// ([`Session::tell_norm`]).
    NormParts(Vec<(ShardId, f64)>),
    /// The pull is answered in full.
    Pulled(Pulled),
    /// Every push is acknowledged. Or the session was lost, and the worker continues from this step after a
    /// pull.
    Settled(Option<Step>),
    /// The chunk to train next.
    Chunk(Next),
    /// Every shard has ended the session.
    Left,
}

/// Weights of one bucket, as received.
#[derive(Debug)]
pub struct Arrived {
    /// The shard whose leader sent them.
    pub shard: ShardId,
    /// Everything but the values.
    pub weights: Weights,
    /// The values, little-endian f32; empty if the worker already has them.
    pub payload: Payload,
    /// When the worker asked for them.
    pub asked: Duration,
    /// When they arrived.
    pub at: Duration,
}

enum Wait {
    Nothing,
    Join,
    Pull,
    Settle(BTreeSet<ShardId>),
    Chunk(ChunkWait),
    Leave(BTreeSet<ShardId>),
}

/// The latest push, if a caller needs its norm.
#[derive(Default)]
struct PushedSquares {
    step: u64,
    /// The sum of squares of each bucket.
    squares: BTreeMap<u32, f64>,
}

/// See the [module](self).
pub struct Session {
    fixed: LinkSettings,
    job: ServerJob,
    layout: Layout,
    shards: u32,
    /// Shards that hold buckets of this process's stages.
    links: BTreeMap<ShardId, Link>,
    /// The buckets of this process's stages.
    own: Range<u32>,
    out: SessionOutput,
    /// Norms of BSP rounds over all shards.
    norms: Norms,
    /// The founding of shard 0.
    founding: u64,
    wait: Wait,
    /// While sessions are being opened: the clocks of the shards that have given one.
    joining: Option<BTreeMap<ShardId, u64>>,
    pulling: Option<PullState>,
    /// Number of chunk requests so far.
    requests: u64,
    /// The version of each bucket that the worker has.
    versions: Vec<u64>,
    /// Whether the worker has the weights as the servers have them. The version alone does not tell, since
    /// the job's algorithm may look ahead.
    holds_plain: bool,
    /// Pushes of this step that wait for the norm of the whole gradient.
    held: Vec<(Push, Duration)>,
    /// The step being pushed, and whether its pushes wait for that norm.
    pushing: (u64, bool),
    pushed: PushedSquares,
    /// The step of a pull whose parts of the norm were not returned yet.
    awaits_parts: Option<u64>,
    /// Samples behind the gradients of the next pushes.
    samples: u32,
    /// Rates for the next pushes; empty: the job's own.
    rates: Vec<f64>,
    /// For each bucket, the version at which the next pushes were computed; empty: the version that the
    /// worker has.
    computed_at: Vec<u64>,
    modes: Modes,
    /// Mean training loss of the step before the next pull.
    loss: Option<f32>,
    /// Complete evaluations that the worker has not taken yet.
    evaluations: Vec<Reported>,
    /// Epochs of all evaluations so far.
    evaluated: BTreeSet<u64>,
    failed: Option<SessionError>,
    rejoins: u64,
    dropped: u64,
    /// Steps and buckets whose pushes the servers refused because they are not finite.
    refused: BTreeSet<(u64, u32)>,
    /// Skipped steps: of this session, as each shard reports them, and of the lost sessions together.
    skipped: (BTreeMap<ShardId, u64>, u64),
}

impl Session {
    /// A session that has not begun: [`Self::join`] begins it.
    pub fn new(options: Options) -> Self {
        let layout = options.job.layout();
        let mut links = BTreeMap::new();
        let (mut trained, mut all_trained) = (BTreeSet::new(), BTreeSet::new());
        let stages = options.stages.unwrap_or(0..layout.stages());
        let own = layout.buckets_in(stages.start).start..layout.buckets_in(stages.end).start;
        for (i, b) in (0u32..).zip(layout.buckets()) {
            let shard = placement::shard_of(&layout, BucketId(i), options.shards);
            if b.kind == TensorKind::Param {
                all_trained.insert(shard);
            }
            if !own.contains(&i) {
                continue;
            }
            if b.kind == TensorKind::Param {
                trained.insert(shard);
            }
            links.entry(shard).or_insert_with(|| {
                let preferred = placement::replicas_of(shard, options.servers.len() as u32, options.replicas);
                let (preferred, mut servers) = (preferred.first(), options.servers.clone());
                // A shard's replicas are on consecutive servers.
                servers.rotate_left(preferred.map_or(0, |s| s.0 as usize));
                Link::new(shard, servers)
            });
        }
        let clips = options.job.clip.norm.is_some();
        Self {
            fixed: LinkSettings {
                worker: options.worker.0,
                job: options.job_text.into(),
                retry: options.retry,
                handover: options.handover,
            },
            modes: Modes::new(options.job.first_mode()),
            versions: vec![0; layout.buckets().len()],
            holds_plain: false,
            job: options.job,
            layout,
            shards: options.shards,
            links,
            own,
            out: SessionOutput {
                effects: VecDeque::new(),
                heard: VecDeque::new(),
                reported: Vec::new(),
                norms: Vec::new(),
                in_flight: 0,
                untaken: 0,
                due: BTreeSet::new(),
                dials: 0,
                draw: options.draw,
            },
            norms: Norms::new(trained.iter().copied().collect(), clips && trained != all_trained),
            founding: 0,
            wait: Wait::Nothing,
            joining: None,
            pulling: None,
            requests: 0,
            held: Vec::new(),
            pushing: (0, false),
            pushed: PushedSquares::default(),
            awaits_parts: None,
            samples: 1,
            rates: Vec::new(),
            computed_at: Vec::new(),
            loss: None,
            evaluations: Vec::new(),
            evaluated: BTreeSet::new(),
            failed: None,
            rejoins: 0,
            dropped: 0,
            refused: BTreeSet::new(),
            skipped: (BTreeMap::new(), 0),
        }
    }

    // ---- for the I/O ----

    /// Takes an input; `now` never decreases.
    pub fn handle(&mut self, now: Duration, input: Input) {
        let (fixed, out) = (&self.fixed, &mut self.out);
        match input {
            Input::Tick => self.links.values_mut().for_each(|l| l.tick(now, fixed, out)),
            Input::Broken { shard, dial, cause } => match self.links.get_mut(&shard) {
                Some(link) if link.is_on(dial) => link.broken(now, &cause, fixed, out),
                Some(link) if link.is_question_stream(dial) => link.answered(now, None, fixed, out),
                _ => {}
            },
            Input::Message { shard, dial, message } => match self.links.get_mut(&shard) {
                Some(link) if link.is_on(dial) => link.message(now, message, fixed, out),
                Some(link) if link.is_question_stream(dial) => {
                    link.answered(now, message.message.kind, fixed, out)
                }
                _ => {}
            },
        }
        for (shard, step, part) in std::mem::take(&mut self.out.norms) {
            if let Some(sum) = self.norms.add(step, shard, part) {
                self.tell(step, sum, vec![shard]);
            } else if let Some(parts) = self.norms.parts(step).filter(|_| !self.norms.is_shared()) {
                self.tell_norm(Step(step), sum_of_parts(parts));
            }
        }
        // A new leader repeats the latest evaluation, since the answer may have been lost with the old
        // leader.
        let new = std::mem::take(&mut self.out.reported).into_iter();
        self.evaluations.extend(new.filter(|r| self.evaluated.insert(r.epoch)));
    }

    fn tell(&mut self, step: u64, sum: f64, shards: Vec<ShardId>) {
        for shard in shards {
            if let Some(link) = self.links.get(&shard) {
                link.norm(step, sum, &mut self.out);
            }
        }
    }

    /// The next action for the I/O, in order; `None`: nothing.
    pub fn next_effect(&mut self) -> Option<Effect> {
        self.out.effects.pop_front()
    }

    /// When [`Input::Tick`] is due.
    pub fn deadline(&self) -> Option<Duration> {
        self.out.due.first().map(|(at, _)| *at)
    }

    /// Bytes of received weights that the worker has not taken. I/O that reads on without a bound would hold
    /// a large model twice.
    pub fn untaken(&self) -> usize {
        self.out.untaken
    }

    // ---- what a worker calls ----

    /// The job's buckets.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// The founding of shard 0 that the job runs in. It names the job to the control group.
    pub fn founding(&self) -> u64 {
        self.founding
    }

    /// The shards that hold buckets of this process's stages.
    pub fn shards(&self) -> impl Iterator<Item = ShardId> {
        self.links.keys().copied()
    }

    /// The shard that holds a bucket.
    pub fn shard_of(&self, bucket: BucketId) -> ShardId {
        placement::shard_of(&self.layout, bucket, self.shards)
    }

    /// The session that a shard has given, and the term of its leader; 0 without a session.
    pub fn session_of(&self, shard: ShardId) -> (u64, u64) {
        self.links.get(&shard).map_or((0, 0), |l| (l.session(), l.term()))
    }

    /// How often the session was lost and opened again.
    pub fn rejoins(&self) -> u64 {
        self.rejoins
    }

    /// Pushes that arrived too late for their rounds, and were dropped.
    pub fn dropped(&self) -> u64 {
        self.dropped
    }

    /// Steps of this worker that were skipped, up to the last pull: by this worker or, in rounds, by any
    /// worker.
    pub fn skipped(&self) -> u64 {
        let (by_shard, before) = &self.skipped;
        before + by_shard.values().copied().max().unwrap_or_default()
    }

    /// Joins the job on every shard; ends with [`Event::Joined`].
    pub fn join(&mut self) {
        self.wait = Wait::Join;
        self.joining = Some(BTreeMap::new());
        for link in self.links.values_mut() {
            link.dial(&self.fixed, &mut self.out);
        }
    }

    /// Whether a push of `len` bytes may go out before an ack comes. So a slow server slows its workers, and
    /// memory does not grow with the model. One larger push always goes out. While the norm of the whole
    /// gradient decides about its first bucket, every push goes out, since no ack comes before the last push.
    pub fn has_room(&self, len: usize) -> bool {
        let waits = &self.out.in_flight;
        self.job.clip.norm.is_some()
            || *waits == 0
            || waits.saturating_add(len) <= limits::PUSH_WINDOW_BYTES
            || self.failed.is_some()
            || self.out.heard.iter().any(|h| matches!(h, LinkEvent::Failed(_)))
    }

    /// Sets the number of samples behind the gradients of the next pushes: servers count them.
    pub fn weigh(&mut self, samples: usize) {
        self.samples = u32::try_from(samples).unwrap_or(u32::MAX);
    }

    /// Sets the rates for the next pushes, one for each group of parameters (one if the job has no groups).
    /// They replace the optimizer's rate times the schedule's factor. Empty: the job's own.
    ///
    /// # Panics
    /// If their number is not the number of groups.
    pub fn rates(&mut self, rates: Vec<f64>) {
        let groups = self.job.groups.len().max(1);
        assert!(rates.is_empty() || rates.len() == groups, "{} rates for {groups} groups", rates.len());
        self.rates = rates;
    }

    /// Number of values of the buckets that this process pulls.
    pub fn own_len(&self) -> usize {
        self.layout.buckets()[self.own.start as usize..self.own.end as usize].iter().map(|b| b.len).sum()
    }

    /// The versions of the last pull, as [`Self::computed_at`] takes them.
    pub fn versions(&self) -> Vec<u64> {
        self.versions.clone()
    }

    /// Sets the versions of the weights at which the gradients of the next pushes were computed, if they were
    /// pulled before the weights that the worker has. `None`: the weights that the worker has.
    pub fn computed_at(&mut self, versions: Option<Vec<u64>>) {
        self.computed_at = versions.unwrap_or_default();
    }

    /// Pushes one bucket's gradient for `step`, in the job's encoding for the bucket. The session keeps it
    /// until its ack, and sends it again after a break.
    pub fn push(&mut self, now: Duration, bucket: BucketId, step: Step, payload: Bytes) {
        let shard = self.shard_of(bucket);
        if self.pushing.0 != step.0 {
            // The shard applies it on arrival and clips it by the norm of the worker's whole gradient:
            // nothing can go out before the last bucket is known. (BSP clips the mean; there the servers
            // exchange the norm.) Either all pushes of a step wait or none, whatever messages arrive
            // meanwhile.
            self.pushing = (step.0, self.job.clip.norm.is_some() && self.any_asynchronous());
            // These belong to an abandoned step, and were not sent to any shard.
            self.held.clear();
        }
        let waits = self.pushing.1;
        let spec = self.layout.buckets()[bucket.0 as usize];
        let of_group = self.rates.get(usize::from(spec.group));
        let rate = of_group.filter(|_| spec.kind == TensorKind::Param).copied();
        let pulled = self.versions[bucket.0 as usize];
        let Some(link) = self.links.get_mut(&shard) else { return };
        link.seq += 1;
        let push = Push {
            seq: link.seq,
            step: step.0,
            bucket: bucket.0,
            version: self.computed_at.get(bucket.0 as usize).copied().unwrap_or(pulled),
            sum_of_squares: 0.0,
            payload,
            samples: self.samples,
            rate,
            skip: false,
        };
        if !waits && !self.norms.is_shared() {
            return link.push(push, now, now, &mut self.out);
        }
        // If processes share a worker, in every mode: another process's shards may be in another mode.
        let squares = self.squares(&push);
        if self.pushed.step != step.0 {
            self.pushed = PushedSquares { step: step.0, squares: BTreeMap::new() };
        }
        self.pushed.squares.insert(bucket.0, squares);
        if waits {
            self.held.push((push, now));
            if self.held.len() == self.own.len() && !self.norms.is_shared() {
                self.release(now, sum_of_parts(self.by_shard(&self.pushed.squares)));
            }
        } else if let Some(link) = self.links.get_mut(&shard) {
            link.push(push, now, now, &mut self.out);
        }
    }

    /// The sums of squares by shard of a step that was pushed whole in this session. `Some` only if some
    /// shards apply pushes one by one, or other processes of the worker have the rest of the gradient.
    pub fn pushed_squares(&self, step: Step) -> Option<Vec<(ShardId, f64)>> {
        let PushedSquares { step: of, squares, .. } = &self.pushed;
        let trained = |b: &u32| self.layout.buckets()[*b as usize].kind == TensorKind::Param;
        let all = self.own.clone().filter(trained).all(|b| *of == step.0 && squares.contains_key(&b));
        all.then(|| self.by_shard(squares).into_iter().collect())
    }

    /// Whether the pushes of this step carry the norm, and are applied as they arrive.
    pub fn is_one_by_one(&self, step: Step) -> bool {
        self.pushing == (step.0, true)
    }

    /// Gives the sum of squares of the worker's whole gradient, of a step that this process has pushed its
    /// part of. The pushes that wait for it go out.
    pub fn clip_by(&mut self, now: Duration, step: Step, sum_of_squares: f64) {
        if self.held.first().is_some_and(|(p, _)| p.step == step.0) {
            self.release(now, sum_of_squares);
        }
    }

    /// Sends this process's shards the sum over all shards, for a step that gave an [`Event::NormParts`].
    /// Shards that know it from another worker ignore it.
    pub fn tell_norm(&mut self, step: Step, sum_of_squares: f64) {
        let shards = self.norms.tell(step.0, sum_of_squares);
        self.tell(step.0, sum_of_squares, shards);
    }

    /// Sends a mark for every bucket of `step` instead of pushes: the worker has no gradient. The session
    /// keeps and sends the marks as it does pushes. If any worker skips, a round changes nothing; where
    /// pushes are applied one by one, only this worker's push is left out.
    ///
    /// If some pushes of the step were refused because they are not finite, only their buckets are skipped:
    /// the step's other pushes stay.
    ///
    /// # Panics
    /// If the worker pushed for this step, and no push was refused.
    pub fn skip(&mut self, now: Duration, step: Step) {
        let refused = std::mem::take(&mut self.refused);
        let whole = !refused.iter().any(|(s, _)| *s == step.0);
        let pushed = self.links.values().any(|l| l.has_pushed(step.0));
        assert!(!(whole && pushed), "{step} was pushed, and cannot be skipped");
        // Pushes that wait for the rest of their step were not sent to any shard.
        self.held.clear();
        self.pushing = (0, false);
        self.pushed = PushedSquares::default();
        let all = (0u32..).zip(&self.versions);
        for (bucket, version) in all.filter(|(bucket, _)| whole || refused.contains(&(step.0, *bucket))) {
            let Some(link) =
                self.links.get_mut(&placement::shard_of(&self.layout, BucketId(bucket), self.shards))
            else {
                continue;
            };
            link.seq += 1;
            let (seq, step, version) = (link.seq, step.0, *version);
            let push = Push { seq, step, bucket, version, skip: true, ..Push::default() };
            link.push(push, now, now, &mut self.out);
        }
    }

    /// Sum of squares of the values as the servers decode them; 0 for running statistics.
    fn squares(&self, p: &Push) -> f64 {
        let spec = self.layout.buckets()[p.bucket as usize];
        if spec.kind != TensorKind::Param {
            return 0.0;
        }
        let squares = sum_of_squares(&p.payload.clone().into(), self.job.encoding(spec.kind), spec.len);
        squares.unwrap_or(f64::NAN) // not in the job's encoding: the servers refuse it
    }

    /// Sums as the servers do for BSP: by shard, and within it by bucket, whatever the order of the backward
    /// pass. The last bit of the sum depends on the order, and one worker must get the same bits in every
    /// mode.
    fn by_shard(&self, squares: &BTreeMap<u32, f64>) -> BTreeMap<ShardId, f64> {
        let mut parts = BTreeMap::new();
        for (bucket, squares) in squares {
            *parts.entry(self.shard_of(BucketId(*bucket))).or_insert(0.0) += squares;
        }
        parts
    }

    /// Sends the pushes that wait for the sum of squares, with it.
    fn release(&mut self, now: Duration, total: f64) {
        for (mut p, at) in std::mem::take(&mut self.held) {
            p.sum_of_squares = total;
            let shard = self.shard_of(BucketId(p.bucket));
            if let Some(link) = self.links.get_mut(&shard) {
                link.push(p, at, now, &mut self.out);
            }
        }
    }

    /// Whether a shard applies pushes as they arrive.
    fn any_asynchronous(&self) -> bool {
        self.links.keys().any(|shard| !self.modes.of(*shard).averages())
    }

    /// The mode in force, as the shards said with the last pull, and the number of switches so far.
    pub fn mode(&self) -> (u64, Mode) {
        self.modes.latest()
    }

    /// Continues from `step`, where the worker's other processes are: shards that are behind count the steps
    /// before it as done.
    pub fn advance_to(&mut self, step: Step) {
        for link in self.links.values_mut() {
            link.retain(Kind::Advance(Advance { step: step.0 }), &mut self.out);
        }
    }

    /// Sets the mean training loss of the step before the next pull, for the rule that chooses the staleness
    /// bound.
    pub fn note_loss(&mut self, loss: f32) {
        self.loss = Some(loss);
    }

    /// Waits until every push is acknowledged, for a worker that continues without a pull; ends with
    /// [`Event::Settled`]. A shard refuses a push until it has the worker's push of the step before.
    pub fn settle(&mut self) {
        self.wait = Wait::Settle(self.settling());
    }

    fn settling(&mut self) -> BTreeSet<ShardId> {
        self.links.values_mut().for_each(|l| l.settle(&mut self.out));
        self.links.keys().copied().collect()
    }

    /// Sends this worker's share of a held-out evaluation to shard 0, which sums the shares.
    pub fn report(&mut self, epoch: u64, loss_sum: f64, correct: u64, count: u64) {
        if let Some(link) = self.links.get_mut(&ShardId(0)) {
            link.retain(Kind::Report(Report { epoch, loss_sum, correct, count }), &mut self.out);
        }
    }

    /// Evaluations that were completed since the last call.
    pub fn evaluations(&mut self) -> Vec<Reported> {
        std::mem::take(&mut self.evaluations)
    }

    /// Tells every shard that this worker has done all its steps.
    pub fn finish(&mut self) {
        self.retain(Kind::Finish(Finish {}));
    }

    /// Ends the session before the worker has done all its steps, so that the other workers need not wait for
    /// its lease to expire; ends with [`Event::Left`]. No other call is allowed afterwards.
    pub fn leave(&mut self) {
        self.retain(Kind::Leave(Leave {}));
        self.wait = Wait::Leave(self.links.keys().copied().collect());
    }

    fn retain(&mut self, kind: Kind) {
        self.links.values_mut().for_each(|l| l.retain(kind.clone(), &mut self.out));
    }

    /// Whether [`Self::poll`] has something to return.
    pub fn has_news(&self) -> bool {
        !self.out.heard.is_empty() || self.failed.is_some() || self.pending_parts().is_some()
    }

    /// The parts of the norm of the pulled step, if they still have to be returned.
    fn pending_parts(&self) -> Option<BTreeMap<ShardId, f64>> {
        let pulls = matches!(self.wait, Wait::Pull) && self.norms.is_shared();
        self.awaits_parts.filter(|_| pulls).and_then(|step| self.norms.parts(step))
    }

    /// The next event of the current wait; `None`: nothing before the next input.
    ///
    /// # Errors
    /// The session cannot continue, and every later call fails, too. One exception: after the refusal of a
    /// push that is not finite ([`WireKind::NotFinite`](paraft_proto::WireKind::NotFinite)) only one call
    /// fails, and the wait continues once the worker skips that step ([`Self::skip`]).
    pub fn poll(&mut self, now: Duration) -> Result<Option<Event>, SessionError> {
        if let Some(e) = &self.failed {
            return Err(e.clone());
        }
        loop {
            // Before the pull ends, since the other processes may need them.
            if let Some(parts) = self.pending_parts() {
                self.awaits_parts = None;
                return Ok(Some(Event::NormParts(parts.into_iter().collect())));
            }
            if let Some(event) = self.over() {
                return Ok(Some(event));
            }
            let Some(heard) = self.out.heard.pop_front() else { return Ok(None) };
            if let LinkEvent::NotFinite { bucket, step, error } = heard {
                self.refused.insert((step, bucket));
                return Err(error);
            }
            match self.hear(now, heard) {
                Ok(None) => {}
                Ok(event) => return Ok(event),
                Err(e) => {
                    self.failed = Some(e.clone());
                    return Err(e);
                }
            }
        }
    }

    fn hear(&mut self, now: Duration, heard: LinkEvent) -> Result<Option<Event>, SessionError> {
        match heard {
            LinkEvent::Weights { shard, weights, payload, asked, at } => {
                self.out.untaken -= payload.len();
                return self.arrived(Arrived { shard, weights, payload, asked, at });
            }
            LinkEvent::Opened { shard, clock, new, founding } => {
                if shard == ShardId(0) {
                    self.founding = founding;
                }
                match &mut self.joining {
                    Some(clocks) => {
                        clocks.insert(shard, clock);
                        if clocks.len() == self.links.len() {
                            return Ok(self.joined(now));
                        }
                    }
                    None if new => self.rejoin(now),
                    // A new leader: the link has sent the request again.
                    None => {}
                }
            }
            LinkEvent::SessionLost => self.rejoin(now),
            LinkEvent::Settled(shard) => match &mut self.wait {
                Wait::Settle(waiting) => drop(waiting.remove(&shard)),
                Wait::Chunk(chunks) => chunks.settled(shard),
                _ => {}
            },
            LinkEvent::Acquired(taken) => return self.taken(&taken),
            LinkEvent::Resumed(shard, clock) => {
                if let Wait::Chunk(chunks) = &mut self.wait {
                    chunks.resumed(shard, clock);
                }
            }
            LinkEvent::Left(shard) => {
                if let Wait::Leave(waiting) = &mut self.wait {
                    waiting.remove(&shard);
                }
            }
            LinkEvent::Dropped(n) => self.dropped += n,
            LinkEvent::Failed(e) => return Err(e),
            LinkEvent::NotFinite { error, .. } => return Err(error), // `poll` has handled it
        }
        Ok(None)
    }

    /// The final event of the wait, if the wait is over.
    fn over(&mut self) -> Option<Event> {
        if self.joining.is_some() {
            return None;
        }
        match &self.wait {
            Wait::Pull if self.pulling.as_ref().is_some_and(PullState::is_answered) => {
                self.wait = Wait::Nothing;
                self.pulled().map(Event::Pulled)
            }
            Wait::Settle(waiting) if waiting.is_empty() => {
                self.wait = Wait::Nothing;
                Some(Event::Settled(None))
            }
            Wait::Leave(waiting) if waiting.is_empty() => {
                self.wait = Wait::Nothing;
                Some(Event::Left)
            }
            Wait::Chunk(_) => self.chunk(),
            _ => None,
        }
    }

    /// A shard has lost the session: opens a new one on all shards.
    fn rejoin(&mut self, now: Duration) {
        if matches!(self.wait, Wait::Leave(_)) {
            return; // the worker leaves anyway: without an answer its lease expires
        }
        if self.joining.is_none() {
            self.rejoins += 1;
            self.skipped = (BTreeMap::new(), self.skipped());
        }
        self.joining = Some(BTreeMap::new());
        self.held.clear();
        self.pushing = (0, false);
        self.pushed = PushedSquares::default();
        self.refused.clear();
        self.computed_at.clear();
        for link in self.links.values_mut() {
            link.reset(now, &self.fixed, &mut self.out);
        }
    }

    /// Every shard has given a session. Shards that are behind advance to the latest of their clocks.
    fn joined(&mut self, now: Duration) -> Option<Event> {
        let clocks = self.joining.take()?;
        let start = self.advance(clocks);
        match std::mem::replace(&mut self.wait, Wait::Nothing) {
            Wait::Nothing => None,
            Wait::Join => Some(Event::Joined(start)),
            Wait::Pull => {
                self.restart_pull(now, start);
                None
            }
            Wait::Settle(_) => Some(Event::Settled(Some(start))),
            Wait::Chunk(_) => Some(Event::Chunk(Next::Rejoined(start))),
            leave @ Wait::Leave(_) => {
                self.wait = leave;
                None
            }
        }
    }

    /// Advances the shards that are behind to the latest of their clocks, and returns that step.
    fn advance(&mut self, clocks: BTreeMap<ShardId, u64>) -> Step {
        let step = clocks.values().copied().max().unwrap_or(0);
        for (shard, clock) in clocks {
            if let Some(link) = self.links.get_mut(&shard).filter(|_| clock < step) {
                link.retain(Kind::Advance(Advance { step }), &mut self.out);
            }
        }
        Step(step)
    }

    /// Sends the last switch of the mode to the shards that have not applied it.
    fn send_mode(&mut self) {
        let (number, mode) = self.mode();
        for shard in self.modes.behind() {
            let switch = SwitchMode { number, mode: mode.to_string() };
            if let Some(link) = self.links.get(&shard) {
                link.once(Kind::SwitchMode(switch), &mut self.out);
            }
        }
    }
}
