//! The delay of each push: in versions, in seconds, and in the distance that the weights moved meanwhile.
//!
//! ```text
//!  pull answered ─▶ version, time, a sample of the weights ······ push applied: delay, age, distance
//! ```
//!
//! The distance is that between the weights that a worker pulled and those that its push is applied to, in average
//! steps: `‖w − w_pulled‖ / mean ‖step‖` (the parameter-space gap of Hakimi et al. 2019, in units of Barkai et al.
//! 2020). Both norms are taken over the same sample of [`SAMPLE_VALUES`] values of the bucket, in short runs that are
//! evenly spread; buckets that are no larger are measured whole.
//!
//! Measured on the leader, beside the state: nothing here is replicated, and all of it may be lost. It takes at
//! most [`MAX_BYTES`]: with more workers and buckets than fit, some pulls are not measured. A push in a round of
//! several is not measured, because it is not late.

use super::{
    command::{Contribution, Proposal},
    state::Shard,
};
use paraft_common::{
    Version, WorkerId,
    histogram::{DelayHistogram, LogHistogram},
};
use parking_lot::Mutex;
use std::{collections::BTreeMap, sync::Arc};
use tokio::time::Instant;

/// Values of a bucket that a distance is measured on. Their root mean square has an error of some percent, and they
/// take 4 KiB per worker and bucket.
pub const SAMPLE_VALUES: usize = 1024;
/// Values in a row: one cache line.
const SAMPLE_RUN: usize = 16;
/// Bound on all samples together. Sixteen workers of a 4 GB model fit on one of three shards.
pub const MAX_BYTES: u64 = 64 << 20;
/// Bound on the measured workers: they choose their ids themselves.
const MAX_WORKERS: usize = 4096;
/// Decay of the mean step per update.
const STEP_DECAY: f64 = 0.98;

/// The measurements of one replica.
#[derive(Debug, Default)]
pub struct Staleness(Mutex<Inner>);

#[derive(Debug, Default)]
struct Inner {
    /// By worker and local bucket.
    pulled: BTreeMap<(WorkerId, usize), PullHistory>,
    /// Bytes of the samples, as if none were shared.
    bytes: u64,
    /// The last sample of each local bucket, until an update: workers that pull the same version share it.
    latest: BTreeMap<usize, (Version, Sample)>,
    /// The mean length of a step, by local bucket.
    step: BTreeMap<usize, f64>,
    workers: BTreeMap<WorkerId, PushStaleness>,
}

/// The last pull, and the one before it if the worker was seen to push what it computed there.
#[derive(Debug, Default)]
struct PullHistory {
    of: Vec<PullRecord>,
    pushes_late: bool,
}

#[derive(Debug)]
struct PullRecord {
    version: Version,
    at: Instant,
    sample: Sample,
}

/// The measurements of one worker's pushes, per bucket.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PushStaleness {
    /// Versions between pull and push.
    pub delay: DelayHistogram,
    /// Average steps between the pulled weights and those that the push was applied to.
    pub distance: LogHistogram,
    /// Seconds from the answer of the pull to the apply of the push.
    pub age: LogHistogram,
}

/// An update that is about to be applied.
#[derive(Debug)]
pub struct BeforeUpdate {
    bucket: usize,
    of: Option<Contribution>,
    version: Version,
    sample: Sample,
}

/// Sampled values of a bucket.
type Sample = Arc<[f32]>;

/// The sampled values of a bucket with more than [`SAMPLE_VALUES`] values; of a smaller one, all values.
fn spread(weights: &[f32]) -> impl Iterator<Item = &f32> {
    let begins = |run| run * (weights.len() - SAMPLE_RUN) / (SAMPLE_VALUES / SAMPLE_RUN - 1);
    (0..SAMPLE_VALUES / SAMPLE_RUN).flat_map(move |run| &weights[begins(run)..][..SAMPLE_RUN])
}

/// Samples a bucket.
fn sample(weights: &[f32]) -> Sample {
    if weights.len() <= SAMPLE_VALUES { weights.into() } else { spread(weights).copied().collect() }
}

/// Memory of a sample, including its overhead.
fn bytes_of(sample: &[f32]) -> u64 {
    (size_of_val(sample) + size_of::<((WorkerId, usize), PullRecord)>()) as u64
}

fn distance<'a>(a: &[f32], b: impl IntoIterator<Item = &'a f32>) -> f64 {
    a.iter().zip(b).map(|(a, b)| f64::from(a - b) * f64::from(a - b)).sum::<f64>().sqrt()
}

impl Inner {
    fn known(&self, bucket: usize, version: Version) -> Option<Sample> {
        self.latest.get(&bucket).filter(|(v, _)| *v == version).map(|(_, sample)| sample.clone())
    }
}

