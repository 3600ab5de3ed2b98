//! Replies to workers: weights, chunks, the shard's part of a checkpoint.

use super::{
    ConnId, DeferredWeights, Effect, GroupStatus, Leader, Purpose, Reply, Weights,
    answers::FetchResult,
    checkpoint::{PartRequest, lowest},
    pulls::{Pull, PullTrigger, ReleasedPull, View},
    weights::BucketWeights,
    working::PushPlace,
};
use crate::shard::{
    command::{Closed, Command},
    state::ShardConfig,
};
use bytes::Bytes;
use paraft_common::{ShardId, Step, WorkerId};
use paraft_proto::{Refusal, RefusalKind};
use std::sync::{Arc, atomic::Ordering::Relaxed};

/// Maximum of replies per stream that hold unsent weights. A worker that pushes and pulls ahead has two in flight.
const UNREAD_PULLS: usize = 3;

impl Leader {
    /// Sends a reply, unless another replica leads by now.
    pub(super) fn send(&mut self, conn: ConnId, reply: Reply) {
        if !self.is_deposed() {
            self.out.push_back(Effect::Send(conn, reply));
        }
    }

    /// Refuses a message. The stream ends, unless the refusal is of one push.
    pub(super) fn refuse(&mut self, conn: ConnId, refusal: impl Into<Refusal>) {
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

    /// Closes a stream.
    pub(super) fn closes(&mut self, conn: ConnId) {
        self.closed(conn);
        self.out.push_back(Effect::Close(conn));
    }

    /// Answers every pull that may be answered.
    pub(super) fn answer_pulls(&mut self, changed: PullTrigger) {
        let now = self.now.at;
        if self.epoch.as_ref().is_none_or(|e| e.pulls.is_empty()) {
            return;
        }
        let Some(conf) = self.shard.configured().filter(|c| c.is_initialised()) else { return };
        self.count_lost_steps(&conf);
        let Some(e) = &mut self.epoch else { return };
        let view = View {
            working: conf.job.durability.is_leader().then(|| e.deltas.working()),
            level: e.deltas.working().is_level() && !e.pending.any_waits_for_room(),
            conn_of: &|worker| e.streams.of(worker),
            waits_in_round: &|worker, step| e.pending.waits_in_round(worker, step),
            now,
        };
        let looked = self.shard.view(|now, m| {
            // The leader is deposed, or a snapshot was installed: these clocks do not belong to its buckets.
            if !now.is_some_and(|now| Arc::ptr_eq(now, &conf)) || e.term < self.shard.term() {
                return Default::default();
            }
            e.pulls.scan(changed, m, &view)
        });
        if looked.last_waits {
            e.deltas.request_delta();
        }
        self.counters.pulls_waited.fetch_add(looked.waited, Relaxed);
        let sections = looked.go.iter().filter(|g| g.pull.checkpoint);
        let pulls: Vec<_> = sections.map(|g| (g.pull.worker, g.pull.done)).collect();
        if !pulls.is_empty() {
            let due = PartRequest { pulls: &pulls, last_proposed: e.pending.last_proposed(), now };
            e.kept.keep(&self.shard, &conf, due);
        }
        for go in looked.go {
            let Some(e) = &mut self.epoch else { return };
            if go.whole && !go.pull.last {
                let lead = go.pull.done.0.saturating_sub(go.slowest.0);
                e.tally.pulled(go.held, lead, now);
                // In a round the arrival times of the pushes are more exact.
                if let Some(held) = go.held.filter(|_| !go.in_force.of_push(go.pull.done).averages()) {
                    let waited = now.saturating_duration_since(held);
                    self.counters.progress.lock().waited(go.pull.worker, waited);
                }
                self.counters.max_step_lead.fetch_max(lead, Relaxed);
            }
            match go.pull.records {
                // The log decides which weights the worker gets.
                true => e.pulls.record(go),
                false => self.answer(&conf, go, false),
            }
        }
    }

    /// Proposes the pulls that the log must hold. They are answered once they are applied.
    pub(super) fn record_pulls(&mut self) {
        let to_record = self.epoch.as_mut().map(|e| e.pulls.to_record()).unwrap_or_default();
        if to_record.is_empty() {
            return;
        }
        let Some(conf) = self.shard.configured() else { return };
        for go in to_record {
            let worker = go.pull.worker;
            let stream = self.epoch.as_ref().and_then(|e| e.streams.get(go.pull.conn));
            let Some(session) = stream.and_then(|s| s.session) else { continue };
            let mut buckets: Vec<_> = go.units.iter().map(|b| conf.buckets[*b].id).collect();
            buckets.sort_unstable();
            self.propose(Purpose::Pull(go), Command::Pull { worker, session, buckets }.into());
        }
    }

    /// At the level `leader`: a worker that comes from another leader and asks for weights after a step has pushed
    /// everything up to it. Pushes that are missing here were acknowledged there and lost. Without this count the
    /// worker would wait forever for its own writes.
    fn count_lost_steps(&mut self, conf: &ShardConfig) {
        let now = self.now.at;
        let Some(e) = self.epoch.as_mut().filter(|_| conf.job.durability.is_leader()) else { return };
        let mut found = Vec::new();
        for (p, todo) in e.pulls.waiting() {
            if e.deltas.has_answered(p.worker) || e.pending.waits_for_room(p.worker) {
                continue;
            }
            let working = e.deltas.working_mut();
            let lost = self.shard.read(|m| {
                let Some(replicated) = m.members.get(p.worker) else { return 0 };
                let mut skip =
                    |bucket| working.skip(PushPlace { conf, replicated, bucket, now }, p.worker, p.done);
                match p.part {
                    true => todo.iter().copied().map(&mut skip).sum(),
                    false => (0..conf.buckets.len()).map(&mut skip).sum(),
                }
            });
            found.push((p.worker, lost));
        }
        found.into_iter().for_each(|(worker, lost)| self.report_lost(worker, lost));
    }

    /// `recorded`: the log has decided which weights the worker gets.
    pub(super) fn answer(&mut self, conf: &Arc<ShardConfig>, go: ReleasedPull, recorded: bool) {
        let ReleasedPull { pull, units: buckets, whole, slowest, in_force, .. } = go;
        let Some(e) = &mut self.epoch else { return };
        if e.streams.get(pull.conn).is_none() {
            return;
        }
        let (unread, mark) = e.streams.unread(pull.worker);
        if unread + buckets.len() > UNREAD_PULLS * conf.buckets.len() {
            let why =
                format!("the answers of {UNREAD_PULLS} pulls are not read: read them before the next pull");
            return self.refuse(pull.conn, RefusalKind::Overloaded(why));
        }
        let checkpoint = pull.checkpoint && e.kept.is_for(&self.shard, conf, pull.worker, pull.done);
        let is_first = self.shard.id() == ShardId(0);
        let evaluates = is_first && whole && !pull.last && !pull.part;
        let before = conf.job.start.as_ref().and_then(|start| start.stopping.evaluated).map(|e| e.number);
        let (stop, clock, finishers, skipped, share, evaluated) = self.shard.read(|m| {
            let f = if pull.last { m.members.iter().map(|(w, _)| w).collect() } else { Vec::new() };
            let member = m.members.get(pull.worker);
            let ahead = member.map_or(0, |m| e.deltas.working().skips_of(pull.worker, m.session));
            let skipped = m.skipped.get(&pull.worker).copied().unwrap_or_default() + ahead;
            let clock = member.map_or(pull.done, |m| m.clock());
            let members = m.members.iter().map(|(w, _)| w);
            let share =
                evaluates.then(|| e.shares.of(pull.worker, (clock.max(pull.done), pull.barrier), members));
            // The state answers the last pull, and a proposal's outcome answers a report, possibly later: so the
            // pull itself tells the worker whether its final weights are evaluated. Evaluations before the
            // checkpoint that it resumed from do not count.
            let evaluated = m
                .evaluated
                .filter(|e| is_first && pull.last && whole && before < Some(e.epoch))
                .map(|e| Closed { evaluated: e, incomplete: false });
            (m.stop, clock, f, skipped, share, evaluated)
        });
        if let Some(stream) = e.streams.get(pull.conn) {
            e.deltas.mark_answered(stream.worker);
        }
        if let Some(evaluated) = evaluated {
            self.send(pull.conn, Reply::Evaluated(evaluated));
        }
        // Two kinds of weights cannot be taken later: those that the log assigned, and those that only this leader
        // has. In rounds a worker may push the next step before it reads these weights, and must get those of this
        // step.
        let rounds = in_force.mode.averages() || in_force.of_push(pull.done).averages();
        let now = recorded || rounds || conf.job.durability.is_leader() || !pull.rows.is_empty();
        let (count, since) = (buckets.len(), self.now.moment);
        for (i, bucket) in (1..).zip(buckets) {
            let Some((taken, later)) = self.take_weights(conf, &pull, bucket, now, recorded) else { return };
            let BucketWeights { version, not_modified, payload } = taken;
            let last = whole && i == count;
            // After a part of the weights the worker is in the middle of a step.
            let save = last && !pull.last && !pull.part && self.saves(pull.worker);
            let weights = Weights {
                bucket: conf.buckets[bucket].id,
                version,
                payload,
                not_modified,
                last,
                done: pull.done,
                slowest,
                stop,
                in_force,
                clock: clock.max(pull.done),
                finishers: if last { finishers.clone() } else { Vec::new() },
                checkpoint: checkpoint && last,
                save,
                skipped,
                share: if last { share } else { None },
                since,
                unread: now.then(|| mark.clone()),
                later,
            };
            self.send(pull.conn, Reply::Weights(Box::new(weights)));
        }
    }

    /// The weights of a bucket for a reply, taken `now`; or else how to take them once its stream has room.
    fn take_weights(
        &self,
        conf: &Arc<ShardConfig>,
        pull: &Pull,
        bucket: usize,
        now: bool,
        recorded: bool,
    ) -> Option<(BucketWeights, Option<DeferredWeights>)> {
        let e = self.epoch.as_ref()?;
        let later = DeferredWeights {
            shard: Arc::downgrade(&self.shard),
            conf: Arc::downgrade(conf),
            term: e.term,
            bucket,
            worker: pull.worker,
            have: pull.have.get(bucket).copied(),
            ahead: !pull.last && !pull.barrier,
            measured: !pull.last,
            counters: self.counters.clone(),
        };
        if !now {
            let version = conf.buckets[bucket].version();
            let none = BucketWeights { version, not_modified: false, payload: Bytes::new() };
            return Some((none, Some(later)));
        }
        if let Some(ids) = pull.rows.get(&bucket)
            && let Some((version, payload)) = conf.buckets[bucket].pull_rows(ids)
        {
            self.counters.pulled(payload.len(), false);
            return Some((BucketWeights { version, not_modified: false, payload }, None));
        }
        if let Some(memory) = conf.shared() {
            conf.buckets[bucket].share(memory);
        }
        let data = e.deltas.working().data(conf, bucket);
        let logged = data.kept.get(&pull.worker).and_then(|k| k.pulled.clone()).filter(|_| recorded);
        Some((later.take(conf, &data, logged), None))
    }

    /// Whether this worker must write a checkpoint of this moment. True once per request.
    fn saves(&self, worker: WorkerId) -> bool {
        let wanted = || self.counters.save.load(Relaxed);
        wanted() && lowest(&self.shard) == Some(worker) && self.counters.save.swap(false, Relaxed)
    }

    /// Answers every chunk request that the state has an answer for.
    pub(super) fn answer_asks(&mut self) {
        let Some(e) = self.epoch.as_mut().filter(|e| !e.asks.is_empty()) else { return };
        let answers = self.shard.read(|m| e.asks.take_answers(m));
        answers.into_iter().for_each(|(conn, reply)| self.send(conn, reply));
    }

    /// Hands out the shard's part of a checkpoint; `now`: a part of this moment.
    pub(super) fn fetch_part(&mut self, group: &dyn GroupStatus, step: Step, now: bool) -> FetchResult {
        let shard = self.shard.id();
        let none = RefusalKind::NoPart { shard, step };
        let Some(e) = &mut self.epoch else { return Err(self.not_leader(group)) };
        let part = match self.shard.configured().filter(|c| now && c.is_initialised()) {
            Some(conf) => e.kept.fetch_now(&self.shard, &conf, step, e.pending.last_proposed(), self.now.at),
            None => e.kept.fetch(step),
        };
        part.ok_or(none)
    }
}
