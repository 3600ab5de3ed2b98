//! One shard's link: finds the leader, keeps unacknowledged pushes, and sends them again after a break.
//!
//! ```text
//! dialling ──Opened──▶ open ──break / not leader──▶ pausing ──deadline──▶ dialling
//!     │                  └──refused──▶ failed, or lost (until the session is opened again)
//!     └── no leader until the deadline ──▶ failed
//! ```

mod inquiry;

use crate::{
    error::SessionError,
    io::{Acked, Effect},
    search::Search,
    session::Reported,
};
use inquiry::{LeaderInquiry, SILENCE_TIMEOUT};
use paraft_common::{BucketId, Payload, ServerId, ShardId, Step, retry::RetryPolicy};
use paraft_proto::{
    Ack, Acquire, Acquired, Advice, Chunk, FromShard, Norm, Open, Opened, PROTOCOL, Pause, Pull, Push,
    Refused, Resume, ToShard, Weights, WireKind, WithBulk, from_shard, to_shard::Kind,
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

enum Break {
    /// Another server: the one at this address, if named.
    Redial(Option<String>),
    /// The same server.
    Again,
    SessionLost,
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

    // ---- streams ----

    pub fn dial(&mut self, fixed: &LinkSettings, out: &mut SessionOutput) {
        out.dials += 1;
        self.turns(State::Dialling(out.dials), out);
        let (address, open) = (self.servers[self.next].clone(), self.open(fixed));
        out.effects.push_back(Effect::Dial { shard: self.shard, dial: out.dials, address, open });
    }

    fn open(&self, fixed: &LinkSettings) -> Box<Open> {
        Box::new(Open {
            protocol: PROTOCOL,
            shard: self.shard.0,
            worker: fixed.worker,
            session: self.session,
            job: fixed.job.to_string(),
            founding: self.founding,
        })
    }

    pub fn tick(&mut self, now: Duration, fixed: &LinkSettings, out: &mut SessionOutput) {
        if self.deadline().is_none_or(|at| at > now) {
            return;
        }
        match self.state {
            State::Open(_) => self.looks(now, fixed, out),
            _ => self.dial(fixed, out),
        }
    }

    /// Whether `dial` is the link's stream.
    pub fn is_on(&self, dial: u64) -> bool {
        matches!(self.state, State::Dialling(d) | State::Open(d) if d == dial)
    }

    pub fn broken(&mut self, now: Duration, cause: &str, fixed: &LinkSettings, out: &mut SessionOutput) {
        self.note_cause(cause);
        self.breaks(now, Break::Redial(None), fixed, out);
    }

    fn breaks(&mut self, now: Duration, how: Break, fixed: &LinkSettings, out: &mut SessionOutput) {
        // A redirect of a stream is no evidence against its connection.
        let broken = matches!(how, Break::Redial(None));
        out.effects.push_back(Effect::HangUp { shard: self.shard, broken });
        match how {
            Break::SessionLost => {
                self.drop_unacked(out);
                self.turns(State::Lost, out);
                out.heard.push_back(LinkEvent::SessionLost);
                return;
            }
            Break::Redial(to) => {
                let named = to.map(|address| self.place_of(address));
                self.next = self.search.next(self.next, named, self.servers.len());
            }
            Break::Again => {}
        }
        self.back_off(now, fixed, out);
    }

    fn back_off(&mut self, now: Duration, fixed: &LinkSettings, out: &mut SessionOutput) {
        let (since, attempt) = self.trouble.get_or_insert((now, 0));
        *attempt += 1;
        let waited = now.saturating_sub(*since);
        match fixed.retry.delay(*attempt, waited, (out.draw)()) {
            Some(Duration::ZERO) => self.dial(fixed, out),
            Some(delay) => self.turns(State::Pausing(now + delay), out),
            None => {
                let causes = std::mem::take(&mut self.causes).into_iter().collect();
                self.fails(SessionError::Unreachable { shard: self.shard, waited, causes }, out);
            }
        }
    }

    fn fails(&mut self, e: SessionError, out: &mut SessionOutput) {
        self.turns(State::Ended, out);
        out.effects.push_back(Effect::HangUp { shard: self.shard, broken: false });
        out.heard.push_back(LinkEvent::Failed(e));
    }

    /// The index of an address in the list; a new address (of a server that joined later) is added.
    fn place_of(&mut self, address: String) -> usize {
        self.servers.iter().position(|s| *s == address).unwrap_or_else(|| {
            self.servers.push(address);
            self.servers.len() - 1
        })
    }

    fn note_cause(&mut self, cause: &str) {
        self.causes.insert(self.servers[self.next].clone(), cause.to_string());
    }

    /// Drops the pushes of a lost session: they will not be acknowledged.
    fn drop_unacked(&mut self, out: &mut SessionOutput) {
        out.in_flight -= self.unacked.iter().map(|(p, _)| p.payload.len()).sum::<usize>();
        self.unacked.clear();
    }

    /// Forgets the session, and opens a new one.
    pub fn reset(&mut self, now: Duration, fixed: &LinkSettings, out: &mut SessionOutput) {
        self.session = 0;
        self.drop_unacked(out);
        self.asked = None;
        self.asked_chunk = None;
        self.presence = None;
        self.settling = false;
        // It belongs to the lost session: in the new one it would skip steps that the worker is about to
        // push.
        self.retained.retain(|k| !matches!(k, Kind::Advance(_)));
        match self.state {
            State::Lost => self.dial(fixed, out),
            State::Dialling(_) | State::Open(_) => self.breaks(now, Break::Again, fixed, out),
            State::Pausing(_) | State::Ended => {}
        }
    }

    // ---- messages of the worker: kept first, and sent if the stream is open; kept messages go out when it
    // opens ----

    fn send(&self, kind: Kind, out: &mut SessionOutput) {
        if matches!(self.state, State::Open(_)) {
            out.effects.push_back(Effect::Send(self.shard, ToShard { kind: Some(kind) }));
        }
    }

    /// Sent only where the stream is open.
    pub fn once(&self, kind: Kind, out: &mut SessionOutput) {
        self.send(kind, out);
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

    // ---- messages of the leader ----

    pub fn message(
        &mut self,
        now: Duration,
        message: WithBulk<FromShard>,
        fixed: &LinkSettings,
        out: &mut SessionOutput,
    ) {
        let WithBulk { message: FromShard { kind }, bulk } = message;
        self.quiet = now;
        if self.asking.is_some() {
            self.asks_no_more(out);
            self.changes(out, |link| link.look = Some(now + SILENCE_TIMEOUT));
        }
        let broken = |what: &str| SessionError::Protocol { shard: self.shard, what: what.into() };
        let failed = match kind {
            None => Some(broken("an empty message")),
            Some(from_shard::Kind::Opened(o)) => {
                self.opened(now, &o, fixed, out);
                None
            }
            Some(from_shard::Kind::Refused(r)) => self.refused(now, r, fixed, out),
            Some(_) if !matches!(self.state, State::Open(_)) => Some(broken("a message before Opened")),
            Some(from_shard::Kind::Weights(w)) => {
                self.weights(now, w, bulk.into_iter().next().unwrap_or_default(), out);
                None
            }
            Some(from_shard::Kind::Ack(a)) => {
                self.ack(&a, out);
                None
            }
            Some(from_shard::Kind::RoundNorm(n)) => {
                out.norms.push((self.shard, n.step, n.sum_of_squares));
                None
            }
            Some(from_shard::Kind::Reported(r)) => {
                // The evaluation is complete: no leader needs this worker's share again.
                self.retained.retain(|k| !matches!(k, Kind::Report(s) if s.epoch == r.epoch));
                out.reported.push(r);
                None
            }
            Some(from_shard::Kind::Acquired(t)) => {
                // The worker no longer wants an answer to an earlier request.
                if self.asked_chunk.is_some_and(|a| a.request == t.request) {
                    if t.kind() != Chunk::Wait {
                        self.asked_chunk = None;
                    }
                    out.heard.push_back(LinkEvent::Acquired(t));
                }
                None
            }
            Some(from_shard::Kind::Resumed(r)) => {
                if matches!(self.presence, Some(Kind::Resume(_))) {
                    self.presence = None;
                    out.heard.push_back(LinkEvent::Resumed(self.shard, r.clock));
                }
                None
            }
            Some(from_shard::Kind::Left(_)) => {
                self.turns(State::Ended, out);
                out.effects.push_back(Effect::HangUp { shard: self.shard, broken: false });
                out.heard.push_back(LinkEvent::Left(self.shard));
                None
            }
        };
        if let Some(e) = failed {
            self.fails(e, out);
        }
    }

    fn opened(&mut self, now: Duration, o: &Opened, fixed: &LinkSettings, out: &mut SessionOutput) {
        let State::Dialling(dial) = self.state else { return };
        if o.term < self.term {
            // This leader does not know what the worker did under the later leader.
            self.note_cause("it leads an earlier term than another server: it is deposed");
            let next = (self.next + 1) % self.servers.len();
            let next = self.servers[next].clone();
            return self.breaks(now, Break::Redial(Some(next)), fixed, out);
        }
        self.turns(State::Open(dial), out);
        self.term = o.term;
        self.founding = o.founding;
        self.holds = false;
        self.opened = (now, ServerId(o.server));
        if self.owes() {
            self.start_owing(now, out);
        }
        self.trouble = None;
        self.search.found();
        self.causes.clear();
        let new = self.session != o.session;
        self.session = o.session;
        if !o.initialised && self.has_initial {
            out.effects.push_back(Effect::SendInitial(self.shard));
        }
        if let Some((pull, _)) = &mut self.asked {
            pull.have.clear();
        }
        let kept = self.unacked.iter().map(|(p, _)| Kind::Push(p.clone()));
        let asked = self.asked.iter().map(|(p, _)| Kind::Pull(p.clone()));
        let take = self.asked_chunk.map(Kind::Acquire);
        let all = kept.chain(asked).chain(self.presence.clone()).chain(take);
        for kind in all.chain(self.retained.iter().cloned()) {
            self.send(kind, out);
        }
        let (shard, clock, founding) = (self.shard, o.clock, o.founding);
        out.heard.push_back(LinkEvent::Opened { shard, clock, new, founding });
    }

    fn weights(&mut self, now: Duration, weights: Weights, payload: Payload, out: &mut SessionOutput) {
        // The worker no longer wants an answer to an earlier pull, from before the session was opened again.
        let wanted =
            |p: &Pull| p.done == weights.done && (p.only.is_empty() || p.only.contains(&weights.bucket));
        let Some((pull, asked)) = self.asked.as_ref().filter(|(p, _)| wanted(p)) else { return };
        let (asked, part) = (*asked, !pull.only.is_empty());
        if weights.last {
            self.asked = None;
            // Of the other buckets the worker keeps its weights, from this stream or an earlier one.
            self.holds |= !part;
            if std::mem::take(&mut self.has_initial) {
                out.effects.push_back(Effect::InitialKnown(self.shard));
            }
        }
        out.untaken += payload.len();
        out.heard.push_back(LinkEvent::Weights { shard: self.shard, weights, payload, asked, at: now });
    }

    fn ack(&mut self, a: &Ack, out: &mut SessionOutput) {
        // An ack for a push that was acknowledged before, and then sent again, changes nothing.
        let place = self.unacked.binary_search_by_key(&a.seq, |(push, _)| push.seq);
        if let Some((push, pushed)) = place.ok().and_then(|place| self.unacked.remove(place)) {
            out.in_flight -= push.payload.len();
            let (opened, leader) = self.opened;
            out.effects.push_back(Effect::Acked(Acked {
                shard: self.shard,
                bucket: BucketId(push.bucket),
                step: Step(push.step),
                seq: push.seq,
                bytes: push.payload.len(),
                pushed,
                leader,
                opened,
                dropped: a.dropped,
            }));
            if a.dropped {
                out.heard.push_back(LinkEvent::Dropped(1));
            }
        }
        self.settled(out);
    }

    pub fn norm(&self, step: u64, sum_of_squares: f64, out: &mut SessionOutput) {
        self.send(Kind::Norm(Norm { step, sum_of_squares }), out);
    }

    /// The stream stays open, and the worker may skip the step.
    fn is_not_finite(&mut self, r: Refused, out: &mut SessionOutput) {
        let place = self.unacked.binary_search_by_key(&r.seq, |(push, _)| push.seq);
        let Some((push, _)) = place.ok().and_then(|place| self.unacked.remove(place)) else { return };
        out.in_flight -= push.payload.len();
        let (shard, kind) = (self.shard, r.kind());
        let error = SessionError::Refused { shard, kind, message: r.message };
        out.heard.push_back(LinkEvent::NotFinite { bucket: push.bucket, step: push.step, error });
    }

    fn refused(
        &mut self,
        now: Duration,
        r: Refused,
        fixed: &LinkSettings,
        out: &mut SessionOutput,
    ) -> Option<SessionError> {
        if r.seq > 0 && r.kind() == WireKind::NotFinite {
            self.is_not_finite(r, out);
            return None;
        }
        self.note_cause(&r.message);
        // Right after a break the server may still hold the old stream.
        let recent = self.trouble.is_none_or(|(since, _)| now.saturating_sub(since) < fixed.handover);
        let how = match r.advice() {
            Advice::Redirect => Break::Redial((!r.leader.is_empty()).then_some(r.leader)),
            Advice::Retry => Break::Again,
            Advice::Stop => Break::SessionLost,
            Advice::Lost => return Some(SessionError::StateLost { shard: self.shard }),
            Advice::Fix if r.kind() == WireKind::RankTaken && recent => Break::Again,
            Advice::Fix | Advice::Unspecified => {
                let (shard, kind) = (self.shard, r.kind());
                return Some(SessionError::Refused { shard, kind, message: r.message });
            }
        };
        self.breaks(now, how, fixed, out);
        None
    }
}
