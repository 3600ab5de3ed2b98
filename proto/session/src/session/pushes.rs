//! Pushes: the gradients of a step, bucket by bucket, or the marks of a skipped step.

use super::Session;
use crate::{link::LinkEvent, norms::sum_of_parts};
use bytes::Bytes;
use paraft_common::{
    BucketId, ShardId, Step, TensorKind, encoding::sum_of_squares, optim::Overrides, placement, table::Rows,
};
use paraft_proto::{self as wire, Push, limits};
use std::{collections::BTreeMap, time::Duration};

/// Overrides without the rate, as they travel.
fn wire_overrides(set: &Overrides) -> Option<wire::Overrides> {
    let Overrides { weight_decay, momentum, square, eps, clip_value, .. } = *set;
    let whole = wire::Overrides { weight_decay, momentum, square, eps, clip_value };
    (!set.is_rate_alone()).then_some(whole)
}

/// The latest push, if a caller needs its norm.
#[derive(Default)]
pub(super) struct PushedSquares {
    step: u64,
    /// The sum of squares of each bucket.
    squares: BTreeMap<u32, f64>,
}

impl Session {
    /// Whether a push of `len` bytes may go out before an ack comes. So a slow server slows its workers, and
    /// memory does not grow with the model. One larger push always goes out. While the norm of the whole
    /// gradient decides about its first bucket, every push goes out, since no ack comes before the last push.
    pub fn has_room(&self, len: usize) -> bool {
        let waits = &self.out.in_flight;
        self.job.clip.norm.is_some()
            || self.clipped
            || *waits == 0
            || waits.saturating_add(len) <= limits::PUSH_WINDOW_BYTES
            || self.failed.is_some()
            || self.out.heard.iter().any(|h| matches!(h, LinkEvent::Failed(_)))
    }

    /// Sets the number of samples behind the gradients of the next pushes: servers count them.
    pub fn weigh(&mut self, samples: usize) {
        self.samples = u32::try_from(samples).unwrap_or(u32::MAX);
    }

    /// Sets what replaces the job's options for the next pushes, for each group of parameters (for one if the job has
    /// no groups). Empty: the job's own.
    ///
    /// # Panics
    /// If their number is not the number of groups.
    pub fn override_options(&mut self, of_groups: Vec<Overrides>) {
        let (groups, n) = (self.job.groups.len().max(1), of_groups.len());
        assert!(n == 0 || n == groups, "options of {n} groups for {groups} groups");
        self.overrides = of_groups;
    }

    /// Sets the rate of each table for the next pushes; `None`: the table's own, by the job's schedule.
    pub fn set_table_rates(&mut self, rates: Vec<Option<f64>>) {
        self.table_rates = rates;
    }

    /// The versions of the last pull, as [`Self::computed_at`] takes them.
    pub fn versions(&self) -> Vec<u64> {
        self.versions.clone()
    }

    /// Sets the versions of the weights at which the gradients of the next pushes were computed, if they were
    /// pulled before the weights that the worker has. `None`: the weights that the worker has.
    pub fn computed_at(&mut self, versions: Option<Vec<u64>>) {
        self.computed_at = versions.unwrap_or_default();
    }

    /// Pushes one bucket's gradient for `step`, in the job's encoding for the bucket. The session keeps it
    /// until its ack, and sends it again after a break.
    pub fn push(&mut self, now: Duration, bucket: BucketId, step: Step, payload: Bytes) {
        let shard = self.shard_of(bucket);
        if self.pushing.0 != step.0 {
            // The shard applies it on arrival and clips it by the norm of the worker's whole gradient:
            // nothing can go out before the last bucket is known. (BSP clips the mean; there the servers
            // exchange the norm.) Either all pushes of a step wait or none, whatever messages arrive
            // meanwhile.
            self.pushing = (step.0, self.job.clip.norm.is_some() && self.any_asynchronous());
            // These belong to an abandoned step, and were not sent to any shard.
            self.held.clear();
        }
        let waits = self.pushing.1;
        let spec = self.layout.buckets()[bucket.0 as usize];
        let set = match spec.kind {
            TensorKind::Param => self.overrides.get(usize::from(spec.group)).copied(),
            TensorKind::Rows => {
                self.table_rates.get(usize::from(spec.group)).map(|rate| Overrides::rate(*rate))
            }
            TensorKind::Buffer | TensorKind::Result => None,
        };
        let set = set.unwrap_or_default();
        let pulled = self.versions[bucket.0 as usize];
        let Some(link) = self.links.get_mut(&shard) else { return };
        link.seq += 1;
        let push = Push {
            seq: link.seq,
            step: step.0,
            bucket: bucket.0,
            version: self.computed_at.get(bucket.0 as usize).copied().unwrap_or(pulled),
            sum_of_squares: 0.0,
            payload,
            samples: self.samples,
            rate: set.rate,
            skip: false,
            overrides: wire_overrides(&set),
            clipped: self.clipped,
        };
        if !waits && !self.norms.is_shared() {
            return link.push(push, now, now, &mut self.out);
        }
        // If processes share a worker, in every mode: another process's shards may be in another mode.
        let squares = self.squares(&push);
        self.note_squares(bucket, step, squares);
        if waits {
            self.held.push((push, now));
            if self.pushed.squares.len() == self.own.len() && !self.norms.is_shared() {
                self.release(now, sum_of_parts(self.by_shard(&self.pushed.squares)));
            }
        } else if let Some(link) = self.links.get_mut(&shard) {
            link.push(push, now, now, &mut self.out);
        }
    }

    /// Records a bucket's part of the norm of a step's gradient.
    fn note_squares(&mut self, bucket: BucketId, step: Step, squares: f64) {
        if self.pushed.step != step.0 {
            self.pushed = PushedSquares { step: step.0, squares: BTreeMap::new() };
        }
        self.pushed.squares.insert(bucket.0, squares);
    }

