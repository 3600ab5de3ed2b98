//! Pushes: admission, BSP's rounds, and the global norm over all shards.

use super::{
    ConnId, Lead, Message, Owner, Proposed, Purpose, Reply,
    cuts::Queued,
    pulls::{Pull, Touched, WaitingPull},
};
use crate::compute;
use crate::shard::{
    admission::{Admission, admit},
    command::{Command, Contribution, Proposal},
    round::{Part, Sum},
    state::Configured,
    working::add,
};
use paraft_common::{
    Encoding, Payload, Step, TensorKind, WorkerId,
    codec::F32_BYTES,
    config::MAX_STEP,
    optim::{Gradient, norm_factor},
};
use paraft_proto::{Refusal, RefusalKind};
use paraft_trace::{Moment, Stage};
use std::{
    collections::BTreeMap,
    sync::{Arc, atomic::Ordering::Relaxed},
};
use tokio::time::Instant;

/// Steps that a worker may push without waiting for their acks; its stream has room for as many.
pub const MAX_AHEAD: u64 = 4;

impl Owner {
    pub(super) async fn message(&mut self, conn: ConnId, message: Message) {
        let Some(stream) = self.streams.get(&conn) else { return };
        let (worker, Some(session)) = (stream.worker, stream.session) else {
            return self.refuse(conn, RefusalKind::NotOpened.into());
        };
        if self.lead.as_ref().is_none_or(|l| l.by_worker.get(&worker) != Some(&conn)) {
            return self.refuse(conn, RefusalKind::NotOpened.into());
        }
        match message {
            Message::Init { bucket, part, payload } => {
                let command = Command::Init { bucket, part };
                self.propose(Purpose::Init, Proposal { command, payload }).await;
            }
            Message::Push { seq, step, bucket, pulled, samples, sum_of_squares, payload, arrived } => {
                let contribution = Contribution { worker, session, seq, step, pulled, samples };
                let from_elsewhere = self.lead.as_ref().is_none_or(|l| !l.cuts.answered.contains(&worker));
                let push =
                    Queued { conn, contribution, bucket, sum_of_squares, payload, arrived, from_elsewhere };
                self.push(push).await;
            }
            Message::Pull { done, last, section, have, loss, only } => {
                self.counters.pulls.fetch_add(1, Relaxed);
                let conf = self.shard.configured();
                let buckets = conf.as_ref().map_or(0, |c| c.buckets.len());
                let records = !last && conf.is_some_and(|c| c.job.keeps().pulled);
                if let Some(lead) = &mut self.lead {
                    lead.steering.hear_loss(loss);
                    let part = !only.is_empty();
                    let todo = if part { only.into_iter().collect() } else { (0..buckets).collect() };
                    let pull = Arc::new(Pull { conn, worker, done, last, section, records, have, part });
                    lead.pulls.insert(WaitingPull { pull, todo, held: None });
                }
                self.answer_pulls(Touched::Pull(conn));
            }
            Message::Norm { step, sum_of_squares } => self.norm(step, sum_of_squares).await,
            Message::Report { epoch, sums } => {
                let command = Command::Report { worker, session, epoch, sums };
                self.propose(Purpose::Other, command.into()).await;
            }
            Message::Advance { step } => {
                self.propose(Purpose::Other, Command::Advance { worker, session, step }.into()).await;
            }
            Message::SwitchMode { number, mode } => self.switch_asked(Some(number), mode.into(), None),
            Message::Take { .. } | Message::Rest | Message::Resume { .. } => {
                self.leased(conn, worker, session, message).await;
            }
            Message::Finish => {
                let finish = Command::Finish { worker, session };
                self.propose_behind_own(worker, Purpose::Other, finish).await;
            }
            Message::Leave => self.take_out(worker, session, Some(conn)).await,
        }
    }

    /// Proposes what a worker says behind its pushes. As long as one of them waits, for room, for an earlier one or for
    /// the others of its round, this waits too: a worker that the log calls finished has all its pushes there, and who asks
    /// for the final weights, of whichever leader, gets them. What a worker says keeps its order.
    pub(super) async fn propose_behind_own(&mut self, worker: WorkerId, purpose: Purpose, command: Command) {
        let Some(lead) = &mut self.lead else { return };
        if holds_pushes(lead, worker) || lead.behind_own.iter().any(|(w, ..)| *w == worker) {
            lead.behind_own.push((worker, purpose, command));
        } else {
            self.propose_behind_cut(purpose, command.into()).await;
        }
    }

