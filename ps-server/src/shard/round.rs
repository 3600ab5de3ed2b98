//! BSP's open rounds: the pushes of one (step, bucket) until everyone's are in. Leader-only: may vanish at any
//! moment, since nothing in it has been acknowledged.

use super::{command::Contribution, members::Members, several::Several};
use paraft_common::{
    Encoding, Payload, Step, WorkerId,
    codec::F32_BYTES,
    config::ServerJob,
    encoding::sum_of_squares,
    round::{RoundConfig, Weight},
};
use std::{collections::BTreeMap, time::Duration};
use tokio::time::Instant;

/// A push that waits for the others.
#[derive(Clone, Debug)]
pub struct Part {
    /// Who, which seq, which step, pulled when.
    pub contribution: Contribution,
    /// In the encoding that the job has for the bucket.
    pub payload: Payload,
}

/// What each push of a round is multiplied by before they are added (empty: nothing), and what their sum is divided by for the
/// mean. Every replica has both from the entry.
pub fn weights(job: &ServerJob, contributions: &[Contribution]) -> (Vec<f32>, f64) {
    let samples = |c: &Contribution| c.samples.max(1);
    let mut all = contributions.iter().map(samples);
    let first = all.next();
    if job.round.rule().weight() == Weight::Equal || all.all(|n| Some(n) == first) {
        return (Vec::new(), contributions.len().max(1) as f64);
    }
    let total: u64 = contributions.iter().map(|c| u64::from(samples(c))).sum();
    (contributions.iter().map(|c| samples(c) as f32).collect(), total as f64)
}

/// A closed round: its parts in rising order of workers, or their sum.
#[derive(Clone, Debug)]
pub struct Sum {
    /// By rising worker.
    pub contributions: Vec<Contribution>,
    /// That of their update: the only push as it came, or what [`Several`] writes.
    pub payload: Payload,
    /// Makes the mean of the sum.
    pub factor: f32,
    /// Of the mean.
    pub mean_sum_of_squares: f64,
}

/// All open rounds of a shard.
#[derive(Debug, Default)]
pub struct Rounds {
    open: BTreeMap<(Step, usize), BTreeMap<WorkerId, Part>>,
    /// Since when each that is open has had as many as it needs.
    ready: BTreeMap<(Step, usize), Instant>,
}

impl Rounds {
    /// Adds a part; one that was there from the same worker is replaced (a retry in a new session).
    pub fn add(&mut self, bucket: usize, part: Part) {
        let round = self.open.entry((part.contribution.step, bucket)).or_default();
        round.insert(part.contribution.worker, part);
    }

    /// The step of `worker` that waits in bucket `bucket`, if there is one.
    pub fn waiting(&self, worker: WorkerId, bucket: usize) -> Option<Step> {
        self.open.iter().find(|((_, b), r)| *b == bucket && r.contains_key(&worker)).map(|((s, _), _)| *s)
    }

    /// Whether a push of `worker` for `step` waits for the others in any bucket.
    pub fn holds(&self, worker: WorkerId, step: Step) -> bool {
        self.open.range((step, 0)..=(step, usize::MAX)).any(|(_, r)| r.contains_key(&worker))
    }

    /// Whether any push of `worker` waits for the others.
    pub fn holds_any(&self, worker: WorkerId) -> bool {
        self.open.values().any(|r| r.contains_key(&worker))
    }

    /// Drops what a worker that left has pushed into open rounds: it was never acknowledged.
    pub fn forget(&mut self, worker: WorkerId) {
        for round in self.open.values_mut() {
            round.remove(&worker);
        }
        self.open.retain(|_, r| !r.is_empty());
        self.ready.retain(|key, _| self.open.contains_key(key));
    }

