//! The task that owns a shard's leader-only state: open rounds, waiting pulls, proposals in flight, streams.
//!
//! It waits for one of a closed list of things (a message of a stream, a proposal's outcome, a change of
//! leadership, a deadline), applies it without awaiting anything slow, and goes on. While the replica does
//! not lead, every stream is sent to the leader. All it knows beyond the replicated state may vanish: the
//! workers keep what is not acknowledged and push it again.
//!
//! ```text
//!  follower ──elected──▶ catching up ──barrier done──▶ leading ──term over / proposal lost──▶ follower
//! ```

use super::{
    admission::{Admission, admit},
    command::{Command, Contribution, EvalSums, Evaluated, Outcome, Proposal},
    round::{Part, Rounds, Sum},
    state::{Configured, Shard},
};
use crate::raft::{Group, Leadership, ProposeError};
use bytes::Bytes;
use futures::{FutureExt, StreamExt, future::BoxFuture, stream::FuturesUnordered};
use paraft_common::{
    BucketId, Mode, Seq, SessionId, Step, TensorKind, Version, WorkerId, config::ServerJob, optim::norm_factor,
};
use paraft_proto::{Refusal, RefusalKind};
use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};
use tokio::{
    sync::{mpsc, watch},
    time::Instant,
};

/// Messages that may wait for the owner; streams wait (and so do their workers) when it is full.
pub const EVENT_QUEUE: usize = 1024;
/// After an election, members have at least this long to find the new leader.
const REFIND: Duration = Duration::from_secs(5);

/// A stream of one worker to this shard, unique in this process.
pub type ConnId = u64;

/// What streams send the owner.
#[derive(Debug)]
pub enum Event {
    /// A stream's first message.
    Open {
        /// The stream.
        conn: ConnId,
        /// Where its answers go; bounded.
        tx: mpsc::Sender<Reply>,
        /// Who.
        worker: WorkerId,
        /// The session to take up again, or none.
        session: Option<SessionId>,
        /// TOML of the job.
        job: String,
    },
    /// A later message.
    Message(ConnId, Message),
    /// The stream ended or broke.
    Closed(ConnId),
}

/// A checked message: the bucket is this shard's, the payload has its length and is finite.
#[derive(Debug)]
#[allow(missing_docs)] // as in shard.proto
pub enum Message {
    Init { bucket: BucketId, payload: Bytes },
    Push { seq: Seq, step: Step, bucket: usize, pulled: Version, sum_of_squares: f64, payload: Bytes },
    Pull { done: Step, last: bool },
    Norm { step: Step, sum_of_squares: f64 },
    Report { epoch: u64, sums: EvalSums },
    Advance { step: Step },
    Finish,
}

/// What the owner answers. Converted to the wire in `rpc/`.
#[derive(Debug)]
#[allow(missing_docs)] // as in shard.proto
pub enum Reply {
    Opened { session: SessionId, last_seq: Seq, clock: Step, initialised: bool, term: u64 },
    Ack { seq: Seq, version: Version },
    Weights(Box<Weights>),
    RoundNorm { step: Step, sum_of_squares: f64 },
    Evaluated(Evaluated),
    Refused(Refusal),
}

/// One bucket of a pull's answer.
#[derive(Debug)]
#[allow(missing_docs)] // as in shard.proto
pub struct Weights {
    pub bucket: BucketId,
    pub version: Version,
    pub payload: Bytes,
    pub last: bool,
    pub done: Step,
    pub slowest: Step,
    pub stop: bool,
    pub finishers: Vec<WorkerId>,
}

/// What only the leader counts; starts at zero with the process.
#[derive(Debug, Default)]
#[allow(missing_docs)]
pub struct Counters {
    pub pulls: AtomicU64,
    pub pulls_waited: AtomicU64,
    pub bytes_pulled: AtomicU64,
    pub refused: AtomicU64,
    pub max_gap: AtomicU64,
    pub streams: AtomicU64,
}

/// Starts the owner of one replica.
pub fn spawn(shard: Arc<Shard>, group: Group, counters: Arc<Counters>) -> mpsc::Sender<Event> {
    let (tx, events) = mpsc::channel(EVENT_QUEUE);
    let leadership = group.leadership();
    let owner = Owner { shard, group, counters, lead: None, streams: HashMap::new(), done: FuturesUnordered::new() };
    tokio::spawn(owner.run(events, leadership));
    tx
}