    pub(super) async fn propose_what_waited(&mut self) {
        let Some(lead) = self.lead.as_mut().filter(|l| !l.behind_own.is_empty()) else { return };
        for (worker, purpose, command) in std::mem::take(&mut lead.behind_own) {
            self.propose_behind_own(worker, purpose, command).await;
        }
    }

    pub(super) async fn push(&mut self, push: Queued) {
        let Some(conf) = self.shard.configured() else { return };
        let (conn, seq) = (push.conn, push.contribution.seq);
        // A round has room, but a worker's pushes keep their order.
        let waits = self.lead.as_ref().is_some_and(|l| l.cuts.has_queued(push.contribution.worker));
        let averages = self.shard.read(|m| m.in_force.of_push(push.contribution.step)).averages();
        if averages && !waits || self.takes_pushes(&conf) {
            self.take_push(&conf, push).await;
        } else if !self.queue(&conf, push) {
            let why = "more pushes wait than the consistency rule lets a worker have outstanding";
            let kind = RefusalKind::Overloaded(why.into());
            self.refuse(conn, Refusal { kind, seq: seq.0 });
        }
    }

    /// Decides over one push and applies it to the working copy, proposes it, or adds it to its round.
    pub(super) async fn take_push(&mut self, conf: &Arc<Configured>, push: Queued) {
        let Queued { conn, contribution: mut c, bucket, sum_of_squares, payload, arrived, from_elsewhere } =
            push;
        let Some(lead) = &mut self.lead else { return };
        let target = &conf.buckets[bucket];
        // The latest: of one that the shard shows already the outcome may not be heard yet.
        let in_flight = lead.in_flight.get(&(c.worker, bucket)).copied();
        let in_flight = in_flight.max(lead.rounds.waiting(c.worker, bucket));
        let in_flight = in_flight.max(unclipped_step(lead, c.worker, bucket));
        let leader_acks = conf.job.durability.is_leader();
        let working = leader_acks.then(|| lead.cuts.working.data(conf, bucket));
        let current = working.as_ref().map_or_else(|| target.version(), |w| w.version);
        let averages = self.shard.read(|m| m.in_force.of_push(c.step)).averages();
        if leader_acks && from_elsewhere {
            // What a leader shows at this level may not be replicated yet, so after a change of leadership a worker may
            // come with a version of a state that is gone.
            c.pulled = c.pulled.min(current);
        }
        let mut lost = 0;
        let decision = self.shard.read(|m| {
            let replicated = m.members.in_session(c.worker, c.session)?;
            if leader_acks && from_elsewhere && (1..=MAX_STEP).contains(&c.step.0) {
                // Steps that an earlier leader acknowledged and took down with it. The worker does not have them any
                // more; they are counted, and it goes on.
                let upto = Step(c.step.0 - 1);
                let now = Instant::now();
                lost = lead.cuts.working.skip(conf, replicated, c.worker, bucket, upto, now);
            }
            let member = lead.cuts.working.member(c.worker, replicated);
            Some(admit(member, bucket, c.step, c.pulled, current, in_flight))
        });
        self.report_lost(c.worker, lost);
        let waits = match decision {
            // Its round is closed, and not applied yet: then it will be too late.
            Some(Admission::Accept) => self.is_closed(bucket, c.step),
            Some(Admission::WrongStep { .. }) => !leader_acks && self.is_early(bucket, &c, in_flight),
            _ => false,
        };
        if waits {
            return self.wait_early(Queued {
                conn,
                contribution: c,
                bucket,
                sum_of_squares,
                payload,
                arrived,
                from_elsewhere,
            });
        }
        let refuse = |kind| Refusal { kind, seq: c.seq.0 };
        match decision {
            None => {
                let kind = RefusalKind::UnknownSession { worker: c.worker, session: c.session };
                self.refuse(conn, kind.into());
            }
            Some(Admission::Applied) => self.send(conn, Reply::Ack { seq: c.seq, version: current }),
            Some(Admission::PassedOver) => self.send(conn, Reply::PassedOver { seq: c.seq }),
            Some(Admission::InFlight) => {}
            Some(Admission::WrongStep { expected }) => {
                let kind = RefusalKind::WrongStep { bucket: target.id, expected, got: c.step };
                self.refuse(conn, refuse(kind));
            }
            Some(Admission::FutureVersion { current }) => {
                let (got, current) = (c.pulled.0, current.0);
                self.refuse(conn, refuse(RefusalKind::FutureVersion { bucket: target.id, got, current }));
            }
            Some(Admission::Accept) if averages => {
                if let Some(lead) = &mut self.lead {
                    lead.arrived.insert((c.worker, bucket), (arrived, payload.len() as u64));
                    lead.rounds.add(bucket, Part { contribution: c, payload });
                }
                self.close_rounds().await;
            }
            Some(Admission::Accept) => {
                let factor = match (conf.job.clip.norm, target.spec.kind) {
                    (Some(max), TensorKind::Param) => norm_factor(max, sum_of_squares),
                    _ => 1.0,
                };
                if let Some(lead) = self.lead.as_mut().filter(|_| working.is_none()) {
                    lead.arrived.insert((c.worker, bucket), (arrived, payload.len() as u64));
                }
                let encoding = conf.encoding(bucket);
                match working {
                    None => self.update(conf, bucket, vec![c], factor, false, payload).await,
                    // Its image would say that the bucket has its initial weights.
                    Some(w) if !w.initialised => self.refuse(conn, refuse(RefusalKind::NotInitialised)),
                    Some(w) => {
                        drop(w); // or the update would copy the bucket
                        let (of, bytes) = ((target.id, c.step, Some(c.worker)), payload.len() as u64);
                        let began = Moment::now();
                        self.counters.note(self.shard.id(), Stage::Queue, (arrived, began), of, bytes);
                        self.push_working(conf, conn, bucket, c, (payload, encoding, factor)).await;
                        self.counters.note(self.shard.id(), Stage::Apply, (began, Moment::now()), of, bytes);
                        self.answer_pulls(Touched::Bucket(bucket, vec![c.worker]));
                    }
                }
            }
        }
    }

