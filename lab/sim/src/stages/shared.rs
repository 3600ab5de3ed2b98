//! What the ranks of a worker share: minibatches under way, the newest weights, and what is counted.

use super::{Cut, lost};
use crate::{SimError, client::Client, clock::Moment, lines::Lines, world::World};
use paraft_common::{Step, WorkerId};
use parking_lot::Mutex;
use std::{collections::BTreeMap, ops::Range, sync::Arc};

/// A minibatch under way.
struct Minibatch {
    samples: Vec<u32>,
    /// So many are in the one behind it.
    behind: usize,
    /// Those that it is computed at.
    weights: Vec<f32>,
    /// Mean loss, and the gradient.
    gradient: Option<(f32, Vec<f32>)>,
    /// Ranks that have not pushed their part of it.
    left: usize,
}

/// How busy ranks are.
#[derive(Default)]
struct Busy {
    /// Since when one of them has been, behind a time when none was.
    began: Option<Moment>,
    ended: Moment,
    /// From beginnings to ends.
    spans: u64,
}

/// What the ranks of a worker share.
pub(crate) struct Shared {
    worker: WorkerId,
    pub lines: Arc<Lines>,
    /// The newest weights of all stages.
    pub whole: Mutex<Vec<f32>>,
    minibatches: Mutex<BTreeMap<Step, Minibatch>>,
    busy: Mutex<Busy>,
    ranks: Mutex<Vec<OfRank>>,
}

/// What a rank has done.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct OfRank {
    /// Nanoseconds of its processor.
    pub worked: u64,
    /// Of those in which its worker was in steps.
    pub idle: f64,
    pub bytes_pushed: u64,
    pub bytes_pulled: u64,
    pub bytes_sent: u64,
}

impl Shared {
    pub fn new(world: &World, worker: WorkerId, ranks: usize) -> Arc<Self> {
        let first = worker.0 as usize * ranks;
        Arc::new(Self {
            worker,
            lines: Lines::new(&world.network, first, ranks),
            whole: Mutex::new(vec![0.0; world.layout.len()]),
            minibatches: Mutex::default(),
            busy: Mutex::default(),
            ranks: Mutex::new(vec![OfRank::default(); ranks]),
        })
    }

    /// What each rank has done.
    pub fn of_ranks(&self) -> Vec<OfRank> {
        let spans = self.busy.lock().spans.max(1) as f64;
        let with = |(rank, of): (usize, &OfRank)| OfRank {
            idle: 1.0 - of.worked as f64 / spans,
            bytes_sent: self.lines.sent(rank),
            ..*of
        };
        self.ranks.lock().iter().enumerate().map(with).collect()
    }

    pub fn note(&self, rank: usize, client: &Client) {
        let of = &mut self.ranks.lock()[rank];
        (of.bytes_pushed, of.bytes_pulled) = (client.bytes_pushed, client.bytes_pulled);
    }

    /// The leader has the samples of a step; so many are in the minibatch behind it.
    pub fn has(&self, step: Step, samples: Vec<u32>, behind: usize) {
        let (weights, left) = (vec![0.0; self.whole.lock().len()], self.lines.ranks());
        let minibatch = Minibatch { samples, behind, weights, gradient: None, left };
        self.minibatches.lock().insert(step, minibatch);
    }

    /// Whether it has them.
    pub fn knows(&self, step: Step) -> bool {
        self.minibatches.lock().contains_key(&step)
    }

    /// Samples of a step, and of the one behind it.
    pub fn lens(&self, step: Step) -> (usize, usize) {
        self.minibatches.lock().get(&step).map_or((0, 0), |m| (m.samples.len(), m.behind))
    }

    /// The gradient of a step.
    pub fn gradient<T>(
        &self,
        world: &World,
        cut: &Cut,
        step: Step,
        read: impl FnOnce(&[f32]) -> T,
    ) -> Result<T, SimError> {
        let mut minibatches = self.minibatches.lock();
        let Some(Minibatch { samples, weights, gradient, .. }) = minibatches.get_mut(&step) else {
            return Err(lost());
        };
        if gradient.is_none() {
            let parts = cut.micro_batches;
            let (loss, sum) = world.learner.lock().in_parts((self.worker, step), weights, samples, parts)?;
            *gradient = Some((loss, sum));
        }
        gradient.as_ref().map(|(_, sum)| read(sum)).ok_or_else(lost)
    }

    /// A rank is done with a step; gives its loss.
    pub fn done(&self, step: Step) -> f32 {
        let mut minibatches = self.minibatches.lock();
        let Some(minibatch) = minibatches.get_mut(&step) else { return f32::NAN };
        let loss = minibatch.gradient.as_ref().map_or(f32::NAN, |(loss, _)| *loss);
        minibatch.left -= 1;
        if minibatch.left == 0 {
            minibatches.remove(&step);
        }
        loss
    }

    pub fn worked(&self, rank: usize, time: Range<Moment>) {
        let busy = &mut *self.busy.lock();
        busy.began.get_or_insert(time.start);
        busy.ended = busy.ended.max(time.end);
        self.ranks.lock()[rank].worked += time.end - time.start;
    }

    /// A rank has these weights, in a part of the flat vector, as it begins with a step.
    pub fn begins(&self, step: Step, part: Range<usize>, weights: &[f32]) {
        if let Some(minibatch) = self.minibatches.lock().get_mut(&step) {
            minibatch.weights[part].copy_from_slice(weights);
        }
    }

    /// All ranks are done with what they had begun.
    pub fn flushed(&self) {
        let busy = &mut *self.busy.lock();
        busy.spans += busy.began.take().map_or(0, |began| busy.ended - began);
    }
}
