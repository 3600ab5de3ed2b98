//! `[local]`: its compatibility, and which side applies which part of the job.

use crate::{
    Job,
    check::{Check, bad},
};
use paraft_common::{algorithm::AlgorithmConfig, optim::Descent};

impl Job {
    /// How a gradient changes weights in this job.
    pub fn descent(&self) -> Descent {
        Descent { optimizer: self.optimizer.clone(), schedule: self.schedule.clone(), clip: self.clip }
    }

    /// The servers' part, for a push. Checkpoints hold this optimizer's state.
    pub fn on_servers(&self) -> Descent {
        self.local.on_servers(&self.descent())
    }

    pub(crate) fn check_local(&self) -> Check {
        if let Err(e) = self.local.validate() {
            return bad("local.steps", e.to_string(), "see docs/configuration.md");
        }
        if !self.local.is_local() {
            return Ok(());
        }
        if !matches!(self.algorithm, AlgorithmConfig::Asgd(_) | AlgorithmConfig::StalenessAware(_)) {
            let a = self.algorithm.kind();
            let why = format!("{a} corrects single gradients, and with [local] none is pushed");
            return bad("algorithm.kind", why, "take [algorithm] out, or [local]");
        }
        if self.local.fragments().stream() && self.train.backup_workers > 0 {
            let closed = "fragments of the weights come and go in their turns, and a round that is closed without a worker \
                          would leave its others behind";
            return bad("train.backup_workers", closed, "take it out, or local.fragments");
        }
        Ok(())
    }
}

#[cfg(test)]
#[path = "local_tests.rs"]
mod tests;
