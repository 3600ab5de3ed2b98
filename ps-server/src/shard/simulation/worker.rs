//! A worker, as the client behaves: it keeps what is not acknowledged, opens its session again after a break, and sends
//! everything again. Between it and the owners are streams that keep their order, may be slow, and may break at any
//! message; a broken one may still deliver what was sent on it, long after the worker has another.

use super::{
    cluster::address,
    invariants::{Answer, History},
};
use crate::shard::{
    command::InitPart,
    leader::{Event, Life, Message, Reply},
};
use bytes::Bytes;
use paraft_common::{BucketId, Mode, Seq, SessionId, Step, Version, WorkerId};
use paraft_proto::{Advice, RefusalKind};
use std::{
    collections::{BTreeMap, VecDeque},
    sync::Arc,
};
use tokio::sync::mpsc;

/// Buckets of the shard.
pub const BUCKETS: usize = 2;
/// Values in a bucket: the number of steps that the workers may push, all together.
pub const PLACES: usize = 256;

/// A stream, and what was sent on it and has not arrived.
pub struct Stream {
    owner: mpsc::Sender<Event>,
    conn: u64,
    node: usize,
    life: Arc<Life>,
    sent: VecDeque<Event>,
}

impl Stream {
    /// Delivers so many messages; false where nobody is there any more or nothing is left.
    pub fn deliver(&mut self, count: usize) -> bool {
        for _ in 0..count {
            let Some(event) = self.sent.pop_front() else { return false };
            self.life.heard();
            if self.owner.try_send(event).is_err() {
                return false;
            }
        }
        true
    }

    /// A heartbeat.
    pub fn beats(&self) {
        self.life.heard();
    }

    /// The last that was sent does not arrive. In the end the owner hears that the stream has ended.
    pub fn breaks(mut self, lost: usize) -> Self {
        self.sent.truncate(self.sent.len().saturating_sub(lost));
        self.sent.push_back(Event::Closed(self.conn));
        self
    }
}

/// What an owner has sent on a stream, and its worker has not read.
struct Replies {
    from: mpsc::Receiver<Reply>,
    /// With the last session that anyone had been told of before each was sent.
    sent: VecDeque<(Reply, SessionId)>,
}

#[derive(Clone, Copy)]
struct Push {
    seq: Seq,
    step: Step,
    bucket: usize,
    pulled: Version,
    place: usize,
}

pub struct Worker {
    pub id: WorkerId,
    job: String,
    steps: u64,
    pub stream: Option<Stream>,
    replies: Option<Replies>,
    /// Of the leader that opened the stream.
    term: u64,
    open: bool,
    /// Where it was told to go.
    hint: Option<usize>,
    session: Option<SessionId>,
    seq: u64,
    done: Step,
    versions: [Version; BUCKETS],
    unacked: BTreeMap<Seq, Push>,
    asked: Option<(Step, bool)>,
    finishing: bool,
    pub finished: bool,
    /// It stands still, heartbeats and all; its streams stay open.
    pub hangs: bool,
    /// Buckets of the pull that is being answered.
    got: BTreeMap<usize, (Version, Bytes)>,
    /// The modes in force when they were sent.
    modes: BTreeMap<usize, Mode>,
    /// Buckets of the pull before, if it came by this stream.
    holds: BTreeMap<usize, (Version, Bytes)>,
}

impl Worker {
    pub fn new(id: u32, job: String, steps: u64) -> Self {
        Self {
            id: WorkerId(id),
            job,
            steps,
            stream: None,
            replies: None,
            term: 0,
            open: false,
            hint: None,
            session: None,
            seq: 0,
            done: Step(0),
            versions: [Version(0); BUCKETS],
            unacked: BTreeMap::new(),
            asked: None,
            finishing: false,
            finished: false,
            hangs: false,
            got: BTreeMap::new(),
            modes: BTreeMap::new(),
            holds: BTreeMap::new(),
        }
    }

