//! The leader's work on a shard: everything that is not replicated, as one state machine without a clock, a network or a task.
//!
//! ```text
//!  follower ──elected──▶ catching up ──confirmed──▶ leading ──term over / a proposal lost──▶ follower
//!
//!            ┌────────────────────────────── Leader ─────────────────────────────┐
//!  Input ───▶│ streams  leases  pushes  rounds  norms  pulls  deltas  switch  asks  │───▶ Effect
//!            └───────────────────────────────────────────────────────────────────┘
//! ```
//!
//! Inputs go in with the time, effects come out in the order in which they are to be carried out ([`effects`]). One task per
//! replica does that ([`run`]); the simulation does it without one. While the replica does not lead, every stream is sent to
//! the leader. All that a leader knows beyond the replicated state may vanish: the workers keep what is not acknowledged and
//! push it again.
//!
//! Every event enters by [`Leader::handle`], and each has one function:
//!
//! | event | function | file |
//! |---|---|---|
//! | leadership gained or lost | `leadership` | `epoch` |
//! | a stream opens, closes | `open`, `closed` | `sessions` |
//! | a worker pushes | `push`, then `take_push`, `close_rounds` | `pushes` |
//! | a worker pulls | `answer_pulls`, `answer` | `replies` |
//! | a worker reports, pauses, finishes, asks for a chunk | `message`, which proposes a command | here |
//! | a switch of the mode, the job's end | `switch_asked`, `stop_asked` | `requests` |
//! | a checkpoint's writer asks for this shard's part | `fetch_part` | `replies` |
//! | a proposal is applied, or lost | `outcome` | `proposals` |
//! | something was computed | `computed` | here |
//! | time | `time` | `epoch` |
//!
//! The parts that these functions use have private state, and know nothing of each other:
//!
//! - [`streams`]: who is connected. [`leases`]: who is heard, missed, taken out.
//! - [`pending`]: the pushes that are taken in and not applied, and what each waits for. [`admission`]: may this push be taken?
//!   Pure.
//! - [`rounds`]: BSP's open rounds. [`norms`]: those that wait for the norm of the whole gradient.
//! - [`pulls`]: who may go on.
//! - [`deltas`], [`working`]: the copies that are ahead of the log at the level `leader`, and when they are written.
//! - [`switching`]: the live switch of the mode. [`tally`]: what the rule that chooses modes goes by. [`progress`]: what people
//!   see of it.
//! - `replication`: what it needs of its group.
//! - [`chunks`]: asks of the leased sampler. [`checkpoint`]: the image that a checkpoint is written from.

pub mod admission;
pub mod checkpoint;
pub mod chunks;
pub mod deltas;
pub mod effects;
mod epoch;
pub mod leases;
mod messages;
pub mod norms;
pub mod pending;
pub mod progress;
mod proposals;
pub mod pulls;
mod purpose;
mod pushes;
mod replication;
mod replies;
mod requests;
pub mod rounds;
pub mod run;
mod sessions;
mod shares;
pub mod streams;
pub mod switching;
pub mod tally;
pub mod working;

pub use checkpoint::lowest;
pub use effects::{Effect, Input, Now, Standing};
pub use messages::{
    About, CheckpointImage, ConnId, Counters, Event, Later, Liveness, Message, Reply, Weights,
};
pub use purpose::{Proposed, Purpose, Said};
pub use replication::{Replication, Waits};
pub use run::{random_sessions, spawn};
pub use switching::Wanted;

use super::{
    command::{Command, Contribution, Proposal},
    members::Member,
    state::Shard,
};
use crate::compute::Panicked;
use effects::{Computed, Work};
use epoch::{Epoch, Phase, QUIET};
use paraft_common::{BucketId, SessionId, Step, WorkerId};
use paraft_proto::{Refusal, RefusalKind};
use paraft_trace::{Moment, Span, Stage};
use pending::Push;
use pulls::{Changed, Pull};
use std::{
    collections::VecDeque,
    sync::{Arc, atomic::Ordering::Relaxed},
    time::Instant,
};

/// Steps that a worker may push without waiting for their acks; its stream has room for as many.
pub const MAX_AHEAD: u64 = 4;

