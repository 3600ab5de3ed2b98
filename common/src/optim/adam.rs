//! Adam: Kingma, Ba 2015, "Adam: A Method for Stochastic Optimization". AdamW: Loshchilov, Hutter 2019,
//! "Decoupled Weight Decay Regularization". PyTorch: `torch.optim.Adam`, `torch.optim.AdamW`.
//!
//! ```text
//!  adamw only:  w <- w * (1 - lr * weight_decay)      (adam: g <- g + weight_decay * w, before the rule)
//!  m <- m + (1 - beta1) * (g - m)
//!  v <- beta2 * v + (1 - beta2) * g * g
//!  w <- w - lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)
//! ```
//!
//! `t` counts the bucket's updates from 1. Where pushes are applied one by one (SSP, ASP) it grows with every
//! push, as if one process had made all of them.

use super::exact::pow;
use super::gradient::Prepared;
use super::{Hyper, OPTIMIZER, OptimError};
use serde::{Deserialize, Serialize};

/// Options of Adam.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Adam {
    /// Base rate, 0 or more. Default 0.001.
    pub lr: f64,
    /// Decay of the mean, in `[0, 1)`. Default 0.9.
    pub beta1: f64,
    /// Decay of the mean square, in `[0, 1)`. Default 0.999.
    pub beta2: f64,
    /// Added to the root, in `[1e-30, 1]`. Default 1e-8.
    pub eps: f64,
    /// L2 penalty, 0 or more, added to the gradient. Default 0.
    pub weight_decay: f64,
    /// Divide by the largest mean square so far. Default false.
    pub amsgrad: bool,
}

/// Options of AdamW.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct AdamW {
    /// Base rate, 0 or more. Default 0.001.
    pub lr: f64,
    /// Decay of the mean, in `[0, 1)`. Default 0.9.
    pub beta1: f64,
    /// Decay of the mean square, in `[0, 1)`. Default 0.999.
    pub beta2: f64,
    /// Added to the root, in `[1e-30, 1]`. Default 1e-8.
    pub eps: f64,
    /// Share of a weight lost in an update, divided by the rate; 0 or more. Default 0.01.
    pub weight_decay: f64,
    /// Divide by the largest mean square so far. Default false.
    pub amsgrad: bool,
}

impl Default for Adam {
    fn default() -> Self {
        Self { lr: 1e-3, beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.0, amsgrad: false }
    }
}

impl Default for AdamW {
    fn default() -> Self {
        Self { lr: 1e-3, beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 1e-2, amsgrad: false }
    }
}

impl Adam {
    pub(super) fn validate(&self) -> Result<(), OptimError> {
        OPTIMIZER.adaptive(self.lr, [self.beta1, self.beta2], self.eps, self.weight_decay)
    }

    pub(super) fn rule(&self, hyper: &Hyper) -> AdamRule {
        AdamRule::new(self.beta1, self.beta2, self.eps, 1.0, hyper)
    }
}

impl AdamW {
    pub(super) fn validate(&self) -> Result<(), OptimError> {
        OPTIMIZER.adaptive(self.lr, [self.beta1, self.beta2], self.eps, self.weight_decay)
    }

    pub(super) fn rule(&self, hyper: &Hyper) -> AdamRule {
        let shrink = 1.0 - f64::from(hyper.lr) * self.weight_decay;
        AdamRule::new(self.beta1, self.beta2, self.eps, shrink, hyper)
    }
}

/// One update's constants. They are computed in `f64` and rounded once: `1 - beta2` taken from an `f32` would
/// be wrong in its fifth digit.
#[derive(Clone, Copy, Debug)]
pub struct AdamRule {
    /// The factor of decoupled weight decay.
    pub shrink: f32,
    /// The weight of the gradient in the mean.
    pub enter1: f32,
    /// The decay of the mean square.
    pub keep2: f32,
    /// The weight of the squared gradient in the mean square.
    pub enter2: f32,
    /// The bias-corrected rate.
    pub step: f32,
    /// `1 / sqrt(1 - beta2^t)`. Multiplying saves one of three slow operations; PyTorch divides, which can
    /// differ in the last bit.
    pub unbias2: f32,
    /// Added to the root.
    pub eps: f32,
}

impl AdamRule {
    fn new(beta1: f64, beta2: f64, eps: f64, shrink: f64, hyper: &Hyper) -> Self {
        Self {
            shrink: shrink as f32,
            enter1: (1.0 - beta1) as f32,
            keep2: beta2 as f32,
            enter2: (1.0 - beta2) as f32,
            step: (f64::from(hyper.lr) / (1.0 - pow(beta1, hyper.t))) as f32,
            unbias2: (1.0 / (1.0 - pow(beta2, hyper.t)).sqrt()) as f32,
            eps: eps as f32,
        }
    }

    /// With `amsgrad`: `most` is the largest mean square so far.
    #[inline(always)]
    pub(super) fn run_by_most(
        self,
        weights: &mut [f32],
        (m, v, most): (&mut [f32], &mut [f32], &mut [f32]),
        grad: Prepared<'_>,
    ) {
        let slots = m.iter_mut().zip(v).zip(most);
        for ((w, ((m, v), most)), word) in weights.iter_mut().zip(slots).zip(grad.words()) {
            let (w0, m0, v0, most0) = (*w, *m, *v, *most);
            let g = grad.value(word, w0);
            let m1 = lerp(m0, g, self.enter1);
            let v1 = self.keep2 * v0 + self.enter2 * g * g;
            let most1 = if v1 > most0 { v1 } else { most0 };
            let divisor = most1.sqrt() * self.unbias2 + self.eps;
            (*m, *v, *most, *w) = (m1, v1, most1, w0 * self.shrink - self.step * m1 / divisor);
        }
    }

    #[inline(always)]
    pub(super) fn run(self, weights: &mut [f32], m: &mut [f32], v: &mut [f32], grad: Prepared<'_>) {
        for (((w, m), v), word) in weights.iter_mut().zip(m).zip(v).zip(grad.words()) {
            let (w0, m0, v0) = (*w, *m, *v);
            let g = grad.value(word, w0);
            let m1 = lerp(m0, g, self.enter1);
            let v1 = self.keep2 * v0 + self.enter2 * g * g;
            let divisor = v1.sqrt() * self.unbias2 + self.eps;
            (*m, *v, *w) = (m1, v1, w0 * self.shrink - self.step * m1 / divisor);
        }
    }
}

/// `a` moved towards `b` by `weight`, exactly `b` for weight 1: PyTorch's `lerp`, which changes its
/// formula at one half. The branch is the same for a whole bucket, so the compiler hoists it out of the
/// loop.
#[inline(always)]
pub(super) fn lerp(a: f32, b: f32, weight: f32) -> f32 {
    if weight < 0.5 { a + weight * (b - a) } else { b - (b - a) * (1.0 - weight) }
}