    /// Opens a stream to a node: where it was told to go, or to `node`.
    pub fn connect(&mut self, node: usize, owner: impl Fn(usize) -> mpsc::Sender<Event>, conn: u64) {
        let node = self.hint.take().unwrap_or(node);
        let owner = owner(node);
        let (tx, rx) = mpsc::channel(256);
        let (worker, session, job) = (self.id, self.session, self.job.clone());
        let life = Arc::new(Life::default());
        let open = Event::Open { conn, tx, worker, session, job, life: life.clone() };
        self.stream = Some(Stream { owner, conn, node, life, sent: VecDeque::from([open]) });
        self.replies = Some(Replies { from: rx, sent: VecDeque::new() });
        self.open = false;
        self.got.clear();
        self.holds.clear();
    }

    /// Its stream breaks; it will open another.
    pub fn disconnect(&mut self) -> Option<Stream> {
        self.replies = None;
        self.open = false;
        self.stream.take()
    }

    /// It dies, and another process takes its place.
    pub fn dies(&mut self, history: &mut History) -> Option<Stream> {
        history.forgets(self.id);
        let stream = self.disconnect();
        *self = Self::new(self.id.0, std::mem::take(&mut self.job), self.steps);
        stream
    }

    /// Whether it has had weights.
    pub fn has_begun(&self) -> bool {
        self.done > Step(0) || self.finished
    }

    /// Where it is, for a person to read.
    pub fn state(&self) -> String {
        let Self { id, term, open, session, done, asked, finishing, finished, .. } = self;
        let (stream, unacked) = (self.stream.as_ref().map(|s| s.node), self.unacked.len());
        format!(
            "{id}: stream to {stream:?}, open {open} in term {term}, {session:?}, {done}, {unacked} unacknowledged, \
             asked {asked:?}, finishing {finishing}, finished {finished}"
        )
    }

    fn send(&mut self, message: Message) {
        if let Some(s) = self.stream.as_mut().filter(|_| self.open) {
            s.sent.push_back(Event::Message(s.conn, message));
        }
    }

    fn send_push(&mut self, p: Push) {
        let mut payload = vec![0u8; PLACES * 4];
        payload[p.place * 4..p.place * 4 + 4].copy_from_slice(&1f32.to_le_bytes());
        let (seq, step, bucket, pulled) = (p.seq, p.step, p.bucket, p.pulled);
        let payload = payload.into();
        let arrived = paraft_trace::Moment::default();
        let (samples, sum_of_squares) = (1, 1.0);
        self.send(Message::Push { seq, step, bucket, pulled, samples, sum_of_squares, payload, arrived });
    }

    /// Sends again what it keeps, though nothing is broken.
    pub fn repeats(&mut self) {
        for p in self.unacked.values().copied().collect::<Vec<_>>() {
            self.send_push(p);
        }
    }

    fn ask(&mut self, last: bool, history: &mut History) {
        self.asked = Some((self.done, last));
        history.asks(self.id, self.term);
        let have = self.holds.values().map(|(version, _)| *version).collect();
        self.send(Message::Pull {
            done: self.done,
            last,
            section: false,
            have,
            loss: None,
            only: Vec::new(),
        });
    }

    fn next_step(&mut self, history: &mut History) {
        if self.done.0 >= self.steps {
            self.finishing = true;
            self.send(Message::Finish);
            return self.ask(true, history);
        }
        self.done = self.done.next();
        let place = history.pushes(self.id, self.session.unwrap_or_default(), self.done);
        let ahead = self.id.0 % 2 == 1;
        if ahead {
            self.ask(false, history);
        }
        // The last layer's bucket first.
        for bucket in (0..BUCKETS).rev() {
            self.seq += 1;
            let (seq, pulled) = (Seq(self.seq), self.versions[bucket]);
            let push = Push { seq, step: self.done, bucket, pulled, place };
            self.unacked.insert(seq, push);
            self.send_push(push);
        }
        if !ahead {
            self.ask(false, history);
        }
    }

    /// The owners have worked: what they have sent was sent when nobody knew of a session after `told`. Gives the last
    /// session that is told of here.
    pub fn sent(&mut self, told: SessionId) -> SessionId {
        let mut last = told;
        let Some(replies) = &mut self.replies else { return last };
        while let Ok(reply) = replies.from.try_recv() {
            if let Reply::Opened { session, .. } = &reply {
                last = last.max(*session);
            }
            replies.sent.push_back((reply, told));
        }
        last
    }

