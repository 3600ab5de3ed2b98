//! Losses of one prediction. Their exponential is our own, so that all hosts have the same bits.

use super::{Predicts, SparseInput};
use paraft_common::optim::exact::{exp, ln};

/// The logistic function.
pub fn sigmoid(x: f32) -> f32 {
    let x = f64::from(x);
    let small = exp(-x.abs());
    (if x < 0.0 { small / (1.0 + small) } else { 1.0 / (1.0 + small) }) as f32
}

/// The log loss of a score for label 0 or 1, in nats: `ln(1 + exp(-x))` or `ln(1 + exp(x))`.
pub fn log_loss(score: f32, label: f32) -> f32 {
    let wrong = f64::from(if label > 0.5 { -score } else { score });
    (wrong.max(0.0) + ln(1.0 + exp(-wrong.abs()))) as f32
}

/// The mean loss over the minibatch. Scores become their gradients.
pub fn mean(predicts: Predicts, input: &SparseInput, scores: &mut [f32]) -> f32 {
    let mut sum = 0.0;
    for (i, score) in scores.iter_mut().enumerate() {
        let (label, share) = (input.labels[i], input.share(i));
        let (loss, slope) = match predicts {
            Predicts::Clicks => (log_loss(*score, label), sigmoid(*score) - f32::from(u8::from(label > 0.5))),
            Predicts::Numbers | Predicts::Pairs => {
                let error = *score - label;
                (error * error, 2.0 * error)
            }
        };
        sum += f64::from(loss) * f64::from(share);
        *score = slope * share;
    }
    sum as f32
}
