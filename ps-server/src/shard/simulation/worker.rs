//! A worker: the real session code, with a model of the training loop. The streams between it and the leaders keep
//! their order, may be slow, and may break at any message. A broken stream may still deliver its messages long
//! after the worker has another.

use super::{
    cluster::address,
    invariants::{Answer, History},
};
use crate::{
    rpc::convert,
    shard::{
        Shard,
        leader::{Event, Liveness, Reply},
    },
};
use bytes::Bytes;
use paraft_common::{
    BucketId, Mode, SessionId, ShardId, Step, Version, WorkerId, config::ServerJob, retry::RetryPolicy,
};
use paraft_proto::{Advice, Init, Open, RefusalKind, ToShard, WithBulk, to_shard::Kind};
use paraft_session::{Arrived, Effect, Event as SessionEvent, Input, Options, Pull, Pulled, Session};
use std::{
    collections::{BTreeMap, VecDeque},
    sync::Arc,
    time::Duration,
};
use tokio::sync::mpsc;

/// Buckets of the shard.
pub const BUCKETS: usize = 2;
/// Values in a bucket: the number of steps that all workers together may push.
pub const PLACES: usize = 256;

const SHARD: ShardId = ShardId(0);
/// Delays of a session: it redials at once and never gives up. Time passes for it only when it loses patience with
/// a leader.
const NO_DELAY: Duration = Duration::ZERO;
/// More than its patience.
const SESSION_TIMEOUT: Duration = Duration::from_secs(1);

/// A stream, and the messages on it that have not arrived.
pub struct Stream {
    owner: mpsc::Sender<Event>,
    /// The shard of its node.
    shard: Arc<Shard>,
    conn: u64,
    node: usize,
    liveness: Arc<Liveness>,
    sent: VecDeque<StreamMessage>,
    /// Channel for the refusals of the node's side. Only the owner keeps the stream open.
    refusals: mpsc::WeakSender<Reply>,
}

enum StreamMessage {
    Event(Event),
    Message(ToShard),
}

impl Stream {
    /// Delivers this many messages; returns false if the receiver is gone or nothing is left.
    pub fn deliver(&mut self, count: usize) -> bool {
        for _ in 0..count {
            let Some(sent) = self.sent.pop_front() else { return false };
            self.liveness.heard();
            let event = match sent {
                StreamMessage::Event(event) => event,
                StreamMessage::Message(message) => {
                    match convert::message(&self.shard, WithBulk::from(message)) {
                        Ok(Some(message)) => Event::Message(self.conn, message),
                        Ok(None) => continue,
                        Err(refusal) => {
                            let refused = |tx: mpsc::Sender<Reply>| tx.try_send(Reply::Refused(refusal));
                            self.refusals.upgrade().map(refused);
                            continue;
                        }
                    }
                }
            };
            if self.owner.try_send(event).is_err() {
                return false;
            }
        }
        true
    }

    /// Whether its receiver is this node.
    pub fn is_to(&self, node: usize) -> bool {
        self.node == node
    }

    /// Sends a heartbeat.
    pub fn send_heartbeat(&self) {
        self.liveness.heard();
    }

    /// Breaks the stream: the last `lost` messages do not arrive. The owner then sees its end.
    pub fn break_off(mut self, lost: usize) -> Self {
        self.sent.truncate(self.sent.len().saturating_sub(lost));
        self.sent.push_back(StreamMessage::Event(Event::Closed(self.conn)));
        self
    }
}

/// Replies that an owner has sent on a stream and its worker has not read.
struct Replies {
    from: mpsc::Receiver<Reply>,
    /// Each with the last session that any worker knew when it was sent.
    sent: VecDeque<(Reply, SessionId)>,
}

