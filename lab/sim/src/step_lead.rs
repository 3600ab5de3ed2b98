//! How far the workers are apart, as the workers themselves know it: beside the servers' own figures, and without them.

use paraft_common::{Step, WorkerId};
use std::collections::BTreeMap;

/// The steps that the workers who train have pushed.
#[derive(Debug, Default)]
pub(crate) struct StepLead {
    pushed: BTreeMap<WorkerId, Step>,
    /// How many have pushed up to each step.
    count: BTreeMap<Step, usize>,
    largest: u64,
    steps: u64,
}

impl StepLead {
    /// A worker has pushed everything up to a step; also one that has just come.
    pub fn pushed(&mut self, worker: WorkerId, step: Step) {
        self.left(worker);
        self.steps += 1;
        self.pushed.insert(worker, step);
        *self.count.entry(step).or_default() += 1;
    }

    /// A worker has finished, or is gone.
    pub fn left(&mut self, worker: WorkerId) {
        let Some(step) = self.pushed.remove(&worker) else { return };
        if let Some(n) = self.count.get_mut(&step) {
            *n -= 1;
            if *n == 0 {
                self.count.remove(&step);
            }
        }
    }

    /// Notes how far a worker that has done this step is ahead of the slowest. Servers count what is applied, which is
    /// no more than what is pushed, so with SSP(S) this is never above S.
    pub fn note_step(&mut self, done: Step) {
        if let Some((slowest, _)) = self.count.first_key_value() {
            self.largest = self.largest.max(done.0.saturating_sub(slowest.0));
        }
    }

    /// Grows with every step of anyone.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// The largest so far, in steps.
    pub fn largest(&self) -> u64 {
        self.largest
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_gap_is_to_the_slowest_of_those_who_train() {
        let mut step_lead = StepLead::default();
        for (w, step) in [(0, 7), (1, 3), (2, 5)] {
            step_lead.pushed(WorkerId(w), Step(step));
        }
        step_lead.left(WorkerId(1));
        step_lead.note_step(Step(7));
        assert_eq!(step_lead.largest(), 2);
        step_lead.pushed(WorkerId(2), Step(6));
        step_lead.note_step(Step(7));
        assert_eq!(step_lead.largest(), 2, "the largest stays");
        step_lead.pushed(WorkerId(1), Step(1));
        step_lead.note_step(Step(7));
        assert_eq!(step_lead.largest(), 6);
    }
}