struct Owner {
    shard: Arc<Shard>,
    group: Group,
    counters: Arc<Counters>,
    lead: Option<Lead>,
    streams: HashMap<ConnId, Stream>,
    done: FuturesUnordered<BoxFuture<'static, Finished>>,
}

struct Stream {
    tx: mpsc::Sender<Reply>,
    worker: WorkerId,
    session: Option<SessionId>,
}

/// Leader-only state of one leadership. Dropped as a whole.
#[derive(Default)]
struct Lead {
    /// Tells outcomes of this leadership from those of an earlier one.
    reign: u64,
    term: u64,
    /// The read barrier has passed: everything before this term is applied.
    ready: bool,
    by_worker: BTreeMap<WorkerId, ConnId>,
    rounds: Rounds,
    /// Closed rounds that wait for the norm over all shards, by step and local bucket.
    unclipped: BTreeMap<Step, BTreeMap<usize, Sum>>,
    in_flight: BTreeMap<(WorkerId, usize), Step>,
    pulls: Vec<WaitingPull>,
    absent: BTreeMap<WorkerId, Instant>,
    leaving: BTreeSet<WorkerId>,
}

struct WaitingPull {
    conn: ConnId,
    worker: WorkerId,
    done: Step,
    last: bool,
    counted: bool,
}

enum Finished {
    Barrier { reign: u64, result: Result<(), ProposeError> },
    Proposal { reign: u64, purpose: Purpose, result: Result<Outcome, ProposeError> },
}

enum Purpose {
    Configure { conn: ConnId, job: String },
    Join { conn: ConnId },
    Init,
    Update { bucket: usize, contributions: Vec<Contribution> },
    Leave { worker: WorkerId },
    Other,
}

impl Owner {
    async fn run(mut self, mut events: mpsc::Receiver<Event>, mut leadership: watch::Receiver<Leadership>) {
        let mut reigns = 0;
        self.leadership_changed(&leadership.borrow_and_update().clone(), &mut reigns);
        loop {
            let deadline = self.next_deadline();
            tokio::select! {
                biased;
                Some(f) = self.done.next(), if !self.done.is_empty() => self.finished(f, &mut reigns).await,
                changed = leadership.changed() => {
                    if changed.is_err() {
                        return; // the group has shut down
                    }
                    let now = leadership.borrow_and_update().clone();
                    self.leadership_changed(&now, &mut reigns);
                }
                event = events.recv() => match event {
                    None => return,
                    Some(e) => self.event(e).await,
                },
                () = tokio::time::sleep_until(deadline.unwrap_or_else(Instant::now)), if deadline.is_some() => {
                    self.absent_too_long().await;
                }
            }
            self.counters.streams.store(self.streams.len() as u64, Relaxed);
        }
    }

    // ---- leadership ----

    fn leadership_changed(&mut self, now: &Leadership, reigns: &mut u64) {
        let leads = now.leads.then_some(now.term);
        if self.lead.as_ref().map(|l| l.term) == leads {
            return;
        }
        self.step_down();
        if let Some(term) = leads {
            self.begin(term, reigns);
        }
    }

    /// Begins a leadership: nothing is admitted before everything up to this term's first entry is applied.
    fn begin(&mut self, term: u64, reigns: &mut u64) {
        *reigns += 1;
        let reign = *reigns;
        self.lead = Some(Lead { reign, term, ..Lead::default() });
        let group = self.group.clone();
        self.done.push(
            async move { Finished::Barrier { reign, result: group.barrier().await } }.boxed(),
        );
    }

    /// Everything leader-only vanishes; the streams go and find the leader.
    fn step_down(&mut self) {
        self.lead = None;
        let refusal = self.not_leader();
        for (_, s) in self.streams.drain() {
            let _ = s.tx.try_send(Reply::Refused(refusal.clone().into()));
        }
    }

    fn not_leader(&self) -> RefusalKind {
        RefusalKind::NotLeader { shard: self.shard.id(), leader: self.group.leader_address() }
    }

