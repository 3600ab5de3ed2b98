//! The gradient of the actor-critic loss of some fragments.
//!
//! The loss is a mean over steps: -(advantage · log π(action)) + value · ½ (V - v)² - entropy · H(π), with advantage and v of
//! [V-trace](crate::vtrace), which are constants in it.

use crate::{
    env::{ACTIONS, OBSERVATION, REWARD},
    fragment::Fragment,
    net::{LEN, POLICY, VALUE, log_softmax},
    settings::{Correct, Settings},
    vtrace::{self, Steps},
};

/// A gradient, and what it was made of.
#[derive(Clone, Debug, Default)]
pub struct Gradient {
    /// Of each weight.
    pub values: Vec<f32>,
    /// The loss: the mean over the steps.
    pub loss: f32,
    /// Steps of all fragments.
    pub steps: usize,
    /// The policy's mean entropy in nats, at most ln 2.
    pub entropy: f32,
    /// For each fragment the mean of its truncated importance weights, which an uncorrected gradient does not use.
    pub weights: Vec<f32>,
}

/// Computes the gradient at the weights, of [`LEN`] values.
pub fn gradient(weights: &[f32], fragments: &[Fragment], settings: &Settings) -> Gradient {
    let steps: usize = fragments.iter().map(|f| f.steps.len()).sum();
    if steps == 0 {
        return Gradient { values: vec![0.0; LEN], ..Gradient::default() };
    }
    // The observations of the steps, then what each fragment saw last, which only the values need.
    let all: Vec<[f32; OBSERVATION]> = fragments
        .iter()
        .flat_map(|f| f.steps.iter().map(|s| s.observation))
        .chain(fragments.iter().map(|f| f.last))
        .collect();
    let by_input = |all: &[[f32; OBSERVATION]]| -> Vec<f32> {
        (0..OBSERVATION).flat_map(|i| all.iter().map(move |o| o[i])).collect()
    };
    let policy = POLICY.forward(weights, by_input(&all[..steps]));
    let value = VALUE.forward(weights, by_input(&all));
    let (logits, values) = (policy.outputs(), value.outputs());
    let share = 1.0 / steps as f32;
    let mut sums = Gradient { values: vec![0.0; LEN], steps, ..Gradient::default() };
    let mut by_logit = vec![0.0; logits.len()];
    let mut by_value = vec![0.0; values.len()];
    let mut from = 0;
    for (f, fragment) in fragments.iter().enumerate() {
        let n = fragment.steps.len();
        let logs: Vec<[f32; ACTIONS]> =
            (from..from + n).map(|i| log_softmax(std::array::from_fn(|a| logits[a * steps + i]))).collect();
        let ratios: Vec<f32> = fragment
            .steps
            .iter()
            .zip(&logs)
            .map(|(s, logs)| (logs[usize::from(s.right)] - s.log_probability).exp())
            .collect();
        sums.weights.push(ratios.iter().map(|r| r.min(settings.rho_bar)).sum::<f32>() / n.max(1) as f32);
        let used = match settings.correct {
            Correct::Vtrace => ratios,
            Correct::None => vec![1.0; n],
        };
        let discounts: Vec<f32> =
            fragment.steps.iter().map(|s| if s.over { 0.0 } else { settings.gamma }).collect();
        let bootstrap = values[steps + f];
        let of_steps = [&values[from..from + n], &[bootstrap]].concat();
        let targets = vtrace::targets(
            Steps {
                values: &of_steps,
                rewards: &vec![REWARD * settings.reward_scale; n],
                discounts: &discounts,
                ratios: &used,
            },
            settings.bars(),
        );
        for (t, step) in fragment.steps.iter().enumerate() {
            let (advantage, i) = (targets.advantages[t], from + t);
            let chosen = usize::from(step.right);
            let p = logs[t].map(f32::exp);
            let entropy: f32 = -p.iter().zip(logs[t]).map(|(p, log)| p * log).sum::<f32>();
            for a in 0..ACTIONS {
                let of_choice = p[a] - f32::from(u8::from(a == chosen));
                let of_entropy = p[a] * (logs[t][a] + entropy);
                by_logit[a * steps + i] = share * (advantage * of_choice + settings.entropy * of_entropy);
            }
            let error = values[i] - targets.values[t];
            by_value[i] = share * settings.value * error;
            sums.entropy += share * entropy;
            sums.loss += share
                * (-advantage * logs[t][chosen] + 0.5 * settings.value * error * error
                    - settings.entropy * entropy);
        }
        from += n;
    }
    POLICY.backward(weights, &policy, by_logit, &mut sums.values);
    VALUE.backward(weights, &value, by_value, &mut sums.values);
    sums
}

#[cfg(test)]
#[path = "loss_tests.rs"]
mod tests;