impl Staleness {
    /// Records that a worker's pull of a local bucket was answered with these weights.
    pub fn pulled(&self, worker: WorkerId, bucket: usize, version: Version, weights: &[f32]) {
        let mut inner = self.0.lock();
        let sample = inner.known(bucket, version).unwrap_or_else(|| sample(weights));
        let bytes = bytes_of(&sample);
        let pulled = PullRecord { version, at: Instant::now(), sample: sample.clone() };
        let Inner { pulled: all, bytes: sum, .. } = &mut *inner;
        let PullHistory { of, pushes_late } = all.entry((worker, bucket)).or_default();
        let most = if *pushes_late && *sum + bytes <= MAX_BYTES { 2 } else { 1 };
        let drops = (of.len() + 1).saturating_sub(most);
        *sum -= of.drain(..drops).map(|p| bytes_of(&p.sample)).sum::<u64>();
        if *sum + bytes > MAX_BYTES {
            all.remove(&(worker, bucket));
            return;
        }
        of.push(pulled);
        *sum += bytes;
        inner.latest.insert(bucket, (version, sample));
    }

    /// Drops the samples of a worker that is gone. Its measurements stay.
    pub fn forget(&self, worker: WorkerId) {
        let inner = &mut *self.0.lock();
        let mut gone = inner.pulled.split_off(&(worker, 0));
        if let Some(next) = worker.0.checked_add(1) {
            inner.pulled.append(&mut gone.split_off(&(WorkerId(next), 0)));
        }
        inner.bytes -= gone.values().flat_map(|p| &p.of).map(|p| bytes_of(&p.sample)).sum::<u64>();
    }

    /// Memory of the samples.
    pub fn bytes(&self) -> u64 {
        self.0.lock().bytes
    }

    /// Drops all samples at the end of a leadership: another leader answers pulls from now on. Measurements stay.
    pub fn clear(&self) {
        let mut inner = self.0.lock();
        (inner.pulled, inner.latest, inner.step, inner.bytes) = Default::default();
    }

    /// Reads a local bucket before an update; `of` is the push, if the update is a single one.
    pub fn before(
        &self,
        bucket: usize,
        of: Option<Contribution>,
        version: Version,
        weights: &[f32],
    ) -> Option<BeforeUpdate> {
        // A replica that does not lead answers no pulls.
        let known = {
            let inner = self.0.lock();
            if inner.pulled.is_empty() {
                return None;
            }
            inner.known(bucket, version)
        };
        let sample = known.unwrap_or_else(|| sample(weights));
        Some(BeforeUpdate { bucket, of, version, sample })
    }

    /// Reads the bucket after the update, and measures.
    pub fn after(&self, before: BeforeUpdate, weights: &[f32]) {
        let BeforeUpdate { bucket, of, version, sample: old } = before;
        let moved = match weights.len() > SAMPLE_VALUES {
            true => distance(&old, spread(weights)),
            false => distance(&old, weights),
        };
        let inner = &mut *self.0.lock();
        inner.latest.remove(&bucket);
        let mean = inner.step.entry(bucket).or_insert(moved);
        *mean = STEP_DECAY * *mean + (1.0 - STEP_DECAY) * moved;
        let mean = *mean;
        let Some(c) = of else { return };
        let Some(pulls) = inner.pulled.get_mut(&(c.worker, bucket)) else { return };
        pulls.pushes_late |= pulls.of.last().is_some_and(|p| p.version > c.pulled);
        let Some(pulled) = pulls.of.iter().rev().find(|p| p.version == c.pulled) else { return };
        if inner.workers.len() >= MAX_WORKERS && !inner.workers.contains_key(&c.worker) {
            return;
        }
        let worker = inner.workers.entry(c.worker).or_default();
        worker.delay.record(version.0.saturating_sub(c.pulled.0));
        worker.age.record(pulled.at.elapsed().as_secs_f64());
        if mean > 0.0 {
            worker.distance.record(distance(&old, &*pulled.sample) / mean);
        }
    }

    /// Applies one change, and measures the bucket that it updates.
    pub fn around<T>(&self, shard: &Shard, proposal: &Proposal, apply: impl FnOnce() -> T) -> T {
        let seen = self.read_before(shard, proposal);
        let applied = apply();
        self.read_after(shard, seen);
        applied
    }

    /// Reads the bucket that a change updates, if any, before it.
    pub fn read_before(&self, shard: &Shard, proposal: &Proposal) -> Option<BeforeUpdate> {
        let entry = proposal.command.pushes()?;
        let conf = shard.configured()?;
        let local = conf.local(entry.bucket)?;
        let of = if let [one] = entry.contributions { Some(*one) } else { None };
        conf.buckets[local].peek(|data| self.before(local, of, data.version, &data.weights))
    }

    /// Reads it after the change; an update that changed nothing is not counted.
    pub fn read_after(&self, shard: &Shard, seen: Option<BeforeUpdate>) {
        let Some((before, conf)) = seen.zip(shard.configured()) else { return };
        conf.buckets[before.bucket].peek(|data| {
            if data.version > before.version {
                self.after(before, &data.weights);
            }
        });
    }

    /// The measurements, by worker.
    pub fn workers(&self) -> BTreeMap<WorkerId, PushStaleness> {
        self.0.lock().workers.clone()
    }
}

#[cfg(test)]
#[path = "staleness_tests.rs"]
mod tests;
