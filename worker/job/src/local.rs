//! `[local]`: its compatibility, and which side applies which part of the job.

use crate::{
    Exchange, Job, SamplerKind,
    check::{Check, bad},
};
use paraft_common::{
    algorithm::AlgorithmConfig,
    local::LocalConfig,
    optim::{Descent, OptimizerConfig},
};

impl Job {
    /// How a gradient changes weights in this job.
    pub fn descent(&self) -> Descent {
        Descent { optimizer: self.optimizer.clone(), schedule: self.schedule.clone(), clip: self.clip }
    }

    /// The servers' part, for a push. Checkpoints hold this optimizer's state.
    pub fn on_servers(&self) -> Descent {
        self.local.rule().on_servers(&self.descent())
    }

    pub(crate) fn check_local(&self) -> Check {
        let (kind, t) = (self.local.kind(), &self.train);
        if let Err(e) = self.local.rule().validate() {
            return bad("local.kind", e.to_string(), "see docs/configuration.md");
        }
        if !self.local.is_local() {
            return Ok(());
        }
        let alone =
            |what: &str| format!("with local.kind = \"{kind}\" a worker trains weights of its own, {what}");
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
        let plain = matches!(self.algorithm, AlgorithmConfig::Asgd(_));
        let by_delay = matches!(self.algorithm, AlgorithmConfig::StalenessAware(_));
        let elastic = matches!(self.local, LocalConfig::Easgd(_));
        if !(plain || by_delay && !elastic) {
            let a = self.algorithm.kind();
            let why =
                format!("{a} corrects single gradients, and with local.kind = \"{kind}\" none is pushed");
            return bad("algorithm.kind", why, "take [algorithm] out, or [local]");
        }
        if matches!(self.local, LocalConfig::Diloco(_) | LocalConfig::Easgd(_))
            && matches!(self.optimizer, OptimizerConfig::DelayedNesterov(_))
        {
            let why = alone("and delayed-nesterov is for gradients of several workers");
            let remedy = "set optimizer.kind = \"nesterov\"; it may be local.outer of diloco";
            return bad("optimizer.kind", why, remedy);
        }
        if self.local.rule().fragments().stream() && self.round.drops_late() {
            let closed = "fragments of the weights come and go in their turns, and a round that is closed without a worker \
                          would leave its others behind";
            return bad("round.kind", closed, "take [round] out, or local.fragments");
        }
        Ok(())
    }
}

#[cfg(test)]
#[path = "local_tests.rs"]
mod tests;