    /// Takes out the parts of members that a later round was applied without.
    pub fn take_passed_over(&mut self, members: &Members) -> Vec<Contribution> {
        let mut out = Vec::new();
        for ((step, bucket), round) in &mut self.open {
            let late = |w: WorkerId| members.get(w).is_some_and(|m| m.is_passed_over(*bucket, *step));
            round.retain(|w, part| {
                let late = late(*w);
                out.extend(late.then_some(part.contribution));
                !late
            });
        }
        self.open.retain(|_, r| !r.is_empty());
        self.ready.retain(|key, _| self.open.contains_key(key));
        out
    }

    /// Whether nothing waits.
    pub fn is_empty(&self) -> bool {
        self.open.is_empty()
    }

    /// Those that are open, by step and local bucket.
    pub fn open(&self) -> Vec<(Step, usize)> {
        self.open.keys().copied().collect()
    }

    /// Takes out the parts of these rounds, by rising step, bucket and worker.
    pub fn take(&mut self, keys: Vec<(Step, usize)>) -> Vec<(usize, Part)> {
        keys.iter().for_each(|key| _ = self.ready.remove(key));
        let rounds = keys.into_iter().filter_map(|k| Some((k.1, self.open.remove(&k)?)));
        rounds.flat_map(|(bucket, round)| round.into_values().map(move |part| (bucket, part))).collect()
    }

    /// Everything was lost with the leadership.
    pub fn clear(&mut self) {
        self.open.clear();
        self.ready.clear();
    }

    /// The rounds that close now: those for which every active member's push is in, or as many as `rule` needs, for long
    /// enough. `leaving` are members whose Leave is proposed.
    pub fn complete(
        &mut self,
        members: &Members,
        leaving: &dyn Fn(WorkerId) -> bool,
        rule: &RoundConfig,
        now: Instant,
    ) -> Vec<(Step, usize)> {
        let mut closing = Vec::new();
        for (key, round) in &self.open {
            let (step, bucket) = *key;
            let expected = members
                .active()
                .filter(|(w, m)| !leaving(*w) && m.steps.get(bucket).is_some_and(|s| *s < step));
            let (mut arrived, mut missing) = (0, 0);
            expected
                .for_each(|(w, _)| *(if round.contains_key(&w) { &mut arrived } else { &mut missing }) += 1);
            let active = arrived + missing;
            if arrived < rule.rule().needs(active) {
                self.ready.remove(key);
                continue;
            }
            let since = now - *self.ready.entry(*key).or_insert(now);
            if rule.closes(arrived, active, since) {
                closing.push(*key);
            }
        }
        closing
    }

    /// When the next round has waited long enough for those that are missing.
    pub fn due(&self, rule: &RoundConfig) -> Option<Instant> {
        let first = self.ready.values().min()?;
        (rule.rule().grace() > Duration::ZERO).then(|| *first + rule.rule().grace())
    }

    /// A round that may not close yet is not due before it has waited once more.
    pub fn waits_again(&mut self, round: (Step, usize)) {
        self.ready.remove(&round);
    }

    /// Closes a round.
    pub fn close(&mut self, round: (Step, usize)) -> Option<Closed> {
        self.ready.remove(&round);
        self.open.remove(&round).map(|r| Closed(r.into_values().collect()))
    }
}

/// The pushes of a round that is closed, by rising worker.
#[derive(Debug)]
pub struct Closed(Vec<Part>);

impl Closed {
    /// Bytes that are read for the sum of `len` values.
    pub fn bytes(&self, len: usize) -> u64 {
        (self.0.len() * len * F32_BYTES) as u64
    }

    /// Their update, of a bucket with `len` values, which they carry in `encoding`.
    pub fn sum(self, job: &ServerJob, encoding: Encoding, len: usize) -> Sum {
        sum(job, self.0, encoding, len)
    }
}

