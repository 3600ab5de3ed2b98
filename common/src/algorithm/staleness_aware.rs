//! Staleness-aware learning rate: Zhang, Gupta, Lian, Liu, "Staleness-aware Async-SGD for Distributed Deep Learning",
//! IJCAI 2016.
//!
//! ```text
//!  w <- w - lr / max(1, delay) * g
//! ```
//!
//! With a fixed delay `d` on the quadratic `h w^2 / 2`, plain SGD is stable up to `lr h = 2 sin(pi / (2 (2 d + 1)))`,
//! which falls as `1 / d`; this one up to `d` times that, which goes to `pi / 2` from below.

use super::Algorithm;
use serde::{Deserialize, Serialize};

/// The rate is divided by the delay.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StalenessAware {}

impl Algorithm for StalenessAware {
    fn rate(&self, delay: u64) -> f32 {
        1.0 / delay.max(1) as f32
    }
}
