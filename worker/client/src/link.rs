//! One shard's link: finds the leader, keeps what is not acknowledged, sends it again after a break.
//!
//! ```text
//!  dialling ──stream open──▶ opening ──Opened──▶ open ──break / not leader──▶ dialling
//!      └──deadline──▶ failed          └─refused─▶ failed, or session lost (wait for Reset)
//! ```

use crate::{
    acks::Acked,
    backlog::Backlog,
    client::{Command, Event},
    connect::{Channels, Shared},
    error::ClientError,
    initial::{Initial, Messages},
    norms::Norms,
    search::Search,
    window::Window,
};
use futures::{FutureExt, Stream, StreamExt, stream};
use paraft_common::{
    BucketId, BucketSpec, Payload, ServerId, ShardId, Step, WorkerId, placement, retry::RetryPolicy,
};
use paraft_proto::{
    Advice, Beat, Chunk, FromShard, Incoming, Norm, Open, Opened, PROTOCOL, Pull, Push, Refused, Rest,
    Resume, Take, ToShard, Weights, WireKind, WithBulk, from_shard, services, to_shard,
};
use paraft_trace::{Moment, Span, Stage, Stages};
use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};
use tokio::{sync::mpsc, time::MissedTickBehavior};
use tokio_stream::wrappers::UnboundedReceiverStream;

/// What a link needs to know.
pub(crate) struct LinkOptions {
    pub shard: ShardId,
    pub replicas: u32,
    pub worker: u32,
    pub servers: Vec<String>,
    pub job: String,
    pub channels: Arc<Channels>,
    pub retry: RetryPolicy,
    /// How long another process may be connected as this worker.
    pub handover: Duration,
    /// A sign of life goes out this often, whatever the training loop does.
    pub heartbeat: Duration,
    /// Initial state of the shard's buckets, until the servers have it.
    pub init: Option<Arc<Initial>>,
    /// Where the shard's buckets lie.
    pub buckets: Arc<[(BucketId, BucketSpec)]>,
    /// What the client may have pushed without an ack.
    pub window: Arc<Window>,
    /// Weights that the client has not taken.
    pub backlog: Arc<Backlog>,
    /// Where spans are noted.
    pub stages: Arc<Stages>,
}

/// Runs a link until its commands end or it fails; either way the client hears of it by an event.
pub(crate) async fn run(
    options: LinkOptions,
    commands: mpsc::UnboundedReceiver<Command>,
    events: std::sync::mpsc::Sender<Event>,
    norms: Arc<Mutex<Norms>>,
    siblings: Vec<(ShardId, mpsc::UnboundedSender<Command>)>,
) {
    let preferred = placement::replicas_of(options.shard, options.servers.len() as u32, options.replicas);
    let next = preferred.first().map_or(0, |s| s.0 as usize);
    let mut link = Link {
        options,
        events,
        norms,
        siblings,
        session: 0,
        origin: 0,
        term: 0,
        next,
        search: Search::default(),
        unacked: BTreeMap::new(),
        asked: None,
        asked_at: Moment::default(),
        holds: false,
        asked_chunk: None,
        presence: None,
        flush: false,
        sticky: Vec::new(),
        trouble: None,
        causes: BTreeMap::new(),
        opened_at: (Instant::now(), ServerId(0)),
        watcher: None,
        connection: None,
    };
    if let Err(e) = link.work(commands).await {
        let _ = link.events.send(Event::Failed(e));
    }
    link.options.window.give_up(); // a client that waits there must go and see
}

struct Link {
    options: LinkOptions,
    events: std::sync::mpsc::Sender<Event>,
    norms: Arc<Mutex<Norms>>,
    siblings: Vec<(ShardId, mpsc::UnboundedSender<Command>)>,
    session: u64,
    /// The founding of the shard's state that this client has seen; 0: none.
    origin: u64,
    /// The latest term of a leader that has opened a stream: who leads an earlier one is deposed and does not know.
    term: u64,
    /// Which server to try next.
    next: usize,
    search: Search,
    /// Pushes without an ack, by seq. Bounded by the window, and by one step: a pull is answered only after them.
    /// With the moment at which each was handed over.
    unacked: BTreeMap<u64, (Push, Moment)>,
    /// The pull that waits for its answer.
    asked: Option<Pull>,
    asked_at: Moment,
    /// The latest pull was answered in full on the stream that is open: the versions that it brought are its leader's.
    holds: bool,
    /// The ask for a chunk that waits for its answer.
    asked_chunk: Option<Take>,
    /// That the worker rests, or wants to go on and has no answer yet.
    presence: Option<to_shard::Kind>,
    /// The client wants to know when every push is acknowledged.
    flush: bool,
    /// Reports, Finish and Leave: sent again after a break, since applying them twice changes nothing.
    sticky: Vec<ToShard>,
    /// Since when, and how often, no leader was reached.
    trouble: Option<(Instant, u32)>,
    causes: BTreeMap<String, String>,
    /// When the open stream was opened, and by which leader.
    opened_at: (Instant, ServerId),
    /// The connection that the stream is on, and its server.
    connection: Option<(String, Shared)>,
    /// Is told of every ack.
    watcher: Option<std::sync::mpsc::Sender<Acked>>,
}

