//! `[eval]`: held-out evaluation, and its consequences.

use crate::{
    Job, SamplerKind,
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
    /// Evaluate after each this many steps too, from 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub every_steps: Option<u64>,
    /// The accuracy whose time is reported, above 0, at most 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub target_accuracy: Option<f64>,
    /// Stop when the held-out loss has not fallen for a while.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub early_stop: Option<EarlyStop>,
}

impl Default for EvalConfig {
    fn default() -> Self {
        Self { every_epoch: true, every_steps: None, target_accuracy: None, early_stop: None }
    }
}

impl EvalConfig {
    pub(crate) fn check(&self, job: &Job) -> Check {
        if self.every_steps == Some(0) {
            return bad("eval.every_steps", "every 0", "use 1 or more, or leave it out");
        }
        if self.every_steps.is_some() && job.train.sampler == SamplerKind::Leased {
            let why = "with the leased sampler workers evaluate between epochs, when no worker trains";
            return bad("eval.every_steps", why, "take it out, or set train.sampler = \"static\"");
        }
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
        if !self.every_epoch && self.every_steps.is_none() {
            let why = "early stopping needs evaluations before the job's end";
            return bad("eval.every_epoch", why, "set eval.every_epoch = true, or eval.every_steps");
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use paraft_common::TensorSpec;
    use std::path::Path;

    #[test]
    fn an_interval_in_steps_is_checked_and_agreed_on() {
        let of = |more: &str| {
            let text = format!("[model]\nkind = \"logistic-regression\"\n[data]\nkind = \"digits\"\n{more}");
            Job::parse(&text, Path::new("job.toml"), &[])
        };
        for (more, key) in [
            ("[eval]\nevery_steps = 0\n", "eval.every_steps"),
            ("[train]\nsampler = \"leased\"\n[eval]\nevery_steps = 5\n", "eval.every_steps"),
            ("[eval]\nevery_epoch = false\nearly_stop = { patience = 1 }\n", "eval.every_epoch"),
        ] {
            let error = of(more).map(drop).expect_err(more).to_string();
            assert!(error.contains(key), "{error}");
        }
        let stops = "[eval]\nevery_epoch = false\nevery_steps = 5\nearly_stop = { patience = 1 }\n";
        assert!(of(stops).is_ok(), "it has evaluations before its end");
        let facts =
            |more: &str| of(more).expect("a job").server_job(&[TensorSpec::param("w", &[4])]).fingerprint;
        assert_ne!(facts(""), facts("[eval]\nevery_steps = 5\n"), "workers that differ are refused");
    }
}