    async fn finished(&mut self, f: Finished, reigns: &mut u64) {
        let current = self.lead.as_ref().map(|l| (l.reign, l.term));
        match f {
            Finished::Barrier { reign, result } => {
                if current.map(|c| c.0) != Some(reign) {
                    return;
                }
                match result {
                    Ok(()) => self.ready(),
                    Err(e) => {
                        tracing::warn!(shard = self.shard.id().0, error = %e, "cannot lead yet");
                        self.restart(reigns).await;
                    }
                }
            }
            Finished::Proposal { reign, purpose, result } => {
                if current.map(|c| c.0) != Some(reign) {
                    return; // of an earlier leadership: the workers ask again
                }
                match result {
                    Ok(outcome) => self.applied(purpose, outcome).await,
                    Err(e) => {
                        tracing::warn!(shard = self.shard.id().0, error = %e, "a proposal was lost");
                        self.restart(reigns).await;
                    }
                }
            }
        }
    }

    /// A proposal failed though the term did not end (the lease ran out, say): begin again.
    async fn restart(&mut self, reigns: &mut u64) {
        let term = self.lead.as_ref().map(|l| l.term);
        self.step_down();
        if let Some(term) = term.filter(|_| self.group.leadership().borrow().leads) {
            // Without a pause a leader that cannot reach its followers would spin here.
            tokio::time::sleep(Duration::from_millis(20)).await;
            self.begin(term, reigns);
        }
    }

    fn ready(&mut self) {
        let Some(lead) = &mut self.lead else { return };
        lead.ready = true;
        let grace = self.shard.configured().map_or(REFIND, |c| grace(&c.job).max(REFIND));
        let deadline = Instant::now() + grace;
        lead.absent = self.shard.read(|m| m.members.active().map(|(w, _)| (w, deadline)).collect());
        tracing::info!(shard = self.shard.id().0, term = lead.term, "leading");
    }

    // ---- proposals ----

    async fn propose(&mut self, purpose: Purpose, proposal: Proposal) {
        let Some(lead) = &self.lead else { return };
        let reign = lead.reign;
        let waits = self.group.propose(proposal).await;
        self.done.push(
            async move {
                let result = match waits {
                    Ok(w) => w.await,
                    Err(e) => Err(e),
                };
                Finished::Proposal { reign, purpose, result }
            }
            .boxed(),
        );
    }

    async fn applied(&mut self, purpose: Purpose, outcome: Outcome) {
        match (purpose, outcome) {
            (Purpose::Configure { conn, job }, Outcome::Done) => self.open_configured(conn, &job).await,
            (Purpose::Configure { conn, job }, Outcome::Refused(_)) if self.shard.configured().is_some() => {
                self.open_configured(conn, &job).await;
            }
            (Purpose::Configure { conn, .. }, Outcome::Refused(why)) => {
                self.refuse(conn, RefusalKind::BadJob(why).into());
            }
            (Purpose::Join { conn }, Outcome::Joined { worker, session }) => {
                // Its predecessor's part would make the new session's push of the same step look in flight.
                if let Some(lead) = &mut self.lead {
                    lead.rounds.forget(worker);
                }
                if let Some(s) = self.streams.get_mut(&conn) {
                    s.session = Some(session);
                    self.attach(conn, worker, session);
                } else if let Some(lead) = &mut self.lead {
                    lead.absent.insert(worker, Instant::now());
                }
            }
            (Purpose::Update { bucket, contributions }, Outcome::Updated { version, applied }) => {
                self.updated(bucket, &contributions, version, applied);
            }
            (Purpose::Leave { worker }, outcome) => {
                // It may have come back in between; then the Leave has changed nothing, and what it pushed in
                // its new session must not be forgotten.
                let back = self.shard.read(|m| m.members.get(worker).is_some());
                if let Some(lead) = &mut self.lead {
                    lead.leaving.remove(&worker);
                }
                if let Some(lead) = self.lead.as_mut().filter(|_| !back) {
                    lead.absent.remove(&worker);
                    lead.rounds.forget(worker);
                    lead.in_flight.retain(|(w, _), _| *w != worker);
                }
                self.evaluated(outcome);
            }
            (_, Outcome::Refused(why)) => tracing::error!(shard = self.shard.id().0, why, "refused by apply"),
            (_, outcome) => self.evaluated(outcome),
        }
        self.close_rounds().await;
        self.answer_pulls();
    }

