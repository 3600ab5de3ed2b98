//! The leader's work on a shard: everything that is not replicated, as one state machine without a clock, a network or a task.
//!
//! ```text
//!  follower ──elected──▶ catching up ──confirmed──▶ leading ──term over / a proposal lost──▶ follower
//!
//!            ┌────────────────────────────── Leader ─────────────────────────────┐
//!  Input ───▶│ streams  leases  pushes  rounds  norms  pulls  cuts  switch  asks  │───▶ Effect
//!            └───────────────────────────────────────────────────────────────────┘
//! ```
//!
//! Inputs go in with the time, effects come out in the order in which they are to be carried out ([`effects`]). One task per
//! replica does that ([`run`]); the simulation does it without one. While the replica does not lead, every stream is sent to
//! the leader. All that a leader knows beyond the replicated state may vanish: the workers keep what is not acknowledged and
//! push it again.
//!
//! Each part has its state for itself and hears of events by its methods; what they mean for each other is here:
//!
//! - [`streams`]: who is connected. [`leases`]: who is heard, missed, taken out.
//! - [`pending`]: the pushes that are taken in and not applied, and what each waits for. [`admission`]: may this push be taken?
//!   Pure.
//! - [`rounds`]: BSP's open rounds. [`norms`]: those that wait for the norm of the whole gradient.
//! - [`pulls`]: who may go on.
//! - [`cuts`], [`working`]: the copies that are ahead of the log at the level `leader`, and when they are cut.
//! - [`switching`]: the live switch of the mode. [`auto`]: the rule that decides on it.
//! - [`chunks`]: asks of the leased sampler. [`checkpoint`]: the image that a checkpoint is written from.
//! - `opening`, `pushing`, `answering`, `outcomes`: what the leader does with them, by what has happened.

pub mod admission;
mod answering;
pub mod auto;
pub mod checkpoint;
pub mod chunks;
pub mod cuts;
pub mod effects;
pub mod leases;
mod messages;
pub mod norms;
mod opening;
mod outcomes;
pub mod pending;
pub mod pulls;
mod pushing;
pub mod rounds;
pub mod run;
pub mod streams;
pub mod switching;
pub mod working;

pub use effects::{Effect, Input, Now, Standing};
pub use messages::{ConnId, Counters, Event, Life, Message, Reply, Section, Weights};
pub use run::{random_sessions, spawn};

use super::{
    command::{Command, Contribution, Proposal},
    members::Member,
    state::Shard,
};
use crate::compute::Panicked;
use crate::raft::{Leadership, ProposeError};
use effects::{Computed, Work};
use paraft_common::{BucketId, SessionId, Step, WorkerId};
use paraft_proto::{Refusal, RefusalKind};
use paraft_trace::{Moment, Span, Stage};
use pending::Push;
use std::{
    collections::{BTreeMap, VecDeque},
    sync::{Arc, atomic::Ordering::Relaxed},
    time::{Duration, Instant},
};

/// Steps that a worker may push without waiting for their acks; its stream has room for as many.
pub const MAX_AHEAD: u64 = 4;

/// Before a leader begins again: one that cannot reach its followers would spin otherwise, and hear nobody else.
const PAUSE: Duration = Duration::from_millis(20);
/// A leader that begins again waits so long for a majority before it sends its workers away once more.
const FENCE: Duration = Duration::from_secs(2);
/// A group that had nothing to do for so long is put to sleep.
const QUIET: Duration = Duration::from_secs(5);

/// Draws the numbers of sessions. They are what a worker takes its session up again with, so nobody else must be able to guess
/// one; and no two may be equal, whichever replica draws them.
pub type DrawSession = Box<dyn FnMut() -> SessionId + Send>;

/// One replica's.
pub struct Leader {
    shard: Arc<Shard>,
    counters: Arc<Counters>,
    /// Names the founding of the shard's state.
    origin: u64,
    draw_session: DrawSession,
    /// While this replica leads.
    epoch: Option<Epoch>,
    /// Image cuts that this process has begun, in any of its leaderships.
    cuts: u64,
    /// The last number of a proposal or confirmation.
    asked: u64,
    /// Effects that an input will answer, of earlier leaderships too.
    under_way: usize,
    agenda: VecDeque<Task>,
    /// What is computed now. Nothing else is done before.
    computing: Option<Computing>,
    now: Now,
    out: Vec<Effect>,
}