enum Break {
    /// The client is done.
    End,
    /// Dial another, if named the one at this address.
    Redial(Option<String>),
    /// Dial the same again.
    Again,
    /// The session is over; the client decides.
    SessionLost,
}

type Outbound = mpsc::UnboundedSender<Sent>;

/// What waits to go out. Initial states are made when their turn comes: those of a large model would fill the memory.
enum Sent {
    One(Option<ToShard>),
    Initial(Messages),
}

impl Iterator for Sent {
    type Item = ToShard;

    fn next(&mut self) -> Option<ToShard> {
        match self {
            Sent::One(m) => m.take(),
            Sent::Initial(all) => all.next().map(|m| wrap(to_shard::Kind::Init(m))),
        }
    }
}

impl From<ToShard> for Sent {
    fn from(m: ToShard) -> Self {
        Sent::One(Some(m))
    }
}

fn outgoing(rx: mpsc::UnboundedReceiver<Sent>) -> impl Stream<Item = WithBulk<ToShard>> + Send + Unpin {
    UnboundedReceiverStream::new(rx).flat_map(stream::iter).map(WithBulk::from)
}

impl Link {
    async fn work(&mut self, mut commands: mpsc::UnboundedReceiver<Command>) -> Result<(), ClientError> {
        loop {
            let end = match self.dial().await {
                Ok((out, inbound)) => self.serve(&mut commands, out, inbound).await?,
                Err((address, cause)) => {
                    self.causes.insert(address, cause);
                    Break::Redial(None)
                }
            };
            match end {
                Break::End => return Ok(()),
                Break::SessionLost => {
                    self.drop_unacked();
                    let _ = self.events.send(Event::SessionLost);
                    if !self.wait_for_reset(&mut commands).await {
                        return Ok(());
                    }
                }
                Break::Redial(to) => {
                    // A stream that was sent elsewhere says nothing against its connection.
                    if let (Some((address, shared)), None) = (self.connection.take(), &to) {
                        self.options.channels.broken(&address, &shared);
                    }
                    let named = to.map(|address| self.place_of(address));
                    self.next = self.search.next(self.next, named, self.options.servers.len());
                    self.pause().await?;
                }
                Break::Again => {
                    self.connection = None;
                    self.pause().await?;
                }
            }
        }
    }

    /// The place of an address in the list; one that is new (a server that joined later) is added.
    fn place_of(&mut self, address: String) -> usize {
        let servers = &mut self.options.servers;
        servers.iter().position(|s| *s == address).unwrap_or_else(|| {
            servers.push(address);
            servers.len() - 1
        })
    }

    async fn pause(&mut self) -> Result<(), ClientError> {
        let (since, attempt) = self.trouble.get_or_insert_with(|| (Instant::now(), 0));
        *attempt += 1;
        let delay = self.options.retry.delay(*attempt, since.elapsed(), rand::random());
        let Some(delay) = delay else {
            let causes = std::mem::take(&mut self.causes).into_iter().collect();
            let (shard, waited) = (self.options.shard, since.elapsed());
            return Err(ClientError::Unreachable { shard, waited, causes });
        };
        tokio::time::sleep(delay).await;
        Ok(())
    }

    /// Throws away what belongs to the lost session and waits for the client's word.
    async fn wait_for_reset(&mut self, commands: &mut mpsc::UnboundedReceiver<Command>) -> bool {
        loop {
            match commands.recv().await {
                None => return false,
                Some(Command::Reset) => {
                    self.reset();
                    return true;
                }
                Some(Command::Watch(watcher)) => self.watcher = Some(watcher),
                Some(Command::Push(p, _)) => self.options.window.leave(p.payload.len()),
                Some(_) => {}
            }
        }
    }