/// Draws the numbers of sessions. They are what a worker takes its session up again with, so nobody else must be able to guess
/// one; and no two may be equal, whichever replica draws them.
pub type DrawSession = Box<dyn FnMut() -> SessionId + Send>;

/// One replica's.
pub struct Leader {
    shard: Arc<Shard>,
    counters: Arc<Counters>,
    /// Names the founding of the shard's state.
    founding: u64,
    draw_session: DrawSession,
    /// While this replica leads.
    epoch: Option<Epoch>,
    /// State deltas that this process has begun, in any of its leaderships.
    deltas: u64,
    /// The last number of a proposal or confirmation.
    asked: u64,
    /// Effects that an input will answer, of earlier leaderships too.
    under_way: usize,
    /// Inputs that came while something was computed.
    inputs: VecDeque<Input>,
    agenda: VecDeque<Task>,
    /// What is done next when nothing is left on the agenda.
    after: Option<After>,
    /// What is computed now. Nothing else is done before.
    computing: Option<Computing>,
    now: Now,
    out: VecDeque<Effect>,
}

/// What is done one after the other. What one brings with it is done before what comes after it.
enum Task {
    /// Decide over a push.
    Take(Push),
    /// Look which rounds close.
    Rounds,
    /// Close one.
    Close(rounds::Key),
    /// Look which pulls go.
    Pulls(Changed),
    /// Look which asks for chunks have an answer.
    Asks,
    /// Take pushes that wait for room, after one was.
    Room,
}

/// After every input, one after the other: whatever has become possible. It is done for each push, so what has nothing to do
/// finds that out without the state's lock.
#[derive(Clone, Copy)]
enum After {
    /// It may have to begin again; the mode is switched.
    GoOn,
    /// Take pushes that wait for room.
    Room,
    /// Propose what workers have said behind pushes.
    Said,
    /// Write a state delta, if it is time.
    Delta,
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
    /// Of a replica that does not lead. `founding` names the founding of the shard's state.
    pub fn new(shard: Arc<Shard>, counters: Arc<Counters>, founding: u64, draw_session: DrawSession) -> Self {
        Self {
            shard,
            counters,
            founding,
            draw_session,
            epoch: None,
            deltas: 0,
            asked: 0,
            under_way: 0,
            inputs: VecDeque::new(),
            agenda: VecDeque::new(),
            after: None,
            computing: None,
            now: Now { at: Instant::now(), moment: Moment::default() },
            out: VecDeque::new(),
        }
    }

    /// Takes one input in. What is to be done now is in [`Self::next_effect`], and must be done before the next input.
    pub fn handle(&mut self, now: Now, group: &dyn Standing, input: Input) {
        self.now = now;
        match input {
            Input::Computed(result) => self.computed(result),
            input if self.computing.is_some() => self.inputs.push_back(input),
            input => self.begins_with(group, input),
        }
        while self.computing.is_none() {
            if let Some(task) = self.agenda.pop_front() {
                self.does(task);
            } else if let Some(after) = self.after.take() {
                self.does_after(group, after);
            } else if let Some(input) = self.inputs.pop_front() {
                self.begins_with(group, input);
            } else {
                return;
            }
        }
    }

    /// What is to be done next, in order; `None`: nothing.
    pub fn next_effect(&mut self) -> Option<Effect> {
        self.out.pop_front()
    }

    fn begins_with(&mut self, group: &dyn Standing, input: Input) {
        self.after = Some(After::GoOn);
        self.input(group, input);
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
        let of_job = || {
            let conf = self.shard.configured()?;
            e.deltas.due(&conf.job)
        };
        let own = [
            e.leases.deadline(e.streams.any_attached()),
            if e.deltas.working().is_level() { None } else { of_job() },
            e.quiet.map(|since| since + QUIET),
            e.stalled(),
        ];
        own.into_iter().flatten().min()
    }

    fn does(&mut self, task: Task) {
        match task {
            Task::Take(push) => self.take_push(push),
            Task::Rounds => self.close_rounds(),
            Task::Close(round) => self.close_round(round),
            Task::Pulls(changed) => self.answer_pulls(changed),
            Task::Asks => self.answer_asks(),
            Task::Room => self.take_if_room(true),
        }
    }

