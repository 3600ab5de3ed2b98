//! Streams of workers: opening, attaching, losing them.

use super::{ConnId, Event, Finished, Owner, Purpose, Reply, Stream};
use crate::shard::{begin::JOB_FORM, command::Command};
use futures::FutureExt;
use paraft_common::{SessionId, WorkerId, config::ServerJob};
use paraft_proto::{Refusal, RefusalKind};
use std::sync::atomic::Ordering::Relaxed;
use tokio::time::Instant;

impl Owner {
    pub(super) async fn event(&mut self, event: Event) {
        match event {
            Event::Open { conn, tx, worker, session, job, life } => {
                self.streams.insert(conn, Stream { tx, worker, session, life, silent: 0 });
                if self.woken_by(conn) {
                    return;
                }
                if !self.lead.as_ref().is_some_and(|l| l.ready) {
                    let refusal = match &self.lead {
                        Some(l) if !l.again => {
                            RefusalKind::Unavailable("the new leader is still catching up".into())
                        }
                        // One that begins again may have been deposed: its workers should look at the others.
                        _ => self.not_leader(),
                    };
                    self.refuse(conn, refusal.into());
                } else if self.shard.read(|m| m.job.is_empty()) {
                    let command = Command::Admit { form: JOB_FORM, job: job.clone() };
                    self.propose(Purpose::Configure { conn, job }, command.into()).await;
                } else {
                    self.open_configured(conn, &job).await;
                }
            }
            Event::Message(conn, m) => self.message(conn, m).await,
            Event::Bulk(conn, m, room) => {
                drop(room); // from here on the rule of the shard bounds it
                self.message(conn, m).await;
            }
            Event::Closed(conn) => self.closed(conn),
            Event::SwitchMode { number, mode, tx } => self.switch_asked(number, mode, Some(tx)),
            Event::Fetch { step, tx } => {
                let _ = tx.send(self.fetch_section(step)); // who asked may be gone
            }
        }
    }

