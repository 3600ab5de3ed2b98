//! Proposals and confirmations, and their outcomes.

use super::{Effect, GroupStatus, Leader, Purpose, Reply, Task, epoch::Phase, pulls::PullTrigger};
use crate::{
    raft::ProposeError,
    shard::{
        command::{Command, Contribution, Outcome, Proposal},
        members::Members,
        round::Sum,
    },
};
use paraft_common::{SessionId, Version, WorkerId};
use paraft_proto::RefusalKind;
use std::sync::atomic::Ordering::Relaxed;

/// Whether each push of a closed round is already applied, or of a session that is over, whose worker pushes it
/// again.
pub(super) fn changes_nothing(members: &Members, bucket: usize, sum: &Sum) -> bool {
    let member = |c: &Contribution| members.in_session(c.worker, c.session);
    sum.contributions.iter().all(|c| member(c).is_none_or(|m| m.step(bucket) >= Some(c.step)))
}

impl Leader {
    /// The number of the next proposal or confirmation, which this replica makes for `purpose`.
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

    /// Proposes a command.
    pub(super) fn propose(&mut self, purpose: Purpose, proposal: Proposal) {
        let Some(number) = self.number(purpose) else { return };
        self.counters.bytes_logged.fetch_add(proposal.payload.len() as u64, Relaxed);
        self.out.push_back(Effect::Propose(number, proposal));
    }

    /// Asks whether this replica still leads, and has applied everything.
    pub(super) fn confirm(&mut self, purpose: Purpose) {
        let Some(number) = self.number(purpose) else { return };
        self.out.push_back(Effect::Confirm(number));
    }

    /// Proposes a command behind a delta with everything that was pushed before the command.
    pub(super) fn propose_behind_cut(&mut self, purpose: Purpose, proposal: Proposal) {
        let free = self.epoch.as_mut().and_then(|e| e.deltas.behind(purpose, proposal));
        if let Some((purpose, proposal)) = free {
            self.propose(purpose, proposal);
        }
    }

    /// Proposes a command behind the worker's own pushes; it waits while one of them waits. So the log holds all
    /// pushes of a worker that it calls finished, and every leader serves final weights with all of them. Commands
    /// of a worker keep their order.
    pub(super) fn propose_behind_own(&mut self, worker: WorkerId, purpose: Purpose, command: Command) {
        let free = self.epoch.as_mut().and_then(|e| e.pending.defer_command(worker, (purpose, command)));
        if let Some((purpose, command)) = free {
            self.propose_behind_cut(purpose, command.into());
        }
    }

    /// Proposes the commands that wait for no push any more.
    pub(super) fn propose_deferred_commands(&mut self) {
        let free = self.leading().map(|e| e.pending.take_ready_commands()).unwrap_or_default();
        for (purpose, command) in free {
            self.propose_behind_cut(purpose, command.into());
        }
    }

    /// Handles an outcome. It ignores outcomes of an earlier epoch: the workers ask again.
    pub(super) fn outcome(
        &mut self,
        group: &dyn GroupStatus,
        number: u64,
        result: Result<Outcome, ProposeError>,
    ) {
        let now = self.now.at;
        let purpose = self.epoch.as_mut().and_then(|e| {
            let purpose = e.asked.remove(&number)?;
            e.heard = now;
            Some(purpose)
        });
        let Some(purpose) = purpose else { return };
        let shard = self.shard.id().0;
        match (purpose, result) {
            (Purpose::Fence | Purpose::CatchUp, Err(e)) => self.cannot_lead_yet(group, &e),
            (Purpose::Fence, Ok(_)) => {
                self.enter_phase(Phase::CatchesUp);
                self.confirm(Purpose::CatchUp);
            }
            (Purpose::CatchUp, Ok(_)) => self.ready(),
            (Purpose::Session(_), Err(e)) => {
                tracing::info!(shard, error = %e, "a session was not confirmed; the worker asks again");
                self.restart(group);
            }
            // This replica leads and has applied everything, so its record of the session is correct.
            (Purpose::Session(conn), Ok(_)) => self.open_confirmed(conn),
            // This leader's copy of the replicated state is wrong: everything derived from it must be dropped.
            (Purpose::DeltaPart | Purpose::Delta(_), Ok(Outcome::Refused(why))) => {
                tracing::error!(shard, why, "a state delta was refused");
                self.restart(group);
            }
            (_, Err(e)) => {
                // An election does this, and nothing is lost by it: workers send again what has no ack.
                tracing::info!(shard, error = %e, "a change was not committed; workers send it again");
                self.restart(group);
            }
            (purpose, Ok(outcome)) => self.applied(purpose, outcome),
        }
    }

