//! The leader's work on a shard: all state that is not replicated, as one state machine without a clock, a network
//! or a task.
//!
//! ```text
//!  follower ──elected──▶ catching up ──confirmed──▶ leading ──term over / a proposal lost──▶ follower
//!
//!            ┌────────────────────────────── Leader ─────────────────────────────┐
//!  Input ───▶│ streams  leases  pushes  rounds  norms  pulls  deltas  switch  asks  │───▶ Effect
//!            └───────────────────────────────────────────────────────────────────┘
//! ```
//!
//! Inputs arrive with the time; effects leave in the order in which they must run ([`effects`]). One task per
//! replica does that ([`run`]); the simulation does it without a task. While the replica does not lead, it
//! redirects every stream to the leader. All state of the leader beyond the replicated state may be lost: the
//! workers keep what is not acknowledged, and push it again.
//!
//! Every event enters by [`Leader::handle`], and each has one function:
//!
//! | event | function | file |
//! |---|---|---|
//! | leadership gained or lost | `leadership` | `epoch` |
//! | a stream opens, closes | `open`, `closed` | `sessions` |
//! | a worker pushes | `push`, then `take_push`; `close_rounds` | `pushes`; `closing` |
//! | a worker pulls | `answer_pulls`, `answer` | `replies` |
//! | a worker reports, pauses, finishes, asks for a chunk | `message`, which proposes a command | here |
//! | a switch of the mode, the job's end | `switch_asked`, `stop_asked` | `requests` |
//! | a checkpoint's writer asks for this shard's part | `fetch_part` | `replies` |
//! | a proposal is applied, or lost | `outcome` | `proposals` |
//! | something was computed | `computed` | `agenda` |
//! | time | `time` | `epoch` |
//!
//! `agenda` says what runs after an event, `update` proposes the updates of buckets, `working_pushes` applies pushes at
//! the level `leader`, and `spans` records how long a stage took.
//!
//! The modules behind these functions have private state and do not depend on each other:
//!
//! - [`streams`]: open streams. [`leases`]: which members are alive, absent or leaving.
//! - [`pending`]: pushes that are received and not applied, and what each waits for. [`admission`]: whether a push
//!   is accepted (a pure function).
//! - [`rounds`]: BSP's open rounds. [`norms`]: closed rounds that wait for the norm of the whole gradient.
//! - [`pulls`]: which pulls may be answered.
//! - [`deltas`], [`working`]: the working copies that are ahead of the log at the level `leader`, and when they are
//!   written to it.
//! - [`switching`]: the live switch of the mode. [`tally`]: the counts that the rule for the mode uses.
//!   [`progress`]: counts for people.
//! - `replication`: what the leader needs of its Raft group.
//! - [`chunks`]: requests to the leased sampler. [`checkpoint`]: when the shard is cut for a checkpoint.
//! - `messages`: what streams and the leader tell each other. [`answers`]: to requests that are not of a stream.
//!   `weights`: the weights in a reply. `counters`: counts for people and metrics.

pub mod admission;
mod agenda;
pub mod answers;
pub mod checkpoint;
pub mod chunks;
mod closing;
mod counters;
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
mod push;
mod pushes;
mod replication;
mod replies;
mod requests;
pub mod rounds;
pub mod run;
mod sessions;
mod shares;
mod spans;
pub mod streams;
pub mod switching;
pub mod tally;
mod update;
mod weights;
pub mod working;
mod working_pushes;

pub use checkpoint::{CheckpointPart, lowest};
pub use counters::{Counters, WorkerInfo};
pub use effects::{Effect, Input, Now};
pub use messages::{ConnId, Event, Liveness, Message, Reply};
pub use purpose::{DeferredCommand, ProposalSpan, Purpose};
pub use replication::{GroupStatus, OutcomeFuture, Replication};
pub use run::{random_sessions, spawn};
pub use switching::RequestedMode;
pub use weights::{DeferredWeights, Weights};

use super::{
    command::{Command, Proposal},
    state::Shard,
};
use agenda::{Computing, FollowUp, Task};
use epoch::{Epoch, Phase};
use paraft_common::SessionId;
use paraft_proto::RefusalKind;
use paraft_trace::Moment;
use pulls::{Pull, PullTrigger};
use std::{
    collections::VecDeque,
    sync::{Arc, atomic::Ordering::Relaxed},
    time::Instant,
};

/// Steps that a worker may push without waiting for acks. Its stream has room for as many.
pub const MAX_AHEAD: u64 = 4;

/// Draws session ids. A worker resumes its session with the id, so the id must not be guessable, and must be unique
/// over all replicas.
pub type DrawSession = Box<dyn FnMut() -> SessionId + Send>;

/// The leader of one replica.
pub struct Leader {
    shard: Arc<Shard>,
    counters: Arc<Counters>,
    /// Identifies the creation of the shard's state.
    founding: u64,
    draw_session: DrawSession,
    /// Present while this replica leads.
    epoch: Option<Epoch>,
    /// State deltas that this process has started, in all its epochs.
    deltas: u64,
    /// Number of the last proposal or confirmation.
    asked: u64,
    /// Effects that an input will answer, including those of earlier epochs.
    under_way: usize,
    /// The group is about to sleep.
    falls_asleep: bool,
    /// Inputs that arrived during a computation.
    inputs: VecDeque<Input>,
    agenda: VecDeque<Task>,
    /// What runs next once the agenda is empty.
    after: Option<FollowUp>,
    /// The computation in progress. Nothing else runs before it ends.
    computing: Option<Computing>,
    now: Now,
    out: VecDeque<Effect>,
}