    fn does_after(&mut self, group: &dyn Standing, after: After) {
        self.after = match after {
            After::GoOn => Some(After::Room),
            After::Room => Some(After::Said),
            After::Said => Some(After::Delta),
            After::Delta => Some(After::Record),
            After::Record => Some(After::Quiet),
            After::Quiet => None,
        };
        match after {
            After::GoOn => self.go_on(group),
            After::Room => self.take_if_room(false),
            After::Said => self.propose_what_was_said(),
            After::Delta => self.begin_delta_if_due(),
            After::Record => self.record_pulls(),
            After::Quiet => self.look_for_quiet(),
        }
    }

    /// To be done next, in this order, before everything else.
    fn next(&mut self, tasks: impl IntoIterator<Item = Task, IntoIter: DoubleEndedIterator>) {
        tasks.into_iter().rev().for_each(|task| self.agenda.push_front(task));
    }

    fn input(&mut self, group: &dyn Standing, input: Input) {
        match input {
            Input::Leadership(now) => self.leadership(group, &now),
            Input::Open { conn, worker, session, job, liveness } => {
                self.open(group, conn, (worker, session, liveness), job);
            }
            Input::Message(conn, message) => self.message(group, conn, message),
            Input::Closed(conn) => self.closed(conn),
            Input::SwitchMode(number, wanted, asker) => {
                self.switch_asked(group, number, wanted, asker);
            }
            Input::Stop => self.stop_asked(),
            Input::Fetch(step, now, asker) => {
                let fetched = self.fetch_part(group, step, now);
                self.out.push_back(Effect::Fetched(asker, fetched));
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

    /// A message on a worker's stream.
    pub(super) fn message(&mut self, group: &dyn Standing, conn: ConnId, message: Message) {
        let Some(e) = &mut self.epoch else { return };
        if e.streams.get(conn).is_none() {
            return;
        }
        let Some((worker, session)) = e.streams.member(conn) else {
            return self.refuse(conn, RefusalKind::NotOpened);
        };
        match message {
            Message::Init { bucket, part, payload } => {
                let command = Command::Init { bucket, part };
                self.propose(Purpose::Init, Proposal { command, payload });
            }
            Message::Push { .. } => self.push(conn, worker, session, message),
            Message::Pull { done, last, checkpoint, barrier, have, loss, only } => {
                self.counters.pulls.fetch_add(1, Relaxed);
                let conf = self.shard.configured();
                let buckets = conf.as_ref().map_or(0, |c| c.buckets.len());
                let records = !last && !barrier && conf.is_some_and(|c| c.job.keeps().pulled);
                e.tally.loss(loss);
                self.counters.progress.lock().loss(loss);
                let part = !only.is_empty();
                let todo = if part { only.into_iter().collect() } else { (0..buckets).collect() };
                let pull = Pull { conn, worker, done, last, checkpoint, barrier, records, have, part };
                e.pulls.ask(pull, todo);
                self.next([Task::Pulls(Changed::Pull(conn))]);
            }
            Message::Norm { step, sum_of_squares } => self.norm(step, sum_of_squares),
            Message::Report { epoch, sums } => {
                let command = Command::Report { worker, session, epoch, sums };
                self.propose(Purpose::Other, command.into());
            }
            Message::Advance { step } => {
                let advance = Command::Advance { worker, session, step };
                self.propose(Purpose::Member(worker), advance.into());
            }
            Message::SwitchMode { number, mode } => {
                self.switch_asked(group, Some(number), Wanted::Choice(mode.into()), None);
            }
            Message::Acquire { request, epoch, done } => {
                e.asks.ask(conn, worker, request);
                let take = Command::Acquire { worker, session, request, epoch, done };
                self.propose(Purpose::Other, take.into());
            }
            Message::Pause => {
                // In the log too a worker trains, then rests.
                let pause = Command::Pause { worker, session };
                self.propose_behind_own(worker, Purpose::Member(worker), pause);
            }
            Message::Resume { level } => {
                // Behind what the others have pushed: where they are decides where it begins.
                let resume = Command::Resume { worker, session, level };
                self.propose_behind_own(worker, Purpose::Resume(conn), resume);
            }
            Message::Finish => {
                let finish = Command::Finish { worker, session };
                self.propose_behind_own(worker, Purpose::Member(worker), finish);
            }
            Message::Leave => self.take_out(worker, session, Some(conn)),
        }
    }

    // ---- effects ----

    fn number(&mut self, purpose: Purpose) -> Option<u64> {
        let now = self.now.at;
        let e = self.epoch.as_mut()?;
        if e.asked.is_empty() {
            e.heard = now;
        }
        self.asked += 1;
        self.under_way += 1;
        e.asked.insert(self.asked, purpose);
        Some(self.asked)
    }

    fn propose(&mut self, purpose: Purpose, proposal: Proposal) {
        let Some(number) = self.number(purpose) else { return };
        self.counters.bytes_logged.fetch_add(proposal.payload.len() as u64, Relaxed);
        self.out.push_back(Effect::Propose(number, proposal));
    }

    fn confirm(&mut self, purpose: Purpose) {
        let Some(number) = self.number(purpose) else { return };
        self.out.push_back(Effect::Confirm(number));
    }

    /// Proposes a command that must find everything in the log that was pushed before it.
    fn propose_behind_cut(&mut self, purpose: Purpose, proposal: Proposal) {
        let free = self.epoch.as_mut().and_then(|e| e.deltas.behind(purpose, proposal));
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
        self.out.push_back(Effect::Compute(bytes, work));
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
                self.next([Task::Pulls(Changed::Bucket(bucket, vec![contribution.worker]))]);
            }
            (Some(Computing::Round(round)), Ok(Computed::Sum(sum))) => self.summed(round, sum),
            (_, Err(e)) => self.broken(&e),
            (_, Ok(_)) => {}
        }
    }

    fn send(&mut self, conn: ConnId, reply: Reply) {
        if !self.is_deposed() {
            self.out.push_back(Effect::Send(conn, reply));
        }
    }

    fn refuse(&mut self, conn: ConnId, refusal: impl Into<Refusal>) {
        let refusal = refusal.into();
        let count = match refusal.kind.is_for_now() {
            true => &self.counters.redirected,
            false => &self.counters.refused,
        };
        count.fetch_add(1, Relaxed);
        let keeps = refusal.seq > 0;
        self.send(conn, Reply::Refused(refusal));
        if !keeps {
            self.closes(conn);
        }
    }

    /// Ends a stream.
    fn closes(&mut self, conn: ConnId) {
        self.closed(conn);
        self.out.push_back(Effect::Close(conn));
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
        self.counters.stages.note(Span { stage, begin, end, step, shard, bucket, worker, bytes, pass: None });
    }

    /// The outcome of an update or of a delta is here.
    fn note_replicated(&self, of: Proposed, bucket: Option<BucketId>, worker: Option<WorkerId>) {
        let (stage, shard, end) = (Stage::Replicate, self.shard.id(), self.now.moment);
        let Proposed { began: begin, step, bytes } = of;
        self.counters.stages.note(Span { stage, begin, end, step, shard, bucket, worker, bytes, pass: None });
    }
}

#[cfg(test)]
mod whole_tests;

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::shard::{InitPart, begin::JOB_FORM};
    use paraft_common::{Payload, ShardId, codec::F32_BYTES, config::ServerJob};

    /// A shard of this job, with its initial weights.
    pub fn shard_of(job: &ServerJob) -> Shard {
        first_shard_of(job, 1)
    }

    /// The first of so many shards.
    pub fn first_shard_of(job: &ServerJob, shards: u32) -> Shard {
        let shard = Shard::new(ShardId(0), shards);
        let text = job.to_toml().expect("a valid job");
        shard.apply(&Command::Admit { form: JOB_FORM, job: text }.into());
        let conf = shard.configured().expect("the job is taken");
        for b in &conf.buckets {
            let command = Command::Init { bucket: b.id, part: InitPart::FRESH };
            shard.apply(&Proposal { command, payload: Payload::from(vec![0u8; b.spec.len * F32_BYTES]) });
        }
        shard
    }
}