    /// What was pushed in a session that is over will not be acknowledged.
    fn drop_unacked(&mut self) {
        let bytes = self.unacked.values().map(|(p, _)| p.payload.len()).sum();
        self.unacked.clear();
        self.options.window.leave(bytes);
    }

    fn reset(&mut self) {
        self.session = 0;
        self.drop_unacked();
        self.asked = None;
        self.asked_chunk = None;
        self.presence = None;
        self.flush = false;
        // Of the lost session: in the new one it would skip steps that the worker is about to push.
        self.sticky.retain(|m| !is_advance(m));
    }

    async fn dial(&mut self) -> Result<(Outbound, Incoming<FromShard>), (String, String)> {
        let address = self.options.servers[self.next].clone();
        let fail = |cause: String| (address.clone(), cause);
        let (channel, shared) = self.options.channels.get(&address).await.map_err(&fail)?;
        self.connection = Some((address.clone(), shared));
        let (out, rx) = mpsc::unbounded_channel();
        let open = Open {
            protocol: PROTOCOL,
            shard: self.options.shard.0,
            worker: self.options.worker,
            session: self.session,
            job: self.options.job.clone(),
            origin: self.origin,
        };
        let _ = out.send(wrap(to_shard::Kind::Open(open)).into());
        // The kernel accepts connections for a process that hangs, so only an answer tells that it lives.
        let exchange = services::exchange(&channel, outgoing(rx));
        let stream = tokio::time::timeout(ANSWER_PATIENCE, exchange).await;
        let stream = stream.map_err(|_| fail(format!("no answer within {ANSWER_PATIENCE:?}")))?;
        Ok((out, stream.map_err(|s| fail(s.message().to_string()))?))
    }

    async fn serve(
        &mut self,
        commands: &mut mpsc::UnboundedReceiver<Command>,
        out: Outbound,
        mut inbound: Incoming<FromShard>,
    ) -> Result<Break, ClientError> {
        let mut open = false;
        let mut heartbeat = tokio::time::interval(self.options.heartbeat);
        heartbeat.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let backlog = self.options.backlog.clone();
        loop {
            tokio::select! {
                biased;
                // First: a stream of weights that keeps this loop busy must not look like silence on the other side.
                _ = heartbeat.tick(), if open => {
                    let _ = out.send(wrap(to_shard::Kind::Beat(Beat {})).into());
                }
                message = backlog.room().then(|()| inbound.next()) => {
                    let WithBulk { message: FromShard { kind }, bulk } = match message {
                        Some(Ok(m)) => m,
                        Some(Err(s)) => {
                            self.note_cause(s.message());
                            return Ok(Break::Redial(None));
                        }
                        None => {
                            self.note_cause("the server closed the stream");
                            return Ok(Break::Redial(None));
                        }
                    };
                    match kind {
                        Some(from_shard::Kind::Opened(o)) if o.term < self.term => {
                            // What this worker has done under the later leader would look wrong to it.
                            self.note_cause("it leads an earlier term than another server: it is deposed");
                            let next = (self.next + 1) % self.options.servers.len();
                            return Ok(Break::Redial(Some(self.options.servers[next].clone())));
                        }
                        Some(from_shard::Kind::Opened(o)) => {
                            open = true;
                            self.term = o.term;
                            self.opened(&o, &out);
                        }
                        Some(from_shard::Kind::Refused(r)) => if let Some(end) = self.refused(r)? {
                            return Ok(end);
                        },
                        Some(from_shard::Kind::Weights(w)) => {
                            self.weights(w, bulk.into_iter().next().unwrap_or_default());
                        }
                        Some(from_shard::Kind::Left(_)) => {
                            let _ = self.events.send(Event::Left(self.options.shard));
                            return Ok(Break::End);
                        }
                        Some(kind) => self.message(kind)?,
                        None => return Err(self.broken("an empty message")),
                    }
                }
                command = commands.recv() => match command {
                    None => return Ok(Break::End),
                    Some(Command::Reset) => {
                        self.reset();
                        return Ok(Break::Again);
                    }
                    Some(c) => self.command(c, open.then_some(&out)),
                },
            }
        }
    }

