//! A worker's pushes: whether each is accepted, and what it waits for.

use super::{
    ConnId, Leader, MAX_AHEAD, Message, Reply, Task,
    admission::{Admission, admit},
    pulls::PullTrigger,
    push::Push,
    update::UpdatePlan,
    working::PushPlace,
};
use crate::shard::{
    command::Contribution,
    state::{Meta, ShardConfig},
};
use paraft_common::{SessionId, Step, TensorKind, WorkerId, config::MAX_STEP, optim::norm_factor};
use paraft_proto::{Refusal, RefusalKind};
use paraft_trace::Stage;

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
            overrides,
            skip,
            clipped,
            arrived,
        } = message
        else {
            return;
        };
        let now = self.now.at;
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
            overrides,
            skip,
            clipped,
            arrived,
            precedes_weights,
        };
        // Only the level `leader` bounds what is ahead of the log.
        if !e.pending.any_waits_for_room() && e.deltas.working().is_level() {
            return self.take_push(push);
        }
        let seen = self.shard.view(|conf, m| {
            let conf = conf?;
            Some((conf.clone(), averages(conf, m, (bucket, step), sum_of_squares)))
        });
        let Some((conf, averages)) = seen else { return };
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
        let Some(e) = &mut self.epoch else { return };
        if e.broken {
            return; // a retry
        }
        let (conn, mut c, bucket) = (push.conn, push.contribution, push.unit);
        let in_flight = Some(c.step).filter(|step| e.pending.is_taken(c.worker, bucket, *step));
        let mut lost = 0;
        // One lock: job, bucket, mode and member are of one moment.
        let seen = self.shard.view(|conf, m| {
            let conf = conf?;
            let averages = averages(conf, m, (bucket, c.step), push.sum_of_squares);
            let leader_acks = conf.job.durability.is_leader();
            let working = leader_acks.then(|| e.deltas.working().data(conf, bucket));
            let current = working.as_ref().map_or_else(|| conf.buckets[bucket].version(), |w| w.version);
            if leader_acks {
                // At this level a leader serves weights that may not be replicated yet. After a failover a worker may
                // therefore name a version that is lost: with its first push, or later if it computes at weights
                // before the latest.
                c.pulled = c.pulled.min(current);
            }
            let decision = m.members.in_session(c.worker, c.session).map(|replicated| {
                let working = e.deltas.working_mut();
                if leader_acks && push.precedes_weights && (1..=MAX_STEP).contains(&c.step.0) {
                    // An earlier leader acknowledged these steps and lost them. The worker no longer has them: they
                    // are counted, and it continues.
                    let at = PushPlace { conf, replicated, bucket, now };
                    lost = working.skip(at, c.worker, Step(c.step.0 - 1));
                }
                admit(working.member(c.worker, replicated), bucket, c.step, c.pulled, current, in_flight)
            });
            Some((conf.clone(), averages, working, current, decision))
        });
        let Some((conf, averages, working, current, decision)) = seen else { return };
        let (target, leader_acks) = (&conf.buckets[bucket], working.is_some());
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
        let refuse = |kind| Refusal { kind: conf.named(bucket, kind), seq: c.seq.0 };
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
                    let (arrived, part) = (push.arrived, push.round_push());
                    e.clips |= part.clipped;
                    e.rounds.add(c.step, bucket, c.worker);
                    e.pending.wait_for_round(bucket, part, arrived);
                }
                self.next([Task::Rounds]);
            }
            Some(Admission::Accept) => {
                let bound = conf.job.clip.norm.filter(|_| target.spec.kind.is_in_norm());
                let factor = bound.map_or(1.0, |max| norm_factor(max, push.sum_of_squares));
                match working.map(|w| w.initialised) {
                    None => {
                        let of = (bucket, c.step, Some(c.worker));
                        self.note(Stage::Queue, push.arrived, of, push.payload.len() as u64);
                        self.update(&conf, bucket, UpdatePlan::alone(push.round_push(), factor));
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
}

/// Whether a push of a step joins a round. If the job clips by the norm of the whole gradient, a push that carries the
/// norm is applied by itself in every mode. The same holds for all pushes of that worker and step, so a switch never
/// splits a step. One worker writes a result for all.
fn averages(conf: &ShardConfig, meta: &Meta, (unit, step): (usize, Step), sum_of_squares: f64) -> bool {
    let alone = conf.job.clip.norm.is_some() && sum_of_squares > 0.0;
    let result = conf.buckets[unit].spec.kind == TensorKind::Result;
    !alone && !result && meta.in_force.of_push(step).averages()
}
