//! `[local]`: its compatibility, and which side applies which part of the job.

use crate::{
    Exchange, Job, SamplerKind,
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
        let t = &self.train;
        if let Err(e) = self.local.validate() {
            return bad("local.steps", e.to_string(), "see docs/configuration.md");
        }
        if !self.local.is_local() {
            return Ok(());
        }
        let alone = |what: &str| format!("with [local] a worker trains weights of its own, {what}");
        if t.exchange == Exchange::AllReduce {
            let why = alone("and in an all-reduce job all ranks have the same");
            return bad("train.exchange", why, "set train.exchange = \"servers\", or take [local] out");
        }
        if t.group_size > 1 {
            let why = alone("and a group's ranks would each need them");
            return bad("train.group_size", why, "set train.group_size = 1, or take [local] out");
        }
        if t.sampler == SamplerKind::Leased {
            let why = alone("and a chunk that it leaves behind may be in them and in no push");
            return bad("train.sampler", why, "set train.sampler = \"static\", or take [local] out");
        }
        if !matches!(self.algorithm, AlgorithmConfig::Asgd(_) | AlgorithmConfig::StalenessAware(_)) {
            let a = self.algorithm.kind();
            let why = format!("{a} corrects single gradients, and with [local] none is pushed");
            return bad("algorithm.kind", why, "take [algorithm] out, or [local]");
        }
        if self.local.fragments().stream() && t.backup_workers > 0 {
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