/// One leadership epoch: all that is leader-only. Dropped as a whole.
struct Epoch {
    term: u64,
    /// It is not the first in its term.
    again: bool,
    /// Something that it holds is lost: it must begin again.
    broken: bool,
    phase: Phase,
    /// What the proposals and confirmations under way are for, by number.
    asked: BTreeMap<u64, Purpose>,
    /// Since when there is nothing to do.
    quiet: Option<Instant>,
    streams: streams::Streams,
    leases: leases::Leases,
    pending: pending::Pushes<Said>,
    rounds: rounds::Rounds,
    norms: norms::Norms,
    pulls: pulls::Pulls,
    cuts: cuts::Cuts,
    switching: switching::Switching,
    controller: auto::Controller,
    asks: chunks::Asks,
    kept: checkpoint::Kept,
}

/// How far a leadership has come. Nothing is admitted before everything up to its term's first entry is applied: a push that
/// the last leader committed but this one has not applied yet would look new. Where it begins again in its term, also
/// everything that it has proposed so far: an entry whose outcome it does not know may be committed yet, and must not come
/// between what is applied from then on and what that is built on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// It begins again, at this time.
    Pauses(Instant),
    /// An entry behind everything that it has proposed is under way, until then.
    Fences(Instant),
    /// Its leadership is confirmed.
    CatchesUp,
    /// Workers are served.
    Leads,
}

/// What a proposal or a confirmation is for.
#[derive(Debug)]
pub enum Purpose {
    /// Everything that this leader has proposed before is applied.
    Fence,
    /// It leads, and has applied everything.
    CatchUp,
    /// A worker comes with a session that this leader does not know.
    Session(ConnId),
    /// The first worker brings the job.
    Configure {
        /// Its stream.
        conn: ConnId,
        /// Its job.
        job: String,
    },
    /// A worker joins.
    Join(ConnId),
    /// An update.
    Update {
        /// Of this local bucket.
        bucket: usize,
        /// Whose pushes.
        contributions: Vec<Contribution>,
        /// For its span.
        of: Proposed,
    },
    /// A worker's session ends.
    Leave {
        /// Whose.
        worker: WorkerId,
        /// It has asked for it, on this stream.
        asks: Option<ConnId>,
    },
    /// A pull that the log must hold.
    Pull(pulls::Go),
    /// The mode is switched.
    SwitchMode,
    /// A worker goes on.
    Resume(ConnId),
    /// A part of an image cut.
    CutPart,
    /// Its marker.
    Cut(Proposed),
    /// Nothing that anybody waits for.
    Other,
}

/// What a worker has said behind its pushes.
type Said = (Purpose, Command);

/// What the span of a proposal says of it.
#[derive(Clone, Copy, Debug)]
pub struct Proposed {
    began: Moment,
    step: Step,
    /// Payload.
    bytes: u64,
}

/// What is done one after the other. What one brings with it is done before what comes after it.
enum Task {
    Input(Input),
    /// Decide over a push.
    Take(Push),
    /// Look which rounds close.
    Rounds,
    /// Close one.
    Close(rounds::Key),
    /// Look which pulls go.
    Pulls(pulls::Touched),
    /// Look which asks for chunks have an answer.
    Asks,
    /// After every input: whatever has become possible. It may have to begin again; the mode is switched.
    GoOn,
    /// Take pushes that wait for room; whether any was.
    Room(bool),
    /// Propose what workers have said behind pushes.
    Said,
    /// Cut, if it is time.
    Cut,
    /// Propose the pulls that the log must hold.
    Record,
    /// Is there nothing left to do?
    Quiet,
}

/// For what something is computed.
enum Computing {
    /// A push to a working copy.
    Push {
        conn: ConnId,
        bucket: usize,
        contribution: Contribution,
        bytes: usize,
        replicated: Member,
        began: Moment,
    },
    /// The sum of a round.
    Round(rounds::Key),
}

impl Leader {
    /// Of a replica that does not lead. `origin` names the founding of the shard's state.
    pub fn new(shard: Arc<Shard>, counters: Arc<Counters>, origin: u64, draw_session: DrawSession) -> Self {
        Self {
            shard,
            counters,
            origin,
            draw_session,
            epoch: None,
            cuts: 0,
            asked: 0,
            under_way: 0,
            agenda: VecDeque::new(),
            computing: None,
            now: Now { at: Instant::now(), moment: Moment::default() },
            out: Vec::new(),
        }
    }

    /// Takes one input in, and gives what is to be done now, in this order.
    pub fn handle(&mut self, now: Now, group: &dyn Standing, input: Input) -> Vec<Effect> {
        self.now = now;
        match input {
            Input::Computed(result) => self.computed(result),
            input => {
                let tail = [Task::GoOn, Task::Room(false), Task::Said, Task::Cut, Task::Record, Task::Quiet];
                self.agenda.push_back(Task::Input(input));
                self.agenda.extend(tail);
            }
        }
        while self.computing.is_none()
            && let Some(task) = self.agenda.pop_front()
        {
            self.does(group, task);
        }
        std::mem::take(&mut self.out)
    }

