//! Elastic averaging SGD: Zhang, Choromanska, LeCun, "Deep learning with Elastic Averaging SGD", NIPS 2015, algorithm 1 (with a
//! job's momentum, its algorithm 2, EAMSGD).
//!
//! Workers never take the center's weights. Each has its own, which the job's optimizer moves; every tau minibatches the two
//! draw each other:
//!
//! ```text
//!  e <- a * (x - c)        c pulled just now
//!  x <- x - lr * g - e     g at the same x, as in the paper
//!  c <- c + e              pushed as -e, applied by SGD at rate 1
//! ```
//!
//! In lock-step the servers average a round; there the rate is the number of its pushes, so that `c <- c + a * sum of
//! (x_m - c)`. Running statistics of the center take the mean of the workers' `e`, without that factor: the servers' rule for
//! them has no rate.
//!
//! On a quadratic with one value (eta: rate times curvature) and workers that take turns with tau = 1 it is stable for
//! `0 <= a <= (4 - 2 eta) / (4 - eta)` (section 3 of the paper, for one worker's pair of values). The paper's `a` is 0.9 over
//! the number of workers.

use super::{LOCAL, LocalRule, Notes, count};
use crate::optim::{ClipConfig, Descent, LrScale, OptimError, OptimizerConfig, ScheduleConfig};
use serde::{Deserialize, Serialize};

/// Elastic averaging SGD.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Easgd {
    /// Minibatches between two pushes: tau, 1 to 1000000. Default 10.
    pub steps: u64,
    /// The share of the distance by which worker and center approach each other, above 0, at most 1.
    /// Default 0.3.
    pub alpha: f64,
}

impl Default for Easgd {
    fn default() -> Self {
        Self { steps: 10, alpha: 0.3 }
    }
}

impl LocalRule for Easgd {
    fn validate(&self) -> Result<(), OptimError> {
        count("steps", self.steps)?;
        let ok = self.alpha > 0.0 && self.alpha <= 1.0;
        LOCAL.that("alpha", self.alpha, ok, "above 0 and at most 1")
    }

    fn minibatches(&self) -> u64 {
        self.steps
    }

    fn pulls_first(&self) -> bool {
        true
    }

    fn follows(&self) -> bool {
        false
    }

    fn on_servers(&self, _job: &Descent) -> Descent {
        Descent {
            optimizer: OptimizerConfig::sgd(1.0),
            schedule: ScheduleConfig { scale: LrScale::Linear, ..ScheduleConfig::default() },
            clip: ClipConfig::default(),
        }
    }

    fn notes(&self) -> Notes {
        Notes::Before
    }

    fn push(&self, center: &[f32], weights: &mut [f32], push: &mut [f32]) {
        let alpha = self.alpha as f32;
        for ((p, c), x) in push.iter_mut().zip(center).zip(weights) {
            let e = alpha * (*p - *c);
            (*x, *p) = (*x - e, -e);
        }
    }
}
