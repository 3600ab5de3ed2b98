//! A worker's session with all shards of a job.
//!
//! The worker waits for one thing at a time: a join, a pull, acks, a chunk, or a leave. A call starts the
//! wait, and [`Session::poll`] returns its events until the wait ends. Pushes and early pull requests need no
//! wait.
//!
//! When a session is lost, the worker joins again within its next wait. What it waited for then restarts from
//! the step at which it continues.

mod chunks;
mod events;
mod joins;
mod pulls;
mod pushes;

pub use events::{Arrived, Event, Next, Pulled};
pub use pulls::Pull;

use crate::{
    error::SessionError,
    io::{Effect, Input},
    link::{Link, LinkSettings, SessionOutput},
    norms::{Norms, sum_of_parts},
};
use chunks::ChunkWait;
use paraft_common::{
    BucketId, Layout, Mode, ShardId, Step, WorkerId, config::ServerJob, modes::Modes, optim::Overrides,
    placement, retry::RetryPolicy,
};
use paraft_proto::{Advance, Finish, Leave, Norm, Push, Report, SwitchMode, to_shard::Kind};
use pulls::PullState;
use pushes::PushedSquares;
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

enum Wait {
    Nothing,
    Join,
    Pull,
    Settle(BTreeSet<ShardId>),
    /// The norm of this step, or until no shard owes an ack of it.
    Norm(u64),
    Chunk(ChunkWait),
    Leave(BTreeSet<ShardId>),
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
    overrides: Vec<Overrides>,
    table_rates: Vec<Option<f64>>,
    /// The script clips steps by their norm.
    clipped: bool,
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
            if b.kind.is_in_norm() {
                all_trained.insert(shard);
            }
            if !own.contains(&i) {
                continue;
            }
            if b.kind.is_in_norm() {
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
            overrides: Vec::new(),
            table_rates: Vec::new(),
            clipped: false,
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
            let asks = self.norms.is_shared() || self.clipped;
            if let Some((sum, bound)) = self.norms.add(step, shard, part) {
                self.tell(step, (sum, bound), vec![shard]);
            } else if let Some(parts) = self.norms.parts(step).filter(|_| !asks) {
                self.tell_norm(Step(step), sum_of_parts(parts), None);
            }
        }
        // A new leader repeats the latest evaluation, since the answer may have been lost with the old
        // leader.
        let new = std::mem::take(&mut self.out.reported).into_iter();
        self.evaluations.extend(new.filter(|r| self.evaluated.insert(r.epoch)));
    }

    fn tell(&mut self, step: u64, (sum_of_squares, bound): (f64, Option<f64>), shards: Vec<ShardId>) {
        for shard in shards {
            if let Some(link) = self.links.get(&shard) {
                link.send(Kind::Norm(Norm { step, sum_of_squares, bound }), &mut self.out);
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

    /// Number of values of the buckets that this process pulls.
    pub fn own_len(&self) -> usize {
        self.layout.buckets()[self.own.start as usize..self.own.end as usize].iter().map(|b| b.len).sum()
    }

    /// Sends this process's shards the sum over all shards, for a step that gave an [`Event::NormParts`], and a script's
    /// bound. Shards that know it from another worker ignore it.
    pub fn tell_norm(&mut self, step: Step, sum_of_squares: f64, bound: Option<f64>) {
        let shards = self.norms.tell(step.0, sum_of_squares, bound);
        self.tell(step.0, (sum_of_squares, bound), shards);
    }

    /// Whether the script clips the next pushes' steps by their norm: their rounds wait for [`Self::tell_norm`].
    pub fn clip_steps(&mut self, clips: bool) {
        self.clipped = clips;
    }

    /// Waits for the parts of the norm of a step that is pushed and clipped; ends with [`Event::NormParts`], or with
    /// [`Event::Settled`] if the step was applied without.
    pub fn ask_norm(&mut self, step: Step) {
        self.settling(); // wakes the caller when the acks are here
        self.wait = Wait::Norm(step.0);
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

    /// Sends the last switch of the mode to the shards that have not applied it.
    fn send_mode(&mut self) {
        let (number, mode) = self.mode();
        for shard in self.modes.behind() {
            let switch = SwitchMode { number, mode: mode.to_string() };
            if let Some(link) = self.links.get(&shard) {
                link.send(Kind::SwitchMode(switch), &mut self.out);
            }
        }
    }
}