    fn applied(&mut self, purpose: Purpose, outcome: Outcome) {
        let changed = match (&purpose, &outcome) {
            (Purpose::Update { bucket, contributions, .. }, _) => {
                Some(PullTrigger::Unit(*bucket, contributions.iter().map(|c| c.worker).collect()))
            }
            (Purpose::Init, _) => Some(PullTrigger::Initial),
            (Purpose::Member(worker) | Purpose::Leave { worker, .. }, _)
            | (Purpose::Join(_), Outcome::Joined { worker, .. }) => Some(PullTrigger::Member(*worker)),
            (Purpose::Pull(_) | Purpose::EditRows(_) | Purpose::Other, _) => None,
            _ => Some(PullTrigger::All),
        };
        if let Some(e) = &mut self.epoch {
            if e.deltas.working().has_members() {
                self.shard.read(|m| e.deltas.follow(&m.members));
            }
            match &changed {
                None | Some(PullTrigger::Initial) => {}
                Some(PullTrigger::Unit(bucket, _)) => e.rounds.touch(*bucket),
                Some(_) => e.rounds.touch_all(),
            }
        }
        if matches!(changed, Some(PullTrigger::Member(_) | PullTrigger::Unit(..))) {
            self.forget_orphans();
        }
        let mut again = Vec::new();
        match (purpose, outcome) {
            (Purpose::DeltaPart, _) => {
                if let Some(e) = &mut self.epoch {
                    e.deltas.part_applied();
                }
                return;
            }
            (Purpose::Delta(of), _) => {
                self.note_replicated(of, None, None);
                if let Some(e) = &mut self.epoch {
                    e.deltas.applied();
                }
            }
            (Purpose::Configure { conn, job }, Outcome::Done) => self.open_configured(conn, &job),
            (Purpose::Configure { conn, job }, Outcome::Refused(_)) if self.shard.configured().is_some() => {
                self.open_configured(conn, &job);
            }
            (Purpose::Configure { conn, .. }, Outcome::Refused(why)) => {
                self.refuse(conn, RefusalKind::BadJob(why));
            }
            (Purpose::Join(conn), Outcome::Joined { worker, session }) => self.joined(conn, worker, session),
            (Purpose::Update { bucket, contributions, of }, Outcome::Updated { version, applied }) => {
                let worker = Some(contributions.as_slice()).filter(|c| c.len() == 1).map(|c| c[0].worker);
                self.note_replicated(of, self.shard.configured().map(|c| c.buckets[bucket].id), worker);
                self.updated(bucket, &contributions, version, applied);
                if let Some(e) = self.epoch.as_mut().filter(|_| applied) {
                    contributions.iter().for_each(|c| e.tally.pushed(version, c.pulled));
                    if bucket == 0 {
                        let samples: u64 = contributions.iter().map(|c| u64::from(c.samples)).sum();
                        self.counters.progress.lock().samples += samples;
                    }
                }
                // Decides again on the pushes that waited for it.
                again = self.epoch.as_mut().map(|e| e.pending.updated(bucket)).unwrap_or_default();
            }
            (Purpose::Leave { worker, asks }, outcome) => {
                self.left(worker);
                self.evaluated(outcome);
                if let Some(conn) = asks {
                    self.send(conn, Reply::Left);
                    self.closes(conn);
                }
                self.session_over(worker);
            }
            (Purpose::Pull(go), Outcome::Done) => {
                if let Some(conf) = self.shard.configured() {
                    self.answer(&conf, go, true);
                }
                return;
            }
            (Purpose::SwitchMode, outcome) => self.switched(&outcome),
            (Purpose::EditRows(asker), outcome) => {
                let edited = match outcome {
                    Outcome::Edited(rows) => Ok(rows),
                    Outcome::Refused(why) => Err(RefusalKind::BadOrder(why)),
                    _ => Err(RefusalKind::Unavailable("the edit has no result; ask again".into())),
                };
                self.out.push_back(Effect::EditResult(asker, edited));
                return;
            }
            (Purpose::Resume(conn), Outcome::Resumed { clock }) => self.send(conn, Reply::Resumed { clock }),
            (_, Outcome::Refused(why)) => {
                tracing::error!(shard = self.shard.id().0, why, "apply refused a proposal")
            }
            (_, outcome) => self.evaluated(outcome),
        }
        self.next([Task::ChunkRequests]);
        self.next(changed.map(Task::Pulls));
        self.next([Task::Rounds]);
        self.next(again.into_iter().map(Task::Take));
    }

