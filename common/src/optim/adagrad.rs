//! Adagrad: Duchi, Hazan, Singer 2011, "Adaptive Subgradient Methods for Online Learning and Stochastic
//! Optimization". PyTorch: `torch.optim.Adagrad`.
//!
//! ```text
//!  s <- s + g * g
//!  w <- w - lr / (1 + (t - 1) * lr_decay) * g / (sqrt(s) + eps)
//! ```

use super::gradient::Prepared;
use super::{Hyper, OPTIMIZER, OptimError};
use serde::{Deserialize, Serialize};

/// Options of Adagrad.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Adagrad {
    /// Base rate, 0 or more. Default 0.01.
    pub lr: f64,
    /// Added to the root, in `[1e-30, 1]`. Default 1e-10.
    pub eps: f64,
    /// What the sum of squares starts from, 0 or more. Default 0.
    pub initial_accumulator: f64,
    /// How the rate falls with the number of updates, 0 or more. Default 0.
    pub lr_decay: f64,
    /// L2 penalty, 0 or more. Default 0.
    pub weight_decay: f64,
}

impl Default for Adagrad {
    fn default() -> Self {
        Self { lr: 1e-2, eps: 1e-10, initial_accumulator: 0.0, lr_decay: 0.0, weight_decay: 0.0 }
    }
}

impl Adagrad {
    pub(super) fn validate(&self) -> Result<(), OptimError> {
        OPTIMIZER.not_negative("lr", self.lr)?;
        OPTIMIZER.eps(self.eps)?;
        OPTIMIZER.not_negative("initial_accumulator", self.initial_accumulator)?;
        OPTIMIZER.not_negative("lr_decay", self.lr_decay)?;
        OPTIMIZER.not_negative("weight_decay", self.weight_decay)
    }

    pub(super) fn rule(&self, hyper: &Hyper) -> AdagradRule {
        let lr = f64::from(hyper.lr) / (1.0 + (hyper.t - 1) as f64 * self.lr_decay);
        AdagradRule { lr: lr as f32, eps: self.eps as f32 }
    }
}

/// One update's constants.
#[derive(Clone, Copy, Debug)]
pub struct AdagradRule {
    /// The rate, as far as it has fallen.
    pub lr: f32,
    /// Added to the root.
    pub eps: f32,
}

impl AdagradRule {
    #[inline(always)]
    pub(super) fn run(self, weights: &mut [f32], sum: &mut [f32], grad: Prepared<'_>) {
        let Self { lr, eps } = self;
        for ((w, s), word) in weights.iter_mut().zip(sum).zip(grad.words()) {
            let w0 = *w;
            let g = grad.value(word, w0);
            let s1 = *s + g * g;
            (*s, *w) = (s1, w0 - lr * g / (s1.sqrt() + eps));
        }
    }
}
