//! RMSprop: Tieleman, Hinton 2012, "Lecture 6.5" of Coursera's Neural Networks for Machine Learning; centred as
//! in Graves 2013, "Generating Sequences With Recurrent Neural Networks". PyTorch: `torch.optim.RMSprop`.
//!
//! ```text
//!  v <- alpha * v + (1 - alpha) * g * g
//!  a <- a + (1 - alpha) * (g - a)                 (centred only)
//!  d  = sqrt(v) + eps                             (centred: sqrt(v - a * a) + eps)
//!  w <- w - lr * g / d
//!  with momentum: b <- mu * b + g / d;  w <- w - lr * b
//! ```
//!
//! One difference from PyTorch: rounding can make `v - a * a` negative when gradients hardly vary. PyTorch then
//! takes the root of a negative number and the weight becomes NaN; here the difference is at least 0.

use super::gradient::Prepared;
use super::{Hyper, OPTIMIZER, OptimError};
use crate::optim::adam::lerp;
use serde::{Deserialize, Serialize};
use std::ops::Range;

/// Options of RMSprop.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RmsProp {
    /// Base rate, 0 or more. Default 0.01.
    pub lr: f64,
    /// Decay of the averages, in `[0, 1)`. Default 0.99.
    pub alpha: f64,
    /// Added to the root, in `[1e-30, 1]`. Default 1e-8.
    pub eps: f64,
    /// Decay of the momentum buffer, in `[0, 1)`. Default 0: no buffer.
    pub momentum: f64,
    /// Divides by the standard deviation rather than by the root mean square. Default false.
    pub centered: bool,
    /// L2 penalty, 0 or more. Default 0.
    pub weight_decay: f64,
}

impl Default for RmsProp {
    fn default() -> Self {
        Self { lr: 1e-2, alpha: 0.99, eps: 1e-8, momentum: 0.0, centered: false, weight_decay: 0.0 }
    }
}

impl RmsProp {
    pub(super) fn validate(&self) -> Result<(), OptimError> {
        OPTIMIZER.not_negative("lr", self.lr)?;
        OPTIMIZER.below_one("alpha", self.alpha)?;
        OPTIMIZER.eps(self.eps)?;
        OPTIMIZER.below_one("momentum", self.momentum)?;
        OPTIMIZER.not_negative("weight_decay", self.weight_decay)
    }

    /// The mean square, then the mean where centred, then the momentum buffer where there is momentum.
    pub(super) fn slots(&self) -> usize {
        1 + usize::from(self.centered) + usize::from(self.momentum > 0.0)
    }

    /// PyTorch's names, in the order that `apply` expects.
    pub(super) fn slot_names(&self) -> Vec<&'static str> {
        let mut names = vec!["square_avg"];
        names.extend(self.centered.then_some("grad_avg"));
        names.extend((self.momentum > 0.0).then_some("momentum_buffer"));
        names
    }

    pub(super) fn rule(&self, hyper: &Hyper) -> RmsPropRule {
        let n = Norm { keep: self.alpha as f32, enter: (1.0 - self.alpha) as f32, eps: self.eps as f32 };
        RmsPropRule { lr: hyper.lr, mu: self.momentum as f32, n, centered: self.centered }
    }
}

/// One update's constants.
#[derive(Clone, Copy, Debug)]
pub struct RmsPropRule {
    /// The rate.
    pub lr: f32,
    /// Decay of the momentum buffer.
    pub mu: f32,
    /// The averages' constants.
    pub n: Norm,
    /// Whether there is a mean.
    pub centered: bool,
}

impl RmsPropRule {
    #[inline(always)]
    pub(super) fn run(
        self,
        weights: &mut [f32],
        slots: &mut [Vec<f32>],
        at: Range<usize>,
        grad: Prepared<'_>,
    ) {
        // One loop for each set of slots: a branch or an optional slice inside would prevent
        // vectorization.
        let Self { lr, mu, n, centered } = self;
        match (slots, centered) {
            ([v], false) => {
                for ((w, v), word) in weights.iter_mut().zip(&mut v[at]).zip(grad.words()) {
                    let w0 = *w;
                    let g = grad.value(word, w0);
                    let (v1, divisor) = n.plain(g, *v);
                    (*v, *w) = (v1, w0 - lr * g / divisor);
                }
            }
            ([v, buf], false) => {
                for (((w, v), b), word) in
                    weights.iter_mut().zip(&mut v[at.clone()]).zip(&mut buf[at]).zip(grad.words())
                {
                    let w0 = *w;
                    let g = grad.value(word, w0);
                    let (v1, divisor) = n.plain(g, *v);
                    let b1 = mu * *b + g / divisor;
                    (*v, *b, *w) = (v1, b1, w0 - lr * b1);
                }
            }
            ([v, mean], true) => {
                for (((w, v), a), word) in
                    weights.iter_mut().zip(&mut v[at.clone()]).zip(&mut mean[at]).zip(grad.words())
                {
                    let w0 = *w;
                    let g = grad.value(word, w0);
                    let (v1, a1, divisor) = n.centered(g, *v, *a);
                    (*v, *a, *w) = (v1, a1, w0 - lr * g / divisor);
                }
            }
            ([v, mean, buf], true) => {
                let state = v[at.clone()].iter_mut().zip(&mut mean[at.clone()]).zip(&mut buf[at]);
                for ((w, ((v, a), b)), word) in weights.iter_mut().zip(state).zip(grad.words()) {
                    let w0 = *w;
                    let g = grad.value(word, w0);
                    let (v1, a1, divisor) = n.centered(g, *v, *a);
                    let b1 = mu * *b + g / divisor;
                    (*v, *a, *b, *w) = (v1, a1, b1, w0 - lr * b1);
                }
            }
            _ => unreachable!("the number of slots was checked by the caller"),
        }
    }
}

/// The constants of the averages. Its methods return the divisor last.
#[derive(Clone, Copy, Debug)]
pub struct Norm {
    /// Decay of an average.
    pub keep: f32,
    /// The weight of the new value in an average.
    pub enter: f32,
    /// Added to the root.
    pub eps: f32,
}

impl Norm {
    #[inline(always)]
    fn plain(self, g: f32, v: f32) -> (f32, f32) {
        let v = self.keep * v + self.enter * g * g;
        (v, v.sqrt() + self.eps)
    }

    #[inline(always)]
    fn centered(self, g: f32, v: f32, mean: f32) -> (f32, f32, f32) {
        let v = self.keep * v + self.enter * g * g;
        let mean = lerp(mean, g, self.enter);
        let variance = v - mean * mean;
        (v, mean, (if variance > 0.0 { variance } else { 0.0 }).sqrt() + self.eps)
    }
}
