//! A worker whose ranks hold one pipeline stage each (`[parallel]`), in simulated time.
//!
//! Each rank has its own session with the shards of its stage. `paraft_worker`'s stages decide the
//! order of micro-batches, the pulls, the versions and the waits. A step's time is divided among stages
//! by the cost of their layers, and among micro-batches by samples.
//!
//! The gradient is that of the whole model, micro-batch by micro-batch, at the weights with which the
//! ranks started it. It is computed once, when its first bucket is pushed.
//!
//! - this file: the division of the model, and the leading rank. `rank`: the actions of each rank.
//!   `shared`: their shared state.

mod rank;
mod shared;

pub(crate) use rank::Rank;
pub(crate) use shared::{OfRank, Shared};

use crate::{SimError, client::Client, lines::Message};
use paraft_common::{Layout, Step, pipeline::PipelineSchedule};
use paraft_models::{Layer, Loan, Stages};
use paraft_session::{Pull, Pulled};
use paraft_worker::worker::Minibatches;
use std::{collections::VecDeque, ops::Range, sync::Arc};

/// The division of the model.
pub(crate) struct Cut {
    schedule: PipelineSchedule,
    micro_batches: usize,
    pub stages: Vec<Part>,
}

/// A stage.
pub(crate) struct Part {
    pub layers: Range<usize>,
    pub buckets: Range<usize>,
    /// Its share of a step's time.
    pub share: f64,
    /// Values per sample that the next stage receives.
    outputs: usize,
    /// Parameters that another stage uses too, with that stage.
    lends: Vec<(Range<usize>, usize)>,
    /// Parameters of another stage that it uses, with that stage.
    borrows: Vec<(Range<usize>, usize)>,
}

impl Cut {
    pub fn new(
        (schedule, micro_batches): (PipelineSchedule, usize),
        layers: &[Layer],
        stages: &Stages,
        layout: &Layout,
    ) -> Self {
        let cost: f64 = stages.costs().iter().sum();
        let part = |stage: usize| {
            let of = stages.layers()[stage].clone();
            let buckets = layout.buckets_in(stage);
            let between = |is: fn(&Loan) -> (usize, usize)| {
                let loans = stages.loans().iter().map(|loan| (is(loan), loan.range.clone()));
                loans
                    .filter(|((here, _), _)| *here == stage)
                    .map(|((_, other), range)| (range, other))
                    .collect()
            };
            Part {
                buckets: buckets.start as usize..buckets.end as usize,
                share: if cost > 0.0 { stages.costs()[stage] / cost } else { 1.0 / stages.len() as f64 },
                outputs: layers[of.end - 1].outputs,
                lends: between(|loan| (loan.owner, loan.user)),
                borrows: between(|loan| (loan.user, loan.owner)),
                layers: of,
            }
        };
        Self { schedule, micro_batches, stages: (0..stages.len()).map(part).collect() }
    }

    pub fn ranks(&self) -> usize {
        self.stages.len()
    }

    /// The number of micro-batches in a minibatch of `n` samples.
    fn micro(&self, n: usize) -> usize {
        self.micro_batches.min(n).max(1)
    }

    /// Samples of one micro-batch.
    fn samples(&self, n: usize, m: usize) -> usize {
        let micro = self.micro(n);
        n * (m + 1) / micro - n * m / micro
    }
}

/// The leading rank.
pub(crate) struct Leader {
    shared: Arc<Shared>,
    rank: Rank,
    /// The samples of the next steps.
    ahead: VecDeque<Vec<u32>>,
}

impl Leader {
    pub fn new(shared: &Arc<Shared>, rank: Rank) -> Self {
        Self { shared: shared.clone(), rank, ahead: VecDeque::new() }
    }

    /// The next steps use new minibatches.
    pub fn begins(&mut self) {
        self.ahead.clear();
    }

    /// Makes all ranks pull; after a step that another step overlaps, each pulls alone.
    pub async fn pull(&mut self, client: &mut Client, pull: Pull) -> Result<Pulled, SimError> {
        let together = !self.rank.goes_on_with(pull.done.next());
        if together {
            self.rank.say(Message::Pull(pull.clone()));
        }
        let pulled = self.rank.pull_own(client, pull).await?;
        if together {
            self.rank.level(pulled.done).await?;
        }
        self.rank.lend().await;
        Ok(pulled)
    }

    /// Makes all ranks take a step; returns its loss and its number of samples. `goes_on`: the next
    /// step follows at once.
    pub async fn step(
        &mut self,
        client: &mut Client,
        (step, goes_on): (Step, bool),
        minibatches: &mut Minibatches,
    ) -> Result<(f32, usize), SimError> {
        let goes_on = goes_on && self.rank.goes_on();
        self.know(step, minibatches);
        if goes_on {
            self.know(step.next(), minibatches);
        }
        if !self.rank.goes_on_with(step) {
            self.rank.say(Message::Step(step));
        }
        let samples = self.shared.lens(step).0;
        let loss = self.rank.step(client, step, Some(goes_on)).await?;
        Ok((loss, samples))
    }

    fn know(&mut self, step: Step, minibatches: &mut Minibatches) {
        if self.shared.knows(step) {
            return;
        }
        while self.ahead.len() < 2 {
            self.ahead.push_back(minibatches.next());
        }
        let samples = self.ahead.pop_front().unwrap_or_default();
        self.shared.has(step, samples, self.ahead.front().map_or(0, Vec::len));
    }

    /// The newest weights of all stages, while no step is in progress.
    pub fn whole(&self) -> Vec<f32> {
        self.shared.whole.lock().clone()
    }

    /// Ends the job. Returns the results of each rank.
    pub fn over(&mut self) -> Vec<OfRank> {
        self.rank.say(Message::Over);
        self.shared.of_ranks()
    }
}

/// The range of values of consecutive buckets.
pub(crate) fn values(layout: &Layout, buckets: &Range<usize>) -> Range<usize> {
    let of = layout.buckets().get(buckets.clone()).unwrap_or_default();
    of.first().map_or(0, |b| b.offset)..of.last().map_or(0, |b| b.range().end)
}

/// No event of the simulator takes a rank's session away.
fn lost() -> SimError {
    SimError::Runtime("a rank of a worker's stages is not where the others are".into())
}
