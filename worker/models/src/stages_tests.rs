//! Tests of `stages`.

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
