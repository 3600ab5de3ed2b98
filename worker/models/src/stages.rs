//! Splits a model into pipeline stages: runs of its layers, each held by a rank of a worker.
//!
//! A stage owns the parameters that its layers are the first to use; they are contiguous in the flat vector. A
//! later stage that uses some of them (a tied embedding) borrows them: the owner sends the weights, and receives
//! the gradient.

use crate::net::Layer;
use std::ops::Range;

/// See the module.
#[derive(Clone, Debug, PartialEq)]
pub struct Stages {
    layers: Vec<Range<usize>>,
    own: Vec<Range<usize>>,
    loans: Vec<Loan>,
    costs: Vec<f64>,
}

/// Parameters that one stage uses and another owns.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Loan {
    /// Their range in the flat vector.
    pub range: Range<usize>,
    /// The stage that pulls and pushes them.
    pub owner: usize,
    /// The later stage that uses them too.
    pub user: usize,
}

impl Stages {
    /// This many stages, split so that the most expensive one costs least.
    ///
    /// # Errors
    /// The model has fewer layers, or they do not say which parameters they own.
    pub fn even(layers: &[Layer], stages: usize) -> Result<Self, String> {
        if stages == 0 || stages > layers.len() {
            return Err(format!("{stages} stages of a model of {} layers: each needs one", layers.len()));
        }
        Self::of(layers, &even(layers, stages))
    }

    /// Stages with these numbers of layers.
    ///
    /// # Errors
    /// The numbers do not add up to the model's layers, or the layers do not say which parameters they
    /// own.
    pub fn given(layers: &[Layer], counts: &[usize]) -> Result<Self, String> {
        let sum = counts.iter().fold(0usize, |sum, n| sum.saturating_add(*n));
        if sum != layers.len() || counts.contains(&0) {
            return Err(format!(
                "{counts:?} layers in the stages, and the model has {}: each has one at least",
                layers.len()
            ));
        }
        Self::of(layers, counts)
    }

    fn of(layers: &[Layer], counts: &[usize]) -> Result<Self, String> {
        let mut at = 0;
        let ranges: Vec<Range<usize>> = (counts.iter())
            .map(|n| {
                at += n;
                at - n..at
            })
            .collect();
        let stage_of = |layer: usize| ranges.iter().position(|r| r.contains(&layer)).unwrap_or_default();
        // The parameters that each layer owns.
        let mut owned: Vec<Range<usize>> = Vec::with_capacity(layers.len());
        let (mut end, mut loans) = (0, Vec::new());
        for (i, layer) in layers.iter().enumerate() {
            let begin = end;
            for p in &layer.params {
                if p.start == end {
                    end = p.end;
                } else if let Some(owner) = owned.iter().position(|o| o.start <= p.start && p.end <= o.end) {
                    let (owner, user) = (stage_of(owner), stage_of(i));
                    let loan = Loan { range: p.clone(), owner, user };
                    if owner != user && !loans.contains(&loan) {
                        loans.push(loan);
                    }
                } else {
                    return Err(format!(
                        "layer {i} names the parameters {p:?}, which neither follow those of the layers before it nor are one's of them"
                    ));
                }
            }
            owned.push(begin..end);
        }
        let own: Vec<Range<usize>> =
            ranges.iter().map(|r| owned[r.start].start..owned[r.end - 1].end).collect();
        if let Some(stage) = own.iter().position(Range::is_empty) {
            return Err(format!("stage {stage} (layers {:?}) has no parameters of its own", ranges[stage]));
        }
        let costs = ranges.iter().map(|r| layers[r.clone()].iter().map(|l| l.cost).sum()).collect();
        Ok(Self { layers: ranges, own, loans, costs })
    }

    /// Number of stages.
    pub fn len(&self) -> usize {
        self.layers.len()
    }

    /// Never true.
    pub fn is_empty(&self) -> bool {
        self.layers.is_empty()
    }

    /// The layers of each stage.
    pub fn layers(&self) -> &[Range<usize>] {
        &self.layers
    }

    /// Each stage's own parameters in the flat vector, in order and contiguous.
    pub fn own(&self) -> &[Range<usize>] {
        &self.own
    }

    /// The loans between stages.
    pub fn loans(&self) -> &[Loan] {
        &self.loans
    }

    /// The cost of each stage, in the unit of [`Layer::cost`].
    pub fn costs(&self) -> &[f64] {
        &self.costs
    }

    /// The number of values of each stage, as in a server's job; empty for a single stage.
    pub fn values(&self) -> Vec<usize> {
        if self.len() == 1 { Vec::new() } else { self.own.iter().map(Range::len).collect() }
    }
}

/// The number of layers of each stage that minimizes the largest cost.
fn even(layers: &[Layer], stages: usize) -> Vec<usize> {
    let mut sums = vec![0.0];
    for layer in layers {
        sums.push(sums.last().copied().unwrap_or(0.0) + layer.cost.max(0.0));
    }
    let n = layers.len();
    // `best[i]`: the smallest maximum cost of the first `i` layers in the stages so far; and the start of the last
    // of these, by stage.
    let mut best: Vec<f64> = (0..=n).map(|i| if i == 0 { 0.0 } else { f64::INFINITY }).collect();
    let mut begins: Vec<Vec<usize>> = Vec::new();
    for stage in 0..stages {
        let (mut next, mut begin) = (vec![f64::INFINITY; n + 1], vec![0; n + 1]);
        for end in stage + 1..=n {
            for from in stage..end {
                let cost = f64::max(best[from], sums[end] - sums[from]);
                if cost < next[end] {
                    (next[end], begin[end]) = (cost, from);
                }
            }
        }
        best = next;
        begins.push(begin);
    }
    let (mut counts, mut end) = (vec![0; stages], n);
    for stage in (0..stages).rev() {
        let begin = begins[stage][end];
        counts[stage] = end - begin;
        end = begin;
    }
    counts
}

#[cfg(test)]
#[path = "stages_tests.rs"]
mod tests;
