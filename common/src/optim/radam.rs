//! RAdam: Liu, Jiang, He, Chen, Liu, Gao, Han 2020, "On the Variance of the Adaptive Learning Rate and Beyond". PyTorch:
//! `torch.optim.RAdam`.
//!
//! ```text
//!  decoupled only:  w <- w * (1 - lr * weight_decay)      (else: g <- g + weight_decay * w, before the rule)
//!  m <- m + (1 - beta1) * (g - m)
//!  v <- beta2 * v + (1 - beta2) * g * g
//!  R  = 2 / (1 - beta2) - 1                               r_t = R - 2 t beta2^t / (1 - beta2^t)
//!  r_t > 5    w <- w - lr / (1 - beta1^t) * sqrt((r_t - 4)(r_t - 2) R / ((R - 4)(R - 2) r_t))
//!                    * sqrt(1 - beta2^t) * m / (sqrt(v) + eps)
//!  else       w <- w - lr / (1 - beta1^t) * m
//! ```

use super::adam::lerp;
use super::exact::pow;
use super::gradient::Prepared;
use super::{Hyper, OPTIMIZER, OptimError};
use serde::{Deserialize, Serialize};

/// Options of RAdam.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RAdam {
    /// Base rate, 0 or more. Default 0.001.
    pub lr: f64,
    /// Decay of the mean, in `[0, 1)`. Default 0.9.
    pub beta1: f64,
    /// Decay of the mean square, in `[0, 1)`. Default 0.999.
    pub beta2: f64,
    /// Added to the root, in `[1e-30, 1]`. Default 1e-8.
    pub eps: f64,
    /// L2 penalty, 0 or more. Default 0.
    pub weight_decay: f64,
    /// Whether decay shrinks the weights, as AdamW's, rather than enters the gradient. Default false.
    pub decoupled_weight_decay: bool,
}

impl Default for RAdam {
    fn default() -> Self {
        Self {
            lr: 1e-3,
            beta1: 0.9,
            beta2: 0.999,
            eps: 1e-8,
            weight_decay: 0.0,
            decoupled_weight_decay: false,
        }
    }
}

impl RAdam {
    pub(super) fn validate(&self) -> Result<(), OptimError> {
        OPTIMIZER.adaptive(self.lr, [self.beta1, self.beta2], self.eps, self.weight_decay)
    }

    pub(super) fn rule(&self, hyper: &Hyper) -> RAdamRule {
        let (lr, t) = (f64::from(hyper.lr), hyper.t);
        let power2 = pow(self.beta2, t);
        let longest = 2.0 / (1.0 - self.beta2) - 1.0;
        let length = longest - 2.0 * t as f64 * power2 / (1.0 - power2);
        let step = lr / (1.0 - pow(self.beta1, t));
        let adaptive = length > 5.0;
        let rectified = if adaptive {
            let variance = (length - 4.0) * (length - 2.0) * longest;
            let shortest = (longest - 4.0) * (longest - 2.0) * length;
            step * (variance / shortest).sqrt() * (1.0 - power2).sqrt()
        } else {
            step
        };
        RAdamRule {
            shrink: if self.decoupled_weight_decay { (1.0 - lr * self.weight_decay) as f32 } else { 1.0 },
            enter1: (1.0 - self.beta1) as f32,
            keep2: self.beta2 as f32,
            enter2: (1.0 - self.beta2) as f32,
            step: rectified as f32,
            adaptive,
            eps: self.eps as f32,
        }
    }
}

/// One update's constants.
#[derive(Clone, Copy, Debug)]
pub struct RAdamRule {
    /// The factor of decoupled weight decay.
    pub shrink: f32,
    /// The weight of the gradient in the mean.
    pub enter1: f32,
    /// The decay of the mean square.
    pub keep2: f32,
    /// The weight of the squared gradient in the mean square.
    pub enter2: f32,
    /// The bias-corrected and rectified rate.
    pub step: f32,
    /// Whether the mean square is known well enough to divide by.
    pub adaptive: bool,
    /// Added to the root.
    pub eps: f32,
}

impl RAdamRule {
    #[inline(always)]
    pub(super) fn run(self, weights: &mut [f32], m: &mut [f32], v: &mut [f32], grad: Prepared<'_>) {
        for (((w, m), v), word) in weights.iter_mut().zip(m).zip(v).zip(grad.words()) {
            let (w0, m0, v0) = (*w, *m, *v);
            let g = grad.value(word, w0);
            let m1 = lerp(m0, g, self.enter1);
            let v1 = self.keep2 * v0 + self.enter2 * g * g;
            // The branch is the same for a whole bucket, as in `lerp`.
            let divisor = if self.adaptive { v1.sqrt() + self.eps } else { 1.0 };
            (*m, *v, *w) = (m1, v1, w0 * self.shrink - self.step * m1 / divisor);
        }
    }
}
