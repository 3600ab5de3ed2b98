//! DANA: Hakimi, Barkai, Gabel, Schuster, "Taming Momentum in a Distributed Asynchronous Environment", 2019.
//!
//! Each worker has a momentum of its own, and gets the weights where all momenta together will have taken them by the
//! time its gradient comes back. That is Nesterov's look-ahead, over all workers:
//!
//! ```text
//!  dana-zero   v_m <- mu * v_m + g        w <- w - lr * v_m        a pull gets  w - lr * mu * sum of all v_j
//! ```
//!
//! With one worker that is Nesterov's momentum.
//!
//! The sum runs along: a push takes its worker's momentum out of it, and puts the new one in. What a worker has
//! that trains no more is taken out with the next update. The last pull of a job, and checkpoints, get `w` itself.

use super::{Algorithm, AlgorithmError, Keeps};
use crate::optim::{Momentum, OptimizerConfig};
use serde::{Deserialize, Serialize};

/// With the workers' momenta on the shard.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DanaZero {}

impl Algorithm for DanaZero {
    fn validate(&self, optimizer: &OptimizerConfig) -> Result<(), AlgorithmError> {
        if matches!(optimizer, OptimizerConfig::Nesterov(_)) {
            return Ok(());
        }
        let needs = "optimizer.kind = \"nesterov\"";
        Err(AlgorithmError::Optimizer { algorithm: "dana-zero", needs, optimizer: optimizer.kind() })
    }

    fn keeps(&self) -> Keeps {
        Keeps { own_slots: true, slots: &["momentum_sum"], ..Keeps::default() }
    }

    fn on_shard(&self, optimizer: &OptimizerConfig) -> OptimizerConfig {
        match optimizer {
            OptimizerConfig::Nesterov(n) => OptimizerConfig::Momentum(Momentum {
                lr: n.lr,
                momentum: n.momentum,
                dampening: 0.0,
                weight_decay: n.weight_decay,
            }),
            other => other.clone(),
        }
    }

    fn own_changes(&self, own: &[&[f32]], enter: bool, slots: &mut [Vec<f32>]) {
        let ([own], [sum]) = (own, slots) else { return };
        let sign = if enter { 1.0 } else { -1.0 };
        sum.iter_mut().zip(*own).for_each(|(s, v)| *s += sign * v);
    }

    fn looks_ahead(&self) -> bool {
        true
    }

    fn look_ahead(
        &self,
        optimizer: &OptimizerConfig,
        lr: f32,
        weights: &[f32],
        slots: &[Vec<f32>],
        out: &mut [f32],
    ) {
        let ([sum], OptimizerConfig::Nesterov(n)) = (slots, optimizer) else {
            return out.copy_from_slice(weights);
        };
        let ahead = lr * n.momentum as f32;
        out.iter_mut().zip(weights).zip(sum).for_each(|((o, w), s)| *o = w - ahead * s);
    }
}
