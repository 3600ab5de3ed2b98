//! A worker's session with all shards of a job.
//!
//! The worker waits for one thing at a time (to have joined, a pull, its acks, a chunk, to have left): it begins the wait
//! with a call, and [`Session::poll`] gives what comes of it until the wait is over. Pushes and asks ahead need no wait.
//!
//! Where a session is lost, the worker joins anew within the next wait, and what it waited for begins again from the step
//! that it then goes on from.

mod chunks;
mod pulls;

pub use chunks::Next;
pub use pulls::{Pull, Pulled};

use crate::{
    error::SessionError,
    io::{Effect, Input},
    link::{Fixed, Link, LinkEvent, Outlet},
    norms::{Norms, sum_of_parts},
};
use bytes::Bytes;
use chunks::Chunks;
use paraft_common::{
    BucketId, Layout, Mode, Payload, ShardId, Step, TensorKind, WorkerId, config::ServerJob,
    encoding::sum_of_squares, modes::Modes, placement, retry::RetryPolicy,
};
use paraft_proto::{Advance, Finish, Leave, Push, Report, SwitchMode, Weights, limits, to_shard::Kind};
use pulls::Pulling;
use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    ops::Range,
    time::Duration,
};

/// A complete held-out evaluation, summed over the members.
pub type Reported = paraft_proto::Reported;

/// Right after a worker's end its stream may still be there on the server's side.
pub const HANDOVER: Duration = Duration::from_secs(3);

/// How to take part in a job.
pub struct Options {
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
    /// The same as it is sent.
    pub job_text: String,
    /// How a leader is looked for; its deadline is how long it is done without success.
    pub retry: RetryPolicy,
    /// How long another process may be connected as this worker before that is an error: one that has just ended, or whose
    /// lease has to end first.
    pub handover: Duration,
    /// The stages of the model that this process has, where others of the same worker have the rest; all.
    pub stages: Option<Range<usize>>,
    /// Uniform in 0..1, for the pauses between tries.
    pub draw: Box<dyn FnMut() -> f64 + Send>,
}

/// What a worker hears while it waits.
#[derive(Debug)]
pub enum Event {
    /// Every shard has given a session: the worker goes on from this step.
    Joined(Step),
    /// Weights of one bucket.
    Weights(Arrived),
    /// Once in a pull at most, where other processes of the worker have more shards: what those of this one have said of the norm
    /// of the step that was pulled. They wait for the sum of all ([`Session::tell_norm`]).
    NormParts(Vec<(ShardId, f64)>),
    /// The pull is answered in full.
    Pulled(Pulled),
    /// Every push is acknowledged; or the session was lost, and the worker goes on from a step once it has pulled.
    Settled(Option<Step>),
    /// What to train next.
    Chunk(Next),
    /// Every shard has ended the session.
    Left,
}

/// Weights of one bucket, as they came.
#[derive(Debug)]
pub struct Arrived {
    /// From the leader of this shard.
    pub shard: ShardId,
    /// Everything but the values.
    pub weights: Weights,
    /// The values, little-endian f32; none where the worker has them.
    pub payload: Payload,
    /// When they were asked for.
    pub asked: Duration,
    /// When they came.
    pub at: Duration,
}

enum Wait {
    Nothing,
    Join,
    Pull,
    Settle(BTreeSet<ShardId>),
    Chunk(Chunks),
    Leave(BTreeSet<ShardId>),
}

/// What was pushed last, where somebody needs its norm.
#[derive(Default)]
struct Pushed {
    step: u64,
    /// The sum of squares of each bucket.
    squares: BTreeMap<u32, f64>,
}

