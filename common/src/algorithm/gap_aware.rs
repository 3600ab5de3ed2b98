//! Gap-aware gradients: Barkai, Hakimi, Schuster, "Gap-Aware Mitigation of Gradient Staleness", ICLR 2020.
//!
//! The gap of a value is the way that its weight has gone since the worker pulled it, in average steps:
//!
//! ```text
//!  gap = 1 + |w - w_pulled| / C          C = base_lr * sqrt(ms / (1 - decay^t))
//!  g <- g / gap
//!  ms <- decay * ms + (1 - decay) * (moved / lr)^2      after the update; moved: by how much it moved the weight
//! ```
//!
//! `C` is an average step at the base rate, so the gap falls with the rate: when a schedule has made steps short, late
//! gradients do little harm and are shrunk little. Without delay the gap is 1 and the gradient stays as it is, bit for
//! bit.

use super::{Algorithm, Keeps, Late, finite_or};
use crate::optim::exact::pow;
use serde::{Deserialize, Serialize};

/// Each value by its own gap.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GapAware {}

/// What remains of the mean square of the steps after an update: an average step is one of the last 1000 or so, as with
/// Adam's second moment.
const DECAY: f64 = 0.999;

/// The gap of a value: at least 1. `step` is the average step.
pub(super) fn gap(way: f32, step: f32) -> f32 {
    // No step was ever made: then there was no way either.
    if step > 0.0 { 1.0 + way.abs() / step } else { 1.0 }
}

impl Algorithm for GapAware {
    fn keeps(&self) -> Keeps {
        Keeps { pulled: true, slots: &["mean_square_step"], ..Keeps::default() }
    }

    fn corrects(&self, push: &Late<'_>) -> bool {
        push.pulled.is_some()
    }

    fn correct(&self, push: &Late<'_>, slots: &mut [Vec<f32>], gradient: &mut [f32]) {
        let (Some(pulled), [mean_square]) = (push.pulled, slots) else { return };
        let unbias = (1.0 / (1.0 - pow(DECAY, push.t.saturating_sub(1).max(1)))) as f32;
        for (((g, ms), w), p) in gradient.iter_mut().zip(mean_square).zip(push.weights).zip(pulled) {
            *g = finite_or(*g / gap(w - p, push.base_lr * (*ms * unbias).sqrt()), *g);
        }
    }

    fn watches(&self) -> bool {
        true
    }

    fn moved(&self, push: &Late<'_>, weights: &[f32], slots: &mut [Vec<f32>]) {
        let [mean_square] = slots else { return };
        if push.lr <= 0.0 {
            return;
        }
        let (decay, enter) = (DECAY as f32, (1.0 - DECAY) as f32);
        for ((ms, before), after) in mean_square.iter_mut().zip(push.weights).zip(weights) {
            let step = (before - after) / push.lr;
            *ms = finite_or(decay * *ms + enter * (step * step), *ms);
        }
    }
}
