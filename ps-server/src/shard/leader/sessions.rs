//! Workers' streams and their sessions: open, attach, lease expiry and loss.

use super::{ConnId, Effect, GroupStatus, Leader, Liveness, Purpose, Reply};
use crate::shard::{begin::JOB_FORM, command::Command};
use paraft_common::{
    SessionId, WorkerId,
    config::{ServerJob, facts_missing},
};
use paraft_proto::RefusalKind;
use std::sync::{Arc, atomic::Ordering::Relaxed};

/// A small job may have this many more workers than it started with; a larger one, twice as many.
const MORE_WORKERS: usize = 64;

/// A request to open a stream: the worker, the session that it wants to resume, its signs of life.
type OpenRequest = (WorkerId, Option<SessionId>, Arc<Liveness>);

impl Leader {
    pub(super) fn open(&mut self, group: &dyn GroupStatus, conn: ConnId, who: OpenRequest, job: String) {
        let (worker, session, liveness) = who;
        if let Some(e) = &mut self.epoch {
            e.streams.open(conn, worker, session);
            e.leases.opened(conn, liveness);
            e.quiet = None;
        }
        if self.woken_by(group, conn) {
            return;
        }
        if self.leading().is_none() {
            let refusal = match &self.epoch {
                Some(e) if !e.again => RefusalKind::Unavailable("the new leader is still catching up".into()),
                // A leader that restarts its epoch may have been deposed: its workers should ask the other
                // replicas.
                _ => self.not_leader(group),
            };
            self.refuse(conn, refusal);
        } else if self.shard.read(|m| m.job.is_empty()) {
            let command = Command::Admit { form: JOB_FORM, job: job.clone() };
            self.propose(Purpose::Configure { conn, job }, command.into());
        } else {
            self.open_configured(conn, &job);
        }
    }

    /// Handles a stream that opens, or sends something, while the group sleeps. A leader may have been deposed
    /// meanwhile: it restarts its epoch, and the worker opens the stream again. Otherwise the leader is notified,
    /// wherever it is.
    pub(super) fn woken_by(&mut self, group: &dyn GroupStatus, conn: ConnId) -> bool {
        // Also if another replica has woken the group meanwhile.
        let slept = group.has_slept();
        if group.is_asleep() || self.falls_asleep {
            self.under_way += 1;
            self.out.push_back(Effect::Wake);
        }
        if !slept {
            return false;
        }
        let Some(e) = self.leading() else { return false };
        e.broken = true;
        self.refuse(conn, RefusalKind::Unavailable("this shard's leader was asleep".into()));
        true
    }

    pub(super) fn open_configured(&mut self, conn: ConnId, job: &str) {
        if let Err(kind) = self.same_job(job) {
            return self.refuse(conn, kind);
        }
        let full = self.is_full();
        let Some(e) = &mut self.epoch else { return };
        let Some(stream) = e.streams.get(conn) else { return };
        let (worker, session) = (stream.worker, stream.session);
        if e.leases.leaving().contains(&worker) {
            let why = format!("{worker} is being taken out; open a new session");
            return self.refuse(conn, RefusalKind::Unavailable(why));
        }
        match session {
            Some(session) => {
                if self.shard.read(|m| m.members.in_session(worker, session).is_some()) {
                    self.attach(conn, worker, session);
                } else {
                    // A worker discards its kept pushes when it learns that its session is over. A deposed leader
                    // must not say that of a session that started under its successor.
                    self.confirm(Purpose::Session(conn));
                }
            }
            None if e.streams.of(worker).is_some() => self.refuse(conn, RefusalKind::RankTaken(worker)),
            None if full => {
                let why = format!(
                    "as many workers train as this job may have at a time, and {worker} would be one more"
                );
                self.refuse(conn, RefusalKind::Overloaded(why));
            }
            None => {
                e.pending.forget_room(worker);
                let join = Command::Join { worker, session: (self.draw_session)() };
                self.propose_behind_cut(Purpose::Join(conn), join.into());
            }
        }
    }

    /// Whether the job has its maximum of workers. Weights that a worker pulls and does not read stay in memory for
    /// a while, so the number of workers is bounded, with room for workers that replace others.
    fn is_full(&self) -> bool {
        let expected = self.shard.configured().map_or(1, |conf| conf.job.workers as usize);
        let most = (2 * expected).max(expected + MORE_WORKERS);
        let open = self.epoch.as_ref().map_or(0, |e| e.streams.len());
        // The stream of the requester is already open.
        open > most || self.shard.read(|m| m.members.unfinished().count()) >= most
    }

    /// Handles a confirmation: this replica's record of the session is correct.
    pub(super) fn open_confirmed(&mut self, conn: ConnId) {
        let stream = self.epoch.as_ref().and_then(|e| e.streams.get(conn));
        if let Some((stream, session)) = stream.and_then(|s| Some((s, s.session?))) {
            self.attach(conn, stream.worker, session); // or refuses
        }
    }

    fn same_job(&self, asked: &str) -> Result<(), RefusalKind> {
        if self.shard.read(|m| m.job == asked) {
            return Ok(());
        }
        let asked = ServerJob::decode(asked).map_err(|e| RefusalKind::BadJob(e.to_string()))?;
        // Another client may write the same values in another order.
        if self.shard.configured().is_some_and(|c| c.job.is_same(&asked)) {
            return Ok(());
        }
        let there = self.shard.configured().map(|c| c.job.clone());
        let running = there.as_ref().map(|j| j.name.clone()).unwrap_or_default();
        let difference = there.as_ref().and_then(|there| difference(there, &asked));
        Err(RefusalKind::OtherJob { running, asked: asked.name, difference })
    }