    fn updated(&mut self, bucket: usize, contributions: &[Contribution], version: Version, applied: bool) {
        for c in contributions {
            let Some(lead) = &mut self.lead else { return };
            lead.in_flight.remove(&(c.worker, bucket));
            let is_in = applied
                || self.shard.read(|m| {
                    m.members.in_session(c.worker, c.session).is_some_and(|m| m.steps[bucket] >= c.step)
                });
            let Some(&conn) = lead.by_worker.get(&c.worker) else { continue };
            if self.streams.get(&conn).and_then(|s| s.session) != Some(c.session) {
                continue;
            }
            if is_in {
                self.send(conn, Reply::Ack { seq: c.seq, version });
            } else {
                let why = "the round was dropped as a duplicate of another member's push; push again";
                self.refuse(conn, RefusalKind::Unavailable(why.into()).into());
            }
        }
    }

    fn evaluated(&mut self, outcome: Outcome) {
        if let Outcome::Evaluated(list) = outcome {
            for e in list {
                for conn in self.attached() {
                    self.send(conn, Reply::Evaluated(e));
                }
            }
        }
    }

    // ---- streams ----

    async fn event(&mut self, event: Event) {
        match event {
            Event::Open { conn, tx, worker, session, job } => {
                self.streams.insert(conn, Stream { tx, worker, session });
                if !self.lead.as_ref().is_some_and(|l| l.ready) {
                    let refusal = match &self.lead {
                        Some(_) => RefusalKind::Unavailable("the new leader is still catching up".into()),
                        None => self.not_leader(),
                    };
                    self.refuse(conn, refusal.into());
                } else if self.shard.read(|m| m.job.is_empty()) {
                    let command = Command::Configure { job: job.clone() };
                    self.propose(Purpose::Configure { conn, job }, command.into()).await;
                } else {
                    self.open_configured(conn, &job).await;
                }
            }
            Event::Message(conn, m) => self.message(conn, m).await,
            Event::Closed(conn) => self.closed(conn),
        }
    }

    async fn open_configured(&mut self, conn: ConnId, job: &str) {
        if let Err(kind) = self.same_job(job) {
            return self.refuse(conn, kind.into());
        }
        let (Some(stream), Some(lead)) = (self.streams.get(&conn), &self.lead) else { return };
        let (worker, session) = (stream.worker, stream.session);
        if lead.leaving.contains(&worker) {
            let why = format!("{worker} is being taken out; open a new session");
            return self.refuse(conn, RefusalKind::Unavailable(why).into());
        }
        match session {
            Some(session) => {
                if self.shard.read(|m| m.members.in_session(worker, session).is_some()) {
                    self.attach(conn, worker, session);
                } else {
                    self.refuse(conn, RefusalKind::UnknownSession { worker, session }.into());
                }
            }
            None if lead.by_worker.contains_key(&worker) => {
                self.refuse(conn, RefusalKind::RankTaken(worker).into());
            }
            None => self.propose(Purpose::Join { conn }, Command::Join { worker }.into()).await,
        }
    }

    fn same_job(&self, asked: &str) -> Result<(), RefusalKind> {
        let running = self.shard.read(|m| m.job.clone());
        if running == asked {
            return Ok(());
        }
        let asked = ServerJob::from_toml(asked).map_err(|e| RefusalKind::BadJob(e.to_string()))?;
        let name = self.shard.configured().map(|c| c.job.name.clone()).unwrap_or_default();
        let line = |text: &str, other: &str| text.lines().find(|l| !other.lines().any(|o| o == *l)).map(str::to_string);
        let text = asked.to_toml().unwrap_or_default();
        let difference = match (line(&running, &text), line(&text, &running)) {
            (Some(a), Some(b)) => Some(format!("there `{a}`, here `{b}`")),
            (a, b) => a.or(b),
        };
        Err(RefusalKind::OtherJob { running: name, asked: asked.name, difference })
    }

    fn attach(&mut self, conn: ConnId, worker: WorkerId, session: SessionId) {
        let Some(lead) = &mut self.lead else { return };
        if let Some(old) = lead.by_worker.insert(worker, conn).filter(|old| *old != conn) {
            self.streams.remove(&old); // half-open; its worker has come back by another stream
            lead.pulls.retain(|p| p.conn != old);
        }
        lead.absent.remove(&worker);
        let Some((last_seq, clock)) =
            self.shard.read(|m| m.members.in_session(worker, session).map(|m| (m.last_seq, m.clock())))
        else {
            return self.refuse(conn, RefusalKind::UnknownSession { worker, session }.into());
        };
        let initialised =
            self.shard.configured().is_some_and(|c| c.buckets.iter().all(|b| b.initialised()));
        let term = lead.term;
        let norms = self.waiting_norms();
        self.send(conn, Reply::Opened { session, last_seq, clock, initialised, term });
        for (step, sum_of_squares) in norms {
            self.send(conn, Reply::RoundNorm { step, sum_of_squares });
        }
    }

