//! Pushes: admission, BSP's rounds, the global norm over all shards, and the deltas at the level `leader`.

use super::{
    Computed, Computing, ConnId, Leader, MAX_AHEAD, Message, ProposalSpan, Purpose, Reply, Task,
    admission::{Admission, admit},
    deltas::DeltaProposal,
    pending::Push,
    proposals::changes_nothing,
    pulls::PullTrigger,
    rounds::Key,
    working::add,
};
use crate::shard::{
    bucket::BucketData,
    command::{Command, Contribution, Proposal, PushEntry},
    delta::DeltaId,
    members::Member,
    round::{self, Part, Sum},
    state::ShardConfig,
};
use paraft_common::{
    Payload, SessionId, Step, TensorKind, WorkerId,
    codec::F32_BYTES,
    config::MAX_STEP,
    optim::{Gradient, norm_factor},
};
use paraft_proto::{Refusal, RefusalKind};
use paraft_trace::Stage;
use std::sync::{Arc, atomic::Ordering::Relaxed};

/// What a proposed update holds.
struct UpdatePlan {
    contributions: Vec<Contribution>,
    factor: f32,
    closes: bool,
    payload: Payload,
    rate: Option<f64>,
    /// No push of it is applied.
    skip: bool,
}

impl UpdatePlan {
    /// A push that is an update by itself.
    fn alone(part: Part, factor: f32) -> Self {
        let Part { contribution, payload, rate, skip } = part;
        Self { contributions: vec![contribution], factor, closes: false, payload, rate, skip }
    }

    /// A round; its mean is multiplied by `clipped`.
    fn round(sum: Sum, clipped: f32, closes: bool) -> Self {
        let Sum { contributions, payload, factor, rate, skip, .. } = sum;
        Self { contributions, factor: clipped * factor, closes, payload, rate, skip }
    }
}

impl Leader {
    /// Handles a push.
    pub(super) fn push(&mut self, conn: ConnId, worker: WorkerId, session: SessionId, message: Message) {
        let Message::Push {
            seq,
            step,
            bucket,
            pulled,
            samples,
            sum_of_squares,
            payload,
            rate,
            skip,
            arrived,
        } = message
        else {
            return;
        };
        let now = self.now.at;
        let Some(conf) = self.shard.configured() else { return };
        let averages = self.averages(&conf, step, sum_of_squares);
        let Some(e) = &mut self.epoch else { return };
        let contribution = Contribution { worker, session, seq, step, pulled, samples };
        if bucket == 0 {
            self.counters.progress.lock().pushed(worker);
        }
        let precedes_weights = !e.deltas.has_answered(worker);
        let push = Push {
            conn,
            contribution,
            unit: bucket,
            sum_of_squares,
            payload,
            rate,
            skip,
            arrived,
            precedes_weights,
        };
        // A round always has room, but the pushes of a worker keep their order.
        let has_room = averages && !e.pending.waits_for_room(worker)
            || !e.pending.any_waits_for_room() && e.deltas.has_room(&conf.job, now);
        if has_room {
            return self.take_push(push);
        }
        // A worker may resend all its kept pushes and those of its current step at once.
        let most = (MAX_AHEAD as usize + 2) * conf.buckets.len() + 1;
        if !e.pending.wait_for_room(push, most) {
            let why = "more pushes wait than the consistency rule lets a worker have outstanding";
            let kind = RefusalKind::Overloaded(why.into());
            self.refuse(conn, Refusal { kind, seq: seq.0 });
        }
    }

    /// Whether a push of a step joins a round. If the job clips by the norm of the whole gradient, a push that
    /// carries the norm is applied by itself in every mode. The same holds for all pushes of that worker and step,
    /// so a switch never splits a step.
    fn averages(&self, conf: &ShardConfig, step: Step, sum_of_squares: f64) -> bool {
        let alone = conf.job.clip.norm.is_some() && sum_of_squares > 0.0;
        !alone && self.shard.read(|m| m.in_force.of_push(step)).averages()
    }

