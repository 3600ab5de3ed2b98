//! The share of held-out samples that each worker evaluates after an epoch. The members when the first worker
//! finishes the epoch's last step divide the samples; after the last epoch, the members when all have finished. So
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
    /// The share of a worker that has done this step, if the step ends an epoch; with `barrier` all have done it.
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
mod tests {
    use super::*;
    fn at(shares: &mut Shares, worker: u32, done: u64, members: &[u32]) -> (u32, u32) {
        let share = shares.of(WorkerId(worker), (Step(done), false), members.iter().map(|w| WorkerId(*w)));
        (share.place, share.of)
    }

    #[test]
    fn who_is_there_takes_over_what_is_left() {
        let mut shares = Shares::default();
        assert_eq!(at(&mut shares, 1, 8, &[0, 1, 2]), (1, 3));
        assert_eq!(at(&mut shares, 2, 8, &[0, 1, 2]), (2, 3));
        // The first worker is lost before it asks: the others take its share of this evaluation and of the next.
        assert_eq!(at(&mut shares, 2, 8, &[1, 2]), (2, 3));
        assert_eq!(at(&mut shares, 1, 16, &[1, 2]), (0, 2));
        assert_eq!(at(&mut shares, 2, 16, &[1, 2]), (1, 2));
    }

    #[test]
    fn who_joins_has_nothing_of_what_the_others_have_cut() {
        let mut shares = Shares::default();
        assert_eq!(at(&mut shares, 0, 8, &[0]), (0, 1));
        assert_eq!(at(&mut shares, 3, 8, &[0, 3]), (1, 1), "the first has it all");
        assert_eq!(at(&mut shares, 0, 9, &[0, 3]), (0, 2));
        // Slower workers ask for a step that the fastest asked for long ago.
        assert_eq!(at(&mut shares, 3, 7, &[0, 3]), (1, 1));
        assert_eq!(at(&mut shares, 3, 9, &[3]), (1, 2));
    }

    #[test]
    fn behind_the_last_step_those_that_all_have_waited_for_share_it() {
        let mut shares = Shares::default();
        let mut met = |worker, members: &[u32]| {
            let share = shares.of(WorkerId(worker), (Step(8), true), members.iter().map(|w| WorkerId(*w)));
            (share.place, share.of)
        };
        assert_eq!(met(1, &[1, 2]), (0, 2));
        assert_eq!(met(2, &[2]), (1, 2), "the other has its share");
        let mut shares = Shares::default();
        assert_eq!(
            at(&mut shares, 1, 8, &[0, 1, 2]),
            (1, 3),
            "who came by first does not know who will be there"
        );
        let members = [1, 2].map(WorkerId);
        let mut met = |worker| shares.of(WorkerId(worker), (Step(8), true), members.into_iter());
        assert_eq!([met(1), met(2)].map(|s| (s.place, s.of)), [(0, 2), (1, 2)]);
    }

    #[test]
    fn it_stays_small() {
        let mut shares = Shares::default();
        for step in 0..1000 {
            at(&mut shares, 0, step, if step % 2 == 0 { &[0, 1] } else { &[0] });
        }
        assert_eq!(shares.cuts.len(), MAX_CUTS);
        assert_eq!(at(&mut shares, 0, 3, &[0]), (0, 2), "as the oldest that is known");
    }
}