    /// When to come with [`Input::Time`], though nothing else happens.
    pub fn deadline(&self) -> Option<Instant> {
        let e = self.epoch.as_ref()?;
        match e.phase {
            _ if e.broken => return Some(self.now.at),
            Phase::Pauses(at) | Phase::Fences(at) => return Some(at),
            Phase::CatchesUp => return None,
            Phase::Leads => {}
        }
        let conf = self.shard.configured();
        let job = conf.as_ref().map(|c| &c.job);
        let own = [
            e.leases.deadline(e.streams.any_attached()),
            job.and_then(|job| e.cuts.deadline(job)),
            job.and_then(|job| e.rounds.due(&job.round)),
            e.quiet.map(|since| since + QUIET),
        ];
        own.into_iter().flatten().min()
    }

    fn does(&mut self, group: &dyn Standing, task: Task) {
        match task {
            Task::Input(input) => self.input(group, input),
            Task::Take(push) => self.take_push(push),
            Task::Rounds => self.close_rounds(),
            Task::Close(round) => self.close_round(round),
            Task::Pulls(touched) => self.answer_pulls(touched),
            Task::Asks => self.answer_asks(),
            Task::GoOn => self.go_on(group),
            Task::Room(any) => self.take_if_room(any),
            Task::Said => self.propose_what_was_said(),
            Task::Cut => self.cut_if_due(),
            Task::Record => self.record_pulls(),
            Task::Quiet => self.look_for_quiet(),
        }
    }

    /// To be done next, in this order, before everything else.
    fn next(&mut self, tasks: impl IntoIterator<Item = Task, IntoIter: DoubleEndedIterator>) {
        tasks.into_iter().rev().for_each(|task| self.agenda.push_front(task));
    }

    fn input(&mut self, group: &dyn Standing, input: Input) {
        match input {
            Input::Leadership(now) => self.leadership(group, &now),
            Input::Open { conn, worker, session, job, life } => {
                self.open(group, conn, (worker, session, life), job);
            }
            Input::Message(conn, message) => self.message(group, conn, message),
            Input::Closed(conn) => self.closed(conn),
            Input::SwitchMode(number, choice, asker) => {
                self.switch_asked(group, number, choice, Some(asker));
            }
            Input::Fetch(step, asker) => {
                let fetched = self.fetch_section(group, step);
                self.out.push(Effect::Fetched(asker, fetched));
            }
            Input::Outcome(number, result) => {
                self.under_way -= 1;
                self.outcome(group, number, result);
            }
            Input::SleepOrWake => self.under_way -= 1,
            Input::Time => self.time(group),
            Input::Computed(_) => {} // handled where it comes in
        }
    }

    /// Some deadline is over.
    fn time(&mut self, group: &dyn Standing) {
        let now = self.now.at;
        match self.epoch.as_ref().map(|e| e.phase) {
            Some(Phase::Pauses(at)) if at <= now => {
                self.enters(Phase::Fences(now + FENCE));
                self.propose(Purpose::Fence, Command::Fence.into());
            }
            Some(Phase::Fences(until)) if until <= now => {
                let why = format!("no majority answered within {FENCE:?}");
                self.cannot_lead_yet(group, &ProposeError::new(why));
            }
            Some(Phase::Leads) => {
                self.sleep_if_quiet(group);
                self.check_leases();
                self.absent_too_long();
                self.next([Task::Rounds]);
            }
            _ => {}
        }
    }

    // ---- leadership ----

    fn leadership(&mut self, group: &dyn Standing, now: &Leadership) {
        let leads = now.leads.then_some(now.term);
        if self.epoch.as_ref().map(|e| e.term) == leads {
            return;
        }
        self.step_down(group);
        if let Some(term) = leads {
            self.begin(term, false);
        }
    }

    fn begin(&mut self, term: u64, again: bool) {
        let phase = if again { Phase::Pauses(self.now.at + PAUSE) } else { Phase::CatchesUp };
        self.epoch = Some(Epoch {
            term,
            again,
            broken: false,
            phase,
            asked: BTreeMap::new(),
            quiet: None,
            streams: Default::default(),
            leases: Default::default(),
            pending: Default::default(),
            rounds: Default::default(),
            norms: Default::default(),
            pulls: Default::default(),
            cuts: Default::default(),
            switching: Default::default(),
            controller: Default::default(),
            asks: Default::default(),
            kept: Default::default(),
        });
        if !again {
            self.confirm(Purpose::CatchUp);
        }
    }

