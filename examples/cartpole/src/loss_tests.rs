//! The loss's gradient against differences.

use super::*;
use crate::{env::CartPole, fragment::Step, net, rng::Rng, settings::tests::settings};

fn weights(seed: u64) -> Vec<f32> {
    let mut weights = vec![0.0; LEN];
    net::init(seed, &mut weights);
    weights.iter_mut().for_each(|w| *w *= 3.0);
    // Otherwise the policy is almost uniform, and its entropy has almost no gradient.
    let lens: Vec<_> = net::tensors().iter().map(|t| t.len()).collect();
    let last = lens[..4].iter().sum()..lens[..6].iter().sum();
    weights[last].iter_mut().for_each(|w| *w *= 30.0);
    weights
}

/// Two fragments by the policy of these weights; with `each_over` every step ends an episode.
fn played(by: &[f32], each_over: bool) -> Vec<Fragment> {
    let mut rng = Rng::new(2, 0);
    let mut pole = CartPole::start(&mut rng);
    [5, 3]
        .map(|n| {
            let steps = (0..n).map(|_| {
                let observation = pole.observation();
                let (right, log_probability) = net::act(by, observation, &mut rng);
                pole.step(right);
                Step { observation, log_probability, right, over: each_over }
            });
            let steps = steps.collect();
            Fragment { version: 1, steps, last: pole.observation(), episodes: Vec::new() }
        })
        .into()
}

fn assert_differences(range: std::ops::Range<usize>, of: &Gradient, loss: impl Fn(&[f32]) -> f64) {
    let weights = weights(4);
    for i in range.step_by(13) {
        let moved = |by: f32| {
            let mut moved = weights.clone();
            moved[i] += by;
            (loss(&moved), f64::from(moved[i]))
        };
        let ((up, above), (down, below)) = (moved(0.01), moved(-0.01));
        let by_difference = (up - down) / (above - below);
        let far = (by_difference - f64::from(of.values[i])).abs();
        assert!(far < 1e-4 + 0.02 * by_difference.abs(), "{i}: {} for {by_difference}", of.values[i]);
    }
}

/// Without correction the targets do not depend on the policy.
#[test]
fn gradient_of_the_policy_is_that_of_the_loss() {
    let settings = Settings { correct: Correct::None, entropy: 0.3, ..settings() };
    let fragments = played(&weights(8), false);
    let of = gradient(&weights(4), &fragments, &settings);
    let loss = |weights: &[f32]| f64::from(gradient(weights, &fragments, &settings).loss);
    assert_differences(0..LEN - net::tensors()[6..].iter().map(|t| t.len()).sum::<usize>(), &of, loss);
}

/// Where each step is the last of an episode, the value's target is its reward.
#[test]
fn gradient_of_the_value_is_that_of_its_squared_error() {
    let settings = settings();
    let (fragments, first) = (played(&weights(4), true), LEN / 2 + 100);
    let of = gradient(&weights(4), &fragments, &settings);
    let steps: Vec<_> = fragments.iter().flat_map(|f| f.steps.clone()).collect();
    let loss = |weights: &[f32]| -> f64 {
        let errors = steps.iter().map(|s| {
            let v = VALUE.forward(weights, s.observation.to_vec()).outputs()[0];
            f64::from(v - REWARD * settings.reward_scale).powi(2)
        });
        errors.sum::<f64>() * 0.5 * f64::from(settings.value) / steps.len() as f64
    };
    assert_differences(first..LEN, &of, loss);
}

#[test]
fn own_fragments_have_the_same_gradient_with_both_corrections() {
    let (by, settings) = (weights(4), settings());
    let fragments = played(&by, false);
    let corrected = gradient(&by, &fragments, &settings);
    let not = gradient(&by, &fragments, &Settings { correct: Correct::None, ..settings });
    let far = corrected.values.iter().zip(&not.values).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(far < 1e-4, "they differ by {far}");
    assert!(corrected.weights.iter().all(|w| (w - 1.0).abs() < 1e-4), "weights {:?}", corrected.weights);
}

#[test]
fn fragments_of_another_policy_have_smaller_weights() {
    let of = gradient(&weights(4), &played(&weights(8), false), &settings());
    assert_eq!((of.weights.len(), of.steps), (2, 8));
    assert!(of.weights.iter().all(|w| *w < 0.999), "weights {:?}", of.weights);
}

#[test]
fn no_fragments_have_no_gradient() {
    let of = gradient(&weights(4), &[], &settings());
    assert!(of.values.iter().all(|g| *g == 0.0) && of.loss == 0.0);
}
