//! Local SGD: Stich, "Local SGD Converges Fast and Communicates Little", ICLR 2019. DiLoCo: Douillard et al., "DiLoCo:
//! Distributed Low-Communication Training of Language Models", 2023, algorithm 1.
//!
//! Each worker makes H local steps from the center with an *inner* optimizer and pushes how far it went. The servers take the
//! mean of that as a gradient, and apply an *outer* optimizer:
//!
//! ```text
//!  x_m <- inner(x_m, gradient)     H times, from x_m = c
//!  d   <- mean over m of (c - x_m)
//!  c   <- outer(c, d)
//! ```
//!
//! The inner optimizer, schedule and clipping are the job's; the inner state stays on the worker from one push to the next. The
//! schedule's clock counts the worker's minibatches. The outer rate is constant and `d` is not clipped. Outer SGD at rate 1
//! without decay is local SGD: the center becomes the mean of the workers. Where pushes are applied as they come, `d` is one
//! worker's.
//!
//! *Streaming*, by [`Fragments`](super::Fragments): Douillard et al., "Streaming DiLoCo with overlapping communication: Towards a
//! Distributed Free Lunch", 2025. The model is cut into P fragments, each with its own turn every H minibatches, H/P after the one
//! before; it is pulled right behind its push, without the paper's overlap and mixing:
//!
//! ```text
//!  d_p <- c_p - x_p        push, pull        x_p <- c_p
//! ```
//!
//! One fragment is DiLoCo, bit for bit.

use crate::optim::{Check, Nesterov, OptimError, OptimizerConfig};
use serde::{Deserialize, Serialize};

/// Maximal minibatches of a step: the time between two pushes must be bounded.
const MAX_MINIBATCHES: u64 = 1_000_000;

/// Local SGD and DiLoCo.
///
/// ```
/// use paraft_common::local::Diloco;
/// let d: Diloco = toml::from_str("steps = 20").expect("valid");
/// assert_eq!((d.steps, d.fragments, d.outer.kind()), (20, 1, "nesterov"));
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Diloco {
    /// Minibatches between two pushes: H, 1 to 1000000. Default 50.
    pub steps: u64,
    /// The number of fragments in which the model is pushed and pulled: 1 to `steps`. Default 1.
    pub fragments: u64,
    /// The servers' optimizer. Default: Nesterov, rate 0.7, momentum 0.9.
    pub outer: OptimizerConfig,
}

impl Default for Diloco {
    fn default() -> Self {
        let outer = OptimizerConfig::Nesterov(Nesterov { lr: 0.7, momentum: 0.9, weight_decay: 0.0 });
        Self { steps: 50, fragments: 1, outer }
    }
}

impl Diloco {
    /// Checks the options.
    pub(super) fn validate(&self) -> Result<(), OptimError> {
        let check = Check("local");
        let steps = (1..=MAX_MINIBATCHES).contains(&self.steps);
        check.that("steps", self.steps as f64, steps, "from 1 to 1000000")?;
        let fragments = (1..=self.steps).contains(&self.fragments);
        check.that("fragments", self.fragments as f64, fragments, "from 1 to local.steps")?;
        self.outer.validate().map_err(|e| OptimError { section: "local.outer", ..e })
    }
}
