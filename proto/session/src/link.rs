//! One shard's link: finds the leader, keeps unacknowledged pushes, and sends them again after a break.
//!
//! ```text
//! dialling ──Opened──▶ open ──break / not leader──▶ pausing ──deadline──▶ dialling
//!     │                  └──refused──▶ failed, or lost (until the session is opened again)
//!     └── no leader until the deadline ──▶ failed
//! ```

mod answers;
mod inquiry;
mod streams;

use crate::{error::SessionError, io::Effect, search::Search};
use inquiry::LeaderInquiry;
use paraft_common::{Payload, ServerId, ShardId, retry::RetryPolicy};
use paraft_proto::{
    Acquire, Acquired, Pause, Pull, Push, Reported, Resume, ToShard, Weights, to_shard::Kind,
};
use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    sync::Arc,
    time::Duration,
};

/// Events of a link that the worker may be waiting for, in order.
#[derive(Debug)]
pub(crate) enum LinkEvent {
    Opened {
        shard: ShardId,
        clock: u64,
        new: bool,
        founding: u64,
    },
    Weights {
        shard: ShardId,
        weights: Weights,
        payload: Payload,
        asked: Duration,
        at: Duration,
    },
    Settled(ShardId),
    Acquired(Acquired),
    Resumed(ShardId, u64),
    Left(ShardId),
    /// This many pushes arrived too late for their rounds, and were dropped.
    Dropped(u64),
    /// A push was refused because it is not finite. Its bucket still waits for this worker's step.
    NotFinite {
        bucket: u32,
        step: u64,
        error: SessionError,
    },
    SessionLost,
    Failed(SessionError),
}

/// State that all links of a session share and write to.
pub(crate) struct SessionOutput {
    pub effects: VecDeque<Effect>,
    pub heard: VecDeque<LinkEvent>,
    /// Complete evaluations.
    pub reported: Vec<Reported>,
    /// Received parts of norms.
    pub norms: Vec<(ShardId, u64, f64)>,
    /// Bytes of payload that are pushed and not acknowledged.
    pub in_flight: usize,
    /// Bytes of received weights that the worker has not taken.
    pub untaken: usize,
    /// When each link has to act without an input.
    pub due: BTreeSet<(Duration, ShardId)>,
    pub dials: u64,
    /// Uniform in 0..1.
    pub draw: Box<dyn FnMut() -> f64 + Send>,
}

/// The fixed settings of a link.
pub(crate) struct LinkSettings {
    pub worker: u32,
    pub job: Arc<str>,
    pub retry: RetryPolicy,
    pub handover: Duration,
}

#[derive(Debug, PartialEq)]
enum State {
    /// Dials at this time.
    Pausing(Duration),
    /// The stream is being opened; only Open may be sent.
    Dialling(u64),
    Open(u64),
    /// The session is lost: the worker has to open another.
    Lost,
    /// The worker has left, or the link has failed.
    Ended,
}

pub(crate) struct Link {
    pub shard: ShardId,
    state: State,
    servers: Vec<String>,
    session: u64,
    /// The founding of the shard's state that this worker has seen; 0: none.
    founding: u64,
    /// The latest term of a leader that has opened a stream. A leader of an earlier term is deposed and does
    /// not know it.
    term: u64,
    /// The index of the server to dial. The shard's replicas are on the first servers of the list.
    next: usize,
    search: Search,
    /// Sequence number of the last push. It keeps counting when a session is lost.
    pub seq: u64,
    /// Pushes without an ack and their times, by rising seq. The window bounds them, and so do two steps: the
    /// answer to a pull comes after them, and a stage of a model may push once more before it takes the
    /// answer.
    unacked: VecDeque<(Push, Duration)>,
    /// The pull without an answer yet, and its time.
    asked: Option<(Pull, Duration)>,
    /// The open stream has answered the latest pull in full: the worker's versions are this leader's.
    holds: bool,
    asked_chunk: Option<Acquire>,
    /// The latest Pause or Resume: the worker is idle, or wants to continue and has no answer yet.
    presence: Option<Kind>,
    /// The worker waits until every push is acknowledged.
    settling: bool,
    /// Reports, Advance, Finish and Leave: sent again after a break, since applying them twice changes
    /// nothing.
    retained: Vec<Kind>,
    /// Since when no leader was reached, and how many tries failed.
    trouble: Option<(Duration, u32)>,
    causes: BTreeMap<String, String>,
    /// When the open stream was opened, and by which leader.
    opened: (Duration, ServerId),
    /// Since when the leader owes an answer and is silent.
    quiet: Duration,
    /// When to check for silence, while a stream is open.
    look: Option<Duration>,
    asking: Option<LeaderInquiry>,
    /// The servers may still need the initial state.
    has_initial: bool,
}