    /// Everything leader-only vanishes; the streams go and find the leader.
    fn step_down(&mut self, group: &dyn Standing) {
        let Some(epoch) = self.epoch.take() else { return };
        self.counters.leases.lock().clear();
        self.counters.lateness.rest();
        self.counters.queued.store(0, Relaxed);
        self.counters.streams.store(0, Relaxed);
        let window = epoch.cuts.working().unreplicated();
        if window > 0 {
            let shard = self.shard.id().0;
            tracing::warn!(shard, pushes = window, "stepping down with pushes that no cut holds");
        }
        let refusal = self.not_leader(group);
        for conn in epoch.streams.all() {
            self.out.push(Effect::Send(conn, Reply::Refused(refusal.clone().into())));
            self.out.push(Effect::Close(conn));
        }
    }

    fn not_leader(&self, group: &dyn Standing) -> RefusalKind {
        RefusalKind::NotLeader { shard: self.shard.id(), leader: group.leader_address() }
    }

    /// A proposal failed though the term did not end (the lease ran out, say): begin again.
    fn restart(&mut self, group: &dyn Standing) {
        let term = self.epoch.as_ref().map(|e| e.term).filter(|_| !self.is_deposed());
        self.step_down(group);
        if let Some(term) = term.filter(|_| group.leads()) {
            self.begin(term, true);
        }
    }

    /// Something of a successor is applied here, and that there is one was not heard yet. What this leader has (working
    /// copies, what is in flight) does not fit to what is replicated any more: nobody may be told anything by it.
    fn is_deposed(&self) -> bool {
        self.epoch.as_ref().is_some_and(|e| e.term < self.shard.term())
    }

    fn enters(&mut self, phase: Phase) {
        if let Some(e) = &mut self.epoch {
            e.phase = phase;
        }
    }

    /// The epoch, if workers are served in it.
    fn leading(&mut self) -> Option<&mut Epoch> {
        self.epoch.as_mut().filter(|e| e.phase == Phase::Leads)
    }

    fn ready(&mut self) {
        let conf = self.shard.configured();
        let Some(e) = &mut self.epoch else { return };
        e.phase = Phase::Leads;
        let members = self.shard.read(|m| m.members.unfinished().map(|(w, _)| w).collect());
        e.leases.begin(members, conf.as_ref().map(|c| &c.job), self.now.at);
        tracing::info!(shard = self.shard.id().0, term = e.term, "leading");
    }

    fn cannot_lead_yet(&mut self, group: &dyn Standing, e: &ProposeError) {
        // Said once a term: it tries again many times a second.
        let shard = self.shard.id().0;
        match self.epoch.as_ref().is_some_and(|e| e.again) {
            true => tracing::debug!(shard, error = %e, "cannot lead yet"),
            false => tracing::warn!(shard, error = %e, "cannot lead yet"),
        }
        self.restart(group);
    }

    fn go_on(&mut self, group: &dyn Standing) {
        let now = self.now.at;
        if self.leading().and_then(|e| e.cuts.stalled()).is_some_and(|at| at <= now) {
            tracing::warn!(shard = self.shard.id().0, "no majority takes the image cut under way");
            return self.restart(group);
        }
        if self.epoch.as_ref().is_some_and(|e| e.broken) || self.is_deposed() {
            return self.restart(group);
        }
        self.steer();
        self.propose_switch();
    }

    /// What this leader computed with is gone: it begins again, as where a proposal is lost.
    fn broken(&mut self, e: &Panicked) {
        tracing::error!(shard = self.shard.id().0, error = %e, "this leader cannot go on with what it has");
        if let Some(epoch) = &mut self.epoch {
            epoch.broken = true;
        }
    }

    // ---- quiet: nobody is connected, nobody is missed, and nothing is on its way ----

    fn look_for_quiet(&mut self) {
        let (under_way, now) = (self.under_way, self.now.at);
        let members = || self.shard.read(|m| m.members.unfinished().next().is_some());
        let Some(e) = &mut self.epoch else { return };
        self.counters.streams.store(e.streams.len() as u64, Relaxed);
        let busy = under_way > 0 || e.phase != Phase::Leads || !e.streams.is_empty() || !e.leases.is_quiet();
        match !busy && !members() {
            true => _ = e.quiet.get_or_insert(now),
            false => e.quiet = None,
        }
    }

    /// Also of a group that sleeps it is looked again: others wake it too, and nobody says so here.
    fn sleep_if_quiet(&mut self, group: &dyn Standing) {
        let now = self.now.at;
        let Some(e) = self.epoch.as_mut().filter(|e| e.quiet.is_some_and(|since| since + QUIET <= now))
        else {
            return;
        };
        e.quiet = Some(now);
        if !group.is_asleep() {
            self.under_way += 1;
            self.out.push(Effect::Sleep);
        }
    }

