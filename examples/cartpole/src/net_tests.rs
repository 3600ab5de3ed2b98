//! Gradients against differences.

use super::*;

fn weights() -> Vec<f32> {
    let mut weights = vec![0.0; LEN];
    init(5, &mut weights);
    weights
}

#[test]
fn tensors_fill_the_flat_vector() {
    let tensors = tensors();
    assert_eq!(tensors.iter().map(TensorSpec::len).sum::<usize>(), LEN);
    assert_eq!(tensors[0].name, "policy.0.weight");
    assert_eq!(tensors[11].name, "value.4.bias");
}

#[test]
fn first_policy_is_almost_uniform() {
    let mut rng = Rng::new(1, 1);
    let observation = [0.5, -1.0, 0.1, 1.0];
    for _ in 0..20 {
        let (_, log) = act(&weights(), observation, &mut rng);
        assert!((log.exp() - 0.5).abs() < 0.01, "probability {}", log.exp());
    }
}

#[test]
fn log_probabilities_of_large_logits_are_finite() {
    let logs = log_softmax([500.0, -500.0]);
    assert_eq!(logs, [0.0, -1000.0]);
}

/// The sum of a function of the outputs, and its gradient by backward, against central differences.
fn assert_gradient(mlp: Mlp) {
    let (weights, batch) = (weights(), 3);
    let mut rng = Rng::new(9, 0);
    let inputs: Vec<f32> = (0..OBSERVATION * batch).map(|_| rng.between(-1.0, 1.0) as f32).collect();
    let outputs = mlp.sizes[3] * batch;
    let factors: Vec<f32> = (0..outputs).map(|_| rng.between(-1.0, 1.0) as f32).collect();
    let loss = |weights: &[f32]| -> f64 {
        let of = mlp.forward(weights, inputs.clone());
        of.outputs().iter().zip(&factors).map(|(y, f)| f64::from(*y) * f64::from(*f)).sum()
    };
    let mut gradient = vec![0.0; LEN];
    mlp.backward(&weights, &mlp.forward(&weights, inputs.clone()), factors.clone(), &mut gradient);
    let (from, len) = (mlp.offset, mlp.len());
    assert!(gradient[..from].iter().chain(&gradient[from + len..]).all(|g| *g == 0.0), "of the other MLP");
    for i in (from..from + len).step_by(7) {
        let moved = |by: f32| {
            let mut moved = weights.clone();
            moved[i] += by;
            (loss(&moved), f64::from(moved[i]))
        };
        let ((up, above), (down, below)) = (moved(0.01), moved(-0.01));
        let by_difference = (up - down) / (above - below);
        let far = (by_difference - f64::from(gradient[i])).abs();
        assert!(far < 1e-3 * (1.0 + by_difference.abs()), "weight {i}: {} for {by_difference}", gradient[i]);
    }
}

#[test]
fn gradient_of_the_policy_is_that_of_differences() {
    assert_gradient(POLICY);
}

#[test]
fn gradient_of_the_value_is_that_of_differences() {
    assert_gradient(VALUE);
}
