//! BSP's rounds as they close: which are complete, their sums, and the global norm over all shards.

use super::{
    Leader, Reply, Task, agenda::Computing, effects::Computed, proposals::changes_nothing, rounds::Key,
    update::UpdatePlan,
};
use crate::shard::round::{self, Sum};
use paraft_common::{Step, optim::norm_factor};
use paraft_trace::Stage;

impl Leader {
    /// Closes every complete round. Called after everything that may complete one: a push, an apply, a member that
    /// left.
    pub(super) fn close_rounds(&mut self) {
        let Some(e) = self.epoch.as_mut().filter(|e| !e.rounds.is_empty()) else { return };
        // One lock: the mode and the members are of one moment.
        let seen = self.shard.view(|conf, m| {
            let conf = conf?;
            let drops_late = conf.job.round.drops_late();
            let late = if drops_late { e.rounds.take_dropped(&m.members) } else { Vec::new() };
            // The mode was switched: each push is now an update by itself, unless a later round that passes it over is
            // in flight.
            let mut over: Vec<Key> =
                e.rounds.touched().filter(|(step, _)| !m.in_force.of_push(*step).averages()).collect();
            over.retain(|(step, bucket)| !(drops_late && e.rounds.is_closed(*bucket, *step)));
            let over: Vec<_> = over.into_iter().map(|key| (key, e.rounds.take(key))).collect();
            let complete = match m.started {
                true => e.rounds.complete(&m.members, e.leases.leaving(), &conf.job.round),
                false => Vec::new(),
            };
            Some((conf.clone(), late, over, complete))
        });
        let Some((conf, late, over, complete)) = seen else { return };
        let late: Vec<_> = late
            .into_iter()
            .filter_map(|((step, bucket), w)| e.pending.leave_round(w, bucket, step))
            .map(|(part, _)| part.contribution)
            .filter_map(|c| Some((e.streams.of_session(c.worker, c.session)?, c.seq)))
            .collect();
        late.into_iter().for_each(|(conn, seq)| self.send(conn, Reply::Dropped { seq }));
        for ((step, bucket), workers) in over {
            for worker in workers {
                let left = self.epoch.as_mut().and_then(|e| e.pending.leave_round(worker, bucket, step));
                if let Some((part, arrived)) = left {
                    let of = (bucket, step, Some(worker));
                    self.note(Stage::Queue, arrived, of, part.payload.len() as u64);
                    self.update(&conf, bucket, UpdatePlan::alone(part, 1.0));
                }
            }
        }
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
        let (bytes, work): (_, Box<dyn FnOnce() -> Computed + Send>) = match conf.buckets[bucket].rows() {
            Some(rows) => {
                let (bytes, dim) = (parts.iter().map(|p| p.payload.len() as u64).sum(), rows.spec().dim);
                (bytes, Box::new(move || Computed::Sum(round::sum_rows(parts, dim))))
            }
            None => {
                let bytes = round::bytes(parts.len(), len);
                (bytes, Box::new(move || Computed::Sum(round::sum(parts, encoding, len))))
            }
        };
        self.compute(bytes, Computing::Round(round), work);
    }

    /// Handles the sum of a closed round.
    pub(super) fn summed(&mut self, (step, bucket): Key, sum: Sum) {
        let (Some(conf), Some(e)) = (self.shard.configured(), &mut self.epoch) else { return };
        let by_script = sum.clipped;
        if conf.job.clip.norm.is_none() && !by_script || !conf.buckets[bucket].spec.kind.is_in_norm() {
            let closes = conf.job.round.drops_late();
            return self.update(&conf, bucket, UpdatePlan::round(sum, 1.0, closes));
        }
        if self.shard.read(|m| changes_nothing(&m.members, bucket, &sum)) {
            return self.give_up(bucket, &sum);
        }
        // All trained buckets of a step are summed, so this shard's part of the global norm is known. With one
        // shard it is the norm. With several, the workers add the parts and send the sum to every shard, so no
        // server needs another shard's leader. A script always receives the norm.
        let is_in = |b| self.shard.read(|m| m.members.behind(b, step) == 0);
        let Some(partial) = e.norms.summed(&conf, step, bucket, sum, is_in) else { return };
        let layout = conf.job.layout();
        let trained = layout.buckets().iter().filter(|b| b.kind.is_in_norm()).count();
        if trained.min(self.shard.shards() as usize) == 1 && !by_script {
            return self.norm(step, partial, None);
        }
        self.send_to_all(|| Reply::RoundNorm { step, sum_of_squares: partial });
    }

    /// Handles the norm over all shards, and a script's bound: the same factor scales every bucket of the step. Copies
    /// from other workers have no effect.
    pub(super) fn norm(&mut self, step: Step, sum_of_squares: f64, bound: Option<f64>) {
        let (Some(conf), Some(e)) = (self.shard.configured(), &mut self.epoch) else { return };
        let bound = bound.map(|b| b as f32).or(conf.job.clip.norm);
        // Before all of the step is summed, the norm is of an incomplete sum. Its worker is asked later, and sends
        // it again.
        if !e.norms.is_known(&conf, step) {
            return;
        }
        let closes = conf.job.round.drops_late();
        for (bucket, sum) in e.norms.take(step) {
            let clipped = bound.map_or(1.0, |bound| norm_factor(bound, sum_of_squares));
            self.update(&conf, bucket, UpdatePlan::round(sum, clipped, closes));
        }
    }
}
