//! Downpour SGD: Dean et al., "Large Scale Distributed Deep Networks", NIPS 2012, section 4.1 and algorithm 7.1.
//!
//! ```text
//!  x <- x - lr * g        s <- s + g        with each minibatch
//!  push s, s <- 0         each n_push-th
//!  x <- pulled weights    behind each push
//! ```
//!
//! What is pushed is the sum of the gradients, not their mean, as in the paper. The servers apply the job's optimizer (Adagrad
//! in the paper) with the job's schedule and clipping. The local rate bridges the time to the next pull; with
//! `n_push = 1` it has no effect. The paper's n_fetch is n_push here, as in the paper's runs.

use super::{LOCAL, LocalRule, Notes, count};
use crate::optim::{ClipConfig, Descent, OptimError, OptimizerConfig, ScheduleConfig};
use serde::{Deserialize, Serialize};

/// Downpour SGD.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Downpour {
    /// Minibatches between two pushes, 1 to 1000000. Default 1.
    pub n_push: u64,
    /// The rate at which the local weights move, 0 or more. Default 0.001.
    pub lr: f64,
}

impl Default for Downpour {
    fn default() -> Self {
        Self { n_push: 1, lr: 1e-3 }
    }
}

impl LocalRule for Downpour {
    fn validate(&self) -> Result<(), OptimError> {
        count("n_push", self.n_push)?;
        LOCAL.not_negative("lr", self.lr)
    }

    fn minibatches(&self) -> u64 {
        self.n_push
    }

    fn on_worker(&self, _job: &Descent) -> Descent {
        let (schedule, clip) = (ScheduleConfig::default(), ClipConfig::default());
        Descent { optimizer: OptimizerConfig::sgd(self.lr), schedule, clip }
    }

    fn notes(&self) -> Notes {
        Notes::Sum
    }
}
