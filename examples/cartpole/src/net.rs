//! Policy and value: two MLPs with tanh, forward and backward.
//!
//! The tensors have the names of PyTorch's `Sequential(Linear, Tanh, Linear, Tanh, Linear)`, one called `policy` and one
//! called `value`. Their values lie in one flat vector, in the order of [`tensors`].

use crate::{
    env::{ACTIONS, OBSERVATION},
    rng::Rng,
};
use paraft_worker::TensorSpec;

/// Neurons of each hidden layer.
pub const HIDDEN: usize = 64;
/// The first policy is almost uniform: its last layer begins this much smaller.
const FIRST_POLICY: f64 = 0.01;

/// An MLP within the flat vector.
#[derive(Clone, Copy, Debug)]
pub struct Mlp {
    name: &'static str,
    offset: usize,
    /// Inputs, neurons of the hidden layers, outputs.
    sizes: [usize; 4],
}

/// Logits of the actions.
pub const POLICY: Mlp = Mlp { name: "policy", offset: 0, sizes: [OBSERVATION, HIDDEN, HIDDEN, ACTIONS] };
/// The expected sum of the discounted rewards to come.
pub const VALUE: Mlp = Mlp { name: "value", offset: POLICY.len(), sizes: [OBSERVATION, HIDDEN, HIDDEN, 1] };
/// Values of both.
pub const LEN: usize = POLICY.len() + VALUE.len();

/// The activations of a batch: those of each layer, neuron by neuron, each with a value for every sample.
#[derive(Clone, Debug)]
pub struct Activations {
    batch: usize,
    layers: Vec<Vec<f32>>,
}

impl Activations {
    /// The outputs: those of the first neuron for all samples, then those of the next.
    pub fn outputs(&self) -> &[f32] {
        self.layers.last().map_or(&[], Vec::as_slice)
    }
}

/// A layer's place in the flat vector.
struct Place {
    inputs: usize,
    outputs: usize,
    weight: usize,
    bias: usize,
}

impl Mlp {
    const fn len(&self) -> usize {
        let (s, mut i, mut len) = (self.sizes, 0, 0);
        while i + 1 < s.len() {
            len += s[i] * s[i + 1] + s[i + 1];
            i += 1;
        }
        len
    }

    fn places(&self) -> Vec<Place> {
        let mut at = self.offset;
        let pairs = self.sizes.windows(2);
        pairs
            .map(|pair| {
                let (inputs, outputs, weight) = (pair[0], pair[1], at);
                let bias = weight + inputs * outputs;
                at = bias + outputs;
                Place { inputs, outputs, weight, bias }
            })
            .collect()
    }

    /// Computes a batch. `weights` has [`LEN`] values; `inputs` those of the first input for all samples, then those of the
    /// next.
    pub fn forward(&self, weights: &[f32], inputs: Vec<f32>) -> Activations {
        let batch = inputs.len() / OBSERVATION;
        let mut layers = vec![inputs];
        let places = self.places();
        for (i, place) in places.iter().enumerate() {
            let x = &layers[i];
            let mut y = Vec::with_capacity(place.outputs * batch);
            for o in 0..place.outputs {
                let from = y.len();
                y.resize(from + batch, weights[place.bias + o]);
                let row = &weights[place.weight + o * place.inputs..][..place.inputs];
                for (w, x) in row.iter().zip(x.chunks_exact(batch)) {
                    y[from..].iter_mut().zip(x).for_each(|(y, x)| *y += w * x);
                }
            }
            if i + 1 < places.len() {
                y.iter_mut().for_each(|y| *y = y.tanh());
            }
            layers.push(y);
        }
        Activations { batch, layers }
    }

