//! NAdam: Dozat 2016, "Incorporating Nesterov Momentum into Adam". PyTorch: `torch.optim.NAdam`.
//!
//! ```text
//!  decoupled only:  w <- w * (1 - lr * weight_decay)      (else: g <- g + weight_decay * w, before the rule)
//!  mu_t = beta1 * (1 - 0.96^(t * momentum_decay) / 2)     M_t = mu_1 * ... * mu_t
//!  m <- m + (1 - beta1) * (g - m)
//!  v <- beta2 * v + (1 - beta2) * g * g
//!  d  = sqrt(v) / sqrt(1 - beta2^t) + eps
//!  w <- w - lr * ((1 - mu_t) / (1 - M_t) * g + mu_{t+1} / (1 - M_{t+1}) * m) / d
//! ```
//!
//! PyTorch keeps `M_t` beside the state. Here it is a function of `t`, computed for each update, so that there is
//! nothing more to replicate: the product shrinks with every factor, and once it is below 2^-60, `1 - M` is 1
//! and the rest of the factors is left out. With the default options that takes some 60 of them.

use super::adam::lerp;
use super::exact::{exp, pow};
use super::gradient::Prepared;
use super::{Hyper, OPTIMIZER, OptimError};
use serde::{Deserialize, Serialize};

/// Options of NAdam.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct NAdam {
    /// Base rate, 0 or more. Default 0.002.
    pub lr: f64,
    /// Decay of the mean, in `[0, 1)`. Default 0.9.
    pub beta1: f64,
    /// Decay of the mean square, in `[0, 1)`. Default 0.999.
    pub beta2: f64,
    /// Added to the root, in `[1e-30, 1]`. Default 1e-8.
    pub eps: f64,
    /// How fast the momentum rises to `beta1`, 0 or more. Default 0.004.
    pub momentum_decay: f64,
    /// L2 penalty, 0 or more. Default 0.
    pub weight_decay: f64,
    /// Whether decay shrinks the weights, as AdamW's, rather than enters the gradient. Default false.
    pub decoupled_weight_decay: bool,
}

impl Default for NAdam {
    fn default() -> Self {
        Self {
            lr: 2e-3,
            beta1: 0.9,
            beta2: 0.999,
            eps: 1e-8,
            momentum_decay: 4e-3,
            weight_decay: 0.0,
            decoupled_weight_decay: false,
        }
    }
}

/// The natural logarithm of 0.96.
const LN_0_96: f64 = -0.040_821_994_520_255_166;

/// Below this a product of momenta has no bit in `1 - product`.
const NOTHING: f64 = 1.0 / (1u64 << 60) as f64;

impl NAdam {
    pub(super) fn validate(&self) -> Result<(), OptimError> {
        OPTIMIZER.adaptive(self.lr, [self.beta1, self.beta2], self.eps, self.weight_decay)?;
        OPTIMIZER.not_negative("momentum_decay", self.momentum_decay)
    }

    /// The momentum of update `t`.
    fn momentum(&self, t: u64) -> f64 {
        self.beta1 * (1.0 - 0.5 * exp(t as f64 * self.momentum_decay * LN_0_96))
    }

    /// The product of the momenta of updates 1 to `t`.
    fn product(&self, t: u64) -> f64 {
        let mut product = 1.0;
        for t in 1..=t {
            product *= self.momentum(t);
            if product < NOTHING {
                break;
            }
        }
        product
    }

    pub(super) fn rule(&self, hyper: &Hyper) -> NAdamRule {
        let (lr, t) = (f64::from(hyper.lr), hyper.t);
        let (now, next, product) = (self.momentum(t), self.momentum(t + 1), self.product(t));
        NAdamRule {
            shrink: if self.decoupled_weight_decay { (1.0 - lr * self.weight_decay) as f32 } else { 1.0 },
            enter1: (1.0 - self.beta1) as f32,
            keep2: self.beta2 as f32,
            enter2: (1.0 - self.beta2) as f32,
            of_gradient: (lr * (1.0 - now) / (1.0 - product)) as f32,
            of_mean: (lr * next / (1.0 - product * next)) as f32,
            unbias2: (1.0 / (1.0 - pow(self.beta2, t)).sqrt()) as f32,
            eps: self.eps as f32,
        }
    }
}

/// One update's constants.
#[derive(Clone, Copy, Debug)]
pub struct NAdamRule {
    /// The factor of decoupled weight decay.
    pub shrink: f32,
    /// The weight of the gradient in the mean.
    pub enter1: f32,
    /// The decay of the mean square.
    pub keep2: f32,
    /// The weight of the squared gradient in the mean square.
    pub enter2: f32,
    /// The rate of the gradient itself.
    pub of_gradient: f32,
    /// The rate of the mean.
    pub of_mean: f32,
    /// `1 / sqrt(1 - beta2^t)`, as Adam's.
    pub unbias2: f32,
    /// Added to the root.
    pub eps: f32,
}

impl NAdamRule {
    #[inline(always)]
    pub(super) fn run(self, weights: &mut [f32], m: &mut [f32], v: &mut [f32], grad: Prepared<'_>) {
        for (((w, m), v), word) in weights.iter_mut().zip(m).zip(v).zip(grad.words()) {
            let (w0, m0, v0) = (*w, *m, *v);
            let g = grad.value(word, w0);
            let m1 = lerp(m0, g, self.enter1);
            let v1 = self.keep2 * v0 + self.enter2 * g * g;
            let divisor = v1.sqrt() * self.unbias2 + self.eps;
            let way = (self.of_gradient * g + self.of_mean * m1) / divisor;
            (*m, *v, *w) = (m1, v1, w0 * self.shrink - way);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nadam_product_after_many_updates_covers_all_factors() {
        for (beta1, momentum_decay) in [(0.9, 4e-3), (0.99, 0.5), (0.0, 0.0), (0.5, 40.0)] {
            let nadam = NAdam { beta1, momentum_decay, ..NAdam::default() };
            let mut product = 1.0;
            for t in 1..=5000u64 {
                product *= beta1 * (1.0 - 0.5 * 0.96f64.powf(t as f64 * momentum_decay));
                let off = ((1.0 - nadam.product(t)) - (1.0 - product)).abs();
                assert!(off < 1e-12, "{beta1} {momentum_decay} at {t}: off by {off}");
            }
        }
    }
}