/// See the [module](self).
pub struct Session {
    fixed: Fixed,
    job: ServerJob,
    layout: Layout,
    shards: u32,
    /// Shards that hold buckets of this process's stages.
    links: BTreeMap<ShardId, Link>,
    /// Which, as buckets.
    own: Range<u32>,
    out: Outlet,
    /// Norms of BSP's rounds over all shards.
    norms: Norms,
    /// The founding of shard 0.
    founding: u64,
    wait: Wait,
    /// While sessions are opened: the clocks of the shards that have given one.
    joining: Option<BTreeMap<ShardId, u64>>,
    pulling: Option<Pulling>,
    /// Asks for chunks so far.
    requests: u64,
    /// Of each bucket, the version that the worker has.
    versions: Vec<u64>,
    /// Whether they are weights as the servers have them: the version does not tell, where the job's algorithm looks ahead.
    holds_plain: bool,
    /// Pushes of this step that wait for the norm of the whole gradient.
    held: Vec<(Push, Duration)>,
    /// The step that is pushed, and whether its pushes wait for that.
    pushing: (u64, bool),
    pushed: Pushed,
    /// The step of a pull whose parts of the norm were not given out.
    awaits_parts: Option<u64>,
    /// That the next pushes are computed from.
    samples: u32,
    /// At which the next pushes are to be applied; none: at the job's own.
    rates: Vec<f64>,
    /// Of each bucket, what the next pushes were computed at; none: what the worker has.
    computed_at: Vec<u64>,
    modes: Modes,
    /// Of the step that the next pull comes behind.
    loss: Option<f32>,
    /// Complete evaluations that nobody has asked for yet.
    evaluations: Vec<Reported>,
    /// Epochs of all evaluations so far.
    evaluated: BTreeSet<u64>,
    failed: Option<SessionError>,
    rejoins: u64,
    dropped: u64,
    /// Steps and buckets whose pushes were refused, since they are not finite.
    refused: BTreeSet<(u64, u32)>,
    /// Of this session's steps, as each shard has said, those that were skipped; and of the sessions that were lost.
    skipped: (BTreeMap<ShardId, u64>, u64),
}