    /// Whether a push follows another of its worker that is taken and not applied yet (`in_flight`), or waits here too: its
    /// worker does not wait for acks.
    fn is_early(&self, bucket: usize, c: &Contribution, in_flight: Option<Step>) -> bool {
        let Some(lead) = &self.lead else { return false };
        let applied =
            self.shard.read(|m| m.members.in_session(c.worker, c.session).and_then(|m| m.step(bucket)));
        // Those before it: of a retry, its first try may wait here too.
        let early = lead.early.get(&bucket).into_iter();
        let early = early
            .flat_map(|e| e.range((c.worker, Step(0))..(c.worker, c.step)))
            .map(|(_, q)| &q.contribution);
        let own = early.filter(|e| e.session == c.session);
        let (waiting, last_waiting) = (own.clone().count() as u64, own.map(|e| e.step).max());
        let last = in_flight.max(applied).max(last_waiting);
        (in_flight.is_some() || waiting > 0)
            && waiting <= MAX_AHEAD
            && last.is_some_and(|last| last.next() == c.step)
    }

    /// Lets a push wait until the next update of its bucket is applied, behind those of its worker that wait.
    fn wait_early(&mut self, push: Queued) {
        let Some(lead) = &mut self.lead else { return };
        let of = (push.contribution.worker, push.contribution.step);
        lead.early.entry(push.bucket).or_default().insert(of, push);
    }

    /// Whether the round of this step, or of a later one, was closed without some of its pushes and is on its way.
    fn is_closed(&self, bucket: usize, step: Step) -> bool {
        let passes_over = self.shard.configured().is_some_and(|c| c.job.round.passes_over());
        let Some(lead) = self.lead.as_ref().filter(|_| passes_over) else { return false };
        let proposed = || lead.closing.range((bucket, step)..=(bucket, Step(u64::MAX))).next().is_some();
        proposed() || lead.unclipped.range(step..).any(|(_, sums)| sums.contains_key(&bucket))
    }

    /// An update of the bucket is applied: decides again over the pushes that waited for it.
    pub(super) async fn take_early(&mut self, bucket: usize) {
        let waiting = self.lead.as_mut().and_then(|l| l.early.remove(&bucket)).unwrap_or_default();
        for push in waiting.into_values() {
            let Some(conf) = self.shard.configured() else { return };
            self.take_push(&conf, push).await;
        }
    }

    /// What this leader computed with is gone: it begins again, as where a proposal is lost.
    fn broken(&mut self, e: &compute::Panicked) {
        tracing::error!(shard = self.shard.id().0, error = %e, "this leader cannot go on with what it has");
        if let Some(lead) = &mut self.lead {
            lead.broken = true;
        }
    }