pub struct Worker {
    pub id: WorkerId,
    job: String,
    steps: u64,
    /// The worker skips every n-th step; 0: none.
    skips: u64,
    session: Session,
    /// The dial that the session wants.
    dials: Option<(u64, Box<Open>, String)>,
    /// A leader was named as the target.
    named: bool,
    /// The session's number of the stream.
    dial: u64,
    pub stream: Option<Stream>,
    /// The leader has answered on it.
    open: bool,
    replies: Option<Replies>,
    /// The node that the session wants to ask about its leader, and the stream for it.
    asks: Option<(u64, Box<Open>)>,
    beside: Option<(u64, Stream, Replies)>,
    /// Streams that it has released, beside those that its functions return.
    pub gone: Vec<Stream>,
    /// How often it has left a silent leader.
    pub turns: u64,
    now: Duration,
    /// Pushes that are not acknowledged, by sequence number: the message, the place and the bucket.
    pushed: BTreeMap<u64, (ToShard, usize, usize)>,
    /// The place of the current step.
    place: usize,
    done: Step,
    /// The step whose weights came last.
    asked: Step,
    last: bool,
    pub finished: bool,
    /// It is suspended, including its heartbeats; its streams stay open.
    pub hangs: bool,
    weights: BTreeMap<usize, (Version, Bytes)>,
    /// The mode in force when each bucket was released.
    modes: BTreeMap<usize, Mode>,
}

fn session(id: u32, job: &str) -> Session {
    let mut session = Session::new(Options {
        servers: (0..3).map(address).collect(),
        shards: 1,
        replicas: 3,
        worker: WorkerId(id),
        job: ServerJob::decode(job).expect("a job of this simulation"),
        job_text: job.into(),
        retry: RetryPolicy { base: NO_DELAY, max: NO_DELAY, deadline: Duration::MAX },
        handover: Duration::MAX,
        stages: None,
        draw: Box::new(|| 0.0),
    });
    session.join();
    session
}

impl Worker {
    pub fn new(id: u32, job: String, steps: u64, skips: u64) -> Self {
        let mut worker = Self {
            id: WorkerId(id),
            session: session(id, &job),
            job,
            steps,
            skips,
            dials: None,
            named: false,
            dial: 0,
            stream: None,
            open: false,
            replies: None,
            asks: None,
            beside: None,
            gone: Vec::new(),
            turns: 0,
            now: NO_DELAY,
            pushed: BTreeMap::new(),
            place: 0,
            done: Step(0),
            asked: Step(0),
            last: false,
            finished: false,
            hangs: false,
            weights: BTreeMap::new(),
            modes: BTreeMap::new(),
        };
        worker.carry_out(None);
        worker
    }

    /// Opens a stream to the named leader, or to `node`.
    pub fn connect(
        &mut self,
        node: usize,
        of: impl Fn(usize) -> (mpsc::Sender<Event>, Arc<Shard>),
        conn: u64,
    ) {
        let Some((dial, open, address_)) = self.dials.take() else { return };
        let named = (0..9).find(|n| address(*n) == address_).filter(|_| std::mem::take(&mut self.named));
        let node = named.unwrap_or(node);
        let (stream, replies) = self.line(node, of(node), conn, *open);
        self.dial = dial;
        self.open = false;
        self.stream = Some(stream);
        self.replies = Some(replies);
    }

    fn line(
        &self,
        node: usize,
        (owner, shard): (mpsc::Sender<Event>, Arc<Shard>),
        conn: u64,
        open: Open,
    ) -> (Stream, Replies) {
        let (tx, rx) = mpsc::channel(256);
        let refusals = tx.downgrade();
        let session = (open.session > 0).then_some(SessionId(open.session));
        let liveness = Arc::new(Liveness::default());
        let open =
            Event::Open { conn, tx, worker: self.id, session, job: open.job, liveness: liveness.clone() };
        let sent = VecDeque::from([StreamMessage::Event(open)]);
        let stream = Stream { owner, shard, conn, node, liveness, sent, refusals };
        (stream, Replies { from: rx, sent: VecDeque::new() })
    }