    /// Kept first, sent if the stream is open; what is kept goes out when it opens.
    fn command(&mut self, command: Command, out: Option<&Outbound>) {
        let kind = match command {
            Command::Push(p, there) => {
                self.unacked.insert(p.seq, (p.clone(), there));
                to_shard::Kind::Push(p)
            }
            Command::Pull(mut p, at) => {
                self.asked_at = at;
                if !self.holds || !p.only.is_empty() {
                    p.have.clear();
                }
                self.asked = Some(p.clone());
                to_shard::Kind::Pull(p)
            }
            Command::Norm(n) => to_shard::Kind::Norm(n),
            Command::Sticky(m) => {
                if is_advance(&m) {
                    self.sticky.retain(|m| !is_advance(m));
                }
                self.sticky.push(m.clone());
                if let Some(out) = out {
                    let _ = out.send(m.into());
                }
                return;
            }
            Command::Once(m) => {
                if let Some(out) = out {
                    let _ = out.send(m.into());
                }
                return;
            }
            Command::Watch(watcher) => {
                self.watcher = Some(watcher);
                return;
            }
            Command::Flush => {
                self.flush = true;
                return self.flushed();
            }
            Command::Take(t) => {
                self.asked_chunk = Some(t);
                to_shard::Kind::Take(t)
            }
            Command::Rest => {
                self.presence = Some(to_shard::Kind::Rest(Rest {}));
                to_shard::Kind::Rest(Rest {})
            }
            Command::Resume { level } => {
                self.presence = Some(to_shard::Kind::Resume(Resume { level }));
                to_shard::Kind::Resume(Resume { level })
            }
            Command::Reset => return,
        };
        if let Some(out) = out {
            let _ = out.send(wrap(kind).into());
        }
    }

    fn flushed(&mut self) {
        if self.flush && self.unacked.is_empty() {
            self.flush = false;
            let _ = self.events.send(Event::Flushed(self.options.shard));
        }
    }

    fn opened(&mut self, o: &Opened, out: &Outbound) {
        self.origin = o.origin;
        self.holds = false;
        self.asked.iter_mut().for_each(|p| p.have.clear());
        self.opened_at = (Instant::now(), ServerId(o.server));
        self.trouble = None;
        self.search.found();
        self.causes.clear();
        let new = self.session != o.session;
        self.session = o.session;
        if let Some(initial) = self.options.init.as_ref().filter(|_| !o.initialised) {
            let messages = initial.clone().messages(self.options.buckets.clone());
            let _ = out.send(Sent::Initial(messages));
        }
        let kept = self.unacked.values().map(|(p, _)| to_shard::Kind::Push(p.clone()));
        let asked = self.asked.clone().map(to_shard::Kind::Pull);
        let presence = self.presence.clone();
        let take = self.asked_chunk.map(to_shard::Kind::Take);
        for kind in kept.chain(asked).chain(presence).chain(take) {
            let _ = out.send(wrap(kind).into());
        }
        for m in &self.sticky {
            let _ = out.send(m.clone().into());
        }
        let _ = self.events.send(Event::Opened {
            shard: self.options.shard,
            clock: o.clock,
            new,
            origin: o.origin,
        });
    }

    fn weights(&mut self, w: Weights, payload: Payload) {
        // An answer to an earlier pull (before a rejoin) is not wanted any more.
        let wanted = |p: &Pull| p.done == w.done && (p.only.is_empty() || p.only.contains(&w.bucket));
        if self.asked.as_ref().is_some_and(wanted) {
            let bucket = (Step(w.done), BucketId(w.bucket), payload.len());
            self.note(Stage::Pull, (self.asked_at, Moment::now()), bucket);
            if w.last {
                let part = self.asked.take().is_some_and(|p| !p.only.is_empty());
                // Of the other buckets it has what it had, on this stream or on none.
                self.holds |= !part;
                self.options.init = None; // the servers have it
            }
            self.options.backlog.add(payload.len());
            let _ = self.events.send(Event::Weights(self.options.shard, w, payload));
        }
    }