    /// Applies an admitted push to the leader's working copy, and acknowledges it (level `leader`).
    async fn push_working(
        &mut self,
        conf: &Arc<Configured>,
        conn: ConnId,
        bucket: usize,
        c: Contribution,
        (payload, encoding, scale): (Payload, Encoding, f32),
    ) {
        let Some(lead) = &mut self.lead else { return };
        let working = &mut lead.cuts.working;
        let lateness = self.counters.lateness.clone();
        // As it is now: a session that ends while the push is computed has pushed it all the same.
        let found = self.shard.read(|m| {
            let replicated = m.members.in_session(c.worker, c.session)?;
            Some((replicated.clone(), m.members.active_count()))
        });
        let Some((replicated, active)) = found else { return };
        let data = working.data(conf, bucket);
        let seen = lateness.before(bucket, Some(c), data.version, &data.weights);
        drop(data); // or the update would copy the bucket
        let (mut data, bytes, own) = (working.lend(conf, bucket), payload.len(), conf.clone());
        let touched = (conf.buckets[bucket].spec.len * F32_BYTES).max(bytes) as u64;
        let computed = compute::run(touched, move || {
            add(&mut data, &own, bucket, active, &c, Gradient { payload: &payload, encoding, scale });
            if let Some(seen) = seen {
                lateness.after(seen, &data.weights);
            }
            data
        });
        let data = match computed.await {
            Ok(data) => data,
            Err(e) => return self.broken(&e),
        };
        let Some(lead) = &mut self.lead else { return };
        let working = &mut lead.cuts.working;
        let version = working.pushed(conf, &replicated, bucket, &c, bytes, data, Instant::now());
        lead.steering.pushed(version, c.pulled);
        self.send(conn, Reply::Ack { seq: c.seq, version });
    }

    pub(super) fn report_lost(&self, worker: WorkerId, lost: u64) {
        if lost > 0 {
            let why = "acknowledged pushes went down with an earlier leader";
            tracing::warn!(shard = self.shard.id().0, worker = worker.0, pushes = lost, "{why}");
        }
    }

    pub(super) async fn update(
        &mut self,
        conf: &Configured,
        bucket: usize,
        contributions: Vec<Contribution>,
        factor: f32,
        closes: bool,
        payload: Payload,
    ) {
        let (id, encoding) = (conf.buckets[bucket].id, conf.encoding(bucket));
        let began = Moment::now();
        if let Some(lead) = &mut self.lead {
            if let Some(step) = contributions.iter().map(|c| c.step).max().filter(|_| closes) {
                lead.closing.insert((bucket, step));
            }
            for c in &contributions {
                lead.in_flight.insert((c.worker, bucket), c.step);
                if let Some((arrived, pushed)) = lead.arrived.remove(&(c.worker, bucket)) {
                    let of = (id, c.step, Some(c.worker));
                    self.counters.note(self.shard.id(), Stage::Queue, (arrived, began), of, pushed);
                }
            }
        }
        let command =
            Command::Update { bucket: id, contributions: contributions.clone(), encoding, factor, closes };
        let step = command.latest_step().unwrap_or_default();
        let of = Proposed { began, step, bytes: payload.len() as u64 };
        self.propose(Purpose::Update { bucket, contributions, of }, Proposal { command, payload }).await;
    }

    /// Closes every round that is complete. Called after anything that may complete one: a push, an apply, a
    /// member that left.
    pub(super) async fn close_rounds(&mut self) {
        let (Some(conf), Some(lead)) = (self.shard.configured(), &mut self.lead) else { return };
        if lead.rounds.is_empty() {
            return;
        }
        let passes_over = conf.job.round.passes_over();
        if passes_over {
            let late = self.lead.as_mut().map(|l| self.shard.read(|m| l.rounds.take_passed_over(&m.members)));
            for c in late.unwrap_or_default() {
                if let Some(conn) = self.conn_of(c.worker, c.session) {
                    self.send(conn, Reply::PassedOver { seq: c.seq });
                }
            }
        }
        // The mode has been switched: each is an update of its own now, unless a later round is on its way that passes it over.
        let in_force = self.shard.read(|m| m.in_force);
        let touched = self.lead.as_ref().map(|l| l.rounds.touched()).unwrap_or_default();
        let over = |(step, bucket): &(Step, usize)| {
            !(in_force.of_push(*step).averages() || self.is_closed(*bucket, *step))
        };
        let over: Vec<_> = touched.into_iter().filter(over).collect();
        let parts = self.lead.as_mut().map(|l| l.rounds.take(over)).unwrap_or_default();
        for (bucket, Part { contribution, payload }) in parts {
            self.update(&conf, bucket, vec![contribution], 1.0, false, payload).await;
        }
        let Some(lead) = &mut self.lead else { return };
        let complete = self.shard.read(|m| {
            if !m.started {
                return Vec::new();
            }
            lead.rounds.complete(&m.members, &lead.leaving, &conf.job.round, Instant::now())
        });
        for (step, bucket) in complete {
            let passed_over = passes_over && self.is_closed(bucket, step);
            let Some(lead) = &mut self.lead else { return };
            // A later round that is on its way passes over those who are in this one.
            if passed_over {
                lead.rounds.waits_again((step, bucket));
                continue;
            }
            let Some(round) = lead.rounds.close((step, bucket)) else { continue };
            let (encoding, len, of) = (conf.encoding(bucket), conf.buckets[bucket].spec.len, conf.clone());
            let computed = compute::run(round.bytes(len), move || round.sum(&of.job, encoding, len)).await;
            let sum = match computed {
                Ok(sum) => sum,
                Err(e) => return self.broken(&e),
            };
            let Some(lead) = &mut self.lead else { return };
            if conf.job.clip.norm.is_some() && conf.buckets[bucket].spec.kind == TensorKind::Param {
                lead.unclipped.entry(step).or_default().insert(bucket, sum);
                self.norm_of_step(&conf, step).await;
            } else {
                self.update(&conf, bucket, sum.contributions, sum.factor, passes_over, sum.payload).await;
            }
        }
    }

