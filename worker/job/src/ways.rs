//! Ways of training that change where weights are or which process applies gradients: a job takes one of them at most.

use crate::{
    Exchange, Job, SamplerKind,
    check::{Check, bad},
};

impl Job {
    /// Checks that there is one at most, and nothing that goes with none of them.
    pub(crate) fn check_ways(&self) -> Check {
        let t = &self.train;
        let cut = if self.parallel.pipeline > 1 { "parallel.pipeline" } else { "parallel.tensor" };
        let ways = [
            (
                t.exchange == Exchange::AllReduce,
                "train.exchange",
                "in an all-reduce job the ranks apply gradients themselves",
            ),
            (self.local.is_local(), "local.steps", "with [local] a worker trains weights of its own"),
            (
                self.memory.resident.is_some(),
                "memory.resident",
                "with [memory] a worker pulls and pushes layer by layer",
            ),
            (self.parallel.is_cut(), cut, "with [parallel] each rank has a part of the model"),
        ];
        let mut taken = ways.into_iter().filter(|(taken, ..)| *taken);
        let Some((_, key, what)) = taken.next() else { return Ok(()) };
        if let Some((_, other, why)) = taken.next() {
            return bad(other, format!("{why}, and {what}"), &format!("take {other} or {key} out"));
        }
        if t.sampler == SamplerKind::Leased {
            let why = format!("{what}, and leased chunks are for workers that push each minibatch whole");
            return bad("train.sampler", why, "set train.sampler = \"static\"");
        }
        if !self.cluster.script.is_empty() && key != "local.steps" {
            let why = format!("{what}, and a script has a loop of its own");
            return bad(key, why, &format!("take {key} or cluster.script out"));
        }
        if t.group_size > 1 && matches!(key, "local.steps" | "memory.resident") {
            let why = format!("{what}, and the ranks of a group have the same weights");
            return bad("train.group_size", why, "set train.group_size = 1");
        }
        Ok(())
    }
}
