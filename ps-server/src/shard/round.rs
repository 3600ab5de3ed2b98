//! BSP's open rounds: the pushes of one (step, bucket) until everyone's are in. Leader-only: may vanish at any
//! moment, since nothing in it has been acknowledged.

use super::{
    command::Contribution,
    members::{Member, Members},
    several::Several,
};
use paraft_common::{
    Encoding, Payload, Step, WorkerId,
    codec::F32_BYTES,
    config::ServerJob,
    encoding::sum_of_squares,
    round::{RoundConfig, Weight},
};
use std::{
    collections::{BTreeMap, BTreeSet, btree_map::Entry},
    time::Duration,
};
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

/// A round: its step and local bucket.
type Key = (Step, usize);

/// All open rounds of a shard.
///
/// A push costs the same with any number of them: who looks for rounds that close looks at those where something has
/// changed since the last look ([`Self::touch`]), and who looks for a worker's pushes finds them by the worker.
#[derive(Clone, Debug, Default)]
pub struct Rounds {
    open: BTreeMap<Key, BTreeMap<WorkerId, Part>>,
    /// Likewise, by worker and local bucket.
    by_worker: BTreeSet<(WorkerId, usize, Step)>,
    /// In how many buckets a worker's pushes of a step wait.
    held: BTreeMap<(WorkerId, Step), usize>,
    /// By local bucket.
    by_bucket: BTreeSet<(usize, Step)>,
    /// Since when each that is open has had as many as it needs.
    ready: BTreeMap<Key, Instant>,
    /// `ready`, the oldest first.
    oldest: BTreeSet<(Instant, Key)>,
    /// Those that may close now, or be passed over.
    touched: BTreeSet<Key>,
}

impl Rounds {
    /// Adds a part; one that was there from the same worker is replaced (a retry in a new session).
    pub fn add(&mut self, bucket: usize, part: Part) {
        let Contribution { worker, step, .. } = part.contribution;
        self.by_bucket.insert((bucket, step));
        self.touched.insert((step, bucket));
        if self.by_worker.insert((worker, bucket, step)) {
            *self.held.entry((worker, step)).or_insert(0) += 1;
        }
        self.open.entry((step, bucket)).or_default().insert(worker, part);
    }

    /// Something has changed that decides over the rounds of a bucket: an update of it is applied.
    pub fn touch(&mut self, bucket: usize) {
        let rounds = self.by_bucket.range((bucket, Step(0))..=(bucket, Step(u64::MAX)));
        self.touched.extend(rounds.map(|(b, s)| (*s, *b)));
    }

    /// Something has changed that decides over every round: who takes part, or the mode.
    pub fn touch_all(&mut self) {
        self.touched.extend(self.open.keys());
    }

    /// The step of `worker` that waits in bucket `bucket`, if there is one.
    pub fn waiting(&self, worker: WorkerId, bucket: usize) -> Option<Step> {
        let of = (worker, bucket, Step(0))..=(worker, bucket, Step(u64::MAX));
        self.by_worker.range(of).next().map(|(_, _, step)| *step)
    }

    /// Whether a push of `worker` for `step` waits for the others in any bucket.
    pub fn holds(&self, worker: WorkerId, step: Step) -> bool {
        self.held.contains_key(&(worker, step))
    }

    /// Whether any push of `worker` waits for the others.
    pub fn holds_any(&self, worker: WorkerId) -> bool {
        self.held.range((worker, Step(0))..=(worker, Step(u64::MAX))).next().is_some()
    }

    /// Drops what a worker that left has pushed into open rounds: it was never acknowledged.
    pub fn forget(&mut self, worker: WorkerId) {
        let of = (worker, 0, Step(0))..=(worker, usize::MAX, Step(u64::MAX));
        let own: Vec<_> = self.by_worker.range(of).copied().collect();
        own.into_iter().for_each(|(_, bucket, step)| _ = self.remove((step, bucket), worker));
    }

    /// Takes out the parts of members that a later round was applied without, of the rounds that were touched.
    pub fn take_passed_over(&mut self, members: &Members) -> Vec<Contribution> {
        let late = |(step, bucket): &Key, w: WorkerId| {
            members.get(w).is_some_and(|m| m.is_passed_over(*bucket, *step))
        };
        let round = |key: &Key| Some((*key, self.open.get(key)?));
        let parts = self.touched.iter().filter_map(round);
        let found: Vec<_> = parts
            .flat_map(|(key, r)| r.keys().filter(move |w| late(&key, **w)).map(move |w| (key, *w)))
            .collect();
        found.into_iter().filter_map(|(key, w)| Some(self.remove(key, w)?.contribution)).collect()
    }

