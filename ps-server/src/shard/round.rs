//! BSP's open rounds: the pushes of one (step, bucket) until everyone's are in. Leader-only: may vanish at any
//! moment, since nothing in it has been acknowledged.

use super::{command::Contribution, members::Members};
use paraft_common::{
    Payload, Step, WorkerId,
    codec::{F32_BYTES, put_f32_le, sum_of_squares_le},
};
use std::collections::BTreeMap;

/// A push that waits for the others.
#[derive(Clone, Debug)]
pub struct Part {
    /// Who, which seq, which step, pulled when.
    pub contribution: Contribution,
    /// Little-endian `f32`.
    pub payload: Payload,
}

/// A closed round: the sum of its parts in rising order of workers.
#[derive(Clone, Debug)]
pub struct Sum {
    /// By rising worker.
    pub contributions: Vec<Contribution>,
    /// The sum, little-endian.
    pub payload: Payload,
    /// Of the mean (the sum over the number of contributions).
    pub mean_sum_of_squares: f64,
}

/// All open rounds of a shard.
#[derive(Debug, Default)]
pub struct Rounds {
    open: BTreeMap<(Step, usize), BTreeMap<WorkerId, Part>>,
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

    /// Drops what a worker that left has pushed into open rounds: it was never acknowledged.
    pub fn forget(&mut self, worker: WorkerId) {
        for round in self.open.values_mut() {
            round.remove(&worker);
        }
        self.open.retain(|_, r| !r.is_empty());
    }

    /// Everything was lost with the leadership.
    pub fn clear(&mut self) {
        self.open.clear();
    }

    /// The rounds for which every active member's push is in. `leaving` are members whose Leave is proposed.
    pub fn complete(&self, members: &Members, leaving: &dyn Fn(WorkerId) -> bool) -> Vec<(Step, usize)> {
        let full = |(step, bucket): &(Step, usize), round: &BTreeMap<WorkerId, Part>| {
            members
                .active()
                .filter(|(w, m)| !leaving(*w) && m.steps.get(*bucket).is_some_and(|s| s < step))
                .all(|(w, _)| round.contains_key(&w))
        };
        self.open.iter().filter(|(k, r)| full(k, r)).map(|(k, _)| *k).collect()
    }

    /// Closes a round.
    pub fn close(&mut self, step: Step, bucket: usize) -> Option<Sum> {
        self.open.remove(&(step, bucket)).map(|r| sum(r.into_values().collect()))
    }
}

/// Adds the parts in rising order of workers: floating-point addition is not associative, so the order must
/// not depend on who came first.
fn sum(parts: Vec<Part>) -> Sum {
    let contributions: Vec<_> = parts.iter().map(|p| p.contribution).collect();
    let payload = match parts.as_slice() {
        // One worker: the bytes as they came, which makes BSP, SSP and ASP bit-equal for one worker.
        [only] => only.payload.clone(),
        [first, rest @ ..] => {
            // Block by block, so that the running sum stays in the first-level cache.
            const BLOCK: usize = 1024;
            const CHECKED: &str = "the parts of a bucket have its length: it was checked where they came in";
            let mut first = first.payload.reader();
            let mut rest: Vec<_> = rest.iter().map(|p| p.payload.reader()).collect();
            let mut acc = [0f32; BLOCK];
            let mut out = Vec::with_capacity(first.left());
            while first.left() > 0 {
                let acc = &mut acc[..BLOCK.min(first.left() / F32_BYTES)];
                first.values(acc).expect(CHECKED);
                rest.iter_mut().for_each(|r| r.add_values(acc).expect(CHECKED));
                put_f32_le(acc, &mut out);
            }
            out.into()
        }
        [] => Payload::EMPTY,
    };
    let n = contributions.len().max(1) as f64;
    Sum { contributions, mean_sum_of_squares: sum_of_squares_le(&payload) / (n * n), payload }
}