    pub(super) async fn open_configured(&mut self, conn: ConnId, job: &str) {
        if let Err(kind) = self.same_job(job) {
            return self.refuse(conn, kind.into());
        }
        let (Some(stream), Some(lead)) = (self.streams.get(&conn), &mut self.lead) else { return };
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
                    // Its worker throws away what it keeps when it hears that its session is over. A leader that was
                    // deposed and does not know it must not say so of a session that began under its successor.
                    let (reign, group) = (lead.reign, self.group.clone());
                    let confirmed =
                        async move { Finished::Confirmed { reign, conn, result: group.barrier().await } };
                    self.done.push(confirmed.boxed());
                }
            }
            None if lead.by_worker.contains_key(&worker) => {
                self.refuse(conn, RefusalKind::RankTaken(worker).into());
            }
            None => {
                lead.cuts.forget(worker);
                let join = Command::JoinAs { worker, session: (self.draw_session)() };
                self.propose_behind_cut(Purpose::Join { conn }, join.into()).await;
            }
        }
    }

    /// This replica leads and has applied everything: what it knows of the session is so.
    pub(super) fn open_confirmed(&mut self, conn: ConnId) {
        let Some(Stream { worker, session: Some(session), .. }) = self.streams.get(&conn) else { return };
        self.attach(conn, *worker, *session); // or refuses
    }

    pub(super) fn same_job(&self, asked: &str) -> Result<(), RefusalKind> {
        if self.shard.read(|m| m.job == asked) {
            return Ok(());
        }
        let asked = ServerJob::decode(asked).map_err(|e| RefusalKind::BadJob(e.to_string()))?;
        // Another client may write the same values in another order.
        if self.shard.configured().is_some_and(|c| c.job == asked) {
            return Ok(());
        }
        let there = self.shard.configured().map(|c| c.job.clone());
        let running = there.as_ref().map(|j| j.name.clone()).unwrap_or_default();
        let difference = there.as_ref().and_then(|there| difference(there, &asked));
        Err(RefusalKind::OtherJob { running, asked: asked.name, difference })
    }

    pub(super) fn attach(&mut self, conn: ConnId, worker: WorkerId, session: SessionId) {
        let Some(lead) = &mut self.lead else { return };
        // With what this leader has applied and not yet replicated: it is what the next push must follow.
        let known = self.shard.view(|conf, m| {
            let m = lead.cuts.working.member(worker, m.members.in_session(worker, session)?);
            let initialised = conf.is_some_and(|c| c.is_initialised());
            Some((m.last_seq, m.clock(), initialised))
        });
        let Some((last_seq, clock, initialised)) = known else {
            return self.refuse(conn, RefusalKind::UnknownSession { worker, session }.into());
        };
        // Only now: a session that is over must not take the place of the one that is not.
        if let Some(old) = lead.by_worker.insert(worker, conn).filter(|old| *old != conn) {
            self.streams.remove(&old); // half-open; its worker has come back by another stream
            lead.pulls.remove(old);
            lead.takes.remove(&old);
        }
        lead.absent.remove(&worker);
        let (term, origin) = (lead.term, self.origin);
        let norms = self.waiting_norms();
        self.send(conn, Reply::Opened { session, last_seq, clock, initialised, term, origin });
        for (step, sum_of_squares) in norms {
            self.send(conn, Reply::RoundNorm { step, sum_of_squares });
        }
    }

    /// Where the worker has a stream whose session the log has ended meanwhile, it hears so: nothing that it waits for will
    /// come.
    pub(super) fn session_over(&mut self, worker: WorkerId) {
        let Some(conn) = self.lead.as_ref().and_then(|l| l.by_worker.get(&worker).copied()) else { return };
        let Some(session) = self.streams.get(&conn).and_then(|s| s.session) else { return };
        if self.shard.read(|m| m.members.in_session(worker, session).is_none()) {
            self.refuse(conn, RefusalKind::UnknownSession { worker, session }.into());
        }
    }

    pub(super) fn attached(&self) -> Vec<ConnId> {
        self.lead.as_ref().map(|l| l.by_worker.values().copied().collect()).unwrap_or_default()
    }

    pub(super) fn send(&mut self, conn: ConnId, reply: Reply) {
        if self.is_deposed() {
            return;
        }
        let failed = self.streams.get(&conn).is_some_and(|s| s.tx.try_send(reply).is_err());
        if failed {
            // The queue holds everything a worker may have outstanding, so a full one is a worker that does
            // not read. Dropping the sender ends its stream.
            self.closed(conn);
        }
    }

    pub(super) fn refuse(&mut self, conn: ConnId, refusal: Refusal) {
        self.counters.refused.fetch_add(1, Relaxed);
        let keeps = refusal.seq > 0;
        self.send(conn, Reply::Refused(refusal));
        if !keeps {
            self.closed(conn);
        }
    }

    pub(super) fn closed(&mut self, conn: ConnId) {
        let Some(stream) = self.streams.remove(&conn) else { return };
        let Some(lead) = &mut self.lead else { return };
        lead.pulls.remove(conn);
        lead.takes.remove(&conn);
        if lead.by_worker.get(&stream.worker) == Some(&conn) {
            lead.by_worker.remove(&stream.worker);
            let active = self.shard.read(|m| m.members.get(stream.worker).is_some_and(|m| !m.finished));
            if active {
                let until = Instant::now() + self.rest_of_lease(stream.silent);
                if let Some(lead) = &mut self.lead {
                    lead.absent.insert(stream.worker, until);
                }
            }
        }
    }

    pub(super) fn next_deadline(&self) -> Option<Instant> {
        let lead = self.lead.as_ref().filter(|l| l.ready)?;
        let look = lead.look.filter(|_| !lead.by_worker.is_empty() || !lead.absent.is_empty());
        let absent = lead.absent.values().min().copied();
        let own = [self.cut_deadline(), self.round_deadline(), self.quiet_deadline()];
        absent.into_iter().chain(look).chain(own.into_iter().flatten()).min()
    }

    pub(super) async fn absent_too_long(&mut self) {
        let Some(lead) = &mut self.lead else { return };
        let now = Instant::now();
        let gone: Vec<_> = lead.absent.iter().filter(|(_, d)| **d <= now).map(|(w, _)| *w).collect();
        for worker in gone {
            if let Some(lead) = &mut self.lead {
                lead.absent.remove(&worker);
            }
            let Some(session) =
                self.shard.read(|m| m.members.get(worker).filter(|m| !m.finished).map(|m| m.session))
            else {
                continue;
            };
            tracing::warn!(
                shard = self.shard.id().0,
                worker = worker.0,
                "a member's lease is over; the others go on"
            );
            self.take_out(worker, session, None).await;
        }
    }

    /// Ends a session, behind everything that was pushed in it; who has asked for it is told on its stream.
    pub(super) async fn take_out(&mut self, worker: WorkerId, session: SessionId, asks: Option<ConnId>) {
        let Some(lead) = &mut self.lead else { return };
        lead.leaving.insert(worker);
        lead.rounds.touch_all();
        lead.cuts.forget(worker);
        let leave = Command::Leave { worker, session };
        self.propose_behind_cut(Purpose::Leave { worker, asks }, leave.into()).await;
    }
}

/// What differs between two jobs, in the words of both: of their fingerprints the facts that do, else the first line.
fn difference(there: &ServerJob, here: &ServerJob) -> Option<String> {
    let only = |a: &ServerJob, b: &ServerJob| {
        let others: Vec<&str> = b.fingerprint.split(", ").collect();
        let facts = a.fingerprint.split(", ").filter(|f| !others.contains(f));
        let facts: Vec<String> =
            facts.take(MOST_FACTS).map(|f| f.chars().take(FACT_CHARS).collect()).collect();
        facts.join(", ")
    };
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

/// Of a fingerprint so much is shown: it is a text of a worker's choice.
const MOST_FACTS: usize = 8;
const FACT_CHARS: usize = 120;