impl Session {
    /// A session that has not begun: [`Self::join`] does.
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
                // A shard's replicas are on servers that follow each other.
                servers.rotate_left(preferred.map_or(0, |s| s.0 as usize));
                Link::new(shard, servers)
            });
        }
        let clips = options.job.clip.norm.is_some();
        Self {
            fixed: Fixed {
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
            out: Outlet {
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
            pushed: Pushed::default(),
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

    /// Takes an input; `now` never goes back.
    pub fn handle(&mut self, now: Duration, input: Input) {
        let (fixed, out) = (&self.fixed, &mut self.out);
        match input {
            Input::Tick => self.links.values_mut().for_each(|l| l.tick(now, fixed, out)),
            Input::Broken { shard, dial, cause } => match self.links.get_mut(&shard) {
                Some(link) if link.is_on(dial) => link.broken(now, &cause, fixed, out),
                Some(link) if link.asks_on(dial) => link.answered(now, None, fixed, out),
                _ => {}
            },
            Input::Message { shard, dial, message } => match self.links.get_mut(&shard) {
                Some(link) if link.is_on(dial) => link.message(now, message, fixed, out),
                Some(link) if link.asks_on(dial) => link.answered(now, message.message.kind, fixed, out),
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
        // A new leader repeats the latest one, since the answer may have been lost with the old.
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

    /// What is to be done next, in order; `None`: nothing.
    pub fn next_effect(&mut self) -> Option<Effect> {
        self.out.effects.pop_front()
    }

    /// When [`Input::Tick`] is due.
    pub fn deadline(&self) -> Option<Duration> {
        self.out.due.first().map(|(at, _)| *at)
    }

    /// Bytes of weights that have come and that the worker has not taken: I/O that reads on without a bound would hold a large
    /// model twice.
    pub fn untaken(&self) -> usize {
        self.out.untaken
    }

    // ---- what a worker calls ----

    /// The job's buckets.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// What names the job to the control group: the founding of shard 0 that it runs in.
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

    /// The session that a shard has given, and the term of its leader; 0 where there is none.
    pub fn session_of(&self, shard: ShardId) -> (u64, u64) {
        self.links.get(&shard).map_or((0, 0), |l| (l.session(), l.term()))
    }

    /// How often the session was lost and opened anew.
    pub fn rejoins(&self) -> u64 {
        self.rejoins
    }

    /// Pushes that came too late for their rounds, and were dropped.
    pub fn dropped(&self) -> u64 {
        self.dropped
    }

    /// Steps of this worker that were skipped: by itself or, where they were rounds, by anybody. Of those up to the last pull.
    pub fn skipped(&self) -> u64 {
        let (by_shard, before) = &self.skipped;
        before + by_shard.values().copied().max().unwrap_or_default()
    }

    /// Joins the job on every shard: [`Event::Joined`].
    pub fn join(&mut self) {
        self.wait = Wait::Join;
        self.joining = Some(BTreeMap::new());
        for link in self.links.values_mut() {
            link.dial(&self.fixed, &mut self.out);
        }
    }

    /// Whether a push of `len` bytes may go out before an ack comes: a slow server slows its workers, and nobody's memory grows
    /// with the model. One larger push is always let through, and any where the norm of the whole gradient decides about its
    /// first bucket, since no ack comes before the last push then.
    pub fn has_room(&self, len: usize) -> bool {
        let waits = &self.out.in_flight;
        self.job.clip.norm.is_some()
            || *waits == 0
            || waits.saturating_add(len) <= limits::PUSH_WINDOW_BYTES
            || self.failed.is_some()
            || self.out.heard.iter().any(|h| matches!(h, LinkEvent::Failed(_)))
    }

    /// From how many samples the gradients of the next pushes are computed: servers count them.
    pub fn weigh(&mut self, samples: usize) {
        self.samples = u32::try_from(samples).unwrap_or(u32::MAX);
    }

    /// The rates at which the next pushes are to be applied, one for each group of parameters (one where the job has none), in
    /// the place of the optimizer's times the schedule's factor. None: at the job's own.
    ///
    /// # Panics
    /// When they are not as many as the groups.
    pub fn rates(&mut self, rates: Vec<f64>) {
        let groups = self.job.groups.len().max(1);
        assert!(rates.is_empty() || rates.len() == groups, "{} rates for {groups} groups", rates.len());
        self.rates = rates;
    }

    /// Values of the buckets that this process pulls.
    pub fn own_len(&self) -> usize {
        self.layout.buckets()[self.own.start as usize..self.own.end as usize].iter().map(|b| b.len).sum()
    }

    /// The versions of the last pull, as [`Self::computed_at`] takes them.
    pub fn versions(&self) -> Vec<u64> {
        self.versions.clone()
    }

    /// The gradients of the next pushes are computed at weights of these versions, which were pulled before the ones that the worker has.
    /// None: at those.
    pub fn computed_at(&mut self, versions: Option<Vec<u64>>) {
        self.computed_at = versions.unwrap_or_default();
    }

    /// Pushes one bucket's gradient for `step`, in the encoding that the job has for it. It is kept until its ack, and sent
    /// again after a break.
    pub fn push(&mut self, now: Duration, bucket: BucketId, step: Step, payload: Bytes) {
        let shard = self.shard_of(bucket);
        if self.pushing.0 != step.0 {
            // Applied on arrival and clipped by the norm of the worker's whole gradient: nothing can go out before the last
            // bucket is known. (BSP clips the mean; there the servers exchange the norm.) All of a step or nothing, whatever
            // is heard meanwhile.
            self.pushing = (step.0, self.job.clip.norm.is_some() && self.any_asynchronous());
            // Of a step that was given up: nobody has been sent it.
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
        // Where they are shared, in every mode: the shards of another process may be in another one.
        let squares = self.squares(&push);
        if self.pushed.step != step.0 {
            self.pushed = Pushed { step: step.0, squares: BTreeMap::new() };
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

    /// Of a step that was pushed whole in this session, the sums of squares by shard, where some shards apply pushes one by one or other
    /// processes of the worker have the rest of the gradient.
    pub fn pushed_squares(&self, step: Step) -> Option<Vec<(ShardId, f64)>> {
        let Pushed { step: of, squares, .. } = &self.pushed;
        let trained = |b: &u32| self.layout.buckets()[*b as usize].kind == TensorKind::Param;
        let all = self.own.clone().filter(trained).all(|b| *of == step.0 && squares.contains_key(&b));
        all.then(|| self.by_shard(squares).into_iter().collect())
    }

    /// Whether the pushes of this step bring the norm, and are applied as they come.
    pub fn is_one_by_one(&self, step: Step) -> bool {
        self.pushing == (step.0, true)
    }

    /// The sum of squares of the worker's whole gradient of a step that this process has pushed its part of: what waits for it
    /// goes out.
    pub fn clip_by(&mut self, now: Duration, step: Step, sum_of_squares: f64) {
        if self.held.first().is_some_and(|(p, _)| p.step == step.0) {
            self.release(now, sum_of_squares);
        }
    }

    /// Tells the shards of this process what the parts of all shards come to, of a step of which [`Event::NormParts`] was heard.
    /// Where they know it from another worker nothing comes of it.
    pub fn tell_norm(&mut self, step: Step, sum_of_squares: f64) {
        let shards = self.norms.tell(step.0, sum_of_squares);
        self.tell(step.0, sum_of_squares, shards);
    }

    /// Says that the worker has nothing for `step`, in the place of its pushes: of every bucket, kept and sent as they are. A
    /// round in which anybody skips changes nothing, and where pushes are applied one by one this worker's does.
    ///
    /// Where pushes of the step were refused, since they are not finite, it is of their buckets: what else was pushed
    /// for it stays.
    ///
    /// # Panics
    /// When something was pushed for this step, and nothing of it refused.
    pub fn skip(&mut self, now: Duration, step: Step) {
        let refused = std::mem::take(&mut self.refused);
        let whole = !refused.iter().any(|(s, _)| *s == step.0);
        let pushed = self.links.values().any(|l| l.has_pushed(step.0));
        assert!(!(whole && pushed), "{step} was pushed, and cannot be skipped");
        // What waits for the rest of its step was sent to nobody.
        self.held.clear();
        self.pushing = (0, false);
        self.pushed = Pushed::default();
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

    /// Of the values as the servers decode them; of running statistics 0.
    fn squares(&self, p: &Push) -> f64 {
        let spec = self.layout.buckets()[p.bucket as usize];
        if spec.kind != TensorKind::Param {
            return 0.0;
        }
        let squares = sum_of_squares(&p.payload.clone().into(), self.job.encoding(spec.kind), spec.len);
        squares.unwrap_or(f64::NAN) // not as the job encodes it: the servers say so
    }

    /// Added up as the servers do for BSP, by shard and in it by bucket, whatever order the backward pass has: the last bit of
    /// the sum depends on it, and one worker must get the same bits in every mode.
    fn by_shard(&self, squares: &BTreeMap<u32, f64>) -> BTreeMap<ShardId, f64> {
        let mut parts = BTreeMap::new();
        for (bucket, squares) in squares {
            *parts.entry(self.shard_of(BucketId(*bucket))).or_insert(0.0) += squares;
        }
        parts
    }

    /// What waits for the sum of squares goes out with it.
    fn release(&mut self, now: Duration, total: f64) {
        for (mut p, at) in std::mem::take(&mut self.held) {
            p.sum_of_squares = total;
            let shard = self.shard_of(BucketId(p.bucket));
            if let Some(link) = self.links.get_mut(&shard) {
                link.push(p, at, now, &mut self.out);
            }
        }
    }

    /// Whether a shard applies pushes as they come.
    fn any_asynchronous(&self) -> bool {
        self.links.keys().any(|shard| !self.modes.of(*shard).averages())
    }

    /// The mode in force, as the shards have said with the last pull, and how often it was switched.
    pub fn mode(&self) -> (u64, Mode) {
        self.modes.latest()
    }

    /// The worker goes on from `step`, where others of its processes are: shards that are behind count it as done.
    pub fn advance_to(&mut self, step: Step) {
        for link in self.links.values_mut() {
            link.retain(Kind::Advance(Advance { step: step.0 }), &mut self.out);
        }
    }

    /// The mean training loss of the step that the next pull comes behind, for the rule that chooses the staleness bound.
    pub fn note_loss(&mut self, loss: f32) {
        self.loss = Some(loss);
    }

    /// Waits until every push is acknowledged, for a worker that goes on without a pull: [`Event::Settled`]. A push is refused
    /// until the one of the step before is in.
    pub fn settle(&mut self) {
        self.wait = Wait::Settle(self.settling());
    }

    fn settling(&mut self) -> BTreeSet<ShardId> {
        self.links.values_mut().for_each(|l| l.settle(&mut self.out));
        self.links.keys().copied().collect()
    }

    /// Gives this worker's share of a held-out evaluation to shard 0, which adds the shares up.
    pub fn report(&mut self, epoch: u64, loss_sum: f64, correct: u64, count: u64) {
        if let Some(link) = self.links.get_mut(&ShardId(0)) {
            link.retain(Kind::Report(Report { epoch, loss_sum, correct, count }), &mut self.out);
        }
    }

    /// Evaluations that became complete since the last call.
    pub fn evaluations(&mut self) -> Vec<Reported> {
        std::mem::take(&mut self.evaluations)
    }

    /// Tells every shard that this worker has done all its steps.
    pub fn finish(&mut self) {
        self.retain(Kind::Finish(Finish {}));
    }

    /// Ends the session before the worker has done all its steps, so that the others need not wait until its lease is over:
    /// [`Event::Left`]. Nothing can be asked afterwards.
    pub fn leave(&mut self) {
        self.retain(Kind::Leave(Leave {}));
        self.wait = Wait::Leave(self.links.keys().copied().collect());
    }

    fn retain(&mut self, kind: Kind) {
        self.links.values_mut().for_each(|l| l.retain(kind.clone(), &mut self.out));
    }

    /// Whether [`Self::poll`] has something to say.
    pub fn has_news(&self) -> bool {
        !self.out.heard.is_empty() || self.failed.is_some() || self.unsaid_parts().is_some()
    }

    /// The parts of the norm of the step that is pulled, where they are to be given out.
    fn unsaid_parts(&self) -> Option<BTreeMap<ShardId, f64>> {
        let pulls = matches!(self.wait, Wait::Pull) && self.norms.is_shared();
        self.awaits_parts.filter(|_| pulls).and_then(|step| self.norms.parts(step))
    }

    /// What comes of the wait that was begun last; `None`: nothing before the next input.
    ///
    /// # Errors
    /// The session cannot go on. It says so each time. Only where a push was refused since it is not finite
    /// ([`WireKind::NotFinite`](paraft_proto::WireKind::NotFinite)) it says so once, and the wait goes on, once that step
    /// is skipped ([`Self::skip`]).
    pub fn poll(&mut self, now: Duration) -> Result<Option<Event>, SessionError> {
        if let Some(e) = &self.failed {
            return Err(e.clone());
        }
        loop {
            // Before the pull is over: the other processes may need them.
            if let Some(parts) = self.unsaid_parts() {
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
                    // A new leader: the link has asked again.
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
            LinkEvent::NotFinite { error, .. } => return Err(error), // `poll` has seen it
        }
        Ok(None)
    }

    /// What the wait has come to, if it is over.
    fn over(&mut self) -> Option<Event> {
        if self.joining.is_some() {
            return None;
        }
        match &self.wait {
            Wait::Pull if self.pulling.as_ref().is_some_and(Pulling::is_answered) => {
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

    /// The session is lost on some shard: a new one is opened on all.
    fn rejoin(&mut self, now: Duration) {
        if matches!(self.wait, Wait::Leave(_)) {
            return; // the worker goes anyway: where nobody answers, its lease ends
        }
        if self.joining.is_none() {
            self.rejoins += 1;
            self.skipped = (BTreeMap::new(), self.skipped());
        }
        self.joining = Some(BTreeMap::new());
        self.held.clear();
        self.pushing = (0, false);
        self.pushed = Pushed::default();
        self.refused.clear();
        self.computed_at.clear();
        for link in self.links.values_mut() {
            link.reset(now, &self.fixed, &mut self.out);
        }
    }

    /// Every shard has given a session. Those that are behind are brought to the latest of their clocks.
    fn joined(&mut self, now: Duration) -> Option<Event> {
        let clocks = self.joining.take()?;
        let start = self.advance(clocks);
        match std::mem::replace(&mut self.wait, Wait::Nothing) {
            Wait::Nothing => None,
            Wait::Join => Some(Event::Joined(start)),
            Wait::Pull => {
                self.pull_anew(now, start);
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

    /// Brings shards that are behind to the latest of their clocks, and gives it.
    fn advance(&mut self, clocks: BTreeMap<ShardId, u64>) -> Step {
        let step = clocks.values().copied().max().unwrap_or(0);
        for (shard, clock) in clocks {
            if let Some(link) = self.links.get_mut(&shard).filter(|_| clock < step) {
                link.retain(Kind::Advance(Advance { step }), &mut self.out);
            }
        }
        Step(step)
    }

    /// Tells the shards that have not come to the last switch of the mode.
    fn tell_mode(&mut self) {
        let (number, mode) = self.mode();
        for shard in self.modes.behind() {
            let switch = SwitchMode { number, mode: mode.to_string() };
            if let Some(link) = self.links.get(&shard) {
                link.once(Kind::SwitchMode(switch), &mut self.out);
            }
        }
    }
}
