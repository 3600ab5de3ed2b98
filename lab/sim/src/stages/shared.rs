//! State that the ranks of a worker share: current minibatches, the newest weights, and counters.

use super::cut::Cut;
use crate::{client::Client, clock::Moment, error::SimError, lines::Lines, world::World};
use paraft_common::{Step, WorkerId};
use parking_lot::Mutex;
use std::{collections::BTreeMap, ops::Range, sync::Arc};

/// A minibatch in progress.
struct Minibatch {
    samples: Vec<u32>,
    /// Samples of the next minibatch.
    behind: usize,
    /// The weights that it is computed at.
    weights: Vec<f32>,
    /// Mean loss, and the gradient.
    gradient: Option<(f32, Vec<f32>)>,
    /// Ranks that have not pushed their part.
    left: usize,
}

/// The utilisation of ranks.
#[derive(Default)]
struct Utilization {
    /// When a rank started after an idle time of all ranks.
    began: Option<Moment>,
    ended: Moment,
    /// Total time between such starts and ends.
    spans: u64,
}

/// The shared state of a worker's ranks.
pub(crate) struct Shared {
    worker: WorkerId,
    pub lines: Arc<Lines>,
    /// The newest weights of all stages.
    pub whole: Mutex<Vec<f32>>,
    minibatches: Mutex<BTreeMap<Step, Minibatch>>,
    busy: Mutex<Utilization>,
    ranks: Mutex<Vec<OfRank>>,
}

/// The counters of a rank.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct OfRank {
    /// Nanoseconds of computation.
    pub worked: u64,
    /// The idle share of the time that its worker spent in steps.
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

    /// The counters of each rank.
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

    /// The leader sets the samples of a step; `behind` is the size of the next minibatch.
    pub fn has(&self, step: Step, samples: Vec<u32>, behind: usize) {
        let (weights, left) = (vec![0.0; self.whole.lock().len()], self.lines.ranks());
        let minibatch = Minibatch { samples, behind, weights, gradient: None, left };
        self.minibatches.lock().insert(step, minibatch);
    }

    /// Whether the samples of a step are set.
    pub fn knows(&self, step: Step) -> bool {
        self.minibatches.lock().contains_key(&step)
    }

    /// The sizes of a step and of the next one.
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

    /// A rank finishes a step; returns its loss.
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

    /// A rank starts a step with these weights of its part of the flat vector.
    pub fn begins(&self, step: Step, part: Range<usize>, weights: &[f32]) {
        if let Some(minibatch) = self.minibatches.lock().get_mut(&step) {
            minibatch.weights[part].copy_from_slice(weights);
        }
    }

    /// All ranks have finished what they started.
    pub fn flushed(&self) {
        let busy = &mut *self.busy.lock();
        busy.spans += busy.began.take().map_or(0, |began| busy.ended - began);
    }
}

/// No event of the simulator takes a rank's session away.
pub(super) fn lost() -> SimError {
    SimError::Runtime("a rank of a worker's stages is not where the others are".into())
}
