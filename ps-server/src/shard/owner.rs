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
//!
//! - `messages`: what goes between a stream and the owner.
//! - `quiet`: when its group may sleep.
//! - `streams`, `leases`, `pushes`, `cuts`, `pulls`, `switching`, `takes`, `sections`: the owner's work, by what it is about.

mod cuts;
mod leases;
mod messages;
mod pulls;
mod pushes;
mod quiet;
mod sections;
mod steering;
mod streams;
mod switching;
mod takes;

pub use messages::{ConnId, Counters, Event, Life, Message, Reply, Weights};
pub use pushes::MAX_AHEAD;
pub use sections::Section;

use super::{
    command::{Command, Contribution, Outcome, Proposal},
    round::{Rounds, Sum},
    state::Shard,
};
use crate::raft::{Applied, Change, Leadership, ProposeError, Replication};
use cuts::Cuts;
use futures::{FutureExt, StreamExt, future::BoxFuture, stream::FuturesUnordered};
use paraft_common::{BucketId, Seq, SessionId, Step, Version, WorkerId, config::ServerJob};
use paraft_proto::RefusalKind;
use paraft_trace::{Moment, Span, Stage};
use pulls::Touched;
use std::{
    collections::{BTreeMap, BTreeSet, btree_map::Entry},
    sync::{Arc, atomic::Ordering::Relaxed},
    time::Duration,
};
use tokio::{
    sync::{mpsc, watch},
    time::Instant,
};

/// Messages that may wait for the owner; streams wait (and so do their workers) when it is full.
pub const EVENT_QUEUE: usize = 1024;
/// After an election, members have at least this long to find the new leader.
/// (They notice a leader that hangs, rather than dies, by the connection's keepalive.)
const REFIND: Duration = Duration::from_secs(10);

/// A leader that begins again waits so long for a majority before it sends its workers away once more.
const FENCE: Duration = Duration::from_secs(2);

/// Draws the numbers of sessions. They are what a worker takes its session up again with, so nobody else must be able to guess
/// one; and no two may be equal, whichever replica draws them.
pub type DrawSession = Box<dyn FnMut() -> SessionId + Send>;

/// Random ones.
pub fn random_sessions() -> DrawSession {
    Box::new(|| SessionId(rand::random_range(1..=u64::MAX)))
}

/// Starts the owner of one replica.
pub fn spawn(
    shard: Arc<Shard>,
    group: Arc<dyn Replication>,
    counters: Arc<Counters>,
    origin: u64,
    draw_session: DrawSession,
) -> mpsc::Sender<Event> {
    let (tx, events) = mpsc::channel(EVENT_QUEUE);
    let leadership = group.leadership();
    let owner = Owner {
        shard,
        group,
        counters,
        origin,
        draw_session,
        lead: None,
        cuts: 0,
        streams: BTreeMap::new(),
        done: FuturesUnordered::new(),
    };
    tokio::spawn(owner.run(events, leadership));
    tx
}

struct Owner {
    shard: Arc<Shard>,
    group: Arc<dyn Replication>,
    counters: Arc<Counters>,
    /// Names the founding of the shard's state.
    origin: u64,
    draw_session: DrawSession,
    lead: Option<Lead>,
    /// Image cuts that this process has begun, in any of its leaderships.
    cuts: u64,
    /// In an order: where all end at once, a simulation ends them in the same one each time.
    streams: BTreeMap<ConnId, Stream>,
    done: FuturesUnordered<BoxFuture<'static, Finished>>,
}

struct Stream {
    tx: mpsc::Sender<Reply>,
    worker: WorkerId,
    session: Option<SessionId>,
    life: Arc<Life>,
    /// Quarters of a lease without a sign of life.
    silent: u32,
}

