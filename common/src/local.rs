//! Local steps: the minibatches of a worker between two pushes, on its own weights.
//!
//! ```text
//!  pull ──▶ center ──▶ ┌─ minibatch ─▶ gradient at the local weights ─▶ the job's optimizer moves them ─┐ ──▶ push
//!                      └─────────────────── [`LocalConfig::minibatches`] times ◀────────────────────────┘
//!  servers: apply the push by [`LocalConfig::on_servers`], as they apply any gradient
//! ```
//!
//! A push with all of its minibatches is one step of the protocol. The consistency rule, rounds,
//! epochs, checkpoints and `train.max_steps` count steps. The last step of an epoch takes the remaining
//! minibatches.
//!
//! [`Diloco`] has the formulas and the papers. [`LocalWeights`] is the worker's side. The module is pure: other modules
//! compute gradients and exchange messages, so workers and the simulator share it.
//!
//! The local weights and their optimizer state belong to the worker. No log and no checkpoint holds
//! them, and they end with the worker.

mod diloco;
mod fragments;
mod weights;

#[cfg(test)]
mod identities;

pub use diloco::Diloco;
pub use fragments::Fragments;
pub use weights::LocalWeights;

use crate::optim::{ClipConfig, Descent, OptimError, ScheduleConfig};
use serde::{Deserialize, Serialize};

/// The `[local]` table of a job. Without it a worker pushes the gradient of each minibatch.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct LocalConfig(pub Option<Diloco>);

impl LocalConfig {
    /// Whether a worker has its own weights.
    pub fn is_local(&self) -> bool {
        self.0.is_some()
    }

    /// Checks the options.
    pub fn validate(&self) -> Result<(), OptimError> {
        self.0.as_ref().map_or(Ok(()), Diloco::validate)
    }

    /// Minibatches between two pushes, from 1: one step.
    pub fn minibatches(&self) -> u64 {
        self.0.as_ref().map_or(1, |d| d.steps)
    }

    /// The parts in which the model is pushed and pulled.
    pub fn fragments(&self) -> Fragments {
        self.0.as_ref().map_or_else(Fragments::default, |d| Fragments { count: d.fragments })
    }

    /// The optimizer that the servers apply to a push, for a job with this one.
    pub fn on_servers(&self, job: &Descent) -> Descent {
        match &self.0 {
            None => job.clone(),
            Some(d) => {
                let (schedule, clip) = (ScheduleConfig::default(), ClipConfig::default());
                Descent { optimizer: d.outer.clone(), schedule, clip }
            }
        }
    }
}
