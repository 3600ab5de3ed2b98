//! Optimizers of rows: each changes one row by its gradient, and no other row. SGD, Adagrad, row-wise Adagrad and FTRL give
//! what the dense rule gives with a gradient of zero for all other rows. Adam does not: it is *lazy*, as an untouched row's
//! averages do not fade.

use crate::optim::exact::pow;
use serde::{Deserialize, Serialize};

/// How a row's gradient changes it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case", deny_unknown_fields)]
pub enum RowOptimizer {
    /// `w <- w - lr * g`
    Sgd {
        /// The rate, 0 or more.
        lr: f64,
    },
    /// Duchi, Hazan, Singer 2011, for each value, as `torch.optim.Adagrad` with a sparse gradient:
    /// `s <- s + g * g;  w <- w - lr * g / (sqrt(s) + eps)`
    Adagrad {
        /// The rate, 0 or more.
        lr: f64,
        /// Added to the root, in `[1e-30, 1]`. Default 1e-10.
        #[serde(default = "adagrad_eps")]
        eps: f64,
    },
    /// Adagrad with one sum for a row, as FBGEMM's `EXACT_ROWWISE_ADAGRAD`:
    /// `s <- s + mean(g * g);  w <- w - lr * g / (sqrt(s) + eps)`
    RowwiseAdagrad {
        /// The rate, 0 or more.
        lr: f64,
        /// Added to the root, in `[1e-30, 1]`. Default 1e-8.
        #[serde(default = "rowwise_eps")]
        eps: f64,
    },
    /// FTRL-proximal, McMahan and others 2013, "Ad Click Prediction: a View from the Trenches", Algorithm 1:
    ///
    /// ```text
    ///  d = (sqrt(n + g * g) - sqrt(n)) / lr;  z <- z + g - d * w;  n <- n + g * g
    ///  w <- 0 if |z| <= l1, else -(z - sign(z) * l1) / ((beta + sqrt(n)) / lr + l2)
    /// ```
    Ftrl {
        /// The paper's alpha, above 0.
        lr: f64,
        /// 0 or more. Default 1.
        #[serde(default = "one")]
        beta: f64,
        /// 0 or more. Default 0.
        #[serde(default)]
        l1: f64,
        /// 0 or more. Default 0.
        #[serde(default)]
        l2: f64,
    },
    /// Lazy Adam: Kingma and Ba 2015 with the row's own number of updates `t`, for the rows of a push only.
    /// `torch.optim.SparseAdam` counts the steps of the whole table in `t`, and adds eps before the correction of the bias.
    Adam {
        /// The rate, 0 or more.
        lr: f64,
        /// In `[0, 1)`. Default 0.9.
        #[serde(default = "beta1")]
        beta1: f64,
        /// In `[0, 1)`. Default 0.999.
        #[serde(default = "beta2")]
        beta2: f64,
        /// In `[1e-30, 1]`. Default 1e-8.
        #[serde(default = "rowwise_eps")]
        eps: f64,
    },
}

fn adagrad_eps() -> f64 {
    1e-10
}
fn rowwise_eps() -> f64 {
    1e-8
}
fn one() -> f64 {
    1.0
}
fn beta1() -> f64 {
    0.9
}
fn beta2() -> f64 {
    0.999
}

/// The rate of one update.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RowRate {
    /// Multiplies the optimizer's rate: the schedule's factor.
    pub factor: f64,
    /// Replaces the optimizer's rate and the schedule: what a worker sent.
    pub set: Option<f64>,
}

