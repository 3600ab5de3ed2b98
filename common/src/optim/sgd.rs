//! SGD, with momentum, with Nesterov's momentum. PyTorch: `torch.optim.SGD`.
//!
//! ```text
//!  sgd        w <- w - lr * g
//!  momentum   b <- mu * b + (1 - dampening) * g        (first update: b <- g)
//!             w <- w - lr * b
//!  nesterov   b <- mu * b + g
//!             w <- w - lr * (g + mu * b)
//! ```
//!
//! The rate multiplies the buffer's sum, not what enters it, as in Sutskever, Martens, Dahl, Hinton 2013 ("On
//! the importance of initialization and momentum in deep learning") and in PyTorch: a change of `lr` acts at
//! once. Weight decay is added to the gradient.

use super::gradient::{Gradient, Prepared, Stages, runs};
use super::{Hyper, OPTIMIZER, OptimError};
use crate::simd::wide;
use serde::{Deserialize, Serialize};

/// Options of plain SGD.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Sgd {
    /// Base rate, 0 or more. Default 0.001.
    pub lr: f64,
    /// L2 penalty, 0 or more. Default 0.
    pub weight_decay: f64,
}

/// Options of SGD with momentum.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Momentum {
    /// Base rate, 0 or more. Default 0.001.
    pub lr: f64,
    /// What remains of the buffer after an update, in `[0, 1)`. Default 0.9.
    pub momentum: f64,
    /// The gradient enters the buffer times `1 - dampening`; in `[0, 1]`. Default 0.
    pub dampening: f64,
    /// L2 penalty, 0 or more. Default 0.
    pub weight_decay: f64,
}

/// Options of SGD with Nesterov's momentum.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Nesterov {
    /// Base rate, 0 or more. Default 0.001.
    pub lr: f64,
    /// What remains of the buffer after an update, in `(0, 1)`. Default 0.9.
    pub momentum: f64,
    /// L2 penalty, 0 or more. Default 0.
    pub weight_decay: f64,
}

impl Default for Sgd {
    fn default() -> Self {
        Self { lr: 1e-3, weight_decay: 0.0 }
    }
}

impl Default for Momentum {
    fn default() -> Self {
        Self { lr: 1e-3, momentum: 0.9, dampening: 0.0, weight_decay: 0.0 }
    }
}

impl Default for Nesterov {
    fn default() -> Self {
        Self { lr: 1e-3, momentum: 0.9, weight_decay: 0.0 }
    }
}

impl Sgd {
    pub(super) fn validate(&self) -> Result<(), OptimError> {
        OPTIMIZER.not_negative("lr", self.lr)?;
        OPTIMIZER.not_negative("weight_decay", self.weight_decay)
    }
}

/// `w <- w - lr * g`.
#[inline(always)]
pub(super) fn plain(weights: &mut [f32], grad: Prepared<'_>, lr: f32) {
    for (w, word) in weights.iter_mut().zip(grad.words()) {
        *w -= lr * grad.value(word, *w);
    }
}

/// Subtracts the pushed value from a buffer tensor (BatchNorm's running statistics): no rate, no decay, no
/// clipping, no state.
///
/// # Panics
/// When the lengths differ, as [`super::OptimizerConfig::apply`].
pub fn apply_buffer(values: &mut [f32], grad: Gradient<'_>) {
    let stages = Stages { scale: grad.scale, limit: f32::INFINITY, decay: 0.0 };
    runs(grad, values.len(), stages, |at, grad| {
        let values = &mut values[at];
        wide(
            #[inline(always)]
            || plain(values, grad, 1.0),
        );
    });
}

impl Momentum {
    pub(super) fn validate(&self) -> Result<(), OptimError> {
        OPTIMIZER.not_negative("lr", self.lr)?;
        OPTIMIZER.below_one("momentum", self.momentum)?;
        let ok = (0.0..=1.0).contains(&self.dampening);
        OPTIMIZER.that("dampening", self.dampening, ok, "between 0 and 1")?;
        OPTIMIZER.not_negative("weight_decay", self.weight_decay)
    }

    pub(super) fn rule(&self, hyper: &Hyper) -> MomentumRule {
        // PyTorch copies the first gradient into the buffer undampened, and ignores dampening without momentum.
        let undampened = hyper.t == 1 || self.momentum == 0.0;
        let enter = if undampened { 1.0 } else { (1.0 - self.dampening) as f32 };
        MomentumRule { mu: self.momentum as f32, enter, lr: hyper.lr }
    }
}

/// One update's constants.
#[derive(Clone, Copy, Debug)]
pub struct MomentumRule {
    /// Decay of the buffer.
    pub mu: f32,
    /// The weight of the gradient in the buffer.
    pub enter: f32,
    /// The rate.
    pub lr: f32,
}

impl MomentumRule {
    #[inline(always)]
    pub(super) fn run(self, weights: &mut [f32], buf: &mut [f32], grad: Prepared<'_>) {
        let Self { mu, enter, lr } = self;
        for ((w, b), word) in weights.iter_mut().zip(buf).zip(grad.words()) {
            let w0 = *w;
            let b1 = mu * *b + enter * grad.value(word, w0);
            (*b, *w) = (b1, w0 - lr * b1);
        }
    }
}

impl Nesterov {
    pub(super) fn validate(&self) -> Result<(), OptimError> {
        OPTIMIZER.not_negative("lr", self.lr)?;
        let ok = self.momentum > 0.0 && self.momentum < 1.0;
        OPTIMIZER.that(
            "momentum",
            self.momentum,
            ok,
            "above 0 and less than 1 (without momentum, use sgd)",
        )?;
        OPTIMIZER.not_negative("weight_decay", self.weight_decay)
    }

    pub(super) fn rule(&self, hyper: &Hyper) -> NesterovRule {
        NesterovRule { mu: self.momentum as f32, lr: hyper.lr }
    }
}

/// One update's constants.
#[derive(Clone, Copy, Debug)]
pub struct NesterovRule {
    /// Decay of the buffer.
    pub mu: f32,
    /// The rate.
    pub lr: f32,
}

impl NesterovRule {
    #[inline(always)]
    pub(super) fn run(self, weights: &mut [f32], buf: &mut [f32], grad: Prepared<'_>) {
        let Self { mu, lr } = self;
        for ((w, b), word) in weights.iter_mut().zip(buf).zip(grad.words()) {
            let w0 = *w;
            let g = grad.value(word, w0);
            let b1 = mu * *b + g;
            (*b, *w) = (b1, w0 - lr * (g + mu * b1));
        }
    }
}