/// The update of the parts: floating-point addition is not associative, so their order is that of the workers, whoever came
/// first.
fn sum(job: &ServerJob, parts: Vec<Part>, encoding: Encoding, len: usize) -> Sum {
    const CHECKED: &str = "the parts of a bucket have its length: it was checked where they came in";
    let (contributions, mut payloads): (Vec<_>, Vec<_>) =
        parts.into_iter().map(|p| (p.contribution, p.payload)).unzip();
    let (weights, total) = weights(job, &contributions);
    let (payload, squares) = match payloads.len() {
        // One worker: the bytes as they came, which makes BSP, SSP and ASP bit-equal for one worker.
        0 | 1 => {
            let only = payloads.pop().unwrap_or_default();
            let squares = sum_of_squares(&only, encoding, len).expect(CHECKED);
            (only, squares)
        }
        _ => {
            let several = Several::of(payloads, encoding, len).expect(CHECKED).weighted(weights);
            let sum = several.sum();
            let squares = sum_of_squares(&sum, Encoding::F32, len).expect(CHECKED);
            (several.payload(sum), squares)
        }
    };
    Sum { contributions, mean_sum_of_squares: squares / (total * total), factor: 1.0 / total as f32, payload }
}

#[cfg(test)]
mod tests {
    use super::*;
    use bytes::Bytes;
    use paraft_common::{Mode, Seq, SessionId, Version, encoding::Values};
    use proptest::prelude::*;

    fn part(worker: u32, payload: Payload) -> Part {
        let worker = WorkerId(worker);
        let (session, seq, step, pulled) = (SessionId(1), Seq(1), Step(1), Version(0));
        Part { contribution: Contribution { worker, session, seq, step, pulled, samples: 1 }, payload }
    }

    proptest! {
        #[test]
        fn a_sum_is_that_of_the_decoded_values_whoever_came_first_and_however_the_bytes_are_cut(
            parts in prop::collection::vec((-1f32..1.0, any::<prop::sample::Index>()), 1..5),
            len in 1usize..2500, encoding in prop::sample::select(Encoding::ALL.to_vec()), swap in any::<bool>(),
        ) {
            let mut rounds = Rounds::default();
            let (mut came, mut expected) = (Vec::new(), vec![0f32; len]);
            for (worker, (size, cut)) in (0u32..).zip(&parts) {
                let values: Vec<f32> = (0..len).map(|i| size * ((i % 37) as f32 - 17.3)).collect();
                let mut sent = Vec::new();
                encoding.encode(&values, &mut sent);
                let mut decoded = vec![0f32; len];
                let payload = Payload::from(sent.clone());
                let read = Values::new(&payload, encoding, len).expect("its length").read(&mut decoded);
                prop_assert_eq!(read, Ok(()));
                if worker == 0 {
                    expected = decoded;
                } else {
                    expected.iter_mut().zip(&decoded).for_each(|(e, d)| *e += d);
                }
                let mut pieces = Bytes::from(sent);
                let first = pieces.split_to(cut.index(pieces.len()));
                came.push(part(worker, Payload::from_pieces(vec![first, pieces])));
            }
            if swap {
                came.reverse();
            }
            came.into_iter().for_each(|p| rounds.add(3, p));
            let job = ServerJob::new("rounds", Mode::Bsp, len, len);
            let sum = rounds.close((Step(1), 3)).expect("an open round").sum(&job, encoding, len);
            let (added, encoding) = match parts.len() {
                1 => (sum.payload, encoding),
                n => (Several::read(&sum.payload, encoding, n, len).expect("as written").sum(), Encoding::F32),
            };
            let mut got = vec![0f32; len];
            let read = Values::new(&added, encoding, len).expect("its length").read(&mut got);
            prop_assert_eq!(read, Ok(()));
            let bits = |v: &[f32]| v.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
            prop_assert_eq!(bits(&got), bits(&expected));
            let squares: f64 = got.iter().map(|v| (f64::from(*v) / parts.len() as f64).powi(2)).sum();
            prop_assert!((sum.mean_sum_of_squares - squares).abs() <= 1e-9 * squares);
            prop_assert!(rounds.close((Step(1), 3)).is_none());
        }
    }
}