    /// When a round has waited long enough for those that are missing.
    pub(super) fn round_deadline(&self) -> Option<Instant> {
        let conf = self.shard.configured()?;
        self.lead.as_ref().filter(|l| l.ready)?.rounds.due(&conf.job.round)
    }

    /// All trained buckets of a step are summed: the shard's part of the global norm is known. With one shard
    /// that is the norm; with several, the workers add the parts up and send the sum to every shard, so that
    /// no server has to know another shard's leader.
    pub(super) async fn norm_of_step(&mut self, conf: &Configured, step: Step) {
        let Some(partial) = self.partial_norm(conf, step) else { return };
        let layout = conf.job.layout();
        let trained = layout.buckets().iter().filter(|b| b.kind == TensorKind::Param).count();
        if trained.min(self.shard.shards() as usize) == 1 {
            return self.norm(step, partial).await;
        }
        for conn in self.attached() {
            self.send(conn, Reply::RoundNorm { step, sum_of_squares: partial });
        }
    }

    pub(super) fn partial_norm(&self, conf: &Configured, step: Step) -> Option<f64> {
        let sums = self.lead.as_ref()?.unclipped.get(&step)?;
        let trained = conf.buckets.iter().filter(|b| b.spec.kind == TensorKind::Param).count();
        (sums.len() == trained).then(|| sums.values().map(|s| s.mean_sum_of_squares).sum())
    }

    pub(super) fn waiting_norms(&self) -> Vec<(Step, f64)> {
        let (Some(conf), Some(lead)) = (self.shard.configured(), &self.lead) else { return Vec::new() };
        lead.unclipped.keys().filter_map(|s| Some((*s, self.partial_norm(&conf, *s)?))).collect()
    }

    /// The norm over all shards is known: every bucket of the step is applied with the same factor. Later
    /// copies, from the other workers, find nothing to do.
    pub(super) async fn norm(&mut self, step: Step, sum_of_squares: f64) {
        let (Some(conf), Some(lead)) = (self.shard.configured(), &mut self.lead) else { return };
        let Some(max) = conf.job.clip.norm else { return };
        for (bucket, sum) in lead.unclipped.remove(&step).unwrap_or_default() {
            let factor = norm_factor(max, sum_of_squares) * sum.factor;
            let passes_over = conf.job.round.passes_over();
            self.update(&conf, bucket, sum.contributions, factor, passes_over, sum.payload).await;
        }
    }
}

/// Whether a push of `worker` was taken and not proposed.
fn holds_pushes(lead: &Lead, worker: WorkerId) -> bool {
    let unclipped = |sum: &Sum| sum.contributions.iter().any(|c| c.worker == worker);
    lead.cuts.has_queued(worker)
        || lead.early.values().any(|pushes| pushes.keys().any(|(w, _)| *w == worker))
        || lead.rounds.holds_any(worker)
        || lead.unclipped.values().flat_map(BTreeMap::values).any(unclipped)
}

fn unclipped_step(lead: &Lead, worker: WorkerId, bucket: usize) -> Option<Step> {
    let holds = |sums: &BTreeMap<usize, Sum>| {
        sums.get(&bucket).is_some_and(|s| s.contributions.iter().any(|c| c.worker == worker))
    };
    lead.unclipped.iter().find(|(_, sums)| holds(sums)).map(|(step, _)| *step)
}