    pub(super) fn attach(&mut self, conn: ConnId, worker: WorkerId, session: SessionId) {
        let Some(e) = &mut self.epoch else { return };
        // With the pushes that this leader has applied and not yet replicated: the next push must follow them.
        let known = self.shard.view(|conf, m| {
            let m = e.deltas.working().member(worker, m.members.in_session(worker, session)?);
            let initialised = conf.is_some_and(|c| c.is_initialised());
            Some((m.last_seq, m.clock(), initialised))
        });
        let Some((last_seq, clock, initialised)) = known else {
            return self.refuse(conn, RefusalKind::UnknownSession { worker, session });
        };
        // Attached last: a session that is over must not replace one that is not.
        if let Some(old) = e.streams.attach(worker, conn) {
            e.leases.closed(old);
            e.pulls.closed(old);
            e.asks.closed(old);
            self.out.push_back(Effect::Close(old));
        }
        e.leases.mark_present(worker);
        let (term, founding) = (e.term, self.founding);
        let norms = self.shard.configured().map(|conf| e.norms.known(&conf)).unwrap_or_default();
        self.send(conn, Reply::Opened { session, last_seq, clock, initialised, term, founding });
        for (step, sum_of_squares) in norms {
            self.send(conn, Reply::RoundNorm { step, sum_of_squares });
        }
    }

    /// Refuses a worker's stream whose session the log has ended meanwhile: nothing that it waits for will arrive.
    pub(super) fn session_over(&mut self, worker: WorkerId) {
        let Some(e) = &self.epoch else { return };
        let Some(conn) = e.streams.of(worker) else { return };
        let Some(session) = e.streams.get(conn).and_then(|s| s.session) else { return };
        if self.shard.read(|m| m.members.in_session(worker, session).is_none()) {
            self.refuse(conn, RefusalKind::UnknownSession { worker, session });
        }
    }

    /// Handles a closed stream.
    pub(super) fn closed(&mut self, conn: ConnId) {
        let (conf, now) = (self.shard.configured(), self.now.at);
        let Some(e) = &mut self.epoch else { return };
        let Some((stream, own)) = e.streams.close(conn) else { return };
        let silence = e.leases.closed(conn);
        e.pulls.closed(conn);
        e.asks.closed(conn);
        let waited_for = |worker| self.shard.read(|m| m.members.get(worker).is_some_and(|m| !m.finished));
        if let Some(silence) = silence.filter(|_| own && waited_for(stream.worker)) {
            e.leases.mark_absent(stream.worker, silence, conf.as_ref().map(|c| &c.job), now);
        }
    }

    /// Checks the leases, if it is time, and closes the streams of members whose lease is over.
    /// [`Self::absent_too_long`] removes those members.
    pub(super) fn check_leases(&mut self) {
        let now = self.now.at;
        let (Some(conf), Some(e)) = (self.shard.configured(), &mut self.epoch) else { return };
        let lease = conf.job.lease();
        let members: Vec<_> = self
            .shard
            .read(|m| m.members.unfinished().filter_map(|(w, _)| Some((w, e.streams.of(w)?))).collect());
        let Some(looked) = e.leases.check(lease, members, now) else { return };
        *self.counters.leases.lock() = looked.left;
        self.counters.queued.store(e.pending.bytes(), Relaxed);
        for (worker, conn) in looked.over {
            tracing::warn!(
                shard = self.shard.id().0,
                worker = worker.0,
                ?lease,
                "a member was silent for its lease; its stream is closed"
            );
            self.closes(conn);
            if let Some(e) = &mut self.epoch {
                e.leases.expire(worker, now);
            }
        }
    }

    pub(super) fn absent_too_long(&mut self) {
        let now = self.now.at;
        let gone = self.epoch.as_mut().map(|e| e.leases.take_expired(now)).unwrap_or_default();
        for worker in gone {
            let session =
                self.shard.read(|m| m.members.get(worker).filter(|m| !m.finished).map(|m| m.session));
            let Some(session) = session else { continue };
            tracing::warn!(
                shard = self.shard.id().0,
                worker = worker.0,
                "a member's lease is over; the other members continue"
            );
            self.take_out(worker, session, None);
        }
    }

    /// Ends a session, behind everything that was pushed in it. A worker that asked for it gets the answer on its
    /// stream.
    pub(super) fn take_out(&mut self, worker: WorkerId, session: SessionId, asks: Option<ConnId>) {
        let Some(e) = &mut self.epoch else { return };
        e.leases.mark_leaving(worker);
        e.rounds.touch_all();
        e.pending.forget_room(worker);
        let leave = Command::Leave { worker, session };
        self.propose_behind_cut(Purpose::Leave { worker, asks }, leave.into());
    }
}

/// What differs between two jobs, as text: the fingerprint fields that differ, else the first line.
fn difference(there: &ServerJob, here: &ServerJob) -> Option<String> {
    let only = |a: &ServerJob, b: &ServerJob| facts_missing(&a.fingerprint, &b.fingerprint);
    let texts = || Some((there.to_toml().ok()?, here.to_toml().ok()?));
    let line =
        |text: &str, other: &str| text.lines().find(|l| !other.lines().any(|o| o == *l)).map(str::to_string);
    let (a, b) = if there.fingerprint == here.fingerprint {
        let (there, here) = texts()?;
        (line(&there, &here).unwrap_or_default(), line(&here, &there).unwrap_or_default())
    } else {
        (only(there, here), only(here, there))
    };
    let said = |text: String| if text.is_empty() { "nothing".to_string() } else { format!("`{text}`") };
    Some(format!("there {}, here {}", said(a), said(b)))
}
