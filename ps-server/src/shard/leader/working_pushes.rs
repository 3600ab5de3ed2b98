//! Pushes at the level `leader`: applied to the working copies, then written to the log as deltas.

use super::{
    Leader, ProposalSpan, Purpose, Reply, Task,
    agenda::{Computing, WorkingPush},
    deltas::DeltaProposal,
    effects::Computed,
    pulls::PullTrigger,
    push::Push,
    working::{PushPlace, add},
};
use crate::shard::{bucket::BucketData, command::Command, delta::DeltaId, state::ShardConfig};
use paraft_common::{codec::F32_BYTES, optim::Gradient};
use paraft_trace::Stage;
use std::sync::{Arc, atomic::Ordering::Relaxed};

impl Leader {
    /// Applies an admitted push to the leader's working copy. It is acknowledged once that is done.
    pub(super) fn push_working(&mut self, conf: &Arc<ShardConfig>, push: Push, scale: f32) {
        let Push { conn, contribution: c, unit: bucket, payload, overrides, skip, arrived, .. } = push;
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
            let at = PushPlace { conf, replicated: &replicated, bucket, now: self.now.at };
            let version = working.skipped(at, active, &c);
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
            add(&mut data, &own, bucket, active, &c, overrides, gradient);
            if let Some(seen) = seen {
                staleness.after(seen, &data.weights);
            }
            Computed::Copy(data)
        };
        let began = self.now.moment;
        let of = WorkingPush { conn, bucket, contribution: c, bytes, replicated, began };
        self.compute(touched, Computing::Push(of), Box::new(work));
    }

    /// Handles a push that the working copy now contains.
    pub(super) fn push_computed(&mut self, push: &WorkingPush, data: Arc<BucketData>) {
        let (c, bucket) = (&push.contribution, push.bucket);
        let (Some(conf), Some(e)) = (self.shard.configured(), &mut self.epoch) else { return };
        let at = PushPlace { conf: &conf, replicated: &push.replicated, bucket, now: self.now.at };
        let version = e.deltas.working_mut().pushed(at, c, push.bytes, data);
        e.tally.pushed(version, c.pulled);
        if bucket == 0 {
            self.counters.progress.lock().samples += u64::from(c.samples);
        }
        self.send(push.conn, Reply::Ack { seq: c.seq, version });
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
