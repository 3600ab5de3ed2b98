//! Tests of `constraint`.

use super::*;
use proptest::prelude::*;

fn held(rule: Rule, values: &[f32]) -> Vec<f32> {
    let mut out = values.to_vec();
    apply(&[Constraint { offset: 0, values: values.len(), rule }], 0..values.len(), &mut out);
    out
}

#[test]
fn rules_give_what_torch_gives() {
    let clamp = Rule::Clamp { min: Some(-0.5), max: None };
    assert_eq!(held(clamp, &[-2.0, -0.5, 0.0, 7.0]), [-0.5, -0.5, 0.0, 7.0]);
    assert!(held(clamp, &[f32::NAN])[0].is_nan());
    assert_eq!(held(Rule::UnitNorm { row: 2 }, &[3.0, 4.0, 0.0, 0.0]), [0.6, 0.8, 0.0, 0.0]);
    // torch.renorm(torch.tensor([[3., 4.], [.3, .4]]), 2, 0, 1.)
    let renormed = held(Rule::MaxNorm { row: 2, max: 1.0 }, &[3.0, 4.0, 0.3, 0.4]);
    assert!(renormed.iter().zip([0.6, 0.8, 0.3, 0.4]).all(|(a, b)| (a - b).abs() < 1e-7), "{renormed:?}");
    // Values that are NaN or overflow stay as they are.
    assert_eq!(held(Rule::UnitNorm { row: 2 }, &[f32::INFINITY, 1.0]), [f32::INFINITY, 1.0]);
}

#[test]
fn constraint_is_of_its_own_values_alone() {
    let rules = [
        Constraint { offset: 2, values: 4, rule: Rule::Clamp { min: Some(0.0), max: Some(1.0) } },
        Constraint { offset: 8, values: 2, rule: Rule::UnitNorm { row: 2 } },
    ];
    let mut whole = vec![-1.0f32; 12];
    apply(&rules, 0..12, &mut whole);
    let mut parts = vec![-1.0f32; 12];
    for at in [0, 4, 8] {
        apply(&rules, at..at + 4, &mut parts[at..at + 4]);
    }
    assert_eq!(whole, parts);
    assert_eq!(whole[..8], [-1.0, -1.0, 0.0, 0.0, 0.0, 0.0, -1.0, -1.0]);
    assert_eq!(whole[8..], [-0.70710677, -0.70710677, -1.0, -1.0]);
}

#[test]
fn constraint_that_makes_no_sense_is_refused() {
    let of = |offset, values, rule| Constraint { offset, values, rule };
    let unit = |row| Rule::UnitNorm { row };
    for (rules, word) in [
        (vec![of(0, 4, Rule::Clamp { min: Some(1.0), max: Some(0.0) })], "holds no value"),
        (vec![of(0, 4, Rule::Clamp { min: Some(f32::NAN), max: None })], "holds no value"),
        (vec![of(0, 4, Rule::Clamp { min: Some(f32::INFINITY), max: None })], "holds no value"),
        (vec![of(0, 4, Rule::MaxNorm { row: 2, max: 0.0 })], "above 0"),
        (vec![of(0, 4, unit(0))], "at least one value"),
        (vec![of(0, 5, unit(2))], "not rows of 2"),
        (vec![of(8, 4, unit(2))], "10 are trained"),
        (vec![of(usize::MAX, 4, unit(2))], "10 are trained"),
        (vec![of(0, 0, unit(2))], "10 are trained"),
        (vec![of(4, 4, unit(2)), of(0, 4, unit(2))], "order"),
        (vec![of(0, 4, unit(2)), of(2, 4, unit(2))], "same values"),
    ] {
        let why = check(&rules, 10).expect_err(word);
        assert!(why.contains(word), "{why}");
    }
    let clamp = Rule::Clamp { min: Some(0.0), max: None };
    assert_eq!(check(&[of(0, 4, unit(2)), of(0, 10, clamp), of(4, 6, unit(3))], 10), Ok(()));
}

proptest! {
    #[test]
    fn projection_is_allowed_and_projecting_again_changes_nothing(
        values in prop::collection::vec(-1e3f32..1e3, 12),
        row in prop::sample::select(vec![1usize, 2, 3, 4, 6, 12]),
        max in 0.1f32..10.0,
    ) {
        let clamp = Rule::Clamp { min: Some(-max), max: Some(max) };
        for rule in [clamp, Rule::MaxNorm { row, max }, Rule::UnitNorm { row }] {
            let once = held(rule, &values);
            for part in once.chunks(row) {
                match rule {
                    Rule::Clamp { .. } => prop_assert!(part.iter().all(|v| (-max..=max).contains(v))),
                    Rule::MaxNorm { .. } => prop_assert!(norm(part) <= f64::from(max) * (1.0 + 1e-6)),
                    Rule::UnitNorm { .. } => prop_assert!((norm(part) - 1.0).abs() < 1e-6 || norm(part) == 0.0),
                }
            }
            let again = held(rule, &once);
            prop_assert!(once.iter().zip(&again).all(|(a, b)| (a - b).abs() <= 1e-5 * a.abs()));
        }
    }
}