    fn attached(&self) -> Vec<ConnId> {
        self.lead.as_ref().map(|l| l.by_worker.values().copied().collect()).unwrap_or_default()
    }

    fn send(&mut self, conn: ConnId, reply: Reply) {
        let failed = self.streams.get(&conn).is_some_and(|s| s.tx.try_send(reply).is_err());
        if failed {
            // The queue holds everything a worker may have outstanding, so a full one is a worker that does
            // not read. Dropping the sender ends its stream.
            self.closed(conn);
        }
    }

    fn refuse(&mut self, conn: ConnId, refusal: Refusal) {
        self.counters.refused.fetch_add(1, Relaxed);
        let keeps = refusal.seq > 0;
        self.send(conn, Reply::Refused(refusal));
        if !keeps {
            self.closed(conn);
        }
    }

    fn closed(&mut self, conn: ConnId) {
        let Some(stream) = self.streams.remove(&conn) else { return };
        let Some(lead) = &mut self.lead else { return };
        lead.pulls.retain(|p| p.conn != conn);
        if lead.by_worker.get(&stream.worker) == Some(&conn) {
            lead.by_worker.remove(&stream.worker);
            let active = self.shard.read(|m| m.members.get(stream.worker).is_some_and(|m| !m.finished));
            if active {
                let grace = self.shard.configured().map_or(REFIND, |c| grace(&c.job));
                lead.absent.insert(stream.worker, Instant::now() + grace);
            }
        }
    }

    fn next_deadline(&self) -> Option<Instant> {
        self.lead.as_ref().filter(|l| l.ready)?.absent.values().min().copied()
    }

    async fn absent_too_long(&mut self) {
        let Some(lead) = &mut self.lead else { return };
        let now = Instant::now();
        let gone: Vec<_> = lead.absent.iter().filter(|(_, d)| **d <= now).map(|(w, _)| *w).collect();
        for worker in gone {
            let Some(lead) = &mut self.lead else { return };
            lead.absent.remove(&worker);
            let Some(session) =
                self.shard.read(|m| m.members.get(worker).filter(|m| !m.finished).map(|m| m.session))
            else {
                continue;
            };
            lead.leaving.insert(worker);
            tracing::warn!(shard = self.shard.id().0, worker = worker.0, "a worker is gone; the others go on");
            self.propose(Purpose::Leave { worker }, Command::Leave { worker, session }.into()).await;
        }
    }

    // ---- messages ----

    async fn message(&mut self, conn: ConnId, message: Message) {
        let Some(stream) = self.streams.get(&conn) else { return };
        let (worker, Some(session)) = (stream.worker, stream.session) else {
            return self.refuse(conn, RefusalKind::NotOpened.into());
        };
        if self.lead.as_ref().is_none_or(|l| l.by_worker.get(&worker) != Some(&conn)) {
            return self.refuse(conn, RefusalKind::NotOpened.into());
        }
        match message {
            Message::Init { bucket, payload } => {
                self.propose(Purpose::Init, Proposal { command: Command::Init { bucket }, payload }).await;
            }
            Message::Push { seq, step, bucket, pulled, sum_of_squares, payload } => {
                let contribution = Contribution { worker, session, seq, step, pulled };
                self.push(conn, contribution, bucket, sum_of_squares, payload).await;
            }
            Message::Pull { done, last } => {
                self.counters.pulls.fetch_add(1, Relaxed);
                if let Some(lead) = &mut self.lead {
                    lead.pulls.retain(|p| p.conn != conn);
                    lead.pulls.push(WaitingPull { conn, worker, done, last, counted: false });
                }
                self.answer_pulls();
            }
            Message::Norm { step, sum_of_squares } => self.norm(step, sum_of_squares).await,
            Message::Report { epoch, sums } => {
                let command = Command::Report { worker, session, epoch, sums };
                self.propose(Purpose::Other, command.into()).await;
            }
            Message::Advance { step } => {
                self.propose(Purpose::Other, Command::Advance { worker, session, step }.into()).await;
            }
            Message::Finish => {
                self.propose(Purpose::Other, Command::Finish { worker, session }.into()).await;
            }
        }
    }