impl Leader {
    /// Creates the leader of a replica that does not lead yet. `founding` identifies the creation of the shard's
    /// state.
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
            falls_asleep: false,
            inputs: VecDeque::new(),
            agenda: VecDeque::new(),
            after: None,
            computing: None,
            now: Now { at: Instant::now(), moment: Moment::default() },
            out: VecDeque::new(),
        }
    }

    /// Handles one input. The caller must run all effects of [`Self::next_effect`] before the next input.
    pub fn handle(&mut self, now: Now, group: &dyn GroupStatus, input: Input) {
        self.now = now;
        match input {
            Input::Computed(result) => self.computed(result),
            input if self.computing.is_some() => self.inputs.push_back(input),
            input => self.begins_with(group, input),
        }
        while self.computing.is_none() {
            if let Some(task) = self.agenda.pop_front() {
                self.run_task(task);
            } else if let Some(after) = self.after.take() {
                self.run_follow_up(group, after);
            } else if let Some(input) = self.inputs.pop_front() {
                self.begins_with(group, input);
            } else {
                return;
            }
        }
    }

    /// The next effect, in order; `None` if there is none.
    pub fn next_effect(&mut self) -> Option<Effect> {
        self.out.pop_front()
    }

    fn begins_with(&mut self, group: &dyn GroupStatus, input: Input) {
        // A push counts when it is applied.
        let counts = !matches!(input, Input::Message(_, Message::Push { .. }));
        self.after = Some(FollowUp::Epoch { counts });
        self.input(group, input);
    }

    /// When the caller must send [`Input::Time`] if nothing else happens.
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
            e.quiet.map(|(since, timeout)| since + timeout),
            e.stalled(),
        ];
        own.into_iter().flatten().min()
    }

    fn input(&mut self, group: &dyn GroupStatus, input: Input) {
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
            Input::EditRows(edit, asker) => self.edit_asked(group, edit, asker),
            Input::Fetch(step, now, asker) => {
                let fetched = self.fetch_part(group, step, now);
                self.out.push_back(Effect::FetchResult(asker, fetched));
            }
            Input::Outcome(number, result) => {
                self.under_way -= 1;
                self.outcome(group, number, result);
            }
            Input::SleepOrWake => {
                self.under_way -= 1;
                self.falls_asleep = false;
            }
            Input::Time => self.time(group),
            Input::Computed(_) => {} // handled on entry
        }
    }

    /// A message on a worker's stream.
    pub(super) fn message(&mut self, group: &dyn GroupStatus, conn: ConnId, message: Message) {
        let Some(e) = &mut self.epoch else { return };
        if e.streams.get(conn).is_none() {
            return;
        }
        let Some((worker, session)) = e.streams.member(conn) else {
            return self.refuse(conn, RefusalKind::NotOpened);
        };
        e.quiet = None;
        // The worker opens its session again, and repeats what has no answer.
        if self.woken_by(group, conn) {
            return;
        }
        let Some(e) = &mut self.epoch else { return };
        match message {
            Message::Init { bucket, part, payload } => {
                let command = Command::Init { bucket, part };
                self.propose(Purpose::Init, Proposal { command, payload });
            }
            Message::Push { .. } => self.push(conn, worker, session, message),
            Message::Pull { done, last, checkpoint, barrier, have, loss, only, rows } => {
                self.counters.pulls.fetch_add(1, Relaxed);
                let conf = self.shard.configured();
                let buckets = conf.as_ref().map_or(0, |c| c.buckets.len());
                let records = !last && !barrier && conf.is_some_and(|c| c.job.keeps().pulled);
                e.tally.loss(loss);
                self.counters.progress.lock().loss(loss);
                let part = !only.is_empty();
                let rows = only.iter().copied().zip(rows).collect();
                let todo = if part { only.into_iter().collect() } else { (0..buckets).collect() };
                let pull = Pull { conn, worker, done, last, checkpoint, barrier, records, have, part, rows };
                e.pulls.ask(pull, todo);
                self.next([Task::Pulls(PullTrigger::Pull(conn))]);
            }
            Message::Norm { step, sum_of_squares, bound } => self.norm(step, sum_of_squares, bound),
            Message::Report { epoch, sums } => {
                let command = Command::Report { worker, session, epoch, sums };
                self.propose(Purpose::Other, command.into());
            }
            Message::Advance { step } => {
                let advance = Command::Advance { worker, session, step };
                self.propose(Purpose::Member(worker), advance.into());
            }
            Message::SwitchMode { number, mode } => {
                self.switch_asked(group, Some(number), RequestedMode::Choice(mode.into()), None);
            }
            Message::Acquire { request, epoch, done } => {
                e.asks.ask(conn, worker, request);
                let take = Command::Acquire { worker, session, request, epoch, done };
                self.propose(Purpose::Other, take.into());
            }
            Message::Pause => {
                // The log records the training before the pause.
                let pause = Command::Pause { worker, session };
                self.propose_behind_own(worker, Purpose::Member(worker), pause);
            }
            Message::Resume { level } => {
                // The command goes behind the pushes of the others: their clocks decide where the worker resumes.
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

    /// The first of `shards` shards.
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
