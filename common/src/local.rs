//! Local steps: the minibatches of a worker between two pushes, on its own weights.
//!
//! ```text
//!  pull ──▶ center ──▶ ┌─ minibatch ─▶ gradient at the local weights ─▶ [`LocalRule::on_worker`] moves them ─┐ ──▶ push
//!                      └───────────────────── [`LocalRule::minibatches`] times ◀─────────────────────────────┘
//!  servers: apply the push by [`LocalRule::on_servers`], as they apply any gradient
//! ```
//!
//! A push with all of its minibatches is one step of the protocol. The consistency rule, rounds,
//! epochs, checkpoints and `train.max_steps` count steps. The last step of an epoch takes the remaining
//! minibatches.
//!
//! Each rule has one file with formula and paper, and implements [`LocalRule`]. [`LocalWeights`] is the
//! worker's side. The module is pure: other modules compute gradients and exchange messages, so workers
//! and the simulator share it.
//!
//! The local weights and their optimizer state belong to the worker. No log and no checkpoint holds
//! them, and they end with the worker.

mod diloco;
mod downpour;
mod easgd;
mod every_step;
mod fragments;
mod weights;

#[cfg(test)]
mod identities;

pub use diloco::Diloco;
pub use downpour::Downpour;
pub use easgd::Easgd;
pub use every_step::EveryStep;
pub use fragments::Fragments;
pub use weights::LocalWeights;

use crate::optim::{Check, Descent, OptimError};
use serde::Serialize;

/// Maximal minibatches of a step: the time between two pushes must be bounded.
pub const MAX_MINIBATCHES: u64 = 1_000_000;

/// The `[local]` table of a job: `kind` and the options of that kind.
///
/// ```
/// use paraft_common::local::LocalConfig;
/// let l: LocalConfig = toml::from_str("kind = \"diloco\"\nsteps = 20").expect("valid");
/// assert_eq!(l.rule().minibatches(), 20);
/// ```
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub enum LocalConfig {
    /// A push for each minibatch.
    EveryStep(EveryStep),
    /// Local SGD and DiLoCo: an inner optimizer on the worker, an outer one on the servers.
    Diloco(Diloco),
    /// Downpour SGD: gradients are summed up, pushes and pulls are rarer than minibatches.
    Downpour(Downpour),
    /// Elastic averaging: workers and a center draw each other.
    Easgd(Easgd),
}

crate::kinds!(LocalConfig {
    "every-step" => Self::EveryStep,
    "diloco" => Self::Diloco,
    "downpour" => Self::Downpour,
    "easgd" => Self::Easgd,
});

impl Default for LocalConfig {
    fn default() -> Self {
        Self::EveryStep(EveryStep {})
    }
}

impl LocalConfig {
    /// The kind's name in the job file.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::EveryStep(_) => "every-step",
            Self::Diloco(_) => "diloco",
            Self::Downpour(_) => "downpour",
            Self::Easgd(_) => "easgd",
        }
    }

    /// The implementation.
    pub fn rule(&self) -> &dyn LocalRule {
        match self {
            Self::EveryStep(r) => r,
            Self::Diloco(r) => r,
            Self::Downpour(r) => r,
            Self::Easgd(r) => r,
        }
    }

    /// Whether a worker has its own weights.
    pub fn is_local(&self) -> bool {
        !matches!(self, Self::EveryStep(_))
    }
}

/// A rule for local steps.
pub trait LocalRule {
    /// Checks the options.
    fn validate(&self) -> Result<(), OptimError> {
        Ok(())
    }

    /// Minibatches between two pushes, from 1: one step.
    fn minibatches(&self) -> u64 {
        1
    }

    /// The parts in which the model is pushed and pulled.
    fn fragments(&self) -> Fragments {
        Fragments::default()
    }

    /// Whether a pull precedes each push rather than follows it.
    fn pulls_first(&self) -> bool {
        false
    }

    /// Whether a pull overwrites the local weights.
    fn follows(&self) -> bool {
        true
    }

    /// The optimizer of the local weights, for a job with this one.
    fn on_worker(&self, job: &Descent) -> Descent {
        job.clone()
    }

    /// The optimizer that the servers apply to a push.
    fn on_servers(&self, job: &Descent) -> Descent {
        job.clone()
    }

    /// What a worker records at each minibatch.
    fn notes(&self) -> Notes {
        Notes::Nothing
    }

    /// Computes the push in place of the recorded values. `center` holds the weights of the last pull.
    fn push(&self, _center: &[f32], _weights: &mut [f32], _push: &mut [f32]) {}
}

/// What a rule records at each minibatch, for the push.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Notes {
    /// Nothing.
    Nothing,
    /// The sum of the gradients since the last push.
    Sum,
    /// The weights before the last gradient.
    Before,
}

const LOCAL: Check = Check("local");

/// Checks a count of steps or minibatches.
fn count(key: &'static str, value: u64) -> Result<(), OptimError> {
    LOCAL.that(key, value as f64, (1..=MAX_MINIBATCHES).contains(&value), "from 1 to 1000000")
}
