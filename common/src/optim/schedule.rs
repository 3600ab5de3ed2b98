//! Learning rate schedules.
//!
//! ```text
//!  lr of an update = base lr * factor(clock, contributions)
//!  factor          = shape(clock) * warmup(clock) * scale(contributions)
//! ```
//!
//! The *clock* is the fleet's progress in steps, an `f64`. Each update adds `contributions / members`.
//! So it grows by 1 when every member has pushed one step, whether the pushes were averaged into one
//! update (BSP) or applied one by one (SSP, ASP). One job file therefore has the same schedule in every
//! mode and for every number of workers. The first update is at clock 0, as in PyTorch:
//! `optimizer.step()` before `scheduler.step()`. Sums of fractions round, so with ten members a change
//! of the rate may come one update early or late; all replicas round alike.
//!
//! Shapes: `torch.optim.lr_scheduler.StepLR` and `CosineAnnealingLR` (Loshchilov, Hutter 2017, "SGDR",
//! without restarts; after `steps` it keeps its last value, where PyTorch's rises again). Warm-up and
//! linear scaling: Goyal et al. 2017, "Accurate, Large Minibatch SGD". The warm-up multiplies the shape
//! and does not shift it: `steps` counts from the start of the run.

use super::exact::{cos_pi, pow};
use super::{Check, OptimError};
use serde::{Deserialize, Serialize};

/// The `[schedule]` table of a job: `kind` (default `constant`), that kind's options, and `warmup` and `scale`.
/// Keys of another kind are refused.
///
/// ```
/// use paraft_common::optim::ScheduleConfig;
/// let s: ScheduleConfig = toml::from_str("kind = \"step\"\nsteps = 100\ngamma = 0.5\nwarmup = 10").expect("valid");
/// assert_eq!((s.factor(0.0, 1), s.factor(50.0, 1), s.factor(250.0, 1)), (0.1, 1.0, 0.25));
/// ```
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[serde(into = "Table")]
pub struct ScheduleConfig {
    /// The shape after the warm-up.
    pub shape: Shape,
    /// Ticks of the clock over which the rate rises linearly from `1 / warmup` to 1. Default 0: none.
    pub warmup: u64,
    /// Whether the rate grows with the number of pushes averaged into an update. Default none.
    pub scale: LrScale,
}

/// A function of the clock.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum Shape {
    /// Always 1.
    #[default]
    Constant,
    /// `gamma ^ floor(clock / steps)`.
    Step {
        /// Ticks between two changes, from 1.
        steps: u64,
        /// The factor of each change, from 0. Default 0.1.
        gamma: f64,
    },
    /// Half a cosine from 1 at clock 0 to `min_factor` at `steps`, and `min_factor` afterwards.
    Cosine {
        /// Ticks to the end, from 1.
        steps: u64,
        /// The factor at the end, in `[0, 1]`. Default 0.
        min_factor: f64,
    },
}

/// How the rate depends on the number of pushes averaged into one update.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LrScale {
    /// Not at all.
    #[default]
    None,
    /// Proportionally: the average of `n` pushes is applied with `n` times the rate.
    Linear,
}

impl LrScale {
    /// The factor on the rate of an update with this many contributions.
    pub fn factor(self, contributions: usize) -> f64 {
        match self {
            LrScale::None => 1.0,
            LrScale::Linear => contributions.max(1) as f64,
        }
    }
}

impl ScheduleConfig {
    /// Checks every option; the error names the key and its range.
    pub fn validate(&self) -> Result<(), OptimError> {
        let check = Check("schedule");
        match self.shape {
            Shape::Constant => Ok(()),
            Shape::Step { steps, gamma } => {
                check.that("steps", steps as f64, steps > 0, "1 or more")?;
                check.not_negative("gamma", gamma)
            }
            Shape::Cosine { steps, min_factor } => {
                check.that("steps", steps as f64, steps > 0, "1 or more")?;
                let ok = (0.0..=1.0).contains(&min_factor);
                check.that("min_factor", min_factor, ok, "between 0 and 1")
            }
        }
    }

    /// The factor on the base rate of an update at `clock` (in steps of the fleet, 0 for the first)
    /// that averages `contributions` pushes.
    pub fn factor(&self, clock: f64, contributions: usize) -> f64 {
        let clock = clock.max(0.0); // and 0 for NaN
        let shape = match self.shape {
            Shape::Constant => 1.0,
            Shape::Step { steps, gamma } => pow(gamma, (clock / steps.max(1) as f64).floor() as u64),
            Shape::Cosine { steps, min_factor } => {
                let done = (clock / steps.max(1) as f64).min(1.0);
                min_factor + (1.0 - min_factor) * (1.0 + cos_pi(done)) / 2.0
            }
        };
        let warmup = self.warmup as f64;
        let rise = if clock < warmup { ((clock + 1.0) / warmup).min(1.0) } else { 1.0 };
        shape * rise * self.scale.factor(contributions)
    }
}

/// The table as it is written.
#[derive(Default, Serialize)]
struct Table {
    kind: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    steps: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    gamma: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    min_factor: Option<f64>,
    warmup: u64,
    scale: LrScale,
}

impl From<ScheduleConfig> for Table {
    fn from(s: ScheduleConfig) -> Self {
        let (warmup, scale) = (s.warmup, s.scale);
        match s.shape {
            Shape::Constant => Self { kind: "constant", warmup, scale, ..Self::default() },
            Shape::Step { steps, gamma } => {
                let (steps, gamma) = (Some(steps), Some(gamma));
                Self { kind: "step", steps, gamma, warmup, scale, ..Self::default() }
            }
            Shape::Cosine { steps, min_factor } => {
                let (steps, min_factor) = (Some(steps), Some(min_factor));
                Self { kind: "cosine", steps, min_factor, warmup, scale, ..Self::default() }
            }
        }
    }
}

#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Constant {
    warmup: u64,
    scale: LrScale,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Step {
    steps: u64,
    #[serde(default = "tenth")]
    gamma: f64,
    #[serde(default)]
    warmup: u64,
    #[serde(default)]
    scale: LrScale,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Cosine {
    steps: u64,
    #[serde(default)]
    min_factor: f64,
    #[serde(default)]
    warmup: u64,
    #[serde(default)]
    scale: LrScale,
}

fn tenth() -> f64 {
    0.1
}

crate::kinds!(ScheduleConfig or "constant" {
    "constant" => |o: Constant| Self { shape: Shape::Constant, warmup: o.warmup, scale: o.scale },
    "step" => |o: Step| {
        let shape = Shape::Step { steps: o.steps, gamma: o.gamma };
        Self { shape, warmup: o.warmup, scale: o.scale }
    },
    "cosine" => |o: Cosine| {
        let shape = Shape::Cosine { steps: o.steps, min_factor: o.min_factor };
        Self { shape, warmup: o.warmup, scale: o.scale }
    },
});

#[cfg(test)]
#[path = "schedule_tests.rs"]
mod tests;