    /// Accepts the pushes that wait for room, while there is room.
    pub(super) fn take_if_room(&mut self, any: bool) {
        let now = self.now.at;
        if !any && !self.leading().is_some_and(|e| e.pending.any_waits_for_room()) {
            return;
        }
        let conf = self.shard.configured();
        let (Some(conf), Some(e)) = (conf, self.leading()) else { return };
        let push = if e.deltas.has_room(&conf.job, now) { e.pending.next_for_room() } else { None };
        match push {
            Some(push) => self.next([Task::Take(push), Task::Room]),
            None if any => self.next([Task::Pulls(PullTrigger::All)]),
            None => {}
        }
    }

    /// Decides on one push: applies it to the working copy, proposes it, or adds it to its round.
    pub(super) fn take_push(&mut self, push: Push) {
        let now = self.now.at;
        let Some(conf) = self.shard.configured() else { return };
        let averages = self.averages(&conf, push.contribution.step, push.sum_of_squares);
        let Some(e) = &mut self.epoch else { return };
        if e.broken {
            return; // a retry
        }
        let (conn, mut c, bucket) = (push.conn, push.contribution, push.unit);
        let target = &conf.buckets[bucket];
        let in_flight = Some(c.step).filter(|step| e.pending.is_taken(c.worker, bucket, *step));
        let leader_acks = conf.job.durability.is_leader();
        let working = leader_acks.then(|| e.deltas.working().data(&conf, bucket));
        let current = working.as_ref().map_or_else(|| target.version(), |w| w.version);
        if leader_acks {
            // At this level a leader serves weights that may not be replicated yet. After a failover a worker may
            // therefore name a version that is lost: with its first push, or later if it computes at weights before
            // the latest.
            c.pulled = c.pulled.min(current);
        }
        let mut lost = 0;
        let decision = self.shard.read(|m| {
            let replicated = m.members.in_session(c.worker, c.session)?;
            let working = e.deltas.working_mut();
            if leader_acks && push.precedes_weights && (1..=MAX_STEP).contains(&c.step.0) {
                // An earlier leader acknowledged these steps and lost them. The worker no longer has them: they are
                // counted, and it continues.
                lost = working.skip(&conf, replicated, c.worker, bucket, Step(c.step.0 - 1), now);
            }
            Some(admit(working.member(c.worker, replicated), bucket, c.step, c.pulled, current, in_flight))
        });
        self.report_lost(c.worker, lost);
        let waits = match decision {
            // Its round is closed and not applied yet; the push will be too late.
            Some(Admission::Accept) => self.is_closed(&conf, bucket, c.step),
            Some(Admission::WrongStep { .. }) => !leader_acks && self.is_early(bucket, &c),
            _ => false,
        };
        let push = Push { contribution: c, ..push };
        if waits {
            if let Some(e) = &mut self.epoch {
                e.pending.wait_for_update(push);
            }
            return;
        }
        let refuse = |kind| Refusal { kind, seq: c.seq.0 };
        match decision {
            None => {
                self.refuse(conn, RefusalKind::UnknownSession { worker: c.worker, session: c.session });
            }
            Some(Admission::Applied) => self.send(conn, Reply::Ack { seq: c.seq, version: current }),
            Some(Admission::Dropped) => self.send(conn, Reply::Dropped { seq: c.seq }),
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
                if let Some(e) = &mut self.epoch {
                    let (arrived, part) = (push.arrived, push.part());
                    e.rounds.add(c.step, bucket, c.worker);
                    e.pending.wait_for_round(bucket, part, arrived);
                }
                self.next([Task::Rounds]);
            }
            Some(Admission::Accept) => {
                let factor = match (conf.job.clip.norm, target.spec.kind) {
                    (Some(max), TensorKind::Param) => norm_factor(max, push.sum_of_squares),
                    _ => 1.0,
                };
                match working.map(|w| w.initialised) {
                    None => {
                        let of = (bucket, c.step, Some(c.worker));
                        self.note(Stage::Queue, push.arrived, of, push.payload.len() as u64);
                        self.update(&conf, bucket, UpdatePlan::alone(push.part(), factor));
                    }
                    // Its image would claim that the bucket has its initial weights.
                    Some(false) => self.refuse(conn, refuse(RefusalKind::NotInitialised)),
                    Some(true) => self.push_working(&conf, push, factor),
                }
            }
        }
    }

    /// Whether a push follows another push of its worker that is admitted and not applied, or that waits here.
    /// Workers push ahead without waiting for acks.
    fn is_early(&self, bucket: usize, c: &Contribution) -> bool {
        let Some(e) = &self.epoch else { return false };
        let in_flight = e.pending.last_taken(c.worker, bucket);
        let applied =
            self.shard.read(|m| m.members.in_session(c.worker, c.session).and_then(|m| m.step(bucket)));
        // Only the pushes before it count: the first try of a retry may wait here too.
        let (waiting, last_waiting) = e.pending.early(c, bucket);
        let last = in_flight.max(applied).max(last_waiting);
        (in_flight.is_some() || waiting > 0)
            && waiting <= MAX_AHEAD
            && last.is_some_and(|last| last.next() == c.step)
    }

    /// Whether the round of this step, or of a later one, was closed without some of its pushes and is in flight.
    fn is_closed(&self, conf: &ShardConfig, bucket: usize, step: Step) -> bool {
        let drops_late = conf.job.round.drops_late();
        drops_late && self.epoch.as_ref().is_some_and(|e| e.rounds.is_closed(bucket, step))
    }

    pub(super) fn report_lost(&self, worker: WorkerId, lost: u64) {
        if lost > 0 {
            let why = "an earlier leader lost acknowledged pushes";
            tracing::warn!(shard = self.shard.id().0, worker = worker.0, pushes = lost, "{why}");
        }
    }

    fn update(&mut self, conf: &ShardConfig, bucket: usize, update: UpdatePlan) {
        let UpdatePlan { contributions, factor, closes, payload, rate, skip } = update;
        let (id, encoding) = (conf.buckets[bucket].id, conf.encoding(bucket));
        // Pushes of sessions that are over are not reported.
        let heard =
            |c: &&Contribution| self.shard.read(|m| m.members.in_session(c.worker, c.session).is_some());
        let heard: Vec<_> = contributions.iter().filter(heard).copied().collect();
        for c in &heard {
            let waited = self.epoch.as_mut().and_then(|e| e.pending.proposed(bucket, c));
            if let Some((arrived, pushed)) = waited {
                self.note(Stage::Queue, arrived, (bucket, c.step, Some(c.worker)), pushed);
            }
        }
        let entry = PushEntry { bucket: id, contributions: &contributions, encoding, factor, closes, rate };
        let command = match skip {
            true => Command::Skip { bucket: id, contributions: contributions.clone(), closes },
            false => Command::of_pushes(entry),
        };
        let step = command.latest_step().unwrap_or_default();
        let of = ProposalSpan { began: self.now.moment, step, bytes: payload.len() as u64 };
        self.propose(Purpose::Update { bucket, contributions, of }, Proposal { command, payload });
    }

    // ---- rounds ----

    /// Closes every complete round. Called after everything that may complete one: a push, an apply, a member that
    /// left.
    pub(super) fn close_rounds(&mut self) {
        let Some(e) = self.epoch.as_mut().filter(|e| !e.rounds.is_empty()) else { return };
        let Some(conf) = self.shard.configured() else { return };
        let drops_late = conf.job.round.drops_late();
        if drops_late {
            let late = self.shard.read(|m| e.rounds.take_dropped(&m.members));
            let late: Vec<_> = late
                .into_iter()
                .filter_map(|((step, bucket), w)| e.pending.leave_round(w, bucket, step))
                .map(|(part, _)| part.contribution)
                .filter_map(|c| Some((e.streams.of_session(c.worker, c.session)?, c.seq)))
                .collect();
            late.into_iter().for_each(|(conn, seq)| self.send(conn, Reply::Dropped { seq }));
        }
        // The mode was switched: each push is now an update by itself, unless a later round that passes it over is
        // in flight.
        let in_force = self.shard.read(|m| m.in_force);
        let Some(e) = &mut self.epoch else { return };
        let mut over: Vec<Key> =
            e.rounds.touched().filter(|(step, _)| !in_force.of_push(*step).averages()).collect();
        over.retain(|(step, bucket)| !(drops_late && e.rounds.is_closed(*bucket, *step)));
        for (step, bucket) in over {
            let workers = self.epoch.as_mut().map(|e| e.rounds.take((step, bucket))).unwrap_or_default();
            for worker in workers {
                let left = self.epoch.as_mut().and_then(|e| e.pending.leave_round(worker, bucket, step));
                if let Some((part, arrived)) = left {
                    let of = (bucket, step, Some(worker));
                    self.note(Stage::Queue, arrived, of, part.payload.len() as u64);
                    self.update(&conf, bucket, UpdatePlan::alone(part, 1.0));
                }
            }
        }
        let Some(e) = &mut self.epoch else { return };
        let complete = self.shard.read(|m| match m.started {
            true => e.rounds.complete(&m.members, e.leases.leaving(), &conf.job.round),
            false => Vec::new(),
        });
        self.next(complete.into_iter().map(Task::Close));
    }

    pub(super) fn close_round(&mut self, round: Key) {
        let (step, bucket) = round;
        let (Some(conf), Some(e)) = (self.shard.configured(), &mut self.epoch) else { return };
        if e.broken {
            return;
        }
        let drops_late = conf.job.round.drops_late();
        // A later round in flight drops the pushes in this one.
        if drops_late && e.rounds.is_closed(bucket, step) {
            return;
        }
        // The bucket that is pushed last.
        if bucket == 0 {
            self.counters.progress.lock().round(&e.pending.arrivals(step, bucket));
        }
        let parts = e.pending.close(step, bucket, e.rounds.close(round, drops_late));
        if parts.is_empty() {
            return;
        }
        let (encoding, len) = (conf.encoding(bucket), conf.buckets[bucket].spec.len);
        let bytes = round::bytes(parts.len(), len);
        let work = move || Computed::Sum(round::sum(parts, encoding, len));
        self.compute(bytes, Computing::Round(round), Box::new(work));
    }

    /// Handles the sum of a closed round.
    pub(super) fn summed(&mut self, (step, bucket): Key, sum: Sum) {
        let (Some(conf), Some(e)) = (self.shard.configured(), &mut self.epoch) else { return };
        if conf.job.clip.norm.is_none() || conf.buckets[bucket].spec.kind != TensorKind::Param {
            let closes = conf.job.round.drops_late();
            return self.update(&conf, bucket, UpdatePlan::round(sum, 1.0, closes));
        }
        if self.shard.read(|m| changes_nothing(&m.members, bucket, &sum)) {
            return self.give_up(bucket, &sum);
        }
        // All trained buckets of a step are summed, so this shard's part of the global norm is known. With one
        // shard it is the norm. With several, the workers add the parts and send the sum to every shard, so no
        // server needs another shard's leader.
        let is_in = |b| self.shard.read(|m| m.members.behind(b, step) == 0);
        let Some(partial) = e.norms.summed(&conf, step, bucket, sum, is_in) else { return };
        let layout = conf.job.layout();
        let trained = layout.buckets().iter().filter(|b| b.kind == TensorKind::Param).count();
        if trained.min(self.shard.shards() as usize) == 1 {
            return self.norm(step, partial);
        }
        self.send_to_all(|| Reply::RoundNorm { step, sum_of_squares: partial });
    }

    /// Handles the norm over all shards: the same factor scales every bucket of the step. Copies from other workers
    /// have no effect.
    pub(super) fn norm(&mut self, step: Step, sum_of_squares: f64) {
        let (Some(conf), Some(e)) = (self.shard.configured(), &mut self.epoch) else { return };
        let Some(max) = conf.job.clip.norm else { return };
        // Before all of the step is summed, the norm is of an incomplete sum. Its worker is asked later, and sends
        // it again.
        if !e.norms.is_known(&conf, step) {
            return;
        }
        let closes = conf.job.round.drops_late();
        for (bucket, sum) in e.norms.take(step) {
            let clipped = norm_factor(max, sum_of_squares);
            self.update(&conf, bucket, UpdatePlan::round(sum, clipped, closes));
        }
    }

    // ---- the level `leader` ----

    /// Applies an admitted push to the leader's working copy. It is acknowledged once that is done.
    fn push_working(&mut self, conf: &Arc<ShardConfig>, push: Push, scale: f32) {
        let Push { conn, contribution: c, unit: bucket, payload, rate, skip, arrived, .. } = push;
        let (encoding, bytes) = (conf.encoding(bucket), payload.len());
        self.note(Stage::Queue, arrived, (bucket, c.step, Some(c.worker)), bytes as u64);
        let Some(e) = &mut self.epoch else { return };
        // The member as it is now: a session that ends during the computation has still made the push.
        let found = self.shard.read(|m| {
            let replicated = m.members.in_session(c.worker, c.session)?;
            Some((replicated.clone(), m.members.active_count()))
        });
        let Some((replicated, active)) = found else { return };
        let working = e.deltas.working_mut();
        if skip {
            let version = working.skipped(conf, &replicated, active, bucket, &c, self.now.at);
            self.send(conn, Reply::Ack { seq: c.seq, version });
            return self.next([Task::Pulls(PullTrigger::Unit(bucket, vec![c.worker]))]);
        }
        let staleness = self.counters.staleness.clone();
        let data = working.data(conf, bucket);
        let seen = staleness.before(bucket, Some(c), data.version, &data.weights);
        drop(data); // otherwise the update would copy the bucket
        let (mut data, own) = (working.lend(conf, bucket), conf.clone());
        let touched = (conf.buckets[bucket].spec.len * F32_BYTES).max(bytes) as u64;
        let work = move || {
            let gradient = Gradient { payload: &payload, encoding, scale };
            add(&mut data, &own, bucket, active, &c, rate, gradient);
            if let Some(seen) = seen {
                staleness.after(seen, &data.weights);
            }
            Computed::Copy(data)
        };
        let began = self.now.moment;
        let of = Computing::Push { conn, bucket, contribution: c, bytes, replicated, began };
        self.compute(touched, of, Box::new(work));
    }

    /// Handles a push that the working copy now contains.
    pub(super) fn push_computed(
        &mut self,
        conn: ConnId,
        bucket: usize,
        c: &Contribution,
        bytes: usize,
        replicated: &Member,
        data: Arc<BucketData>,
    ) {
        let now = self.now.at;
        let (Some(conf), Some(e)) = (self.shard.configured(), &mut self.epoch) else { return };
        let version = e.deltas.working_mut().pushed(&conf, replicated, bucket, c, bytes, data, now);
        e.tally.pushed(version, c.pulled);
        if bucket == 0 {
            self.counters.progress.lock().samples += u64::from(c.samples);
        }
        self.send(conn, Reply::Ack { seq: c.seq, version });
    }

    pub(super) fn begin_delta_if_due(&mut self) {
        let (now, number) = (self.now, self.deltas + 1);
        if self.leading().is_none_or(|e| e.deltas.working().is_level()) {
            return;
        }
        let conf = self.shard.configured();
        let last = self.shard.read(|m| m.last_cut);
        let (Some(conf), Some(e)) = (conf, self.leading()) else { return };
        let delta = DeltaId { term: e.term, number };
        if e.deltas.begin_if_due(&conf, delta, last, now.at, now.moment) {
            self.deltas = number;
            self.counters.deltas.fetch_add(1, Relaxed);
        }
        while let Some(next) = self.leading().and_then(|e| e.deltas.propose(&conf)) {
            match next {
                DeltaProposal::Part(part) => self.propose(Purpose::DeltaPart, part),
                DeltaProposal::Marker(marker, began, behind) => {
                    let bytes = match &marker.command {
                        Command::Delta { record, .. } => record.bytes,
                        _ => 0,
                    };
                    let step = marker.command.latest_step().unwrap_or_default();
                    self.propose(Purpose::Delta(ProposalSpan { began, step, bytes }), marker);
                    behind.into_iter().for_each(|(purpose, proposal)| self.propose(purpose, proposal));
                }
            }
        }
    }
}
