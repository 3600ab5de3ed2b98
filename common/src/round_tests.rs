//! Tests of `round`.

use super::*;

/// Exponential times from a fixed recurrence: this crate has no dependency for random numbers.
fn times(n: usize, state: &mut u64) -> Vec<f64> {
    let mut next = || {
        *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((*state >> 11) as f64 + 0.5) / (1u64 << 53) as f64
    };
    let mut times: Vec<f64> = (0..n).map(|_| -next().ln()).collect();
    times.sort_by(f64::total_cmp);
    times
}

#[test]
fn a_round_of_the_first_takes_the_expected_time() {
    let mut state = 7;
    // 100 workers, rate 1: H(100) - H(b).
    for (spare, expected) in [(0, 5.187), (4, 3.104), (6, 2.737), (10, 2.258)] {
        let needs = RoundConfig::Backup(Backup { spare }).needs(100);
        let rounds = 4000;
        let sum: f64 = (0..rounds).map(|_| times(100, &mut state)[needs - 1]).sum();
        let mean = sum / f64::from(rounds);
        assert!((mean / expected - 1.0).abs() < 0.02, "without {spare}: {mean} for {expected}");
    }
}

#[test]
fn it_does_without_no_more_than_its_spare_and_never_without_all() {
    let needs = |active| RoundConfig::Backup(Backup { spare: 2 }).needs(active);
    assert_eq!((needs(5), needs(2), needs(0)), (3, 1, 1));
    let valid = |spare| RoundConfig::Backup(Backup { spare }).validate(3).is_ok();
    assert!(!valid(3) && valid(2) && RoundConfig::default().validate(1).is_ok());
}
