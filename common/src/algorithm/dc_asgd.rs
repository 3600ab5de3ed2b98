//! Delay compensation: Zheng, Meng, Wang, Chen, Yu, Ma, Liu, "Asynchronous Stochastic Gradient Descent with Delay
//! Compensation", ICML 2017.
//!
//! The gradient at the weights as they are now, to first order, is that at the pulled weights and the Hessian times
//! the way between. The Hessian is approximated by the diagonal of `lambda * g g^T`:
//!
//! ```text
//!  dc-asgd-c   g <- g + lambda * g * g * (w - w_pulled)
//!  dc-asgd-a   ms <- decay * ms + (1 - decay) * g * g
//!              g <- g + lambda / sqrt(ms + eps) * g * g * (w - w_pulled)
//! ```
//!
//! `lambda = 0` is plain asynchronous SGD, bit for bit. A copy of the weights is kept for each worker. The mean square is
//! the bucket's, over the pushes of all workers.

use super::{ALGORITHM, Algorithm, AlgorithmError, Keeps, Late, finite_or};
use crate::optim::OptimizerConfig;
use serde::{Deserialize, Serialize};

/// With a constant weight.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct DcAsgdC {
    /// 0 or more. Default 0.04.
    pub lambda: f64,
}

/// With a weight that the mean square of the gradients divides.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct DcAsgdA {
    /// 0 or more. Default 2.
    pub lambda: f64,
}

/// What remains of the mean square after an update: the paper's, of the last 20 pushes or so.
const DECAY: f64 = 0.95;
/// Keeps the weight finite where no gradient was ever more than 0: the paper's.
const EPS: f64 = 1e-7;

impl Default for DcAsgdC {
    fn default() -> Self {
        Self { lambda: 0.04 }
    }
}

impl Default for DcAsgdA {
    fn default() -> Self {
        Self { lambda: 2.0 }
    }
}

/// What a worker's gradient would be at the weights of now; `lambda` is the weight of the compensation.
pub(super) fn compensated(g: f32, lambda: f32, way: f32) -> f32 {
    finite_or(g + lambda * (g * g) * way, g)
}

impl Algorithm for DcAsgdC {
    fn validate(&self, _: &OptimizerConfig) -> Result<(), AlgorithmError> {
        Ok(ALGORITHM.not_negative("lambda", self.lambda)?)
    }

    fn keeps(&self) -> Keeps {
        Keeps { pulled: true, ..Keeps::default() }
    }

    fn corrects(&self, push: &Late<'_>) -> bool {
        self.lambda > 0.0 && push.pulled.is_some()
    }

    fn correct(&self, push: &Late<'_>, _: &mut [Vec<f32>], gradient: &mut [f32]) {
        let (Some(pulled), lambda) = (push.pulled, self.lambda as f32) else { return };
        for ((g, w), p) in gradient.iter_mut().zip(push.weights).zip(pulled) {
            *g = compensated(*g, lambda, w - p);
        }
    }
}

impl Algorithm for DcAsgdA {
    fn validate(&self, _: &OptimizerConfig) -> Result<(), AlgorithmError> {
        Ok(ALGORITHM.not_negative("lambda", self.lambda)?)
    }

    fn keeps(&self) -> Keeps {
        Keeps { pulled: true, slots: &["mean_square"], ..Keeps::default() }
    }

    fn corrects(&self, _: &Late<'_>) -> bool {
        true
    }

    fn correct(&self, push: &Late<'_>, slots: &mut [Vec<f32>], gradient: &mut [f32]) {
        let (lambda, eps) = (self.lambda as f32, EPS as f32);
        let (decay, enter) = (DECAY as f32, (1.0 - DECAY) as f32);
        let [mean_square] = slots else { return };
        let pulled = push.pulled.unwrap_or(push.weights);
        for (((g, ms), w), p) in gradient.iter_mut().zip(mean_square).zip(push.weights).zip(pulled) {
            *ms = finite_or(decay * *ms + enter * (*g * *g), *ms);
            *g = compensated(*g, lambda / (*ms + eps).sqrt(), w - p);
        }
    }
}