    fn message(&mut self, kind: from_shard::Kind) -> Result<(), ClientError> {
        match kind {
            from_shard::Kind::Ack(a) => {
                // One that was acknowledged before, and sent again meanwhile, is no news.
                let push = self.unacked.remove(&a.seq).map(|(push, there)| {
                    self.options.window.leave(push.payload.len());
                    let of = (Step(push.step), BucketId(push.bucket), push.payload.len());
                    self.note(Stage::Push, (there, Moment::now()), of);
                    push
                });
                if a.passed_over {
                    let _ = self.events.send(Event::PassedOver(u64::from(push.is_some())));
                } else if let Some((push, watcher)) = push.zip(self.watcher.as_ref()) {
                    let (shard, bucket) = (self.options.shard, BucketId(push.bucket));
                    let ((opened, leader), at) = (self.opened_at, Instant::now());
                    let _ = watcher.send(Acked { shard, bucket, seq: push.seq, leader, opened, at });
                }
                self.flushed();
            }
            from_shard::Kind::RoundNorm(n) => {
                let mut norms = self.norms.lock().unwrap_or_else(|e| e.into_inner());
                if let Some((sum, tell)) = norms.add(n.step, self.options.shard, n.sum_of_squares) {
                    for (shard, sibling) in &self.siblings {
                        if tell.contains(shard) {
                            let norm = Norm { step: n.step, sum_of_squares: sum };
                            let _ = sibling.send(Command::Norm(norm));
                        }
                    }
                }
            }
            from_shard::Kind::Reported(r) => {
                // Complete: nobody needs this worker's share again.
                let told =
                    |m: &ToShard| matches!(&m.kind, Some(to_shard::Kind::Report(s)) if s.epoch == r.epoch);
                self.sticky.retain(|m| !told(m));
                let _ = self.events.send(Event::Reported(r));
            }
            from_shard::Kind::Taken(t) => {
                // An answer to an earlier ask is not wanted any more.
                if self.asked_chunk.is_some_and(|a| a.request == t.request) {
                    if t.kind() != Chunk::Wait {
                        self.asked_chunk = None;
                    }
                    let _ = self.events.send(Event::Taken(t));
                }
            }
            from_shard::Kind::Resumed(r) => {
                if matches!(self.presence, Some(to_shard::Kind::Resume(_))) {
                    self.presence = None;
                    let _ = self.events.send(Event::Resumed(self.options.shard, r.clock));
                }
            }
            from_shard::Kind::Opened(_)
            | from_shard::Kind::Refused(_)
            | from_shard::Kind::Weights(_)
            | from_shard::Kind::Left(_) => {
                return Err(self.broken("a message out of place"));
            }
        }
        Ok(())
    }

    fn refused(&mut self, r: Refused) -> Result<Option<Break>, ClientError> {
        self.note_cause(&r.message);
        // Right after a break the old stream may still be there on the server's side.
        let rank_taken = r.kind() == WireKind::RankTaken;
        let recent = self.trouble.is_none_or(|(since, _)| since.elapsed() < self.options.handover);
        match r.advice() {
            Advice::Redirect => Ok(Some(Break::Redial((!r.leader.is_empty()).then_some(r.leader)))),
            Advice::Retry => Ok(Some(Break::Again)),
            Advice::Stop => Ok(Some(Break::SessionLost)),
            Advice::Lost => Err(ClientError::StateLost { shard: self.options.shard }),
            Advice::Fix if rank_taken && recent => Ok(Some(Break::Again)),
            Advice::Fix | Advice::Unspecified => {
                let (shard, kind) = (self.options.shard, r.kind());
                Err(ClientError::Refused { shard, kind, message: r.message })
            }
        }
    }

    fn note_cause(&mut self, cause: &str) {
        self.causes.insert(self.options.servers[self.next].clone(), cause.to_string());
    }

    fn note(&self, stage: Stage, (begin, end): (Moment, Moment), of: (Step, BucketId, usize)) {
        let (shard, worker) = (self.options.shard, Some(WorkerId(self.options.worker)));
        let (step, bucket, bytes) = (of.0, Some(of.1), of.2 as u64);
        self.options.stages.note(Span { stage, begin, end, step, shard, bucket, worker, bytes });
    }

    fn broken(&self, what: &str) -> ClientError {
        ClientError::Protocol { shard: self.options.shard, what: what.to_string() }
    }
}

/// A server answers a new stream at once, whatever it then says on it.
const ANSWER_PATIENCE: Duration = Duration::from_secs(2);

fn is_advance(m: &ToShard) -> bool {
    matches!(m.kind, Some(to_shard::Kind::Advance(_)))
}

fn wrap(kind: to_shard::Kind) -> ToShard {
    ToShard { kind: Some(kind) }
}