    /// The sums of squares by shard of a step that was pushed whole in this session. `Some` only if some
    /// shards apply pushes one by one, or other processes of the worker have the rest of the gradient.
    pub fn pushed_squares(&self, step: Step) -> Option<Vec<(ShardId, f64)>> {
        let PushedSquares { step: of, squares, .. } = &self.pushed;
        let trained = |b: &u32| self.layout.buckets()[*b as usize].kind.is_in_norm();
        let all = self.own.clone().filter(trained).all(|b| *of == step.0 && squares.contains_key(&b));
        all.then(|| self.by_shard(squares).into_iter().collect())
    }

    /// Whether the pushes of this step carry the norm, and are applied as they arrive.
    pub fn is_one_by_one(&self, step: Step) -> bool {
        self.pushing == (step.0, true)
    }

    /// Gives the sum of squares of the worker's whole gradient, of a step that this process has pushed its
    /// part of. The pushes that wait for it go out.
    pub fn clip_by(&mut self, now: Duration, step: Step, sum_of_squares: f64) {
        if self.held.first().is_some_and(|(p, _)| p.step == step.0) {
            self.release(now, sum_of_squares);
        }
    }

    /// Sends a mark for every bucket of `step` instead of pushes: the worker has no gradient. The session
    /// keeps and sends the marks as it does pushes. If any worker skips, a round changes nothing; where
    /// pushes are applied one by one, only this worker's push is left out.
    ///
    /// If some pushes of the step were refused because they are not finite, only their buckets are skipped:
    /// the step's other pushes stay. Results have no marks: whether they are skipped is known with the mean
    /// ([`Self::skip_bucket`]).
    ///
    /// # Panics
    /// If the worker pushed for this step, and no push was refused.
    pub fn skip(&mut self, now: Duration, step: Step) {
        let refused = std::mem::take(&mut self.refused);
        let whole = !refused.iter().any(|(s, _)| *s == step.0);
        let pushed = self.links.values().any(|l| l.has_pushed(step.0));
        assert!(!(whole && pushed), "{step} was pushed, and cannot be skipped");
        // Pushes that wait for the rest of their step were not sent to any shard.
        self.held.clear();
        self.pushing = (0, false);
        self.pushed = PushedSquares::default();
        let rows = self.layout.dense().end..self.layout.buckets().len() as u32;
        for bucket in (0..self.layout.results().start as u32).chain(rows) {
            if whole || refused.contains(&(step.0, bucket)) {
                self.mark_skipped(now, BucketId(bucket), step);
            }
        }
    }

    /// Sends the mark for one bucket: the script leaves its group out of the step, or no worker writes the result
    /// because the step's mean is not whole. Marks come before the pushes of their step.
    pub fn skip_bucket(&mut self, now: Duration, bucket: BucketId, step: Step) {
        // The pushes that wait for the norm wait for this bucket, too.
        self.note_squares(bucket, step, 0.0);
        self.mark_skipped(now, bucket, step);
    }

    fn mark_skipped(&mut self, now: Duration, bucket: BucketId, step: Step) {
        let shard = placement::shard_of(&self.layout, bucket, self.shards);
        let Some(link) = self.links.get_mut(&shard) else { return };
        link.seq += 1;
        let (seq, version) = (link.seq, self.versions[bucket.0 as usize]);
        let push = Push {
            seq,
            step: step.0,
            bucket: bucket.0,
            version,
            skip: true,
            clipped: self.clipped,
            ..Push::default()
        };
        link.push(push, now, now, &mut self.out);
    }

    /// The worker's weights have the results of its own step, written by it or by others, so the next pull need not
    /// bring them.
    pub fn has_results(&mut self) {
        self.layout.results().for_each(|bucket| self.versions[bucket] += 1);
    }

    /// Sum of squares of the values as the servers decode them; 0 for running statistics.
    fn squares(&self, p: &Push) -> f64 {
        let spec = self.layout.buckets()[p.bucket as usize];
        let payload = p.payload.clone().into();
        let squares = match spec.kind {
            TensorKind::Param => sum_of_squares(&payload, self.job.encoding(spec.kind), spec.len).ok(),
            TensorKind::Rows => {
                let dim = self.job.tables.get(usize::from(spec.group)).map_or(0, |t| t.dim);
                Rows::of(&payload, dim).ok().map(|rows| rows.sum_of_squares())
            }
            TensorKind::Buffer | TensorKind::Result => Some(0.0),
        };
        squares.unwrap_or(f64::NAN) // not in the job's encoding: the servers refuse it
    }

    /// Sums as the servers do for BSP: by shard, and within it by bucket, whatever the order of the backward
    /// pass. The last bit of the sum depends on the order, and one worker must get the same bits in every
    /// mode.
    fn by_shard(&self, squares: &BTreeMap<u32, f64>) -> BTreeMap<ShardId, f64> {
        let mut parts = BTreeMap::new();
        for (bucket, squares) in squares {
            *parts.entry(self.shard_of(BucketId(*bucket))).or_insert(0.0) += squares;
        }
        parts
    }

    /// Sends the pushes that wait for the sum of squares, with it.
    fn release(&mut self, now: Duration, total: f64) {
        for (mut p, at) in std::mem::take(&mut self.held) {
            p.sum_of_squares = total;
            let shard = self.shard_of(BucketId(p.bucket));
            if let Some(link) = self.links.get_mut(&shard) {
                link.push(p, at, now, &mut self.out);
            }
        }
    }

    /// Whether a shard applies pushes as they arrive.
    fn any_asynchronous(&self) -> bool {
        self.links.keys().any(|shard| !self.modes.of(*shard).averages())
    }
}