    /// Reads what has come; gives the stream if it is of no use any more.
    pub fn hears(&mut self, history: &mut History) -> Option<Stream> {
        loop {
            let replies = self.replies.as_mut()?;
            match replies.sent.pop_front() {
                Some((reply, told)) => {
                    if let Some(old) = self.reply(reply, told, history) {
                        return Some(old);
                    }
                }
                None if replies.from.is_closed() && replies.from.is_empty() => return self.disconnect(),
                None => return None,
            }
        }
    }

    fn reply(&mut self, reply: Reply, told: SessionId, history: &mut History) -> Option<Stream> {
        match reply {
            Reply::Opened { session, clock, initialised, term, .. } => {
                if term < self.term {
                    return self.disconnect(); // as the client does: it is deposed and does not know
                }
                self.open = true;
                self.term = term;
                history.opened(self.id, session, self.session);
                if self.session != Some(session) {
                    self.session = Some(session);
                    self.unacked.clear();
                    self.done = clock;
                    self.asked = None;
                    self.seq = 0;
                }
                if !initialised {
                    for bucket in 0..BUCKETS as u32 {
                        let payload = vec![0u8; PLACES * 4].into();
                        self.send(Message::Init { bucket: BucketId(bucket), part: InitPart::FRESH, payload });
                    }
                }
                self.repeats();
                if self.finishing {
                    self.send(Message::Finish);
                }
                let last = self.asked.is_some_and(|(_, last)| last);
                self.ask(last, history);
            }
            Reply::Ack { seq, version } => {
                if let Some(p) = self.unacked.remove(&seq) {
                    history.acknowledged(self.term, p.bucket, p.place, version);
                }
            }
            Reply::PassedOver { seq } => {
                if let Some(p) = self.unacked.remove(&seq) {
                    history.passed_over(p.bucket, p.place);
                }
            }
            Reply::Weights(w) => {
                let (done, last) = self.asked.filter(|(done, _)| *done == w.done)?;
                let bucket = w.bucket.0 as usize;
                let payload = if w.not_modified {
                    let (version, held) = &self.holds[&bucket];
                    assert_eq!(*version, w.version, "what is not modified has another version");
                    held.clone()
                } else {
                    w.payload
                };
                self.got.insert(bucket, (w.version, payload));
                self.modes.insert(bucket, w.in_force.mode);
                if w.last {
                    let got = std::mem::take(&mut self.got);
                    let conn = self.stream.as_ref().map_or(0, |s| s.conn);
                    let answer = Answer { conn, told, slowest: w.slowest, modes: self.modes.clone() };
                    history.pulled(self.id, answer, done, last, &got);
                    for (bucket, (version, _)) in &got {
                        self.versions[*bucket] = *version;
                    }
                    self.holds = got;
                    self.asked = None;
                    if last {
                        self.finished = true;
                        return self.disconnect();
                    }
                    // Rounds were closed without it: it goes on with the others.
                    self.done = self.done.max(w.clock);
                    self.next_step(history);
                }
            }
            Reply::Refused(r) => {
                match r.kind.advice() {
                    Advice::Stop => {
                        history.session_lost(self.id, self.session);
                        self.session = None;
                        self.finishing = false;
                        self.unacked.clear();
                        self.asked = None;
                    }
                    Advice::Redirect | Advice::Retry => {}
                    _ if matches!(r.kind, RefusalKind::RankTaken(_)) => {}
                    _ => panic!("{} is refused, and did nothing wrong: {r}", self.id),
                }
                if let RefusalKind::NotLeader { leader: Some(at), .. } = &r.kind {
                    self.hint = (0..9).find(|n| address(*n) == *at);
                }
                return self.disconnect();
            }
            Reply::RoundNorm { .. }
            | Reply::Evaluated(_)
            | Reply::Taken { .. }
            | Reply::Resumed { .. }
            | Reply::Left => {}
        }
        None
    }
}
