//! V-trace against n-step returns, the paper's sums, and RLax.

use super::*;
use crate::rng::Rng;

const ONE: Bars = Bars { rho: 1.0, c: 1.0 };

fn assert_close(ours: &[f32], theirs: &[f32]) {
    assert_eq!(ours.len(), theirs.len());
    let far = ours.iter().zip(theirs).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(far < 1e-5, "{ours:?} and {theirs:?} differ by {far}");
}

#[test]
fn targets_with_ratios_of_one_are_n_step_returns() {
    // Sums and products of these numbers are exact in f32.
    let values = [3.0, -1.0, 0.5, 2.0, 8.0];
    let rewards = [1.0, 2.0, -4.0, 0.25];
    let discounts = [0.5; 4];
    let steps = Steps { values: &values, rewards: &rewards, discounts: &discounts, ratios: &[1.0; 4] };
    let of = targets(steps, ONE);
    for t in 0..4 {
        let rewards = (t..4).map(|k| rewards[k] * 0.5f32.powi((k - t) as i32)).sum::<f32>();
        let returns = rewards + 0.5f32.powi((4 - t) as i32) * values[4];
        assert_eq!(of.values[t], returns);
        assert_eq!(of.advantages[t], returns - values[t]);
    }
}

/// The paper's equation 1, term by term: n² of them.
fn by_definition(steps: Steps<'_>, bars: Bars) -> Targets {
    let Steps { values: v, rewards: r, discounts: d, ratios } = steps;
    let n = r.len();
    let value = |s: usize| {
        let mut sum = f64::from(v[s]);
        for t in s..n {
            let mut factor = 1.0;
            for i in s..t {
                factor *= f64::from(d[i]) * f64::from(ratios[i].min(bars.c));
            }
            let delta = f64::from(ratios[t].min(bars.rho))
                * (f64::from(r[t]) + f64::from(d[t]) * f64::from(v[t + 1]) - f64::from(v[t]));
            sum += factor * delta;
        }
        sum
    };
    let after = |s: usize| if s + 1 < n { value(s + 1) } else { f64::from(v[n]) };
    let advantage = |s: usize| {
        f64::from(ratios[s].min(bars.rho)) * (f64::from(r[s]) + f64::from(d[s]) * after(s) - f64::from(v[s]))
    };
    Targets {
        values: (0..n).map(|s| value(s) as f32).collect(),
        advantages: (0..n).map(|s| advantage(s) as f32).collect(),
    }
}

#[test]
fn recursion_gives_the_sums_of_the_definition() {
    let mut rng = Rng::new(3, 0);
    for case in 0..50 {
        let n = 1 + case % 20;
        let mut draw =
            |count: usize, low, high| (0..count).map(|_| rng.between(low, high) as f32).collect::<Vec<_>>();
        let (values, rewards, ratios) = (draw(n + 1, -2.0, 2.0), draw(n, -1.0, 1.0), draw(n, 0.0, 3.0));
        let discounts: Vec<f32> =
            draw(n, 0.0, 1.0).into_iter().map(|u| if u < 0.1 { 0.0 } else { 0.97 }).collect();
        let steps = Steps { values: &values, rewards: &rewards, discounts: &discounts, ratios: &ratios };
        for bars in [ONE, Bars { rho: 2.0, c: 1.0 }, Bars { rho: 1.0, c: 0.5 }] {
            let (ours, theirs) = (targets(steps, bars), by_definition(steps, bars));
            assert_close(&ours.values, &theirs.values);
            assert_close(&ours.advantages, &theirs.advantages);
        }
    }
}

/// `rlax.vtrace_td_error_and_advantage` of RLax 0.1.9 on JAX 0.10.2; its errors are without the values.
#[test]
fn targets_are_those_of_rlax() {
    let steps = Steps {
        values: &[1.0, 2.5, -0.5, 3.0, 0.75, 2.0],
        rewards: &[1.0, 0.5, 2.0, -1.0, 1.0],
        discounts: &[0.99, 0.99, 0.0, 0.99, 0.9],
        ratios: &[0.5, 1.75, 0.9, 1.2, 0.25],
    };
    let of = targets(steps, ONE);
    assert_close(&of.values, &[2.105_087_5, 2.2325, 1.75, 0.249_875_07, 1.2625]);
    assert_close(&of.advantages, &[1.105_087_5, -0.267_499_92, 2.25, -2.750_125, 0.5125]);
    let of = targets(steps, Bars { rho: 1.5, c: 1.0 });
    assert_close(&of.values, &[1.487_575, 0.985_000_13, 1.75, -0.401_625_16, 1.2625]);
    assert_close(&of.advantages, &[0.487_575_05, -0.401_249_9, 2.25, -3.300_150_2, 0.5125]);
}

#[test]
fn steps_without_a_value_are_left_out() {
    let steps = Steps { values: &[1.0], rewards: &[1.0], discounts: &[1.0], ratios: &[1.0] };
    assert_eq!(targets(steps, ONE), Targets::default());
    let steps = Steps { values: &[], ..steps };
    assert_eq!(targets(steps, ONE), Targets::default());
}
