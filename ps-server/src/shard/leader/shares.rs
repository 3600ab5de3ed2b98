//! The share of held-out samples that each worker evaluates after a step. The members when the first worker finishes
//! the step divide the samples; after the job's last one, the members when all have finished. So
//! the others take over the share of a lost worker. Leader-only: if the leader changes between two answers while a
//! worker joins or is lost, one evaluation may miss some samples and count others twice.

use paraft_common::{Share, Step, WorkerId};
use std::collections::VecDeque;

/// More changes of the members between the first and the last worker are rare: the oldest is then forgotten.
/// the oldest is forgotten then.
const MAX_CUTS: usize = 64;

/// The division of the samples, by step.
#[derive(Debug, Default)]
pub struct Shares {
    /// From this step on, the samples are divided among these workers (ascending).
    cuts: VecDeque<(Step, Vec<WorkerId>)>,
    furthest: Step,
    /// The step at which all members were waited for.
    met: Option<Step>,
}

impl Shares {
    /// The share of a worker that has done this step, if the step is evaluated; with `barrier` all have done it.
    /// `members`: ascending.
    pub fn of(
        &mut self,
        worker: WorkerId,
        (done, barrier): (Step, bool),
        members: impl Iterator<Item = WorkerId> + Clone,
    ) -> Share {
        let begins = self.cuts.is_empty();
        // Some members may be gone since the first one finished; no worker evaluated anything before all arrived.
        let meets = barrier && self.met != Some(done);
        if begins || meets || done > self.furthest {
            let changed = !self.cuts.back().is_some_and(|(_, now)| members.clone().eq(now.iter().copied()));
            if changed {
                let from = if begins { Step(0) } else { done };
                self.cuts.push_back((from, members.collect()));
            }
            if self.cuts.len() > MAX_CUTS {
                self.cuts.pop_front();
            }
            self.furthest = self.furthest.max(done);
            self.met = if meets { Some(done) } else { self.met };
        }
        let cut = self.cuts.iter().rev().find(|(from, _)| *from <= done).or(self.cuts.front());
        let Some((_, among)) = cut else { return Share::ALL };
        let of = u32::try_from(among.len()).unwrap_or(u32::MAX).max(1);
        let place = among.binary_search(&worker).map_or(of, |at| u32::try_from(at).unwrap_or(of));
        Share { place, of }
    }
}

#[cfg(test)]
#[path = "shares_tests.rs"]
mod tests;