impl RowOptimizer {
    /// Its name, as a job has it.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Sgd { .. } => "sgd",
            Self::Adagrad { .. } => "adagrad",
            Self::RowwiseAdagrad { .. } => "rowwise-adagrad",
            Self::Ftrl { .. } => "ftrl",
            Self::Adam { .. } => "adam",
        }
    }

    /// The base rate.
    pub fn lr(&self) -> f64 {
        match self {
            Self::Sgd { lr }
            | Self::Adagrad { lr, .. }
            | Self::RowwiseAdagrad { lr, .. }
            | Self::Ftrl { lr, .. }
            | Self::Adam { lr, .. } => *lr,
        }
    }

    pub(super) fn validate(&self) -> Result<(), String> {
        let within = |name: &str, value: f64, fine: bool, range: &str| match fine && value.is_finite() {
            true => Ok(()),
            false => Err(format!("optimizer.{name} {value} is not {range}")),
        };
        let eps = |e: f64| within("eps", e, (1e-30..=1.0).contains(&e), "within 1e-30 to 1");
        let not_negative = |name, value| within(name, value, value >= 0.0, "a number from 0");
        let beta =
            |name, value| within(name, value, (0.0..1.0).contains(&value), "within 0 to 1, 1 excluded");
        not_negative("lr", self.lr())?;
        match self {
            Self::Sgd { .. } => Ok(()),
            Self::Adagrad { eps: e, .. } | Self::RowwiseAdagrad { eps: e, .. } => eps(*e),
            Self::Ftrl { lr, beta, l1, l2 } => {
                within("lr", *lr, *lr > 0.0, "above 0, as ftrl divides by it")?;
                not_negative("beta", *beta)?;
                not_negative("l1", *l1)?;
                not_negative("l2", *l2)
            }
            Self::Adam { beta1, beta2, eps: e, .. } => {
                beta("beta1", *beta1)?;
                beta("beta2", *beta2)?;
                eps(*e)
            }
        }
    }

    /// State values of a row of `dim` values. All begin at 0.
    pub fn slots(&self, dim: usize) -> usize {
        match self {
            Self::Sgd { .. } => 0,
            Self::RowwiseAdagrad { .. } => 1,
            Self::Adagrad { .. } => dim,
            Self::Ftrl { .. } | Self::Adam { .. } => 2 * dim,
        }
    }

    /// Updates a row: its weights, its state of [`Self::slots`] values, and `t`, the number of this update of the row, from
    /// 1. The gradient is multiplied by `scale`.
    ///
    /// # Panics
    /// If the lengths do not fit.
    pub fn update(&self, rate: RowRate, t: u64, scale: f32, row: &mut [f32], grad: &[[u8; 4]]) {
        let dim = grad.len();
        let (w, state) = row.split_at_mut(dim);
        let lr = rate.set.unwrap_or(self.lr() * rate.factor) as f32;
        let g = |bytes: &[u8; 4]| f32::from_le_bytes(*bytes) * scale;
        match *self {
            Self::Sgd { .. } => w.iter_mut().zip(grad).for_each(|(w, b)| *w -= lr * g(b)),
            Self::Adagrad { eps, .. } => {
                let eps = eps as f32;
                for ((w, s), b) in w.iter_mut().zip(state).zip(grad) {
                    let g = g(b);
                    *s += g * g;
                    *w -= lr * g / (s.sqrt() + eps);
                }
            }
            Self::RowwiseAdagrad { eps, .. } => {
                let squares: f32 = grad.iter().map(|b| g(b) * g(b)).sum();
                state[0] += squares / dim as f32;
                let step = lr / (state[0].sqrt() + eps as f32);
                w.iter_mut().zip(grad).for_each(|(w, b)| *w -= step * g(b));
            }
            Self::Ftrl { beta, l1, l2, .. } => {
                let (beta, l1, l2) = (beta as f32, l1 as f32, l2 as f32);
                let (z, n) = state.split_at_mut(dim);
                for (((w, z), n), b) in w.iter_mut().zip(z).zip(n).zip(grad) {
                    let g = g(b);
                    let n1 = *n + g * g;
                    *z += g - (n1.sqrt() - n.sqrt()) / lr * *w;
                    *n = n1;
                    let beyond = z.abs() - l1;
                    *w = if beyond <= 0.0 {
                        0.0
                    } else {
                        -beyond.copysign(*z) / ((beta + n1.sqrt()) / lr + l2)
                    };
                }
            }
            Self::Adam { beta1, beta2, eps, .. } => {
                let (c1, c2) = (1.0 - pow(beta1, t), 1.0 - pow(beta2, t));
                let (step, root, eps) = (f64::from(lr) / c1, c2.sqrt() as f32, eps as f32);
                let (step, b1, b2) = (step as f32, beta1 as f32, beta2 as f32);
                let (m, v) = state.split_at_mut(dim);
                for (((w, m), v), b) in w.iter_mut().zip(m).zip(v).zip(grad) {
                    let g = g(b);
                    *m = b1 * *m + (1.0 - b1) * g;
                    *v = b2 * *v + (1.0 - b2) * (g * g);
                    *w -= step * *m / (v.sqrt() / root + eps);
                }
            }
        }
    }
}
