//! The division of a model into the stages of its ranks.

use paraft_common::{Layout, pipeline::PipelineSchedule};
use paraft_models::{Layer, Loan, Stages};
use std::ops::Range;

/// The division of the model.
pub(crate) struct Cut {
    pub schedule: PipelineSchedule,
    pub micro_batches: usize,
    pub stages: Vec<Part>,
}

/// A stage.
pub(crate) struct Part {
    pub layers: Range<usize>,
    pub buckets: Range<usize>,
    /// Its share of a step's time.
    pub share: f64,
    /// Values per sample that the next stage receives.
    pub outputs: usize,
    /// Parameters that another stage uses too, with that stage.
    pub lends: Vec<(Range<usize>, usize)>,
    /// Parameters of another stage that it uses, with that stage.
    pub borrows: Vec<(Range<usize>, usize)>,
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
    pub fn micro(&self, n: usize) -> usize {
        self.micro_batches.min(n).max(1)
    }

    /// Samples of one micro-batch.
    pub fn samples(&self, n: usize, m: usize) -> usize {
        let micro = self.micro(n);
        n * (m + 1) / micro - n * m / micro
    }
}

/// The range of values of consecutive buckets.
pub(crate) fn values(layout: &Layout, buckets: &Range<usize>) -> Range<usize> {
    let of = layout.buckets().get(buckets.clone()).unwrap_or_default();
    of.first().map_or(0, |b| b.offset)..of.last().map_or(0, |b| b.range().end)
}
