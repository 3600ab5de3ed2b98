//! Adadelta: Zeiler 2012, "ADADELTA: An Adaptive Learning Rate Method". PyTorch: `torch.optim.Adadelta`.
//!
//! ```text
//!  s <- rho * s + (1 - rho) * g * g
//!  d  = sqrt(a + eps) / sqrt(s + eps) * g
//!  a <- rho * a + (1 - rho) * d * d
//!  w <- w - lr * d
//! ```

use super::gradient::Prepared;
use super::{Hyper, OPTIMIZER, OptimError};
use serde::{Deserialize, Serialize};

/// Options of Adadelta.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Adadelta {
    /// Base rate, 0 or more. Default 1.
    pub lr: f64,
    /// What remains of the averages after an update, in `[0, 1)`. Default 0.9.
    pub rho: f64,
    /// Added under the roots, in `[1e-30, 1]`. Default 1e-6.
    pub eps: f64,
    /// L2 penalty, 0 or more. Default 0.
    pub weight_decay: f64,
}

impl Default for Adadelta {
    fn default() -> Self {
        Self { lr: 1.0, rho: 0.9, eps: 1e-6, weight_decay: 0.0 }
    }
}

impl Adadelta {
    pub(super) fn validate(&self) -> Result<(), OptimError> {
        OPTIMIZER.not_negative("lr", self.lr)?;
        OPTIMIZER.below_one("rho", self.rho)?;
        OPTIMIZER.eps(self.eps)?;
        OPTIMIZER.not_negative("weight_decay", self.weight_decay)
    }

    pub(super) fn rule(&self, hyper: &Hyper) -> AdadeltaRule {
        let (keep, enter) = (self.rho as f32, (1.0 - self.rho) as f32);
        AdadeltaRule { lr: hyper.lr, keep, enter, eps: self.eps as f32 }
    }
}

/// One update's constants.
#[derive(Clone, Copy, Debug)]
pub struct AdadeltaRule {
    /// The rate.
    pub lr: f32,
    /// What remains of an average.
    pub keep: f32,
    /// What enters it.
    pub enter: f32,
    /// Added under the roots.
    pub eps: f32,
}

impl AdadeltaRule {
    #[inline(always)]
    pub(super) fn run(self, weights: &mut [f32], square: &mut [f32], delta: &mut [f32], grad: Prepared<'_>) {
        let Self { lr, keep, enter, eps } = self;
        for (((w, s), a), word) in weights.iter_mut().zip(square).zip(delta).zip(grad.words()) {
            let (w0, s0, a0) = (*w, *s, *a);
            let g = grad.value(word, w0);
            let s1 = keep * s0 + enter * g * g;
            let d = (a0 + eps).sqrt() / (s1 + eps).sqrt() * g;
            (*s, *a, *w) = (s1, keep * a0 + enter * d * d, w0 - lr * d);
        }
    }
}
