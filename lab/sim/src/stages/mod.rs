//! A worker whose ranks hold a stage of its model each (`[parallel]`), in simulated time.
//!
//! Each rank has a session of its own with the shards of its stage. In which order it computes micro-batches, when it pulls, at which versions
//! it computes and what it waits for is what `paraft_worker`'s stages do. A step's time is divided among them as their layers cost, and among
//! micro-batches by samples.
//!
//! The gradient is that of the whole model, micro-batch by micro-batch, at the weights that all ranks had as they began with it: it is computed
//! once, when the first bucket of it is to be pushed.
//!
//! - this file: how the model is cut, and the rank that leads. `rank`: what each does. `shared`: what they share.

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

/// How the model is cut.
pub(crate) struct Cut {
    schedule: PipelineSchedule,
    micro_batches: usize,
    pub stages: Vec<Part>,
}

/// A stage.
pub(crate) struct Part {
    pub layers: Range<usize>,
    pub buckets: Range<usize>,
    /// Of a step's time.
    pub share: f64,
    /// Values of a sample that the next stage takes.
    outputs: usize,
    /// Parameters that another stage uses too, and which that is.
    lends: Vec<(Range<usize>, usize)>,
    /// Those that it uses of another.
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

    /// Micro-batches of a minibatch of so many samples.
    fn micro(&self, n: usize) -> usize {
        self.micro_batches.min(n).max(1)
    }

    /// Samples of one of them.
    fn samples(&self, n: usize, m: usize) -> usize {
        let micro = self.micro(n);
        n * (m + 1) / micro - n * m / micro
    }
}

/// The rank that leads the others.
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

    /// What comes next is from other minibatches.
    pub fn begins(&mut self) {
        self.ahead.clear();
    }

    /// All ranks pull; behind a step that another one is behind, each by itself.
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

    /// All ranks make a step; gives its loss, and how many samples it has. `goes_on`: nothing is to be done before the next.
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

    /// The newest weights of all stages, where nothing is under way.
    pub fn whole(&self) -> Vec<f32> {
        self.shared.whole.lock().clone()
    }

    /// The job is done. Gives what each rank has done.
    pub fn over(&mut self) -> Vec<OfRank> {
        self.rank.say(Message::Over);
        self.shared.of_ranks()
    }
}

/// The values of buckets that follow each other.
pub(crate) fn values(layout: &Layout, buckets: &Range<usize>) -> Range<usize> {
    let of = layout.buckets().get(buckets.clone()).unwrap_or_default();
    of.first().map_or(0, |b| b.offset)..of.last().map_or(0, |b| b.range().end)
}

/// Nothing that the simulator has takes a rank's session from it.
fn lost() -> SimError {
    SimError::Runtime("a rank of a worker's stages is not where the others are".into())
}