impl Link {
    /// A link to `shard`; `servers` are all servers, those with its replicas first.
    pub fn new(shard: ShardId, servers: Vec<String>) -> Self {
        Self {
            shard,
            state: State::Lost,
            servers,
            session: 0,
            founding: 0,
            term: 0,
            next: 0,
            search: Search::default(),
            seq: 0,
            unacked: VecDeque::new(),
            asked: None,
            holds: false,
            asked_chunk: None,
            presence: None,
            settling: false,
            retained: Vec::new(),
            trouble: None,
            causes: BTreeMap::new(),
            opened: (Duration::ZERO, ServerId(0)),
            quiet: Duration::ZERO,
            look: None,
            asking: None,
            has_initial: true,
        }
    }

    /// When the link has to act without an input.
    fn deadline(&self) -> Option<Duration> {
        match self.state {
            State::Pausing(until) => Some(until),
            State::Open(_) => self.look,
            _ => None,
        }
    }

    /// Whether the worker's weights are those that this stream's leader has sent.
    pub fn holds(&self) -> bool {
        self.holds
    }

    /// The session that the shard has given.
    pub fn session(&self) -> u64 {
        self.session
    }

    /// The latest term of a leader that has opened a stream.
    pub fn term(&self) -> u64 {
        self.term
    }

    fn turns(&mut self, to: State, out: &mut SessionOutput) {
        self.asks_no_more(out);
        self.changes(out, |link| {
            link.look = None;
            link.state = to;
        });
    }

    /// Applies a change, and keeps [`SessionOutput::due`] up to date.
    fn changes(&mut self, out: &mut SessionOutput, change: impl FnOnce(&mut Self)) {
        let before = self.deadline();
        change(self);
        let after = self.deadline();
        if before != after {
            before.map(|at| out.due.remove(&(at, self.shard)));
            after.map(|at| out.due.insert((at, self.shard)));
        }
    }

    // ---- messages of the worker: kept first, and sent if the stream is open; kept messages go out when it
    // opens ----

    /// Sends only if the stream is open.
    pub fn send(&self, kind: Kind, out: &mut SessionOutput) {
        if matches!(self.state, State::Open(_)) {
            out.effects.push_back(Effect::Send(self.shard, ToShard { kind: Some(kind) }));
        }
    }

    /// Pushes; `at` is the time of the worker's call, which may be earlier than `now`.
    pub fn push(&mut self, push: Push, at: Duration, now: Duration, out: &mut SessionOutput) {
        if self.state == State::Lost {
            return; // it would not be acknowledged
        }
        if !self.owes() {
            self.start_owing(now, out);
        }
        out.in_flight += push.payload.len();
        self.unacked.push_back((push.clone(), at));
        self.send(Kind::Push(push), out);
    }

    /// Whether a push of this step waits for its ack.
    pub fn has_pushed(&self, step: u64) -> bool {
        self.unacked.iter().any(|(push, _)| push.step == step)
    }

    pub fn pull(&mut self, mut pull: Pull, at: Duration, out: &mut SessionOutput) {
        if !self.holds || !pull.only.is_empty() {
            pull.have.clear();
        }
        if !self.owes() {
            self.start_owing(at, out);
        }
        self.asked = Some((pull.clone(), at));
        self.send(Kind::Pull(pull), out);
    }

    pub fn retain(&mut self, kind: Kind, out: &mut SessionOutput) {
        if matches!(kind, Kind::Advance(_)) {
            self.retained.retain(|k| !matches!(k, Kind::Advance(_)));
        }
        self.retained.push(kind.clone());
        self.send(kind, out);
    }

    pub fn take(&mut self, take: Acquire, out: &mut SessionOutput) {
        self.asked_chunk = Some(take);
        self.send(Kind::Acquire(take), out);
    }

    pub fn pause(&mut self, out: &mut SessionOutput) {
        self.presence = Some(Kind::Pause(Pause {}));
        self.send(Kind::Pause(Pause {}), out);
    }

    pub fn resume(&mut self, level: bool, out: &mut SessionOutput) {
        self.presence = Some(Kind::Resume(Resume { level }));
        self.send(Kind::Resume(Resume { level }), out);
    }

    pub fn settle(&mut self, out: &mut SessionOutput) {
        self.settling = true;
        self.settled(out);
    }

    fn settled(&mut self, out: &mut SessionOutput) {
        if self.settling && self.unacked.is_empty() && self.state != State::Lost {
            self.settling = false;
            out.heard.push_back(LinkEvent::Settled(self.shard));
        }
    }
}