    async fn push(
        &mut self,
        conn: ConnId,
        c: Contribution,
        bucket: usize,
        sum_of_squares: f64,
        payload: Bytes,
    ) {
        let (Some(conf), Some(lead)) = (self.shard.configured(), &mut self.lead) else { return };
        let target = &conf.buckets[bucket];
        let in_flight = lead
            .in_flight
            .get(&(c.worker, bucket))
            .copied()
            .or_else(|| lead.rounds.waiting(c.worker, bucket))
            .or_else(|| unclipped_step(lead, c.worker, bucket));
        let current = target.version();
        let decision = self.shard.read(|m| {
            m.members
                .in_session(c.worker, c.session)
                .map(|m| admit(m, bucket, c.step, c.pulled, current, in_flight))
        });
        let refuse = |kind| Refusal { kind, seq: c.seq.0 };
        match decision {
            None => {
                let kind = RefusalKind::UnknownSession { worker: c.worker, session: c.session };
                self.refuse(conn, kind.into());
            }
            Some(Admission::Applied) => self.send(conn, Reply::Ack { seq: c.seq, version: current }),
            Some(Admission::InFlight) => {}
            Some(Admission::WrongStep { expected }) => {
                let kind = RefusalKind::WrongStep { bucket: target.id, expected, got: c.step };
                self.refuse(conn, refuse(kind));
            }
            Some(Admission::FutureVersion { current }) => {
                let (got, current) = (c.pulled.0, current.0);
                self.refuse(conn, refuse(RefusalKind::FutureVersion { bucket: target.id, got, current }));
            }
            Some(Admission::Accept) if conf.job.mode.averages() => {
                lead.rounds.add(bucket, Part { contribution: c, payload });
                self.close_rounds().await;
            }
            Some(Admission::Accept) => {
                let factor = match (conf.job.clip.norm, target.spec.kind) {
                    (Some(max), TensorKind::Param) => norm_factor(max, sum_of_squares),
                    _ => 1.0,
                };
                self.update(&conf, bucket, vec![c], factor, payload).await;
            }
        }
    }

    async fn update(
        &mut self,
        conf: &Configured,
        bucket: usize,
        contributions: Vec<Contribution>,
        factor: f32,
        payload: Bytes,
    ) {
        if let Some(lead) = &mut self.lead {
            for c in &contributions {
                lead.in_flight.insert((c.worker, bucket), c.step);
            }
        }
        let id = conf.buckets[bucket].id;
        let command = Command::Update { bucket: id, contributions: contributions.clone(), factor };
        self.propose(Purpose::Update { bucket, contributions }, Proposal { command, payload }).await;
    }

    // ---- rounds ----

    /// Closes every round that is complete. Called after anything that may complete one: a push, an apply, a
    /// member that left.
    async fn close_rounds(&mut self) {
        let Some(conf) = self.shard.configured().filter(|c| c.job.mode == Mode::Bsp) else { return };
        let Some(lead) = &mut self.lead else { return };
        let complete = self.shard.read(|m| {
            if !m.started {
                return Vec::new();
            }
            lead.rounds.complete(&m.members, &|w| lead.leaving.contains(&w))
        });
        for (step, bucket) in complete {
            let Some(lead) = &mut self.lead else { return };
            let Some(sum) = lead.rounds.close(step, bucket) else { continue };
            if conf.job.clip.norm.is_some() && conf.buckets[bucket].spec.kind == TensorKind::Param {
                lead.unclipped.entry(step).or_default().insert(bucket, sum);
                self.norm_of_step(&conf, step).await;
            } else {
                let factor = 1.0 / sum.contributions.len() as f32;
                self.update(&conf, bucket, sum.contributions, factor, sum.payload).await;
            }
        }
    }

    /// All trained buckets of a step are summed: the shard's part of the global norm is known. With one shard
    /// that is the norm; with several, the workers add the parts up and send the sum to every shard, so that
    /// no server has to know another shard's leader.
    async fn norm_of_step(&mut self, conf: &Configured, step: Step) {
        let Some(partial) = self.partial_norm(conf, step) else { return };
        let layout = conf.job.layout();
        let trained = layout.buckets().iter().filter(|b| b.kind == TensorKind::Param).count();
        if trained.min(self.group.shards() as usize) == 1 {
            return self.norm(step, partial).await;
        }
        for conn in self.attached() {
            self.send(conn, Reply::RoundNorm { step, sum_of_squares: partial });
        }
    }