    /// Adds the gradient of a loss to `gradient`, of [`LEN`] values. `outer`: the loss's gradient by each output, laid out as
    /// [`Activations::outputs`].
    pub fn backward(&self, weights: &[f32], of: &Activations, outer: Vec<f32>, gradient: &mut [f32]) {
        let batch = of.batch;
        let mut dy = outer;
        for (i, place) in self.places().iter().enumerate().rev() {
            let x = &of.layers[i];
            let mut dx = vec![0.0; x.len()];
            for (o, dy) in dy.chunks_exact(batch).enumerate() {
                gradient[place.bias + o] += dy.iter().sum::<f32>();
                let row = place.weight + o * place.inputs;
                for (k, (x, dx)) in x.chunks_exact(batch).zip(dx.chunks_exact_mut(batch)).enumerate() {
                    gradient[row + k] += dot(dy, x);
                    let w = weights[row + k];
                    dx.iter_mut().zip(dy).for_each(|(dx, dy)| *dx += w * dy);
                }
            }
            if i > 0 {
                // Layer i's inputs are outputs of tanh.
                dx.iter_mut().zip(x).for_each(|(dx, x)| *dx *= 1.0 - x * x);
            }
            dy = dx;
        }
    }
}

/// In eight sums, which the compiler keeps in one vector.
fn dot(a: &[f32], b: &[f32]) -> f32 {
    let (a, b) = (a.as_chunks::<8>(), b.as_chunks::<8>());
    let mut sums = [0.0; 8];
    for (a, b) in a.0.iter().zip(b.0) {
        (0..8).for_each(|i| sums[i] += a[i] * b[i]);
    }
    let rest: f32 = a.1.iter().zip(b.1).map(|(a, b)| a * b).sum();
    sums.iter().sum::<f32>() + rest
}

/// The tensors of both, in the flat vector's order.
pub fn tensors() -> Vec<TensorSpec> {
    let of = |mlp: &Mlp| {
        let name = mlp.name;
        let layers = mlp.places().into_iter().enumerate();
        layers
            .flat_map(|(i, p)| {
                [
                    TensorSpec::param(format!("{name}.{}.weight", 2 * i), &[p.outputs, p.inputs]),
                    TensorSpec::param(format!("{name}.{}.bias", 2 * i), &[p.outputs]),
                ]
            })
            .collect::<Vec<_>>()
    };
    [of(&POLICY), of(&VALUE)].concat()
}

/// Writes the first weights: uniform as in PyTorch's `Linear`, the policy's last layer smaller.
pub fn init(seed: u64, weights: &mut [f32]) {
    let mut rng = Rng::new(seed, 0);
    for mlp in [POLICY, VALUE] {
        let places = mlp.places();
        for (i, place) in places.iter().enumerate() {
            let is_policy_end = mlp.name == POLICY.name && i + 1 == places.len();
            let scale = if is_policy_end { FIRST_POLICY } else { 1.0 };
            let bound = scale / (place.inputs as f64).sqrt();
            let all =
                weights.iter_mut().skip(place.weight).take(place.inputs * place.outputs + place.outputs);
            all.for_each(|w| *w = rng.between(-bound, bound) as f32);
        }
    }
}

/// Log-probabilities of the actions from their logits.
pub fn log_softmax(logits: [f32; ACTIONS]) -> [f32; ACTIONS] {
    let top = logits.iter().fold(f32::MIN, |a, b| a.max(*b));
    let sum: f32 = logits.iter().map(|l| (l - top).exp()).sum();
    logits.map(|l| l - top - sum.ln())
}

/// Draws an action of the policy; returns whether it is a push to the right, and its log-probability.
pub fn act(weights: &[f32], observation: [f32; OBSERVATION], rng: &mut Rng) -> (bool, f32) {
    let of = POLICY.forward(weights, observation.to_vec());
    let logs = log_softmax([of.outputs()[0], of.outputs()[1]]);
    let right = rng.unit() < f64::from(logs[1].exp());
    (right, logs[usize::from(right)])
}

#[cfg(test)]
#[path = "net_tests.rs"]
mod tests;