    // ---- effects ----

    fn number(&mut self, purpose: Purpose) -> Option<u64> {
        let e = self.epoch.as_mut()?;
        self.asked += 1;
        self.under_way += 1;
        e.asked.insert(self.asked, purpose);
        Some(self.asked)
    }

    fn propose(&mut self, purpose: Purpose, proposal: Proposal) {
        let Some(number) = self.number(purpose) else { return };
        self.counters.bytes_logged.fetch_add(proposal.payload.len() as u64, Relaxed);
        self.out.push(Effect::Propose(number, proposal));
    }

    fn confirm(&mut self, purpose: Purpose) {
        let Some(number) = self.number(purpose) else { return };
        self.out.push(Effect::Confirm(number));
    }

    /// Proposes a command that must find everything in the log that was pushed before it.
    fn propose_behind_cut(&mut self, purpose: Purpose, proposal: Proposal) {
        let free = self.epoch.as_mut().and_then(|e| e.cuts.behind(purpose, proposal));
        if let Some((purpose, proposal)) = free {
            self.propose(purpose, proposal);
        }
    }

    /// Proposes what a worker says behind its pushes. As long as one of them waits this waits too: a worker that the log
    /// calls finished has all its pushes there, and who asks for the final weights, of whichever leader, gets them. What a
    /// worker says keeps its order.
    fn propose_behind_own(&mut self, worker: WorkerId, purpose: Purpose, command: Command) {
        let free = self.epoch.as_mut().and_then(|e| e.pending.says(worker, (purpose, command)));
        if let Some((purpose, command)) = free {
            self.propose_behind_cut(purpose, command.into());
        }
    }

    fn propose_what_was_said(&mut self) {
        let free = self.leading().map(|e| e.pending.said()).unwrap_or_default();
        for (purpose, command) in free {
            self.propose_behind_cut(purpose, command.into());
        }
    }

    fn compute(&mut self, bytes: u64, of: Computing, work: Work) {
        self.computing = Some(of);
        self.out.push(Effect::Compute(bytes, work));
    }

    fn computed(&mut self, result: Result<Computed, Panicked>) {
        match (self.computing.take(), result) {
            (
                Some(Computing::Push { conn, bucket, contribution, bytes, replicated, began }),
                Ok(Computed::Copy(data)),
            ) => {
                self.push_computed(conn, bucket, &contribution, bytes, &replicated, data);
                let of = (bucket, contribution.step, Some(contribution.worker));
                self.note(Stage::Apply, began, of, bytes as u64);
                self.next([Task::Pulls(pulls::Touched::Bucket(bucket, vec![contribution.worker]))]);
            }
            (Some(Computing::Round(round)), Ok(Computed::Sum(sum))) => self.summed(round, sum),
            (_, Err(e)) => self.broken(&e),
            (_, Ok(_)) => {}
        }
    }

    fn send(&mut self, conn: ConnId, reply: Reply) {
        if !self.is_deposed() {
            self.out.push(Effect::Send(conn, reply));
        }
    }

    fn refuse(&mut self, conn: ConnId, refusal: impl Into<Refusal>) {
        let refusal = refusal.into();
        self.counters.refused.fetch_add(1, Relaxed);
        let keeps = refusal.seq > 0;
        self.send(conn, Reply::Refused(refusal));
        if !keeps {
            self.closes(conn);
        }
    }

    /// Ends a stream.
    fn closes(&mut self, conn: ConnId) {
        self.closed(conn);
        self.out.push(Effect::Close(conn));
    }

    // ---- spans ----

    fn note(
        &self,
        stage: Stage,
        begin: Moment,
        (bucket, step, worker): (usize, Step, Option<WorkerId>),
        bytes: u64,
    ) {
        let bucket = self.shard.configured().map(|c| c.buckets[bucket].id);
        let (shard, end) = (self.shard.id(), self.now.moment);
        self.counters.stages.note(Span { stage, begin, end, step, shard, bucket, worker, bytes });
    }

    /// The outcome of an update or of a cut is here.
    fn note_replicated(&self, of: Proposed, bucket: Option<BucketId>, worker: Option<WorkerId>) {
        let (stage, shard, end) = (Stage::Replicate, self.shard.id(), self.now.moment);
        let Proposed { began: begin, step, bytes } = of;
        self.counters.stages.note(Span { stage, begin, end, step, shard, bucket, worker, bytes });
    }
}
