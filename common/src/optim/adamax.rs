//! Adamax: Kingma, Ba 2015, "Adam: A Method for Stochastic Optimization", section 7.1. PyTorch: `torch.optim.Adamax`.
//!
//! ```text
//!  m <- m + (1 - beta1) * (g - m)
//!  u <- max(beta2 * u, |g| + eps)
//!  w <- w - lr / (1 - beta1^t) * m / u
//! ```

use super::adam::lerp;
use super::exact::pow;
use super::gradient::Prepared;
use super::{Hyper, OPTIMIZER, OptimError};
use serde::{Deserialize, Serialize};

/// Options of Adamax.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Adamax {
    /// Base rate, 0 or more. Default 0.002.
    pub lr: f64,
    /// What remains of the mean after an update, in `[0, 1)`. Default 0.9.
    pub beta1: f64,
    /// What remains of the largest size after an update, in `[0, 1)`. Default 0.999.
    pub beta2: f64,
    /// Added to each size, in `[1e-30, 1]`. Default 1e-8.
    pub eps: f64,
    /// L2 penalty, 0 or more. Default 0.
    pub weight_decay: f64,
}

impl Default for Adamax {
    fn default() -> Self {
        Self { lr: 2e-3, beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.0 }
    }
}

impl Adamax {
    pub(super) fn validate(&self) -> Result<(), OptimError> {
        OPTIMIZER.adaptive(self.lr, [self.beta1, self.beta2], self.eps, self.weight_decay)
    }

    pub(super) fn rule(&self, hyper: &Hyper) -> AdamaxRule {
        AdamaxRule {
            enter1: (1.0 - self.beta1) as f32,
            keep2: self.beta2 as f32,
            step: (f64::from(hyper.lr) / (1.0 - pow(self.beta1, hyper.t))) as f32,
            eps: self.eps as f32,
        }
    }
}

/// One update's constants.
#[derive(Clone, Copy, Debug)]
pub struct AdamaxRule {
    /// What enters the mean.
    pub enter1: f32,
    /// What remains of the largest size.
    pub keep2: f32,
    /// The rate, without the mean's bias.
    pub step: f32,
    /// Added to each size.
    pub eps: f32,
}

impl AdamaxRule {
    #[inline(always)]
    pub(super) fn run(self, weights: &mut [f32], m: &mut [f32], u: &mut [f32], grad: Prepared<'_>) {
        let Self { enter1, keep2, step, eps } = self;
        for (((w, m), u), word) in weights.iter_mut().zip(m).zip(u).zip(grad.words()) {
            let (w0, m0, u0) = (*w, *m, *u);
            let g = grad.value(word, w0);
            let m1 = lerp(m0, g, enter1);
            let (faded, size) = (keep2 * u0, g.abs() + eps);
            let u1 = if faded > size { faded } else { size };
            (*m, *u, *w) = (m1, u1, w0 - step * m1 / u1);
        }
    }
}
