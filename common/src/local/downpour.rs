//! Downpour SGD: Dean et al., "Large Scale Distributed Deep Networks", NIPS 2012, section 4.1 and algorithm 7.1.
//!
//! ```text
//!  x <- x - lr * g        s <- s + g        with each minibatch
//!  push s, s <- 0         each n_push-th
//!  x <- pulled weights    each n_fetch-th
//! ```
//!
//! What is pushed is the sum of the gradients, not their mean, as in the paper. The servers apply the job's optimizer (Adagrad
//! in the paper) with the job's schedule and clipping. The local rate bridges the time to the next pull; with
//! `n_push = n_fetch = 1` it has no effect.
//!
//! Warm start: the lowest worker trains alone for the first minibatches, and the others begin when the weights that they pull
//! have so many updates in them. That is for pushes that are applied as they come; in other modes workers begin together.
//!
//! A worker pulls right behind a push, so `n_fetch` is a multiple of `n_push`. (The paper's runs have both alike.) Where the
//! mode is not asynchronous, and at the end of an epoch, it pulls behind each push.

use super::{LOCAL, LocalRule, MAX_MINIBATCHES, Notes, count};
use crate::optim::{ClipConfig, Descent, OptimError, OptimizerConfig, ScheduleConfig};
use serde::{Deserialize, Serialize};

/// Downpour SGD.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Downpour {
    /// Minibatches between two pushes, 1 to 1000000. Default 1.
    pub n_push: u64,
    /// Minibatches between two pulls, a multiple of `n_push` up to 1000000. Default: `n_push`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub n_fetch: Option<u64>,
    /// Minibatches that the lowest worker makes alone, 0 to 1000000. Default 0.
    pub warm_start: u64,
    /// The rate at which the local weights move, 0 or more. Default 0.001.
    pub lr: f64,
}

impl Default for Downpour {
    fn default() -> Self {
        Self { n_push: 1, n_fetch: None, warm_start: 0, lr: 1e-3 }
    }
}

impl LocalRule for Downpour {
    fn validate(&self) -> Result<(), OptimError> {
        count("n_push", self.n_push)?;
        let n_fetch = self.n_fetch.unwrap_or(self.n_push);
        count("n_fetch", n_fetch)?;
        let whole = n_fetch.is_multiple_of(self.n_push);
        LOCAL.that("n_fetch", n_fetch as f64, whole, "a multiple of local.n_push")?;
        let ok = self.warm_start <= MAX_MINIBATCHES;
        LOCAL.that("warm_start", self.warm_start as f64, ok, "from 0 to 1000000")?;
        LOCAL.not_negative("lr", self.lr)
    }

    fn minibatches(&self) -> u64 {
        self.n_push
    }

    fn steps_a_pull(&self) -> u64 {
        self.n_fetch.unwrap_or(self.n_push) / self.n_push.max(1)
    }

    fn warm_start(&self) -> u64 {
        self.warm_start
    }

    fn on_worker(&self, _job: &Descent) -> Descent {
        let (schedule, clip) = (ScheduleConfig::default(), ClipConfig::default());
        Descent { optimizer: OptimizerConfig::sgd(self.lr), schedule, clip }
    }

    fn notes(&self) -> Notes {
        Notes::Sum
    }
}