    /// Its leader has been silent for long, as far as it knows.
    pub fn is_impatient(&mut self) {
        self.now += SESSION_TIMEOUT;
        self.session.handle(self.now, Input::Tick);
        let old = self.carry_out(None);
        self.gone.extend(old);
    }

    /// Opens a second stream to a node, if the session wants one.
    pub fn connect_beside(&mut self, node: usize, at: (mpsc::Sender<Event>, Arc<Shard>), conn: u64) {
        let Some((dial, open)) = self.asks.take() else { return };
        let (stream, replies) = self.line(node, at, conn, *open);
        self.beside = Some((dial, stream, replies));
    }

    /// Whether the session wants a second stream.
    pub fn wants_beside(&self) -> bool {
        self.asks.is_some()
    }

    /// Its streams, its leader's first.
    pub fn streams(&mut self) -> impl Iterator<Item = &mut Stream> {
        self.stream.iter_mut().chain(self.beside.as_mut().map(|(_, stream, _)| stream))
    }

    fn asks_no_more(&mut self) {
        self.asks = None;
        self.gone.extend(self.beside.take().map(|(_, stream, _)| stream));
    }

    /// Breaks its stream; it will open another.
    pub fn disconnect(&mut self, history: &mut History) -> Option<Stream> {
        let old = self.hangs_up();
        if old.is_some() {
            let (shard, dial, cause) = (SHARD, self.dial, "it broke".into());
            self.session.handle(self.now, Input::Broken { shard, dial, cause });
            self.handle_events(SessionId(0), history);
        }
        old
    }

    fn hangs_up(&mut self) -> Option<Stream> {
        self.replies = None;
        self.stream.take()
    }

    /// Kills its process; another takes its place.
    pub fn kill(&mut self, history: &mut History) -> Option<Stream> {
        history.forgets(self.id);
        let stream = self.hangs_up();
        self.asks_no_more();
        let (gone, turns) = (std::mem::take(&mut self.gone), self.turns);
        let new = Self::new(self.id.0, std::mem::take(&mut self.job), self.steps, self.skips);
        *self = Self { gone, turns, ..new };
        stream
    }

    /// Whether it has received weights.
    pub fn has_begun(&self) -> bool {
        self.done > Step(0) || self.finished
    }

    fn had(&self) -> Option<SessionId> {
        let (session, _) = self.session.session_of(SHARD);
        (session > 0).then_some(SessionId(session))
    }

    /// Its state as text.
    pub fn state(&self) -> String {
        let Self { id, done, last, finished, .. } = self;
        let (stream, unacked) = (self.stream.as_ref().map(|s| s.node), self.pushed.len());
        let (session, term) = self.session.session_of(SHARD);
        format!(
            "{id}: stream to {stream:?} in term {term}, session {session}, {done}, {unacked} unacknowledged, \
             the last pull {last}, finished {finished}"
        )
    }

    /// Resends everything that it keeps, without a fault.
    pub fn repeats(&mut self) {
        let Some(stream) = self.stream.as_mut().filter(|_| self.open) else { return };
        stream.sent.extend(self.pushed.values().map(|(push, ..)| StreamMessage::Message(push.clone())));
    }