/// Leader-only state of one leadership. Dropped as a whole.
#[derive(Default)]
struct Lead {
    /// Tells outcomes of this leadership from those of an earlier one.
    reign: u64,
    term: u64,
    /// It is not the first in its term.
    again: bool,
    /// Something that it holds is lost: it must begin again.
    broken: bool,
    /// The read barrier has passed: everything before this term is applied.
    ready: bool,
    by_worker: BTreeMap<WorkerId, ConnId>,
    rounds: Rounds,
    /// Closed rounds that wait for the norm over all shards, by step and local bucket.
    unclipped: BTreeMap<Step, BTreeMap<usize, Sum>>,
    in_flight: BTreeMap<(WorkerId, usize), Step>,
    /// When the pushes arrived that are taken and not proposed yet, and their bytes, by worker and local bucket.
    arrived: BTreeMap<(WorkerId, usize), (Moment, u64)>,
    /// Pushes that follow what is not applied here yet, by local bucket; a worker's in the order of their steps.
    early: BTreeMap<usize, BTreeMap<(WorkerId, Step), cuts::Queued>>,
    /// What workers said behind pushes that are not proposed yet, in that order: they finish, rest, go on.
    behind_own: Vec<(WorkerId, Purpose, Command)>,
    /// Rounds on their way that pass members over, by local bucket.
    closing: BTreeSet<(usize, Step)>,
    /// Working copies, and what waits for a cut.
    cuts: Cuts,
    pulls: pulls::Waiting,
    /// Pulls that may go, and that the log must hold first.
    to_record: Vec<pulls::Go>,
    /// The switch of the mode that is under way.
    switching: Option<switching::Switching>,
    /// What the rule that chooses the staleness bound has seen.
    steering: steering::Steering,
    /// Asks for chunks that wait for an answer.
    takes: BTreeMap<ConnId, takes::WaitingTake>,
    /// When leases are looked at next.
    look: Option<Instant>,
    /// Since when there is nothing to do.
    quiet: Option<Instant>,
    /// The image kept for a checkpoint.
    kept: sections::Kept,
    absent: BTreeMap<WorkerId, Instant>,
    leaving: BTreeSet<WorkerId>,
}

enum Finished {
    Barrier {
        reign: u64,
        result: Result<(), ProposeError>,
    },
    /// Leadership was confirmed, or not, for a worker whose session this leader does not know.
    Confirmed {
        reign: u64,
        conn: ConnId,
        result: Result<(), ProposeError>,
    },
    Proposal {
        reign: u64,
        purpose: Purpose,
        result: Result<Outcome, ProposeError>,
    },
    /// The group was asked to sleep, or to wake.
    SleepOrWake,
}

enum Purpose {
    Configure { conn: ConnId, job: String },
    Join { conn: ConnId },
    Init,
    Update { bucket: usize, contributions: Vec<Contribution>, of: Proposed },
    Leave { worker: WorkerId, asks: Option<ConnId> },
    Pull(pulls::Go),
    SwitchMode,
    Resume { conn: ConnId },
    CutPart,
    Cut(Proposed),
    Other,
}

/// What the span of a proposal says of it.
#[derive(Clone, Copy)]
struct Proposed {
    began: Moment,
    step: Step,
    /// Payload.
    bytes: u64,
}

