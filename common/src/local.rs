//! What a worker does between two pushes: one minibatch, or several on weights of its own (*local steps*).
//!
//! ```text
//!  pull ──▶ center ──▶ ┌─ minibatch ─▶ gradient at the local weights ─▶ [`LocalRule::on_worker`] moves them ─┐ ──▶ push
//!                      └───────────────────── [`LocalRule::minibatches`] times ◀─────────────────────────────┘
//!  servers: apply the push by [`LocalRule::on_servers`], as they apply any gradient
//! ```
//!
//! A push and what leads to it is one step of the protocol, however many minibatches that takes: the consistency rule, rounds,
//! epochs, checkpoints and `train.max_steps` count steps. The last step of an epoch takes the minibatches that are left of it.
//!
//! One file for each rule, with formula and paper, all behind [`LocalRule`]; [`LocalWeights`] is a worker's side of them. Pure: who
//! computes gradients and who talks to servers are other questions, so that workers and the simulator share it.
//!
//! The local weights and the state of the optimizer that moves them are the worker's own. They are in no log and in no
//! checkpoint, and end with the worker.

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

/// Minibatches of a step, at most: what a worker does alone must end.
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
    /// As the job file writes it.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::EveryStep(_) => "every-step",
            Self::Diloco(_) => "diloco",
            Self::Downpour(_) => "downpour",
            Self::Easgd(_) => "easgd",
        }
    }

    /// Its behaviour.
    pub fn rule(&self) -> &dyn LocalRule {
        match self {
            Self::EveryStep(r) => r,
            Self::Diloco(r) => r,
            Self::Downpour(r) => r,
            Self::Easgd(r) => r,
        }
    }

    /// Whether a worker has weights of its own.
    pub fn is_local(&self) -> bool {
        !matches!(self, Self::EveryStep(_))
    }
}

/// What a worker does between two pushes.
pub trait LocalRule {
    /// Checks its options.
    fn validate(&self) -> Result<(), OptimError> {
        Ok(())
    }

    /// Minibatches between two pushes, from 1: one step.
    fn minibatches(&self) -> u64 {
        1
    }

    /// In which parts the model goes to the servers and comes back.
    fn fragments(&self) -> Fragments {
        Fragments::default()
    }

    /// Whether a pull comes ahead of each push rather than behind it.
    fn pulls_first(&self) -> bool {
        false
    }

    /// Whether the local weights are what a pull brings; else they stay.
    fn follows(&self) -> bool {
        true
    }

    /// What moves the local weights, in a job with this descent.
    fn on_worker(&self, job: &Descent) -> Descent {
        job.clone()
    }

    /// What the servers do with a push.
    fn on_servers(&self, job: &Descent) -> Descent {
        job.clone()
    }

    /// What it takes note of with each minibatch.
    fn notes(&self) -> Notes {
        Notes::Nothing
    }

    /// Writes what is pushed over what was noted. `center` is what was pulled last.
    fn push(&self, _center: &[f32], _weights: &mut [f32], _push: &mut [f32]) {}
}

/// What a rule takes note of with each minibatch, for the push.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Notes {
    /// Nothing.
    Nothing,
    /// The sum of the gradients since the last push.
    Sum,
    /// The weights that the last gradient was computed at.
    Before,
}

const LOCAL: Check = Check("local");

/// A count of steps or minibatches within its bounds.
fn count(key: &'static str, value: u64) -> Result<(), OptimError> {
    LOCAL.that(key, value as f64, (1..=MAX_MINIBATCHES).contains(&value), "from 1 to 1000000")
}