    /// Carries out the session's commands; returns a stream that it has released.
    fn carry_out(&mut self, mut history: Option<&mut History>) -> Option<Stream> {
        let mut old = None;
        while let Some(effect) = self.session.next_effect() {
            match effect {
                Effect::Dial { dial, address, open, .. } => self.dials = Some((dial, open, address)),
                Effect::HangUp { .. } => old = self.hangs_up().or(old),
                Effect::Ask { dial, open, .. } => {
                    self.asks_no_more();
                    self.asks = Some((dial, open));
                }
                Effect::AskNoMore(_) => self.asks_no_more(),
                Effect::Turn(_) => {
                    if let Some((dial, stream, replies)) = self.beside.take() {
                        self.turns += 1;
                        (self.dial, self.stream, self.replies) = (dial, Some(stream), Some(replies));
                    }
                }
                Effect::Send(_, message) => {
                    match &message.kind {
                        Some(Kind::Push(p)) => {
                            let new = (message.clone(), p.bucket as usize, self.place);
                            self.pushed.entry(p.seq).or_insert(new);
                        }
                        Some(Kind::Pull(_)) => {
                            let term = self.session.session_of(SHARD).1;
                            history.iter_mut().for_each(|h| h.asks(self.id, term));
                        }
                        _ => {}
                    }
                    self.stream
                        .iter_mut()
                        .for_each(|s| s.sent.push_back(StreamMessage::Message(message.clone())));
                }
                Effect::SendInitial(_) => {
                    for bucket in 0..BUCKETS as u32 {
                        let payload = vec![0u8; PLACES * 4].into();
                        let init = Kind::Init(Init { bucket, payload, ..Init::default() });
                        let message = ToShard { kind: Some(init) };
                        self.stream
                            .iter_mut()
                            .for_each(|s| s.sent.push_back(StreamMessage::Message(message.clone())));
                    }
                }
                Effect::InitialKnown(_) | Effect::Acked(_) => {}
            }
        }
        old
    }

    /// Handles the events of the session, and its reactions; `told`: the last session that any worker knew when
    /// they were sent.
    fn handle_events(&mut self, told: SessionId, history: &mut History) -> Option<Stream> {
        let mut old = None;
        loop {
            let polled = self.session.poll(self.now);
            old = self.carry_out(Some(history)).or(old);
            match polled {
                Ok(None) => return old,
                Ok(Some(SessionEvent::Joined(start))) => {
                    self.done = start;
                    self.session.pull(self.now, Pull::of(start), false);
                }
                Ok(Some(SessionEvent::Weights(w))) => self.arrived(w),
                Ok(Some(SessionEvent::Pulled(pulled))) => {
                    self.pulled(&pulled, told, history);
                    if self.finished {
                        return self.hangs_up().or(old);
                    }
                }
                Ok(Some(other)) => panic!("{} waits for nothing like {other:?}", self.id),
                Err(e) => panic!("{} is refused, and did nothing wrong: {e}", self.id),
            }
        }
    }

    fn arrived(&mut self, Arrived { weights, payload, .. }: Arrived) {
        self.asked = Step(weights.done);
        let (bucket, version) = (weights.bucket as usize, Version(weights.version));
        match weights.not_modified {
            true => assert_eq!(self.weights[&bucket].0, version, "what is not modified has another version"),
            false => _ = self.weights.insert(bucket, (version, payload.to_bytes())),
        }
    }

    fn pulled(&mut self, pulled: &Pulled, told: SessionId, history: &mut History) {
        let conn = self.stream.as_ref().map_or(0, |s| s.conn);
        let modes = std::mem::take(&mut self.modes);
        let answer = Answer { conn, told, slowest: pulled.slowest, modes };
        history.pulled(self.id, answer, self.asked, self.last, &self.weights);
        if self.last {
            self.finished = true;
            return;
        }
        self.done = pulled.done;
        self.next_step(history);
    }

    fn next_step(&mut self, history: &mut History) {
        if self.done.0 >= self.steps {
            self.last = true;
            self.session.finish();
            return self.session.pull(self.now, Pull { last: true, ..Pull::of(self.done) }, true);
        }
        self.last = false;
        self.done = self.done.next();
        let session = self.had().unwrap_or_default();
        let skip = self.skips > 0 && (self.done.0 + u64::from(self.id.0)).is_multiple_of(self.skips);
        self.place = history.pushes(self.id, session, self.done, skip);
        if self.id.0 % 2 == 1 {
            self.session.ask_ahead(self.now, Pull::of(self.done), true);
        }
        if skip {
            self.session.skip(self.now, self.done);
            return self.session.pull(self.now, Pull::of(self.done), true);
        }
        let mut payload = vec![0u8; PLACES * 4];
        payload[self.place * 4..self.place * 4 + 4].copy_from_slice(&1f32.to_le_bytes());
        let payload = Bytes::from(payload);
        // The last layer's bucket first.
        for bucket in (0..BUCKETS as u32).rev() {
            self.session.push(self.now, BucketId(bucket), self.done, payload.clone());
        }
        self.session.pull(self.now, Pull::of(self.done), true);
    }