    /// Takes one part out of its round, and the round, where that was its last.
    fn remove(&mut self, key: Key, worker: WorkerId) -> Option<Part> {
        let round = self.open.get_mut(&key)?;
        let part = round.remove(&worker)?;
        if round.is_empty() {
            self.remove_round(key);
        }
        self.forget_part(key, worker);
        Some(part)
    }

    fn remove_round(&mut self, key: Key) -> BTreeMap<WorkerId, Part> {
        let (step, bucket) = key;
        self.waits_again(key);
        self.touched.remove(&key);
        self.by_bucket.remove(&(bucket, step));
        self.open.remove(&key).unwrap_or_default()
    }

    fn forget_part(&mut self, (step, bucket): Key, worker: WorkerId) {
        if self.by_worker.remove(&(worker, bucket, step))
            && let Entry::Occupied(mut held) = self.held.entry((worker, step))
        {
            *held.get_mut() -= 1;
            if *held.get() == 0 {
                held.remove();
            }
        }
    }

    /// Whether nothing waits.
    pub fn is_empty(&self) -> bool {
        self.open.is_empty()
    }

    /// Those that were touched, by step and local bucket.
    pub fn touched(&self) -> Vec<Key> {
        self.touched.iter().copied().collect()
    }

    /// Takes out the parts of these rounds, by rising step, bucket and worker.
    pub fn take(&mut self, keys: Vec<Key>) -> Vec<(usize, Part)> {
        let all = keys.into_iter().flat_map(|key| self.take_round(key).into_iter().map(move |p| (key.1, p)));
        all.collect()
    }

    fn take_round(&mut self, key: Key) -> Vec<Part> {
        let round = self.remove_round(key);
        round.keys().for_each(|w| self.forget_part(key, *w));
        round.into_values().collect()
    }

    /// The rounds that close now, of those that were touched and those that have waited long enough: those for which every
    /// active member's push is in, or as many as `rule` needs, for long enough. `leaving` are members whose Leave is
    /// proposed; who calls touches every round when they change.
    pub fn complete(
        &mut self,
        members: &Members,
        leaving: &BTreeSet<WorkerId>,
        rule: &RoundConfig,
        now: Instant,
    ) -> Vec<Key> {
        let mut closing = Vec::new();
        let due = self.oldest.iter().take_while(|(since, _)| *since + rule.rule().grace() <= now);
        let mut look = std::mem::take(&mut self.touched);
        look.extend(due.map(|(_, key)| *key));
        for key in look {
            let (step, bucket) = key;
            let Some(round) = self.open.get(&key) else { continue };
            let is_behind = |m: &Member| m.is_active() && m.step(bucket).is_some_and(|s| s < step);
            let expects = |w: &WorkerId| members.get(*w).is_some_and(is_behind) && !leaving.contains(w);
            let left = leaving.iter().filter(|w| members.get(**w).is_some_and(is_behind)).count();
            let active = members.behind(bucket, step) - left;
            let needs = rule.rule().needs(active);
            // Members are looked at only where there may be enough.
            let arrived = if round.len() < needs { 0 } else { round.keys().filter(|w| expects(w)).count() };
            if arrived < needs {
                self.waits_again(key);
                continue;
            }
            let since = *self.ready.entry(key).or_insert(now);
            self.oldest.insert((since, key));
            if rule.closes(arrived, active, now - since) {
                closing.push(key);
            }
        }
        closing
    }

    /// When the next round has waited long enough for those that are missing.
    pub fn due(&self, rule: &RoundConfig) -> Option<Instant> {
        let (first, _) = self.oldest.first()?;
        (rule.rule().grace() > Duration::ZERO).then(|| *first + rule.rule().grace())
    }

    /// A round that may not close yet is not due before it has waited once more.
    pub fn waits_again(&mut self, round: Key) {
        if let Some(since) = self.ready.remove(&round) {
            self.oldest.remove(&(since, round));
        }
    }

