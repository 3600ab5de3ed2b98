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
mod tests {
    use super::*;
    use paraft_common::{Seq, SessionId, Step};

    fn push(worker: u32, pulled: u64) -> Option<Contribution> {
        let (worker, session, seq) = (WorkerId(worker), SessionId(1), Seq(1));
        Some(Contribution { worker, session, seq, step: Step(1), pulled: Version(pulled), samples: 1 })
    }

    #[test]
    fn delay_distance_and_age_are_those_between_pull_and_push() {
        let staleness = Staleness::default();
        let at = |w: f32| vec![w; 4];
        assert!(staleness.before(0, push(0, 0), Version(0), &at(0.0)).is_none(), "nobody has pulled");
        staleness.pulled(WorkerId(0), 0, Version(0), &at(0.0));
        staleness.pulled(WorkerId(1), 0, Version(0), &at(0.0));
        // Worker 1 pushes four times, by 1 in each of four values each time; then worker 0 pushes.
        for v in 0..4u64 {
            let before = staleness.before(0, push(1, v), Version(v), &at(v as f32)).expect("it watches");
            staleness.after(before, &at(v as f32 + 1.0));
            staleness.pulled(WorkerId(1), 0, Version(v + 1), &at(v as f32 + 1.0));
        }
        let before = staleness.before(0, push(0, 0), Version(4), &at(4.0)).expect("it watches");
        staleness.after(before, &at(5.0));
        let workers = staleness.workers();
        let (late, prompt) = (&workers[&WorkerId(0)], &workers[&WorkerId(1)]);
        assert_eq!((late.delay.max(), prompt.delay.max()), (Some(4), Some(0)));
        assert_eq!((late.distance.mean(), prompt.distance.mean()), (Some(4.0), Some(0.0)));
        assert_eq!((late.age.total(), prompt.age.total()), (1, 4));
    }

    #[test]
    fn pulls_ahead_are_measured_from_the_named_pull() {
        let staleness = Staleness::default();
        let at = |w: f32| vec![w; 4];
        staleness.pulled(WorkerId(0), 0, Version(0), &at(0.0));
        for v in 0..9u64 {
            // Its push is computed at the pull before, except the first.
            let before = staleness.before(0, push(0, v.saturating_sub(1)), Version(v), &at(v as f32));
            staleness.after(before.expect("it watches"), &at(v as f32 + 1.0));
            staleness.pulled(WorkerId(0), 0, Version(v + 1), &at(v as f32 + 1.0));
            assert!(staleness.0.lock().pulled[&(WorkerId(0), 0)].of.len() <= 2);
        }
        // Its first late push shows that it is such a worker.
        let of = &staleness.workers()[&WorkerId(0)];
        assert_eq!((of.delay.total(), of.delay.max(), of.distance.total()), (8, Some(1), 8));
    }

    #[test]
    fn what_is_noted_of_pulls_has_a_bound_and_goes_with_its_worker() {
        let staleness = Staleness::default();
        let weights = vec![0.5; SAMPLE_VALUES];
        let all = (MAX_BYTES / bytes_of(&weights)) as usize;
        for i in 0..all + 100 {
            staleness.pulled(WorkerId(i as u32 % 64), i / 64, Version(0), &weights);
        }
        let full = staleness.bytes();
        assert!(full <= MAX_BYTES && full > MAX_BYTES - 2 * bytes_of(&weights), "{full}");
        staleness.pulled(WorkerId(3), 0, Version(1), &weights);
        assert_eq!(staleness.bytes(), full, "a later pull takes the place of the one before");
        staleness.forget(WorkerId(3));
        let left = staleness.0.lock().pulled.keys().filter(|(w, _)| *w == WorkerId(3)).count();
        assert!(left == 0 && staleness.bytes() < full);
        let counted: u64 =
            staleness.0.lock().pulled.values().flat_map(|p| &p.of).map(|p| bytes_of(&p.sample)).sum();
        assert_eq!(staleness.bytes(), counted);
        (0..64).for_each(|w| staleness.forget(WorkerId(w)));
        assert_eq!(staleness.bytes(), 0);
    }

    #[test]
    fn push_from_another_leaders_weights_is_not_measured() {
        let staleness = Staleness::default();
        staleness.pulled(WorkerId(0), 0, Version(3), &[0.0]);
        let before = staleness.before(0, push(0, 2), Version(3), &[0.0]).expect("it watches");
        staleness.after(before, &[1.0]);
        assert!(staleness.workers().is_empty());
        staleness.clear();
        assert!(staleness.before(0, push(0, 3), Version(4), &[1.0]).is_none(), "it does not lead any more");
    }

    #[test]
    fn a_sample_of_a_large_bucket_measures_its_norm() {
        let weights: Vec<f32> = (0..100_000).map(|i| ((i * 7919) % 1000) as f32 / 1000.0).collect();
        let (whole, part) =
            (distance(&weights, &vec![0.0; 100_000]), distance(&sample(&weights), &[0.0; SAMPLE_VALUES]));
        let scaled = part * (100_000.0 / SAMPLE_VALUES as f64).sqrt();
        assert!((scaled / whole - 1.0).abs() < 0.05, "{scaled} for {whole}");
    }
}