    /// Receives the leaders' replies. They were sent when no session after `told` was known. Returns the last
    /// session in them.
    pub fn sent(&mut self, told: SessionId) -> SessionId {
        let mut last = told;
        let beside = self.beside.as_mut().map(|(_, _, replies)| replies);
        for replies in self.replies.iter_mut().chain(beside) {
            while let Ok(reply) = replies.from.try_recv() {
                if let Reply::Opened { session, .. } = &reply {
                    last = last.max(*session);
                }
                replies.sent.push_back((reply, told));
            }
        }
        last
    }

    /// Reads the replies of the node that it asked about its leader.
    fn read_beside(&mut self, history: &mut History) {
        while let Some((dial, _, replies)) = &mut self.beside {
            let (shard, dial) = (SHARD, *dial);
            let (input, told) = match replies.sent.pop_front() {
                Some((reply, told)) => {
                    let of_now = self.session.session_of(SHARD).1;
                    if matches!(&reply, Reply::Opened { term, .. } if *term > of_now) {
                        self.notes(&reply, history);
                    }
                    let message = convert::reply(0, reply).into();
                    (Input::Message { shard, dial, message }, told)
                }
                None if replies.from.is_closed() && replies.from.is_empty() => {
                    let cause = "it broke".into();
                    (Input::Broken { shard, dial, cause }, SessionId(0))
                }
                None => return,
            };
            self.session.handle(self.now, input);
            let old = self.handle_events(told, history);
            self.gone.extend(old);
        }
    }

    /// Reads the replies; returns the stream if it is of no use any more.
    pub fn hears(&mut self, history: &mut History) -> Option<Stream> {
        self.read_beside(history);
        loop {
            let replies = self.replies.as_mut()?;
            match replies.sent.pop_front() {
                Some((reply, told)) => {
                    self.notes(&reply, history);
                    let message = convert::reply(0, reply).into();
                    let (shard, dial) = (SHARD, self.dial);
                    self.session.handle(self.now, Input::Message { shard, dial, message });
                    if let Some(old) = self.handle_events(told, history) {
                        return Some(old);
                    }
                }
                None if replies.from.is_closed() && replies.from.is_empty() => {
                    return self.disconnect(history);
                }
                None => return None,
            }
        }
    }

    /// Records a reply for the invariants.
    fn notes(&mut self, reply: &Reply, history: &mut History) {
        let (_, term) = self.session.session_of(SHARD);
        match reply {
            // A leader of an earlier term is deposed without its knowledge: the session goes elsewhere.
            Reply::Opened { session, term: now, .. } if *now >= term => {
                history.opened(self.id, *session, self.had());
                self.open = true;
                if self.had() != Some(*session) {
                    self.pushed.clear();
                }
            }
            Reply::Ack { seq, version } => {
                if let Some((_, bucket, place)) = self.pushed.remove(&seq.0) {
                    history.acknowledged(term, bucket, place, *version);
                }
            }
            Reply::Dropped { seq } => {
                if let Some((_, bucket, place)) = self.pushed.remove(&seq.0) {
                    history.dropped(bucket, place);
                }
            }
            Reply::Weights(w) => _ = self.modes.insert(w.bucket.0 as usize, w.in_force.mode),
            Reply::Refused(r) => {
                self.named = matches!(r.kind, RefusalKind::NotLeader { leader: Some(_), .. });
                if r.kind.advice() == Advice::Stop {
                    history.session_lost(self.id, self.had());
                    self.pushed.clear();
                }
            }
            _ => {}
        }
    }
}