    fn partial_norm(&self, conf: &Configured, step: Step) -> Option<f64> {
        let sums = self.lead.as_ref()?.unclipped.get(&step)?;
        let trained = conf.buckets.iter().filter(|b| b.spec.kind == TensorKind::Param).count();
        (sums.len() == trained).then(|| sums.values().map(|s| s.mean_sum_of_squares).sum())
    }

    fn waiting_norms(&self) -> Vec<(Step, f64)> {
        let (Some(conf), Some(lead)) = (self.shard.configured(), &self.lead) else { return Vec::new() };
        lead.unclipped.keys().filter_map(|s| Some((*s, self.partial_norm(&conf, *s)?))).collect()
    }

    /// The norm over all shards is known: every bucket of the step is applied with the same factor. Later
    /// copies, from the other workers, find nothing to do.
    async fn norm(&mut self, step: Step, sum_of_squares: f64) {
        let (Some(conf), Some(lead)) = (self.shard.configured(), &mut self.lead) else { return };
        let Some(max) = conf.job.clip.norm else { return };
        for (bucket, sum) in lead.unclipped.remove(&step).unwrap_or_default() {
            let factor = norm_factor(max, sum_of_squares) / sum.contributions.len() as f32;
            self.update(&conf, bucket, sum.contributions, factor, sum.payload).await;
        }
    }

    // ---- pulls ----

    /// Answers every pull that the consistency rule lets go.
    fn answer_pulls(&mut self) {
        let Some(conf) = self.shard.configured() else { return };
        let Some(lead) = &mut self.lead else { return };
        if lead.pulls.is_empty() || !conf.buckets.iter().all(|b| b.initialised()) {
            return;
        }
        let slowest = self.shard.slowest();
        let mut go = Vec::new();
        self.shard.read(|m| {
            lead.pulls.retain_mut(|p| {
                let own = m.members.get(p.worker).map(|m| m.clock());
                let may = if p.last {
                    m.members.active().next().is_none()
                } else {
                    // A worker reads its own writes; the rule decides about everyone else's.
                    let reads_own = m.started && own.is_some_and(|own| own >= p.done);
                    let may = conf.job.mode.may_proceed(slowest, p.done);
                    // Held back by others, not by the replication of its own push: in BSP that is an open
                    // round, since there a push is applied only together with the others'.
                    let held = reads_own && !may || lead.rounds.holds(p.worker, p.done);
                    if held && !p.counted {
                        p.counted = true;
                        self.counters.pulls_waited.fetch_add(1, Relaxed);
                    }
                    reads_own && may
                };
                if may {
                    go.push((p.conn, p.worker, p.done, p.last));
                }
                !may
            });
        });
        for (conn, _, done, last) in go {
            if !last {
                self.counters.max_gap.fetch_max(done.0.saturating_sub(slowest.0), Relaxed);
            }
            self.answer(&conf, conn, done, slowest, last);
        }
    }

    fn answer(&mut self, conf: &Configured, conn: ConnId, done: Step, slowest: Step, last_pull: bool) {
        let (stop, finishers) = self.shard.read(|m| {
            let f = if last_pull { m.members.iter().map(|(w, _)| w).collect() } else { Vec::new() };
            (m.stop, f)
        });
        for (i, b) in conf.buckets.iter().enumerate() {
            let (version, payload) = b.encode();
            self.counters.bytes_pulled.fetch_add(payload.len() as u64, Relaxed);
            let last = i + 1 == conf.buckets.len();
            let finishers = finishers.clone();
            let weights = Weights { bucket: b.id, version, payload, last, done, slowest, stop, finishers };
            self.send(conn, Reply::Weights(Box::new(weights)));
        }
    }
}

fn unclipped_step(lead: &Lead, worker: WorkerId, bucket: usize) -> Option<Step> {
    let holds = |sums: &BTreeMap<usize, Sum>| {
        sums.get(&bucket).is_some_and(|s| s.contributions.iter().any(|c| c.worker == worker))
    };
    lead.unclipped.iter().find(|(_, sums)| holds(sums)).map(|(step, _)| *step)
}

fn grace(job: &ServerJob) -> Duration {
    Duration::from_millis(job.grace_ms)
}
