//! The optimizers' rules, for the device's kernels.

use crate::ModelError;
use paraft_common::optim::{self, Hyper, OptimizerConfig};
use paraft_compute::cuda::Rule;

/// An update's rule.
pub(super) fn rule(optimizer: &OptimizerConfig, hyper: &Hyper) -> Result<Rule, ModelError> {
    Ok(match optimizer.rule(hyper) {
        optim::Rule::Sgd { lr } => Rule::Sgd { lr },
        optim::Rule::Momentum(r) => Rule::Momentum { lr: r.lr, mu: r.mu, enter: r.enter },
        optim::Rule::Nesterov(r) => Rule::Nesterov { lr: r.lr, mu: r.mu },
        optim::Rule::Adadelta(_) | optim::Rule::Adamax(_) | optim::Rule::NAdam(_) | optim::Rule::RAdam(_) => {
            return Err(ModelError::new(format!(
                "a GPU has no kernel of {}: train on the CPU, or with servers",
                optimizer.kind()
            )));
        }
        optim::Rule::Adagrad(r) => Rule::Adagrad { lr: r.lr, eps: r.eps },
        optim::Rule::RmsProp(r) => Rule::RmsProp {
            lr: r.lr,
            keep: r.n.keep,
            enter: r.n.enter,
            eps: r.n.eps,
            mu: r.mu,
            mean: r.centered,
            momentum: optimizer.slots() > 1 + usize::from(r.centered),
        },
        optim::Rule::Adam(r) => Rule::Adam {
            shrink: r.shrink,
            enter1: r.enter1,
            keep2: r.keep2,
            enter2: r.enter2,
            step: r.step,
            unbias2: r.unbias2,
            eps: r.eps,
        },
    })
}