impl Purpose {
    /// Whether its refusal by `apply` shows that this leader's picture of the replicated state is wrong: then all that
    /// it built on that picture must go.
    fn is_of_a_cut(&self) -> bool {
        matches!(self, Purpose::CutPart | Purpose::Cut(_))
    }
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
                    let now = *leadership.borrow_and_update();
                    self.leadership_changed(&now, &mut reigns);
                }
                event = events.recv() => match event {
                    None => return,
                    Some(e) => self.event(e).await,
                },
                () = tokio::time::sleep_until(deadline.unwrap_or_else(Instant::now)), if deadline.is_some() => {
                    self.sleep_if_quiet();
                    self.check_leases();
                    self.absent_too_long().await;
                    self.close_rounds().await;
                }
            }
            self.go_on(&mut reigns).await;
            self.record_pulls().await;
            self.look_for_quiet();
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
            self.begin(term, reigns, false);
        }
    }

    /// Begins a leadership: nothing is admitted before everything up to this term's first entry is applied. Where it
    /// begins `again` in its term, also everything that it has proposed so far: an entry whose outcome it does not know
    /// may be committed yet, and must not come between what is applied from then on and what that is built on.
    fn begin(&mut self, term: u64, reigns: &mut u64, again: bool) {
        *reigns += 1;
        let reign = *reigns;
        self.lead = Some(Lead { reign, term, again, ..Lead::default() });
        let group = self.group.clone();
        let barrier = async move {
            if again {
                // Without a pause a leader that cannot reach its followers would spin here, and hear nobody else.
                tokio::time::sleep(Duration::from_millis(20)).await;
                fence(&*group).await?;
            }
            group.barrier().await
        };
        self.done.push(barrier.map(move |result| Finished::Barrier { reign, result }).boxed());
    }

    /// Everything leader-only vanishes; the streams go and find the leader.
    fn step_down(&mut self) {
        self.counters.leases.lock().clear();
        self.counters.lateness.rest();
        self.counters.queued.store(0, Relaxed);
        let window = self.lead.take().map_or(0, |l| l.cuts.working.unreplicated());
        if window > 0 {
            let shard = self.shard.id().0;
            tracing::warn!(shard, pushes = window, "stepping down with pushes that no cut holds");
        }
        let refusal = self.not_leader();
        for (_, s) in std::mem::take(&mut self.streams) {
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
                        // Said once a term: it tries again many times a second.
                        let shard = self.shard.id().0;
                        match self.lead.as_ref().is_some_and(|l| l.again) {
                            true => tracing::debug!(shard, error = %e, "cannot lead yet"),
                            false => tracing::warn!(shard, error = %e, "cannot lead yet"),
                        }
                        self.restart(reigns);
                    }
                }
            }
            Finished::SleepOrWake => {}
            Finished::Confirmed { reign, conn, result } => {
                if current.map(|c| c.0) != Some(reign) {
                    return; // the stream is gone with the leadership
                }
                match result {
                    Ok(()) => self.open_confirmed(conn),
                    Err(e) => {
                        tracing::warn!(shard = self.shard.id().0, error = %e, "another may lead");
                        self.restart(reigns);
                    }
                }
            }
            Finished::Proposal { reign, purpose, result } => {
                if current.map(|c| c.0) != Some(reign) {
                    return; // of an earlier leadership: the workers ask again
                }
                match result {
                    Ok(Outcome::Refused(why)) if purpose.is_of_a_cut() => {
                        tracing::error!(shard = self.shard.id().0, why, "an image cut was refused");
                        self.restart(reigns);
                    }
                    Ok(outcome) => self.applied(purpose, outcome).await,
                    Err(e) => {
                        tracing::warn!(shard = self.shard.id().0, error = %e, "a proposal was lost");
                        self.restart(reigns);
                    }
                }
            }
        }
    }

    /// A proposal failed though the term did not end (the lease ran out, say): begin again.
    fn restart(&mut self, reigns: &mut u64) {
        let term = self.lead.as_ref().map(|l| l.term).filter(|_| !self.is_deposed());
        self.step_down();
        if let Some(term) = term.filter(|_| self.group.leadership().borrow().leads) {
            self.begin(term, reigns, true);
        }
    }

    /// Something of a successor is applied here, and that there is one was not heard yet. What this leader has (working
    /// copies, what is in flight) does not fit to what is replicated any more: nobody may be told anything by it.
    fn is_deposed(&self) -> bool {
        self.lead.as_ref().is_some_and(|l| l.term < self.shard.term())
    }

    fn ready(&mut self) {
        let Some(lead) = &mut self.lead else { return };
        lead.ready = true;
        let grace = self.shard.configured().map_or(REFIND, |c| grace(&c.job).max(REFIND));
        let deadline = Instant::now() + grace;
        lead.absent = self.shard.read(|m| m.members.unfinished().map(|(w, _)| (w, deadline)).collect());
        lead.look = Some(Instant::now());
        tracing::info!(shard = self.shard.id().0, term = lead.term, "leading");
    }

    // ---- proposals ----

    async fn propose(&mut self, purpose: Purpose, proposal: Proposal) {
        let Some(lead) = &self.lead else { return };
        let reign = lead.reign;
        self.counters.bytes_logged.fetch_add(proposal.payload.len() as u64, Relaxed);
        let waits = self.group.propose(Change::Shard(proposal)).await;
        self.done.push(
            async move {
                let result = match waits {
                    Ok(w) => w.await.map(|applied| match applied {
                        Applied::Shard(outcome) => outcome,
                        _ => Outcome::None,
                    }),
                    Err(e) => Err(e),
                };
                Finished::Proposal { reign, purpose, result }
            }
            .boxed(),
        );
    }

    async fn applied(&mut self, purpose: Purpose, outcome: Outcome) {
        let touched = match &purpose {
            Purpose::Update { bucket, contributions, .. } => {
                Touched::Bucket(*bucket, contributions.iter().map(|c| c.worker).collect())
            }
            _ => Touched::All,
        };
        if let Some(lead) = &mut self.lead {
            self.shard.read(|m| lead.cuts.working.follow(&m.members));
            match &touched {
                Touched::Bucket(bucket, _) => lead.rounds.touch(*bucket),
                _ => lead.rounds.touch_all(),
            }
        }
        match (purpose, outcome) {
            (Purpose::CutPart, _) => return self.part_applied(),
            (Purpose::Cut(of), _) => {
                self.note_replicated(of, None, None);
                self.cut_applied();
            }
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
                } else {
                    self.session_over(worker);
                    if let Some(lead) = &mut self.lead {
                        lead.absent.insert(worker, Instant::now());
                    }
                }
            }
            (Purpose::Update { bucket, contributions, of }, Outcome::Updated { version, applied }) => {
                let worker = Some(contributions.as_slice()).filter(|c| c.len() == 1).map(|c| c[0].worker);
                self.note_replicated(of, self.shard.configured().map(|c| c.buckets[bucket].id), worker);
                self.updated(bucket, &contributions, version, applied);
                self.note_delays(&contributions, version, applied);
                self.take_early(bucket).await;
            }
            (Purpose::Leave { worker, asks }, outcome) => {
                // It may have come back in between; then the Leave has changed nothing, and what it pushed in
                // its new session must not be forgotten.
                let back = self.shard.read(|m| m.members.get(worker).is_some());
                if let Some(lead) = &mut self.lead {
                    lead.leaving.remove(&worker);
                }
                if !back {
                    self.counters.lateness.forget(worker);
                }
                if let Some(lead) = self.lead.as_mut().filter(|_| !back) {
                    lead.absent.remove(&worker);
                    lead.rounds.forget(worker);
                    lead.in_flight.retain(|(w, _), _| *w != worker);
                    lead.arrived.retain(|(w, _), _| *w != worker);
                }
                self.evaluated(outcome);
                if let Some(conn) = asks {
                    self.send(conn, Reply::Left);
                    self.closed(conn);
                }
                self.session_over(worker);
            }
            (Purpose::Pull(go), Outcome::Done) => return self.pull_recorded(go),
            (Purpose::SwitchMode, outcome) => self.switched(&outcome),
            (Purpose::Resume { conn }, Outcome::Resumed { clock }) => {
                self.send(conn, Reply::Resumed { clock })
            }
            (_, Outcome::Refused(why)) => tracing::error!(shard = self.shard.id().0, why, "refused by apply"),
            (_, outcome) => self.evaluated(outcome),
        }
        self.close_rounds().await;
        self.answer_pulls(touched);
        self.answer_takes();
    }

    /// The outcome of an update or of a cut is here.
    fn note_replicated(&self, of: Proposed, bucket: Option<BucketId>, worker: Option<WorkerId>) {
        let (stage, shard, end) = (Stage::Replicate, self.shard.id(), Moment::now());
        let Proposed { began: begin, step, bytes } = of;
        self.counters.stages.note(Span { stage, begin, end, step, shard, bucket, worker, bytes });
    }

    fn updated(&mut self, bucket: usize, contributions: &[Contribution], version: Version, applied: bool) {
        if let Some((lead, step)) = self.lead.as_mut().zip(contributions.iter().map(|c| c.step).max()) {
            lead.closing.remove(&(bucket, step));
        }
        for c in contributions {
            let Some(lead) = &mut self.lead else { return };
            // The shard may show the update before this outcome is heard, and the next push be on its way already.
            if let Entry::Occupied(e) = lead.in_flight.entry((c.worker, bucket))
                && *e.get() <= c.step
            {
                e.remove();
            }
            let late = self.shard.read(|m| {
                let member = m.members.in_session(c.worker, c.session);
                member.is_some_and(|m| m.is_passed_over(bucket, c.step))
            });
            if late && !applied {
                // A round that was on its way before it has passed it over.
                if let Some(conn) = self.conn_of(c.worker, c.session) {
                    self.send(conn, Reply::PassedOver { seq: c.seq });
                }
                continue;
            }
            let is_in = applied
                || self.shard.read(|m| {
                    m.members.in_session(c.worker, c.session).is_some_and(|m| m.step(bucket) >= Some(c.step))
                });
            if is_in {
                self.ack(c.worker, c.session, c.seq, version);
            } else if let Some(conn) = self.conn_of(c.worker, c.session) {
                let why = "the round was dropped as a duplicate of another member's push; push again";
                self.refuse(conn, RefusalKind::Unavailable(why.into()).into());
            }
        }
    }

    /// The stream on which the worker's session is open now.
    fn conn_of(&self, worker: WorkerId, session: SessionId) -> Option<ConnId> {
        let conn = *self.lead.as_ref()?.by_worker.get(&worker)?;
        (self.streams.get(&conn)?.session == Some(session)).then_some(conn)
    }

    fn ack(&mut self, worker: WorkerId, session: SessionId, seq: Seq, version: Version) {
        if let Some(conn) = self.conn_of(worker, session) {
            self.send(conn, Reply::Ack { seq, version });
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
}

/// Returns when everything that this leader has proposed is applied.
async fn fence(group: &dyn Replication) -> Result<(), ProposeError> {
    let waits = group.propose(Change::Shard(Command::Fence.into())).await?;
    match tokio::time::timeout(FENCE, waits).await {
        Ok(outcome) => outcome.map(drop),
        Err(_) => Err(ProposeError::new(format!("no majority answered within {FENCE:?}"))),
    }
}

fn grace(job: &ServerJob) -> Duration {
    Duration::from_millis(job.grace_ms)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A stranger who tries a million numbers a second for a year has one chance in 500,000.
    #[test]
    fn the_numbers_of_sessions_cannot_be_guessed() {
        let mut draw = random_sessions();
        let drawn: BTreeSet<u64> = (0..64).map(|_| draw().0).collect();
        assert_eq!(drawn.len(), 64);
        let high = drawn.iter().map(|s| s >> 32).collect::<BTreeSet<_>>();
        assert!(high.len() > 60, "they lie close together: {drawn:x?}");
        assert!(drawn.iter().all(|s| SessionId(*s).tag() != *s), "what is shown is the number itself");
    }
}
