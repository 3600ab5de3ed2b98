//! Multi-ASGD: each worker's pushes have optimizer state of their own on the shard.
//!
//! With one momentum for all, a push adds to what the others' pushes have built up, and the momentum of `n` workers acts
//! as a much larger one (Mitliagkas, Zhang, Hadjis, Re, "Asynchrony begets Momentum", Allerton 2016). With state of its own
//! a worker's momentum is built up by that worker's gradients alone. The baseline in Hakimi, Barkai, Gabel, Schuster,
//! "Taming Momentum in a Distributed Asynchronous Environment", 2019:
//!
//! ```text
//!  v_m <- mu * v_m + g        w <- w - lr * v_m
//! ```
//!
//! Any optimizer with state goes; with `adam` the moments are each worker's.

use super::{Algorithm, AlgorithmError, Keeps};
use crate::optim::OptimizerConfig;
use serde::{Deserialize, Serialize};

/// The optimizer's state is each worker's own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MultiAsgd {}

impl Algorithm for MultiAsgd {
    fn validate(&self, optimizer: &OptimizerConfig) -> Result<(), AlgorithmError> {
        if optimizer.slots() > 0 {
            return Ok(());
        }
        let needs = "an optimizer with state, such as momentum";
        Err(AlgorithmError::Optimizer { algorithm: "multi-asgd", needs, optimizer: optimizer.kind() })
    }

    fn keeps(&self) -> Keeps {
        Keeps { own_slots: true, ..Keeps::default() }
    }
}
