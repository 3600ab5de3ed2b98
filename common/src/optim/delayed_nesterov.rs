//! Delayed Nesterov: Liu, Chhaparia, Douillard, Kale, Rusu, Shen, Szlam, Ranzato, "Asynchronous Local-SGD Training for
//! Language Modeling", 2024, algorithm 3.
//!
//! Late gradients do most harm through momentum. So each of them moves the weights at once, and the momentum changes with
//! every `n`-th alone, by the mean of those `n`:
//!
//! ```text
//!  d <- d + g
//!  every n-th    b <- mu * b + d / n        w <- w - lr * ((1 - c n + c) mu * b + g / n)        d <- 0
//!  else                                     w <- w - lr * (c mu * b + g / n)
//! ```
//!
//! Over `n` updates the weights move by what one update of Nesterov's with the mean gradient would move them. `n = 1` is
//! Nesterov's. `c` spreads the momentum over the updates, in equal parts where it is `1 / n`. Weight decay is added to the
//! gradient. PyTorch has no such optimizer.

use super::gradient::Prepared;
use super::{Hyper, OPTIMIZER, OptimError};
use serde::{Deserialize, Serialize};

/// Options of delayed Nesterov.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct DelayedNesterov {
    /// Base rate, 0 or more. Default 0.7.
    pub lr: f64,
    /// Decay of the buffer when it changes, in `(0, 1)`. Default 0.9.
    pub momentum: f64,
    /// Updates between two changes of the buffer, 1 to 1000000; best the number of workers. Default 4.
    pub n: u64,
    /// The share of the momentum that each intermediate update applies, from 0 to `1 / n`. Default 0.
    pub c: f64,
    /// L2 penalty, 0 or more. Default 0.
    pub weight_decay: f64,
}

impl Default for DelayedNesterov {
    fn default() -> Self {
        Self { lr: 0.7, momentum: 0.9, n: 4, c: 0.0, weight_decay: 0.0 }
    }
}

impl DelayedNesterov {
    pub(super) fn validate(&self) -> Result<(), OptimError> {
        OPTIMIZER.not_negative("lr", self.lr)?;
        let ok = self.momentum > 0.0 && self.momentum < 1.0;
        OPTIMIZER.that("momentum", self.momentum, ok, "above 0 and less than 1")?;
        OPTIMIZER.that("n", self.n as f64, (1..=1_000_000).contains(&self.n), "from 1 to 1000000")?;
        let ok = self.c >= 0.0 && self.c * self.n as f64 <= 1.0;
        OPTIMIZER.that("c", self.c, ok, "from 0 to 1 / n")?;
        OPTIMIZER.not_negative("weight_decay", self.weight_decay)
    }

    pub(super) fn rule(&self, hyper: &Hyper) -> DelayedNesterovRule {
        let n = self.n.max(1);
        let turns = hyper.t.is_multiple_of(n);
        let share = if turns { 1.0 - self.c * n as f64 + self.c } else { self.c };
        DelayedNesterovRule {
            mu: self.momentum as f32,
            share: (share * self.momentum) as f32,
            n: n as f32,
            turns,
            lr: hyper.lr,
        }
    }
}

/// One update's constants.
#[derive(Clone, Copy, Debug)]
pub struct DelayedNesterovRule {
    /// Decay of the buffer when it changes.
    pub mu: f32,
    /// The share of the buffer that this update applies.
    pub share: f32,
    /// Updates between two changes.
    pub n: f32,
    /// Whether the buffer changes with this update.
    pub turns: bool,
    /// The rate.
    pub lr: f32,
}

impl DelayedNesterovRule {
    #[inline(always)]
    pub(super) fn run(self, weights: &mut [f32], buf: &mut [f32], sum: &mut [f32], grad: Prepared<'_>) {
        let Self { mu, share, n, turns, lr } = self;
        for (((w, b), d), word) in weights.iter_mut().zip(buf).zip(sum).zip(grad.words()) {
            let w0 = *w;
            let g = grad.value(word, w0);
            let total = *d + g;
            let (b1, d1) = if turns { (mu * *b + total / n, 0.0) } else { (*b, total) };
            (*b, *d, *w) = (b1, d1, w0 - lr * (g / n + share * b1));
        }
    }
}