    /// Handles a worker's new session.
    fn joined(&mut self, conn: super::ConnId, worker: WorkerId, session: SessionId) {
        let now = self.now.at;
        let Some(e) = &mut self.epoch else { return };
        // The predecessor's part would make the new session's push of the same step look in flight.
        e.rounds.forget(worker);
        e.pending.forget_all(worker);
        if e.streams.set_session(conn, session) {
            return self.attach(conn, worker, session);
        }
        self.session_over(worker);
        if let Some(e) = &mut self.epoch {
            e.leases.expire(worker, now);
        }
    }

    /// Handles the end of a worker's session. If the worker came back meanwhile, the Leave changed nothing, and the
    /// pushes of its new session must stay.
    fn left(&mut self, worker: WorkerId) {
        let back = self.shard.read(|m| m.members.get(worker).is_some());
        if !back {
            self.counters.staleness.forget(worker);
        }
        let Some(e) = &mut self.epoch else { return };
        e.leases.mark_left(worker, back);
        if !back {
            e.rounds.forget(worker);
            e.pending.forget_all(worker);
        }
    }

    /// Drops sums that have no effect any more, and the pushes that wait for their norm.
    fn forget_orphans(&mut self) {
        let Some(e) = self.epoch.as_mut().filter(|e| !e.norms.is_empty()) else { return };
        let orphans =
            self.shard.read(|m| e.norms.take_orphans(|bucket, sum| changes_nothing(&m.members, bucket, sum)));
        orphans.into_iter().for_each(|(bucket, sum)| self.give_up(bucket, &sum));
    }

    /// Abandons a closed round: acknowledges the pushes that are already applied, and decides again on those that
    /// waited for it.
    pub(super) fn give_up(&mut self, bucket: usize, sum: &Sum) {
        let (Some(conf), Some(e)) = (self.shard.configured(), &mut self.epoch) else { return };
        sum.contributions.iter().for_each(|c| e.pending.given_up(bucket, c));
        self.updated(bucket, &sum.contributions, conf.buckets[bucket].version(), false);
        let again = self.epoch.as_mut().map(|e| e.pending.updated(bucket)).unwrap_or_default();
        self.next(again.into_iter().map(Task::Take));
    }

    fn updated(&mut self, bucket: usize, contributions: &[Contribution], version: Version, applied: bool) {
        if let Some((e, step)) = self.epoch.as_mut().zip(contributions.iter().map(|c| c.step).max()) {
            e.rounds.applied(bucket, step);
        }
        for c in contributions {
            let Some(e) = &mut self.epoch else { return };
            e.pending.outcome(bucket, c);
            let Some(conn) = e.streams.of_session(c.worker, c.session) else { continue };
            let (late, is_in) = match applied {
                true => (false, true),
                false => self.shard.read(|m| {
                    let member = m.members.in_session(c.worker, c.session);
                    let late = member.is_some_and(|m| m.is_dropped(bucket, c.step));
                    (late, member.is_some_and(|m| m.step(bucket) >= Some(c.step)))
                }),
            };
            if late {
                // An earlier round in flight passed it over.
                self.send(conn, Reply::Dropped { seq: c.seq });
            } else if is_in {
                self.send(conn, Reply::Ack { seq: c.seq, version });
            } else {
                let why = "the round was dropped as a duplicate of another member's push; push again";
                self.refuse(conn, RefusalKind::Unavailable(why.into()));
            }
        }
    }

    fn evaluated(&mut self, outcome: Outcome) {
        let Outcome::Evaluated(list) = outcome else { return };
        for e in list {
            self.send_to_all(|| Reply::Evaluated(e));
        }
    }

    /// To every member.
    pub(super) fn send_to_all(&mut self, reply: impl Fn() -> Reply) {
        let attached: Vec<_> = self.epoch.iter().flat_map(|e| e.streams.attached()).collect();
        attached.into_iter().for_each(|conn| self.send(conn, reply()));
    }

    fn switched(&mut self, outcome: &Outcome) {
        let in_force = self.shard.read(|m| m.in_force);
        let now = self.now.at;
        let Some(e) = self.epoch.as_mut().filter(|e| e.switching.is_under_way()) else { return };
        let askers = e.switching.over();
        let result = match outcome {
            Outcome::Refused(why) => Err(RefusalKind::Unavailable(why.clone())),
            _ => Ok(in_force),
        };
        if result.is_ok() {
            let (shard, mode, number) = (self.shard.id().0, in_force.mode, in_force.number);
            tracing::info!(shard, %mode, number, "the mode was switched");
            e.tally.begin(now);
        }
        let answers = askers.into_iter().map(|asker| Effect::SwitchResult(asker, result.clone()));
        self.out.extend(answers);
    }
}
