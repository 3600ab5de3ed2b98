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
mod tests {
    use super::*;
    use crate::{DataShape, ModelConfig, Sample};
    use proptest::prelude::*;

    fn layers(costs: &[f64]) -> Vec<Layer> {
        costs.iter().enumerate().map(|(i, c)| Layer::of(10 * i..10 * (i + 1), *c, 4)).collect()
    }

    fn most(costs: &[f64], counts: &[usize]) -> f64 {
        let mut at = 0;
        let of = |n: &usize| {
            at += n;
            costs[at - n..at].iter().sum::<f64>()
        };
        counts.iter().map(of).fold(0.0, f64::max)
    }

    #[test]
    fn a_model_is_cut_where_the_costliest_stage_is_cheapest() {
        let cut = |costs: &[f64], n| {
            let stages = Stages::even(&layers(costs), n).expect("it can be");
            stages.layers().iter().map(Range::len).collect::<Vec<_>>()
        };
        assert_eq!(cut(&[1.0; 8], 2), [4, 4]);
        assert_eq!(cut(&[1.0; 8], 4), [2, 2, 2, 2]);
        assert_eq!(cut(&[0.0, 1.0, 1.0, 1.0, 3.0], 2), [4, 1]);
        assert_eq!(cut(&[5.0, 1.0, 1.0, 1.0], 3)[0], 1);
        assert_eq!(cut(&[1.0, 1.0, 1.0], 3), [1, 1, 1]);
        assert_eq!(cut(&[0.0, 0.0, 0.0], 2).len(), 2);
    }

    proptest! {
        #[test]
        fn no_other_cut_is_cheaper(costs in prop::collection::vec(0u32..50, 2..9), stages in 1usize..5) {
            let costs: Vec<f64> = costs.iter().map(|c| f64::from(*c)).collect();
            let stages = stages.min(costs.len());
            let cut = Stages::even(&layers(&costs), stages).expect("it can be");
            let counts: Vec<usize> = cut.layers().iter().map(Range::len).collect();
            let found = most(&costs, &counts);
            // All other splits: which of the boundaries between layers are used.
            for edges in 0u32..1 << (costs.len() - 1) {
                if edges.count_ones() as usize != stages - 1 {
                    continue;
                }
                let mut other = vec![1];
                for i in 0..costs.len() - 1 {
                    if edges >> i & 1 == 1 { other.push(1) } else { *other.last_mut().expect("one") += 1 }
                }
                prop_assert!(found <= most(&costs, &other), "{counts:?}, {other:?}");
            }
        }
    }

    #[test]
    fn what_a_later_stage_names_of_an_earlier_one_is_a_loan() {
        let shape = DataShape { sample: Sample::Tokens { time: 8, vocab: 30 }, classes: Some(30) };
        let text = "kind = \"transformer\"\nlayers = 4\nheads = 1\nwidth = 16";
        let model = toml::from_str::<ModelConfig>(text).expect("a model").build(shape).expect("it builds");
        let len: usize = model.tensors().iter().map(paraft_common::TensorSpec::len).sum();
        for n in [1, 2, 3, 6] {
            let stages = Stages::even(&model.layers(), n).expect("it can be");
            assert_eq!(stages.own().iter().map(Range::len).sum::<usize>(), len);
            assert!(stages.own().windows(2).all(|w| w[0].end == w[1].start));
            let tied = Loan { range: 0..30 * 16, owner: 0, user: n - 1 };
            assert_eq!(stages.loans(), if n == 1 { vec![] } else { vec![tied] });
            assert_eq!(stages.values().len(), if n == 1 { 0 } else { n });
        }
        assert!(Stages::even(&model.layers(), 7).expect_err("too many").contains("6 layers"));
        let given = Stages::given(&model.layers(), &[1, 4, 1]).expect("it can be");
        assert_eq!(given.layers(), [0..1, 1..5, 5..6]);
        for wrong in [&[1, 4][..], &[1, 5, 0], &[3, 3, 3]] {
            assert!(Stages::given(&model.layers(), wrong).is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn layers_without_clear_parameter_owners_are_refused() {
        let gap = [Layer::of(0..4, 1.0, 1), Layer::of(5..9, 1.0, 1)];
        assert!(Stages::even(&gap, 2).expect_err("a gap").contains("layer 1"));
        let overlaps = [Layer::of(0..4, 1.0, 1), Layer::of(2..9, 1.0, 1)];
        assert!(Stages::even(&overlaps, 2).is_err());
        let bare = [Layer::of(0..4, 1.0, 1), Layer::default()];
        assert!(Stages::even(&bare, 2).expect_err("none").contains("no parameters"));
    }
}