    /// Closes a round.
    pub fn close(&mut self, round: Key) -> Option<Closed> {
        self.open.contains_key(&round).then(|| Closed(self.take_round(round)))
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
    use paraft_common::{
        Mode, Seq, SessionId, Version,
        encoding::Values,
        round::{Backup, Quorum},
    };
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

    #[derive(Clone, Debug)]
    enum Op {
        Push(u32, usize),
        Apply(usize),
        Rest(u32),
        Resume(u32),
        Leave(u32),
        Join(u32),
        Wait,
    }

    fn op() -> impl Strategy<Value = Op> {
        prop_oneof![
            12 => (0u32..4, 0usize..3).prop_map(|(w, b)| Op::Push(w, b)),
            4 => (0usize..3).prop_map(Op::Apply),
            1 => (0u32..4).prop_map(Op::Rest),
            1 => (0u32..4).prop_map(Op::Resume),
            1 => (0u32..4).prop_map(Op::Leave),
            1 => (0u32..4).prop_map(Op::Join),
            2 => Just(Op::Wait),
        ]
    }

    fn rule() -> impl Strategy<Value = RoundConfig> {
        prop_oneof![
            Just(RoundConfig::default()),
            Just(RoundConfig::Backup(Backup { spare: 1 })),
            Just(RoundConfig::Quorum(Quorum { quorum: 2, grace_ms: 20, weight: Weight::Equal })),
        ]
    }

    proptest! {
        /// A leader looks at the rounds where something has changed, and closes those that it would close if it looked at all.
        #[test]
        fn a_round_that_nobody_looks_at_is_one_that_does_not_close(
            ops in prop::collection::vec(op(), 1..120), rule in rule(),
        ) {
            let mut members = Members::default();
            (0..4).for_each(|w| members.join(WorkerId(w), SessionId(1), 3, true));
            let (mut some, mut all) = (Rounds::default(), Rounds::default());
            let (mut leaving, mut now) = (BTreeSet::new(), Instant::now());
            let mut closed: Vec<(Key, Vec<WorkerId>)> = Vec::new();
            for op in ops {
                match op {
                    Op::Push(w, bucket) => {
                        let worker = WorkerId(w);
                        let Some(m) = members.get(worker).filter(|m| m.is_active()) else { continue };
                        let step = m.step(bucket).unwrap_or_default().next();
                        if some.waiting(worker, bucket).is_some() {
                            continue;
                        }
                        let contribution = Contribution { step, ..part(w, Payload::default()).contribution };
                        let part = Part { contribution, payload: Payload::default() };
                        some.add(bucket, part.clone());
                        all.add(bucket, part);
                    }
                    Op::Apply(bucket) => {
                        let Some(at) = closed.iter().position(|((_, b), _)| *b == bucket) else { continue };
                        let ((step, _), workers) = closed.remove(at);
                        workers.into_iter().for_each(|w| members.pushed(w, SessionId(1), Seq(1), bucket, step));
                        members.pass_over(bucket, step);
                        some.touch(bucket);
                    }
                    Op::Rest(w) => members.rest(WorkerId(w), SessionId(1)),
                    Op::Resume(w) => _ = members.resume(WorkerId(w), SessionId(1), false),
                    Op::Leave(w) if leaving.insert(WorkerId(w)) => {}
                    Op::Leave(w) => {
                        leaving.remove(&WorkerId(w));
                        members.leave(WorkerId(w), SessionId(1));
                        [&mut some, &mut all].into_iter().for_each(|r| r.forget(WorkerId(w)));
                    }
                    Op::Join(w) if members.get(WorkerId(w)).is_none() => {
                        members.join(WorkerId(w), SessionId(1), 3, true);
                    }
                    Op::Join(_) => {}
                    Op::Wait => now += Duration::from_millis(15),
                }
                if matches!(op, Op::Rest(_) | Op::Resume(_) | Op::Leave(_) | Op::Join(_)) {
                    some.touch_all();
                }
                all.touch_all();
                prop_assert_eq!(some.take_passed_over(&members).len(), all.take_passed_over(&members).len());
                let keys = some.complete(&members, &leaving, &rule, now);
                prop_assert_eq!(&keys, &all.complete(&members, &leaving, &rule, now));
                prop_assert_eq!(some.due(&rule), all.due(&rule));
                for key in keys {
                    let parts = some.close(key).map(|c| c.0).unwrap_or_default();
                    all.close(key);
                    closed.push((key, parts.iter().map(|p| p.contribution.worker).collect()));
                }
                for w in (0..4).map(WorkerId) {
                    let steps = (1..40).map(Step);
                    prop_assert!(steps.clone().all(|s| some.holds(w, s) == all.open.iter().any(|((t, _), r)| *t == s && r.contains_key(&w))));
                    prop_assert_eq!(some.holds_any(w), all.open.values().any(|r| r.contains_key(&w)));
                }
            }
        }
    }
}
