//! `[eval]`: held-out evaluation, and its consequences.

use crate::{
    Job,
    check::{Check, bad},
};
use paraft_common::config::EarlyStop;
use serde::{Deserialize, Serialize};

/// `[eval]`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct EvalConfig {
    /// Evaluate after each epoch (the final weights are always evaluated).
    pub every_epoch: bool,
    /// The accuracy whose time is reported, above 0, at most 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub target_accuracy: Option<f64>,
    /// Stop when the held-out loss has not fallen for a while.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub early_stop: Option<EarlyStop>,
}

impl Default for EvalConfig {
    fn default() -> Self {
        Self { every_epoch: true, target_accuracy: None, early_stop: None }
    }
}

impl EvalConfig {
    pub(crate) fn check(&self, job: &Job) -> Check {
        if let Some(a) = self.target_accuracy
            && !(a > 0.0 && a <= 1.0)
        {
            return bad("eval.target_accuracy", format!("{a}"), "use a share above 0 and at most 1");
        }
        if self.target_accuracy.is_some() && !job.classifies() {
            let why = "a model without classes has a held-out loss, but no accuracy";
            return bad("eval.target_accuracy", why, "take it out; eval.early_stop watches the loss");
        }
        let Some(e) = self.early_stop else { return Ok(()) };
        if e.patience == 0 || !e.min_delta.is_finite() || e.min_delta < 0.0 {
            return bad("eval.early_stop", format!("{e:?}"), "use patience from 1 and min_delta from 0");
        }
        if !self.every_epoch {
            let why = "early stopping needs an evaluation each epoch";
            return bad("eval.every_epoch", why, "set eval.every_epoch = true");
        }
        Ok(())
    }
}
